"""On a GPU: graphs compute what launching one by one does, engines agree, and the same run gives the same bits."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

import fedabml
from fedabml import rng
from fedabml.accel.convolutions import conv2d, linear
from fedabml.accel.operators import compiler_tracing, triton_usable
from fedabml.accel.recorder import has_side_effects
from fedabml.algorithms import REGISTRY, make
from fedabml.engine import client as client_module
from fedabml.engine import policy
from fedabml.engine.checkpoint import Checkpoint
from fedabml.engine.client import _flagged, personalize, personalize_after, schedule_steps
from fedabml.engine.lanes import Lanes
from fedabml.engine.rounds import Simulation, run_round, run_rounds
from fedabml.evaluation.scoring import evaluate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SIZES = (6, 60, 13, 33, 25, 9)
EVEN = (20, 24, 17, 20, 23, 20)  # three batches of eight each
OPTIONS = {"fedpop": {"gamma": 1e-3}, "pfedme": {"lam": 3.0}, "perfedavg": {"alpha": 0.05}}


def client(n, seed, shape=(5,)):
    g = np.random.default_rng([n, seed])
    x = g.integers(0, 256, (n, *shape)).astype(np.uint8) if len(shape) > 1 else g.normal(size=(n, *shape))
    return x.astype(np.uint8 if len(shape) > 1 else np.float32), g.choice(g.permutation(3)[:2], n)


def federation(shape=(5,), sizes=SIZES):
    pairs = [client(n, i, shape) for i, n in enumerate(sizes)]
    return fedabml.Federation.from_arrays(pairs, [client(7, i, shape) for i in range(len(sizes))], classes=3)


def simulate(fed, algorithm, *, capture=True, rounds=3, model="mlp", refused=0, **options):
    words = {
        "rounds": rounds, "participation": 0.67, "epochs": 2, "batch_size": 8, "seed": 6, "device": "cuda",
        "dtype": "float64", "backend": "vmap", "chunk": 6,
        "model_options": {"hidden": (4,)} if model == "mlp" else {"channels": (3, 4), "hidden": (5,)},
    }  # fmt: skip
    setup = fedabml.prepare(fed, model, algorithm, **(words | options))
    sim = Simulation(setup.cohort.at(graphs=capture))
    sim.run(rounds)
    assert len(sim.cohort.executor.refused) == refused, "capturing failed"
    return sim


@pytest.mark.parametrize("sizes", [EVEN, SIZES])
def test_personalising_on_the_way_is_personalising_anew(sizes):
    cohort = simulate(federation(sizes=sizes), make("fedabml"), rounds=1).cohort
    shared, clients = cohort.algorithm.init(cohort.network.initial, cohort.network.layout), list(range(6))
    shared = {name: value.to("cuda") for name, value in shared.items()}
    epochs = (0, 1, 3, 7)
    seen = [q.mean.clone() for q in personalize_after(Lanes.after_round(cohort, shared, clients), {}, epochs)]
    for many, mean in zip(epochs, seen, strict=True):
        other = cohort.using(dataclasses.replace(cohort.algorithm, personal_epochs=many))
        torch.testing.assert_close(
            mean, personalize(Lanes.after_round(other, shared, clients), {}).mean, rtol=0, atol=1e-12
        )
    assert (seen[1] - seen[3]).abs().max() > 1e-6


def everything(sim):
    kept = {f"{client}.{name}": t for client, own in sim.kept.states.items() for name, t in own.items()}
    return {k: v.cpu() for k, v in (sim.shared | kept).items()}


def assert_close(a, b, atol):
    a, b = everything(a), everything(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.isfinite(a[name]).all()
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol)


@pytest.mark.parametrize("name", REGISTRY)
def test_graphs_equal_eager_steps_and_the_loop(name):
    fed, algorithm = federation(), make(name, lr=0.1, **OPTIONS.get(name, {}))
    graphs = simulate(fed, algorithm)
    assert_close(graphs, simulate(fed, algorithm, capture=False), 1e-9)
    assert_close(graphs, simulate(fed, algorithm, backend="loop", chunk=2), 1e-9)
    again = everything(simulate(fed, algorithm))
    assert all(torch.equal(v, again[k]) for k, v in everything(graphs).items())
    one = {"rounds": 1, "dtype": "float32", "batch_size": 64, "epochs": 1}
    assert_close(simulate(fed, algorithm, **one), simulate(fed, algorithm, backend="loop", capture=False, **one), 1e-5)
    a, b = (evaluate(s.cohort, s.theta, s.kept_for) for s in (graphs, simulate(fed, algorithm, capture=False)))
    for measure in ("nll", "brier", "entropy"):
        np.testing.assert_allclose(a.clients[measure], b.clients[measure], atol=1e-8)


def whole_rounds(sim):
    return [name for name, _ in sim.cohort.executor.graphs if name[0] == "whole_round"]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", REGISTRY)
def test_a_whole_round_is_one_program_where_clients_take_as_many_steps(name, compile, caplog):
    fed, algorithm = federation(sizes=EVEN), make(name, lr=0.1, lr_decay=0.8, **OPTIONS.get(name, {}))
    sim = simulate(fed, algorithm, rounds=4, compile=compile)
    assert len(whole_rounds(sim)) == 1
    assert "without torch.compile" not in caplog.text
    assert_close(sim, simulate(fed, algorithm, rounds=4, capture=False), 1e-9)
    uneven = simulate(federation(), algorithm, rounds=1)
    assert not whole_rounds(uneven)


@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
def test_a_heavy_batch_shrinks_to_one_lane(name, monkeypatch):
    fed, algorithm = federation(), make(name, lr=0.1)
    light = simulate(fed, algorithm)
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(heavy_outputs=0))
    heavy = simulate(fed, algorithm)
    assert len(heavy.cohort.executor.graphs) > len(light.cohort.executor.graphs)
    assert_close(heavy, light, 1e-9)


@pytest.mark.parametrize("refused", [False, True])
def test_where_a_round_is_too_long_or_refused_its_steps_are_captured(refused, monkeypatch, caplog):
    fed, algorithm = federation(sizes=EVEN), make("fedabml", lr=0.1)
    expected = simulate(fed, algorithm)
    if refused:
        monkeypatch.setattr(client_module, "whole_round", refused_at_first(client_module.whole_round))
    else:
        monkeypatch.setattr(policy, "DEFAULT", policy.Policy(round_steps=1))
    sim = simulate(fed, algorithm, refused=int(refused))
    assert not whole_rounds(sim) and any(hasattr(graph, "captured") for graph in sim.cohort.executor.graphs.values())
    assert ("no round today" in caplog.text) == refused
    assert all(torch.equal(v, everything(sim)[k]) for k, v in everything(expected).items())


def refused_at_first(method):
    """The method, but for its first call."""
    left = [True]

    def called(*args):
        if left:
            left.clear()
            raise RuntimeError("no round today")
        return method(*args)

    return called


def test_a_compiled_convolution_changes_no_tensor():
    """Not even in the backward, which autograd runs in a thread of its own."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = (torch.randn(*size, device="cuda").double() for size in ((3, 4, 3, 12, 12), (3, 8, 3, 5, 5)))
    step = torch.vmap(torch.func.grad(lambda w, x: conv2d(x, w, None).tanh().sum()))
    with compiler_tracing():
        trace = make_fx(step)(w, x)
    assert not any(has_side_effects(node) for node in trace.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1,), (7,), (2048,), (3, 1001)])
def test_the_kernel_draws_what_plain_operations_do(size, dtype):
    keys = rng.keys((1, 2), range(5), "cuda").view(5, 1)
    assert triton_usable()
    drawn = rng.normal(keys, size, dtype)
    torch.testing.assert_close(drawn, rng._normal_hashed(keys, size, dtype), rtol=0, atol=1e-5)
    assert torch.equal(torch.vmap(lambda k: rng.normal(k, size, dtype))(keys), drawn)
    many = rng.normal(rng.key(3, device="cuda"), (1 << 20,), dtype).double()
    assert abs(many.mean()) < 0.005 and abs(many.std() - 1) < 0.005 and abs((many**4).mean() - 3) < 0.05


def test_the_kernel_folds_as_plain_operations_do():
    extreme = [0, 1, -1, 15, 1 << 20, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63)]
    wild = lambda *size: torch.randint(-(2**63), 2**63 - 1, size, device="cuda")
    ends, many = torch.tensor(extreme, device="cuda"), wild(6, 3)
    assert rng._uses_kernel(ends)

    def made():
        yield from (rng.fold(ends, value) for value in extreme)
        yield from (rng.folds(many.T, count, first) for count in (0, 1, 1025) for first in (0, 1, 16, 2**40))
        yield rng.fold(many, torch.tensor(5, dtype=torch.int32))
        one = keys[0, 0]
        pairs = ((ends.unsqueeze(1), ends), (one, ends), (keys, one), (keys, wide), (keys[:0], one))
        yield from (rng.fold(key, value) for key, value in pairs)
        yield torch.vmap(rng.fold, (1, None))(many, ends[:6])
        yield torch.vmap(rng.fold, (None, 0))(keys, ends)
        yield torch.vmap(rng.fold, (0, 1))(many[:, 0], many.T)
        yield torch.vmap(torch.vmap(lambda k: rng.folds(rng.fold(k, 3), 4, 2)), 1)(many)

    keys, wide = wild(3, 4, 1), wild(2050)
    ours = list(made())
    with compiler_tracing():
        assert all(torch.equal(a, b) for a, b in zip(ours, made(), strict=True))
    assert torch.equal(rng.fold(ends.cpu(), ends.cpu()), rng.fold(ends, ends).cpu())


@pytest.mark.parametrize("sizes", [(20, 20, 20), EVEN, SIZES], ids=str)
def test_a_schedule_is_that_of_a_cpu(sizes):
    def made(device):
        cohort = simulate(federation(sizes=sizes), make("fedavg"), rounds=0, device=device).cohort
        cohort.executor.capture = True  # for rows of one width
        given = Lanes.after_round(cohort, {}, [2, 0, 1], round=5)
        lanes = Lanes(given.groups, given.tensors, cohort.executor.inside)
        lanes.__dict__["source"] = cohort.data, cohort.client_tensors.rows(given.tensors.clients[0], lanes.longest)
        schedule = schedule_steps(lanes, rng.NOISE, ((3, 1), (2, 2)))
        return [*(t for own, plan in schedule.phases for t in (plan, own.lanes.keys, own.lanes.steps)), schedule.steps]

    for own, other in zip(made("cuda"), made("cpu"), strict=True):
        assert torch.equal(own.cpu(), other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7850, 100_000])
def test_a_lane_with_a_value_that_is_not_finite_is_found(count, dtype):
    values = torch.full((23, count), torch.finfo(dtype).max, dtype=dtype, device="cuda")
    values[3, count // 2], values[9, 0], values[22, -1] = torch.nan, torch.inf, -torch.inf
    losses = torch.arange(23.0, dtype=dtype, device="cuda")
    flagged = _flagged(losses, [torch.zeros(23, 2, 3, device="cuda", dtype=dtype), values.T.contiguous().T])
    assert flagged.isnan().nonzero().flatten().tolist() == [3, 9, 22] and not losses.isnan().any()
    assert torch.equal(flagged[~flagged.isnan()], losses[~flagged.isnan()])


@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
def test_convolutions(name):
    fed, algorithm = federation((1, 16, 16)), make(name, lr=0.05)
    graphs = simulate(fed, algorithm, model="cnn")
    assert_close(graphs, simulate(fed, algorithm, model="cnn", capture=False, backend="loop"), 1e-9)


@pytest.mark.parametrize("sizes", [SIZES, EVEN])
@pytest.mark.parametrize("compile", [False, True])
def test_augmented_images(sizes, compile):
    fed, algorithm = federation((3, 16, 16), sizes), make("fedabml", augment="crop-flip", lr=0.05)
    eager = simulate(fed, algorithm, model="cnn", capture=False)
    assert_close(simulate(fed, algorithm, model="cnn", compile=compile), eager, 1e-9)
    plain = simulate(fed, make("fedabml", lr=0.05), model="cnn")
    assert (plain.shared["mean"] - eager.shared["mean"]).abs().max() > 1e-4


@pytest.mark.parametrize("sizes", [SIZES, EVEN])
def test_several_runs_side_by_side(sizes):
    fed = federation(sizes=sizes)
    runs = [(make("fedabml", lr=0.1 + 0.02 * i), 6 + i % 2) for i in range(3)]
    alone = [simulate(fed, a, seed=s) for a, s in runs]
    sims = [simulate(fed, a, seed=s, rounds=0) for a, s in runs]
    for _ in range(3):
        run_round(sims)
    for one, other in zip(alone, sims, strict=True):
        assert_close(one, other, 1e-9)


def test_a_step_that_cannot_be_captured_is_launched(caplog):
    class Peeking(fedabml.FedAvg):
        def step(self, carry, shared, batches, site, key, loss):
            torch.cuda.synchronize()
            return super().step(carry, shared, batches, site, key, loss)

    with pytest.raises(AssertionError, match="capturing failed"):
        simulate(federation(), Peeking(lr=0.1))
    assert "cannot be a CUDA graph" in caplog.text


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("tf32", 3e-3), ("bf16", 3e-2)])
@pytest.mark.parametrize(
    "geometry", [(3, 64, 5, 1, 0, 14), (32, 20, 3, 1, 1, 9), (16, 24, 3, 2, 1, 11), (8, 8, 1, 2, 0, 6)]
)
def test_convolutions_of_lanes_are_those_of_torch(geometry, dtype, close):
    from fedabml.accel.convolutions import conv2d
    from fedabml.engine.autotune import set_precision

    channels, out, kernel, stride, padding, size = geometry
    kind = set_precision(dtype, torch.device("cuda")).network
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, channels, size, size, generator=g).cuda()
    w = (torch.randn(3, out, channels, kernel, kernel, generator=g) / (channels**0.5 * kernel)).cuda()

    def made(way, kind):
        value = lambda x, w: torch.tanh(way(x, w, None, stride, padding)).pow(3).sum()
        return torch.vmap(torch.func.grad(value, (0, 1)))(x.to(kind), w.to(kind))

    for ours, theirs in zip(made(conv2d, kind), made(torch.nn.functional.conv2d, torch.float64), strict=True):
        assert ours.dtype == kind
        assert (ours.double() - theirs).norm() <= close * theirs.norm()
    set_precision("float32", torch.device("cuda"))


PRODUCTS = [(20, 50, 784, 10), (15, 50, 784, 200), (15, 50, 200, 62), (3, 7, 13, 5), (1, 300, 65, 70), (150, 9, 90, 12)]


@pytest.mark.parametrize(("dtype", "close"), [("float32", 3e-6), ("tf32", 2e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products_of_lanes_are_those_of_torch(sizes, dtype, close):
    from fedabml.engine.autotune import set_precision

    lanes, rows, length, outs = sizes
    kind = set_precision(dtype, torch.device("cuda")).network
    g = torch.Generator().manual_seed(0)
    x = torch.randn(lanes, rows, length, generator=g).cuda().to(kind)
    vector = torch.randn(lanes, outs * length + outs + 2, generator=g).cuda().to(kind)  # as weights lie in practice
    pull = torch.randn(lanes, rows, outs, generator=g).cuda().to(kind)

    def made(way, kind):
        def one(x, vector, pull):
            weight = vector[2 : 2 + outs * length].view(outs, length)
            out, back = torch.func.vjp(lambda x, weight: way(x, weight, vector[-outs:]), x, weight)
            return out, *back(pull)

        return torch.vmap(one)(x.to(kind), vector.to(kind), pull.to(kind))

    ours, again = made(linear, kind), made(linear, kind)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    for own, exact in zip(ours, made(torch.nn.functional.linear, torch.float64), strict=True):
        assert own.dtype == kind and own.shape == exact.shape
        assert (own.double() - exact).norm() <= close * exact.norm()
    assert ours[2].is_contiguous()  # as the weights
    set_precision("float32", torch.device("cuda"))


@pytest.mark.parametrize(
    ("in_dims", "layout"), [((0, 0), "turned"), ((0, None), ""), ((None, 0), ""), ((0, 0), "gaps")]
)
def test_products_read_operands_as_they_lie(in_dims, layout):
    x, w = torch.randn(4, 33, 70, device="cuda"), torch.randn(4, 21, 70, device="cuda")
    if layout == "turned":
        x, w = x.mT.contiguous().mT, w.mT.contiguous().mT
    if layout == "gaps":
        x, w = x[:, ::3, ::2], w[:, :, 1::2]
    x, w = (t if d == 0 else t[0] for t, d in zip((x, w), in_dims, strict=True))
    made = lambda way, *tensors: torch.vmap(
        torch.func.grad(lambda x, w: way(x, w, None).tanh().pow(3).sum(), (0, 1)), in_dims
    )(*tensors)
    expected = made(torch.nn.functional.linear, x.double(), w.double())
    for own, exact in zip(made(linear, x, w), expected, strict=True):
        assert (own.double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("model_options", [{"hidden": ()}, {"hidden": (20, 12)}], ids=["regression", "two layers"])
@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
def test_compiled_and_captured_products_equal_eager_ones(name, model_options, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no other process times kernels and writes its choice
    fed, words = federation((1, 9, 9), EVEN), {"dtype": "float32", "model_options": model_options, "rounds": 2}
    fused = simulate(fed, make(name, lr=0.05), compile=True, **words)
    assert "without torch.compile" not in caplog.text
    assert_close(fused, simulate(fed, make(name, lr=0.05), capture=False, **words), 1e-5)
    assert_close(fused, simulate(fed, make(name, lr=0.05), compile=True, **words), 0)


@pytest.mark.parametrize("name", REGISTRY)
def test_compiled_steps_equal_eager_ones(name, caplog):
    fed = federation()
    fused = simulate(fed, make(name, **OPTIONS.get(name, {})), compile=True)
    assert "without torch.compile" not in caplog.text
    assert_close(fused, simulate(fed, make(name, **OPTIONS.get(name, {})), capture=False), 1e-9)


@contextmanager
def waiting_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that it does not find all of them
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
@pytest.mark.parametrize(
    ("model", "compile", "close"), [("cnn", False, 1e-3), ("cnn", True, 1e-3), ("resnet18", False, 5e-2)]
)
def test_a_float32_round_of_a_whole_network_is_the_plain_loop_s(model, compile, close, name):
    """The kernels of our own, which float64 does not use, in the sizes they are for. Rounding alone takes a ResNet-18
    1e-2 of the way off, the CNN 3e-5."""
    fed = federation((3, 32, 32), (24, 17, 24, 20, 24, 9))
    words = {"rounds": 1, "model": model, "model_options": {}, "participation": 1.0, "epochs": 1}
    ours = simulate(fed, make(name, lr=0.01), dtype="float32", compile=compile, **words)
    plain = simulate(fed, make(name, lr=0.01), dtype="float32", capture=False, backend="loop", **words)
    start = plain.cohort.network.initial
    apart, gone = ours.shared["mean"] - plain.shared["mean"], plain.shared["mean"] - start
    assert gone.norm() > 0 and apart.norm() < close * gone.norm()


@pytest.mark.parametrize("sizes", [EVEN, SIZES])
@pytest.mark.parametrize("name", ["fedavg", "fedabml", "fedprox", "scaffold", "pfedbayes"])
def test_a_warm_round_does_not_wait_for_the_device(name, sizes):
    """Nor does a round whose steps are captured one by one: torch raises where it would."""
    sim = simulate(federation(sizes=sizes), make(name, lr=0.1), rounds=12)  # all shapes have been met
    with waiting_is_an_error():
        with pytest.raises(RuntimeError, match="synchron"):
            sim.shared["mean"].sum().item()
        sim.run(14)
    assert sim.round == 14


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
def test_nor_does_one_of_a_convolutional_network(name, compile):
    sim = simulate(federation((1, 16, 16), EVEN), make(name, lr=0.1), model="cnn", compile=compile, rounds=12)
    with waiting_is_an_error():
        sim.run(14)
    assert sim.round == 14


@pytest.mark.parametrize("sizes", [EVEN, SIZES])
def test_a_long_run_is_compiled_once_that_pays_and_a_short_one_is_not(sizes, tmp_path, caplog):
    """It has the numbers of a run that is not compiled, and goes on compiled where it was interrupted."""
    fed, algorithm = federation(sizes=sizes), make("fedabml", lr=0.1)

    def begun(rounds, state=None, **options):
        words = {"participation": 0.67, "epochs": 2, "batch_size": 8, "seed": 6, "device": "cuda", "dtype": "float64"}
        setup = fedabml.prepare(fed, "mlp", algorithm, rounds=rounds, chunk=6, **(words | options))
        sim = Simulation(setup.cohort, state=state)
        with closing(run_rounds([sim], rounds, lambda round: False)) as lines:
            for round, _ in lines:
                if round == 8:
                    break
        return sim

    with caplog.at_level("INFO", "fedabml"):
        long, short = begun(10**7), begun(8)
    assert long.cohort.executor.compiled and long.compiled == policy.DEFAULT.decide_round + 1
    assert not short.cohort.executor.compiled and short.compiled is None
    assert sum("steps are compiled" in record.getMessage() for record in caplog.records) == 1
    assert "without torch.compile" not in caplog.text
    assert_close(long, short, 1e-9)
    assert_close(short, begun(8, compile=False), 0)
    state = Checkpoint(8, long.shared, long.server.average, {}, 1.0, 6, long.server.velocity, long.compiled)
    again = begun(9, state)
    assert again.cohort.executor.compiled and again.compiled == policy.DEFAULT.decide_round + 1 and again.round == 9
    names = {name for (name, *_), _ in long.cohort.executor.compiled}
    evaluate(long.cohort, long.theta, long.kept_for)
    assert {name for (name, *_), _ in long.cohort.executor.compiled} == names  # personalising is not compiled for it
