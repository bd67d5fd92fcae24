"""Many clients at once equal each alone: models, likelihoods, ragged data, padding; and what a round draws."""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import re

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.checkpoint import checkpoint

import fedabml
from fedabml import FedABML, FedAvg, GaussianNoise, InputError, rng
from fedabml.algorithms import make
from fedabml.algorithms.hyper import hyper
from fedabml.engine import autotune as backend
from fedabml.engine.autotune import Execution, choose_backend, chunk_of, device_of, lane_bytes
from fedabml.engine.checkpoint import Checkpoint
from fedabml.engine.client import _flagged, client_round, personalize, personalize_after, predict
from fedabml.engine.executor import Executor, padding, segments
from fedabml.engine.label_level import label_offset
from fedabml.engine.lanes import Lanes
from fedabml.engine.loss import ClientLoss
from fedabml.engine.minibatches import minibatches, padded
from fedabml.engine.policy import DEFAULT
from fedabml.engine.rounds import Simulation
from fedabml.engine.server import draw_clients
from fedabml.evaluation.scoring import evaluate
from fedabml.runs.folder import Folder
from fedabml.vectors import Network
from tests.engine.plans import plan_of

SIZES = (4, 21, 9)


def federation(kind, sizes=SIZES):
    g = np.random.default_rng(1)
    shape = {"mlr": (6,), "mlp": (6,), "cnn": (1, 16, 16), "linear": (6,)}[kind]

    def client(n):
        if kind == "cnn":
            x = g.integers(0, 256, (n, *shape)).astype(np.uint8)
        else:
            x = g.normal(size=(n, *shape)).astype(np.float32)
        if kind == "linear":
            return x, (x @ g.normal(size=(6, 2)) + 0.1 * g.normal(size=(n, 2))).astype(np.float32)
        return x, g.integers(0, 3, n)

    return fedabml.Federation.from_arrays(
        [client(n) for n in sizes], [client(5) for _ in sizes], classes=None if kind == "linear" else 3
    )


SMALL = {"cnn": {"channels": (3, 4), "hidden": (5,)}, "mlp": {"hidden": (4,)}}
ALGORITHM = FedABML(lr=0.05, lam=0.5, nu0=-2.5, prior_every="batch", prior_std="learned", rho=0.5, personal_epochs=1)


def simulate(fed, model, algorithm=ALGORITHM, rounds=3, **options):
    name, extra = (model, SMALL.get(model)) if isinstance(model, str) else (model, None)
    words = {
        "rounds": rounds, "participation": 1, "epochs": 1, "batch_size": 8, "seed": 2, "device": "cpu",
        "dtype": "float64", "model_options": extra, "backend": "vmap", "chunk": 3,
    }  # fmt: skip
    setup = fedabml.prepare(fed, name, algorithm, **(words | options))
    sim = Simulation(setup.cohort)
    sim.run(rounds)
    return sim


def assert_close(a, b, atol):
    for name in a.shared:
        assert torch.isfinite(a.shared[name]).all()
        torch.testing.assert_close(a.shared[name], b.shared[name], rtol=0, atol=atol)


# -- engines agree -------------------------------------------------------------------------------------------------
CASES = {
    "mlr": ("mlr", "mlr", None),
    "mlp": ("mlp", "mlp", None),
    "cnn": ("cnn", "cnn", None),
    "fixed noise": ("linear", "mlp", GaussianNoise(2, 0.4, learn=False)),
    "learned noise": ("linear", "mlp", GaussianNoise(2, 0.4)),
    "linear": ("linear", "mlr", GaussianNoise(2, 0.4)),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name == "cnn")) for name in CASES])
def test_vmap_equals_loop(case):
    kind, model, likelihood = CASES[case]
    fed = federation(kind)
    vmap, loop = (simulate(fed, model, likelihood=likelihood, backend=b) for b in ("vmap", "loop"))
    assert_close(vmap, loop, 1e-9)
    a, b = (evaluate(s.cohort, s.theta, s.kept_for) for s in (vmap, loop))
    for name in a.clients:
        np.testing.assert_allclose(a.clients[name], b.clients[name], atol=1e-8, err_msg=name)
    one = {"rounds": 1, "dtype": "float32", "batch_size": 64, "likelihood": likelihood}
    assert_close(*(simulate(fed, model, backend=b, **one) for b in ("vmap", "loop")), 1e-5)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.b(nn.functional.dropout(torch.relu(self.a(x)), 0.3, self.training))


@pytest.mark.parametrize("s", [1, 2])
@pytest.mark.slow
def test_dropout_is_the_same_in_every_engine_and_chunk(s):
    torch.manual_seed(0)
    module, algorithm = Dropping(), FedABML(lr=0.05, s=s, nu0=-2.0)
    fed = federation("mlp")
    whole = simulate(fed, module, algorithm)
    for options in ({"backend": "loop"}, {"chunk": 1}, {"chunk": 2}):
        assert_close(simulate(fed, module, algorithm, **options), whole, 1e-9)
    plain = simulate(fed, module.eval(), algorithm)
    assert_close(plain, whole, 0)  # the mode of the user's module does not matter


def test_the_order_of_clients_in_chunks_does_not_matter():
    fed = federation("mlp", (4, 21, 9, 13))
    sim = simulate(fed, "mlp", rounds=0)
    cohort, n = sim.cohort, 4
    results = {}
    for parts in ([[0, 1, 2, 3]], [[2, 0], [3, 1]], [[3], [1], [0], [2]], [[1, 3, 0], [2]]):
        for part in parts:
            update, _, loss = client_round(Lanes.in_round(cohort, sim.shared, part, 1), {}, 2)
            for i, client in enumerate(part):
                results.setdefault(client, []).append((update["mean"][i], update["logstd"][i], loss[i]))
    assert len(results) == n
    for client in results:
        for other in results[client][1:]:
            torch.testing.assert_close(other, results[client][0], rtol=0, atol=1e-12)


def test_lanes_that_are_done_stop_moving():
    """The client of 4 samples has 1 step, its neighbour of 21 has 6: it must end as if trained alone."""
    fed = federation("mlp")
    sim = simulate(fed, "mlp", rounds=0)
    cohort = sim.cohort
    together, _, losses = client_round(Lanes.in_round(cohort, sim.shared, [0, 1, 2], 1), {}, 2)
    for client in range(3):
        alone, _, loss = client_round(Lanes.in_round(cohort, sim.shared, [client], 1), {}, 2)
        for name in alone:
            torch.testing.assert_close(together[name][client], alone[name][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(losses[client], loss[0], rtol=0, atol=1e-12)


def test_padded_rows_have_no_influence():
    fed = federation("mlr")
    cohort = simulate(fed, "mlr", rounds=0).cohort
    loss = ClientLoss(cohort.network, cohort.likelihood, None)
    index = torch.as_tensor(fed.train[0])
    padding = torch.full((5,), -1)
    w = cohort.network.initial
    grad = torch.func.grad_and_value(lambda w, batch: loss.nll(w, batch, rng.key(0)))
    own, value = grad(w, cohort.data.batch(index))
    batch = cohort.data.batch(torch.cat([index, padding]))
    for filled in (batch, batch._replace(x=torch.where(batch.mask[:, None] > 0, batch.x, 1e6))):
        more, same = grad(w, filled)
        torch.testing.assert_close(more, own, rtol=0, atol=1e-12)
        torch.testing.assert_close(same, value, rtol=0, atol=1e-12)
    by_hand = nn.functional.cross_entropy(
        cohort.network(w, cohort.data.inputs(index)), torch.as_tensor(fed.y[fed.train[0]])
    )
    torch.testing.assert_close(value, by_hand)


def test_a_batch_of_padding_alone_gives_nothing():
    cohort = simulate(federation("mlr"), "mlr", rounds=0).cohort
    loss = ClientLoss(cohort.network, cohort.likelihood, None)
    batch = cohort.data.batch(torch.full((3,), -1))
    slope, value = torch.func.grad_and_value(lambda w: loss.nll(w, batch, rng.key(0)))(cohort.network.initial)
    assert value == 0 and (slope == 0).all()


def test_a_client_alone_does_not_depend_on_the_data_of_the_others():
    fed = federation("mlp")
    other = fedabml.Federation.from_arrays(
        [(fed.x[fed.train[c]] + (c != 1) * 3, fed.y[fed.train[c]]) for c in range(3)], classes=3, normalize="none"
    )
    plain = fedabml.Federation.from_arrays(
        [(fed.x[fed.train[c]], fed.y[fed.train[c]]) for c in range(3)], classes=3, normalize="none"
    )
    a, b = (simulate(f, "mlp", rounds=0) for f in (plain, other))
    (first, _, _), (second, _, _) = (
        client_round(Lanes.in_round(s.cohort, s.shared, [0, 1, 2], 1), {}, 2) for s in (a, b)
    )
    torch.testing.assert_close(first["mean"][1], second["mean"][1], rtol=0, atol=1e-13)
    assert (first["mean"][0] - second["mean"][0]).abs().max() > 1e-3


def test_inputs_and_targets_are_standardised_as_the_federation_says():
    fed = federation("linear")
    cohort = simulate(fed, "mlr", rounds=0).cohort
    index = torch.as_tensor(fed.train.index)
    batch = cohort.data.batch(index)
    np.testing.assert_allclose(batch.x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(batch.y.std(0, unbiased=False), 1, atol=1e-6)
    assert batch.x.dtype == batch.y.dtype == batch.mask.dtype == torch.float64


def test_label_level_by_hand():
    fed = fedabml.Federation.from_arrays([(np.zeros((4, 1), np.float32), np.array([0, 0, 2, 0]))] * 2, classes=3)
    cohort = simulate(fed, "mlr", FedABML(label_alpha=0.5), rounds=0).cohort
    expected = np.log(np.array([3.5, 0.5, 1.5]) / 5.5)
    shared = cohort.algorithm.init(cohort.network.initial, cohort.network.layout)
    np.testing.assert_allclose(Lanes.after_round(cohort, shared, [1]).offset[0].numpy(), expected)
    assert np.exp(expected).sum() == pytest.approx(1)
    one = label_offset(cohort.algorithm, type(cohort.site([0]))(*(t[0] for t in cohort.site([0]))))
    np.testing.assert_allclose(one.numpy(), expected)
    assert label_offset(FedAvg(), cohort.site([0])) is None
    third = label_offset(FedABML(label_alpha=None), cohort.site([0]))[0].exp()  # 1/K for each of the three classes
    np.testing.assert_allclose(third.numpy(), np.array([10 / 3, 1 / 3, 4 / 3]) / 5)


def test_predictions_of_many_rows_are_cut_in_pieces_and_joined():
    fed = federation("mlr", (4, 300, 129))
    cohort = simulate(fed, "mlr", FedAvg(lr=0.1), rounds=0).cohort
    lanes = Lanes.after_round(cohort, {"mean": cohort.network.initial}, [0, 1, 2])
    models = personalize(lanes, {})
    outputs = predict(lanes, models, [fed.train[c] for c in range(3)]).split([4, 300, 129], 1)
    for c, out in enumerate(outputs):
        assert out.shape == (1, len(fed.train[c]), 3)
        expected = cohort.network(models.mean[c], cohort.data.inputs(torch.as_tensor(fed.train[c]))).softmax(-1)
        torch.testing.assert_close(out[0], expected)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("sizes", [(12, 12, 12), (11, 15, 13), (4, 30, 12)])
@pytest.mark.slow
def test_personalising_on_the_way_is_personalising_anew(backend, sizes, monkeypatch):
    fed = federation("mlr", sizes)
    cohort = simulate(fed, "mlr", FedABML(lr=0.1, s=2), rounds=0, backend=backend, batch_size=5).cohort
    shared = cohort.algorithm.init(cohort.network.initial, cohort.network.layout)
    epochs, anew, taken = (0, 1, 2, 5), [], []
    for many in epochs:
        other = cohort.using(dataclasses.replace(cohort.algorithm, personal_epochs=many))
        anew.append(personalize(Lanes.after_round(other, shared, [0, 1, 2]), {}))
    honest = cohort.executor.run

    def count(name, step, inputs, plan, steps):
        taken.append(steps.sum())
        return honest(name, step, inputs, plan, steps)

    monkeypatch.setattr(cohort.executor, "run", count)
    for one, other in zip(
        personalize_after(Lanes.after_round(cohort, shared, [0, 1, 2]), {}, epochs), anew, strict=True
    ):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    steps = sum(-(-n // 5) for n in sizes)  # of an epoch
    assert sum(taken) == steps * (5 if backend == "loop" or sizes != (4, 30, 12) else 1 + 2 + 5)


def test_loss_averages_over_draws():
    fed = federation("mlr")
    cohort = simulate(fed, "mlr", rounds=0).cohort
    loss = ClientLoss(cohort.network, cohort.likelihood, None)
    q = fedabml.gaussian.Gaussian(cohort.network.initial, 0 * cohort.network.initial - 1)
    batch = cohort.data.batch(torch.as_tensor(fed.train[0]))
    key = rng.key(4)
    each = [loss.nll(w, batch, key) for w in q.draw(key, 5)]
    torch.testing.assert_close(loss(q, batch, key, 5), torch.stack(each).mean())
    torch.testing.assert_close(loss(q, batch, key, 1), each[0])


# -- what a round draws ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "share", "size"), [(100, 0.1, 10), (15, 0.1, 2), (7, 1.0, 7), (3, 0.01, 1), (200, 0.1, 20)]
)
def test_the_number_of_clients_of_a_round(n, share, size):
    drawn = draw_clients(n, share, 0, 1)
    assert len(drawn) == len(set(drawn)) == size
    assert list(drawn) == sorted(drawn) and min(drawn) >= 0 and max(drawn) < n


def test_clients_are_drawn_uniformly():
    rounds, n = 4000, 20
    draws = np.array([draw_clients(n, 0.25, 5, t) for t in range(rounds)])
    counts = np.bincount(draws.reshape(-1), minlength=n)
    # Without replacement the counts vary less than multinomially, so the statistic is scaled by (n − 1)/(n − size).
    statistic = ((counts - rounds / 4) ** 2 / (rounds / 4)).sum() * (n - 1) / (n - 5)
    assert 1e-4 < stats.chi2.sf(statistic, n - 1) < 1 - 1e-4
    pairs = np.zeros((n, n))
    for drawn in draws:
        pairs[np.ix_(drawn, drawn)] += 1
    together = pairs[np.triu_indices(n, 1)]
    expected = rounds * 5 * 4 / (n * (n - 1))  # pairs are drawn uniformly too
    assert np.abs(together - expected).max() < 5 * expected**0.5


def test_a_round_depends_on_the_seed_and_the_round_alone():
    assert list(draw_clients(50, 0.2, 1, 3)) == list(draw_clients(50, 0.2, 1, 3))
    assert len({tuple(draw_clients(50, 0.2, s, t)) for s in range(3) for t in range(3)}) == 9


def test_every_step_of_every_client_has_its_own_key():
    seen = []

    class Spy(FedAvg):
        def step(self, carry, shared, batches, site, key, loss):
            seen.append(int(key))
            return super().step(carry, shared, batches, site, key, loss)

    fed = federation("mlr")
    simulate(fed, "mlr", Spy(), rounds=2, backend="loop")
    assert len(set(seen)) == len(seen) == 2 * (1 + 3 + 2)  # two rounds, every client's own steps and no more
    first, seen = seen, []
    simulate(fed, "mlr", Spy(), rounds=2, backend="loop", chunk=1)
    assert set(seen) <= set(first)  # the same keys; alone, a lane takes only its own steps


# -- minibatches ---------------------------------------------------------------------------------------------------
ROWS = [np.arange(100, 123), np.arange(5), np.arange(50, 58)]


def test_every_sample_exactly_once_an_epoch():
    plan = plan_of(ROWS, [4, 9, 2], 3, 8, 1, (0, 1))
    assert plan.steps.tolist() == [9, 3, 3] and plan.rows.shape == (9, 1, 3, 8)
    for lane, rows in enumerate(ROWS):
        own = plan.rows[: plan.steps[lane], 0, lane].reshape(3, -1)
        orders = [epoch[epoch >= 0] for epoch in own]
        assert all(sorted(order) == rows.tolist() for order in orders)
        assert len({tuple(order) for order in orders}) == 3  # shuffled anew
        assert (plan.rows[plan.steps[lane] :, 0, lane] == -1).all()
    sizes = (plan.rows[:9, 0, 0] >= 0).sum(1)
    assert sizes.tolist() == [8, 8, 7] * 3  # the last batch is short, never dropped


def test_a_plan_depends_on_its_path_and_its_client_alone():
    def own(lane, rows, names, path=(0, 1), batch=8):
        plan = plan_of(rows, names, 2, batch, 1, path)
        index = plan.rows[: plan.steps[lane], 0, lane]
        return [step[step >= 0].tolist() for step in index]

    base = own(0, ROWS, [4, 9, 2])
    assert own(0, ROWS[:1], [4]) == base
    assert own(2, ROWS[::-1], [2, 9, 4]) == base
    assert own(0, ROWS, [5, 9, 2]) != base
    assert own(0, ROWS, [4, 9, 2], (0, 2)) != base and own(0, ROWS, [4, 9, 2], (1, 1)) != base
    flat = lambda steps: [row for step in steps for row in step]
    assert flat(own(0, ROWS, [4, 9, 2], batch=5)) == flat(base)  # the same order, cut otherwise


def test_steps_of_several_batches():
    plan = plan_of(ROWS, [0, 1, 2], 2, 8, 3, (0,))
    # 23 samples: 3 batches an epoch, 6 in all, 2 steps. 5 samples: 2 batches, fewer than a step takes, so they repeat.
    assert plan.steps.tolist() == [2, 1, 1] and plan.rows.shape == (2, 3, 3, 8)
    small = plan.rows[0, :, 1]
    assert [sorted(b[b >= 0].tolist()) for b in small] == [[0, 1, 2, 3, 4]] * 3
    assert small[2].tolist() == small[0].tolist()


def test_a_batch_larger_than_the_data_is_all_of_it():
    plan = plan_of([np.arange(3)], [0], 1, 50, 1, (0,))
    assert plan.rows.shape == (1, 1, 1, 3) and sorted(plan.rows[0, 0, 0]) == [0, 1, 2]


@pytest.mark.parametrize("per_step", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (13, 13), (9, 16, 12), (23, 5, 8), (3, 5)], ids=str)
def test_a_plan_is_its_definition_whether_or_not_the_fewest_samples_are_known(sizes, per_step):
    epochs, width = 3, min(8, max(sizes))
    rows, keys = torch.as_tensor(padded([np.arange(n) + 100 * n for n in sizes])), rng.keys((3,), range(len(sizes)))
    made = lambda *least: minibatches(rows, torch.tensor(sizes), keys, epochs, 8, per_step, *least)
    most = max(1, epochs * -(-max(sizes) // width) // per_step) * per_step
    for lane, n in enumerate(sizes):
        stream = []
        for epoch in range(epochs):
            order = rng.folds(rng.fold(keys[lane], epoch), n).argsort()
            stream += [[*part.tolist(), *[-1] * (width - len(part))] for part in rows[lane, order].split(width)]
        own = max(1, len(stream) // per_step) * per_step
        expected = [stream[s % len(stream)] if s < own else [-1] * width for s in range(most)]
        for plan in (made(), made(min(sizes))):
            assert plan.is_contiguous() and plan[:, :, lane].reshape(most, width).tolist() == expected


@pytest.mark.parametrize("sizes", [(6, 6, 6), (6, 2, 5)])
def test_rows_of_clients_are_theirs_and_padding(sizes):
    fed = federation("mlr", sizes)
    tensors = simulate(fed, "mlr", rounds=0).cohort.client_tensors
    for width in (6, 9, 18):
        own = [*(fed.train[i] for i in (2, 0)), np.arange(width)]
        assert torch.equal(tensors.rows(torch.tensor([2, 0]), width), torch.as_tensor(padded(own))[:2])
    assert tensors.sizes(torch.tensor([2, 0])).tolist() == [sizes[2], sizes[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_is_nan_where_anything_is_not_finite(dtype):
    large = torch.finfo(dtype).max
    values = torch.tensor([[large, large], [1, torch.nan], [-torch.inf, 0], [-large, large], [0, 0]], dtype=dtype)
    other = torch.tensor([0, 0, 0, 0, torch.inf], dtype=dtype)
    flagged = _flagged(torch.arange(5, dtype=dtype), [values, other])
    assert torch.equal(flagged.isnan(), torch.tensor([False, True, True, False, True]))
    assert flagged[0] == 0 and flagged[3] == 3


@pytest.mark.parametrize("least", [0, 1, 16])
@pytest.mark.parametrize("steps", [[5], [3, 3], [7, 2, 2, 1], [40, 9, 9, 8, 7, 3, 3, 2, 2, 1, 1], [9] * 5 + [1] * 60])
def test_a_batch_shrinks_as_lanes_are_done(steps, least):
    steps = np.array(steps)
    cuts = segments(steps, least)
    assert [c.first for c in cuts] == [0, *(c.last for c in cuts[:-1])] and cuts[-1].last == steps.max()
    taken = np.zeros_like(steps)
    for cut in cuts:
        assert cut.lanes >= (steps > cut.first).sum()  # nobody who still has steps is left out
        taken[: cut.lanes] += np.minimum(steps, cut.last)[: cut.lanes] - np.minimum(steps, cut.first)[: cut.lanes]
    assert (taken == steps).all()
    waste = padding(steps[::-1], least)
    assert waste >= 0 and (least or waste == 0) and padding(steps, 0) <= padding(steps, 1) <= padding(steps, 16)
    assert least != 1 or waste <= 0.35
    whole = 1 - steps.sum() / (steps.max() * len(steps))
    assert waste <= whole + 1e-12


def test_how_far_a_batch_shrinks():
    least = lambda **words: Executor(**words).smallest_batch
    assert (
        least(capture=False, lanes_cost_time=True) == 0
        and least(capture=False, compile=True, lanes_cost_time=True) == 16
    )
    assert least(capture=True) == 16 and least(capture=True, lanes_cost_time=True) == 1
    assert least(capture=True, compile=True, lanes_cost_time=True) == 16
    fed = federation("mlp")
    cohort = simulate(fed, "mlp", FedAvg(lr=0.1), rounds=0, backend="vmap").cohort
    rows = min(cohort.batch_size, int(fed.train.counts.max()))
    many = DEFAULT.heavy_outputs
    for activations, heavy in (((many - 1) // rows, False), (-(-many // rows), True)):
        cohort.network.activations = activations
        assert cohort.among(dataclasses.replace(fed)).executor.lanes_cost_time == heavy
    assert simulate(fed, "mlp", FedAvg(lr=0.1), rounds=0, backend="loop").cohort.executor.lanes_cost_time


def test_padded():
    assert padded([np.array([4, 5]), np.array([], int)]).tolist() == [[4, 5], [-1, -1]]
    assert padded([np.array([], int)]).tolist() == [[-1]]


# -- where and how --------------------------------------------------------------------------------------------------
def test_backends_and_devices_by_name():
    cpu = torch.device("cpu")
    linear, conv = Network(nn.Linear(2, 2)), Network(nn.Conv2d(1, 1, 3))
    row, image = torch.zeros(2, 2), torch.zeros(2, 1, 4, 4)
    for network, x in ((linear, row), (conv, image)):
        assert choose_backend("auto", network, x, cpu)[0].backend in ("vmap", "loop")
        assert choose_backend("auto", network, x, torch.device("cuda")) == (Execution("vmap", 1), "")
    assert choose_backend("loop", linear, row, cpu)[0].backend == "loop"
    with pytest.raises(fedabml.InputError, match="Did you mean 'vmap'"):
        choose_backend("vmapp", linear, row, cpu)
    assert device_of("cpu") == cpu
    for name in ("gpu7", "meta"):
        with pytest.raises(fedabml.InputError, match=r"[Dd]evice"):
            device_of(name)


def test_the_faster_way_is_found_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    times = {Execution("vmap", 2): 3.0, Execution("vmap", 1): 3.5, Execution("loop", 2): 1.4, Execution("loop", 1): 1.2}
    times |= {Execution("loop", 2, channels_last=True): 1.1, Execution("loop", 1, channels_last=True): 1.0}
    ran = []
    monkeypatch.setattr(backend._Trial, "seconds", lambda trial, way: (ran.append(way), times[way])[1])
    conv, image, cpu = Network(nn.Conv2d(1, 1, 3)), torch.rand(2, 1, 5, 5), torch.device("cpu")
    one_by_one = Execution("loop", 1, channels_last=True)
    assert choose_backend("auto", conv, image, cpu) == (one_by_one, "") and set(ran) == set(times)
    times |= {Execution("vmap", 2): 1.02, Execution("vmap", 1): 1.0}  # a tie: the batched program, in threads
    ran.clear()
    assert choose_backend("auto", conv, image, cpu) == (one_by_one, "") and not ran
    with monkeypatch.context() as elsewhere:  # another processor, that shares this home
        elsewhere.setattr(backend, "hardware", lambda device: "Another CPU @ 1 GHz")
        assert choose_backend("auto", conv, image, cpu) == (Execution("vmap", 2), "") and ran
    ran.clear()
    assert choose_backend("auto", conv, image, cpu) == (one_by_one, "") and not ran  # both are remembered
    other_model = Network(nn.Conv2d(1, 2, 3))
    assert choose_backend("auto", other_model, image, cpu) == (Execution("vmap", 2), "") and ran
    assert choose_backend("loop", conv, image, cpu) == (
        Execution("loop", 1, channels_last=True),
        "",
    )  # chosen by name, with threads of its own
    (tmp_path / "cache" / "backends.json").write_text("{ broken")
    assert choose_backend("auto", conv, image, cpu) == (Execution("vmap", 2), "")
    (tmp_path / "cache" / "backends.json").write_text('{"a": ["vmap", 0], "b": 3, "c": ["loop", "x"]}')
    assert choose_backend("auto", conv, image, cpu) == (Execution("vmap", 2), "")
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path / "cache" / "backends.json" / "no folder"))
    assert choose_backend("auto", conv, image, cpu) == (Execution("vmap", 2), "")


def test_the_trial_runs_in_every_way():
    trial = backend._Trial(Network(nn.Linear(2, 2)), torch.zeros(2, 2))
    for name in ("vmap", "loop"):
        for workers in (1, 2):
            assert trial.seconds(Execution(name, workers)) > 0


class Viewing(nn.Module):
    """Says view where it means reshape, which images that lie channels-last do not allow."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(36, 2)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))


@pytest.mark.slow
def test_images_may_lie_channels_last(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path))
    seconds = backend._Trial.seconds
    monkeypatch.setattr(
        backend._Trial, "seconds", lambda trial, way: seconds(trial, way) * (1e-9 if way.channels_last else 1)
    )
    laid = []
    for module in (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2)), Viewing()):
        g = np.random.default_rng(0)
        pairs = [(g.integers(0, 256, (n, 3, 5, 5)).astype(np.uint8), g.integers(0, 2, n)) for n in SIZES]
        fed = fedabml.Federation.from_arrays(pairs, pairs, classes=2)
        torch.manual_seed(0)
        one, other = (simulate(fed, module, FedABML(lr=0.05), backend=b) for b in ("loop", "vmap"))
        assert_close(one, other, 1e-9)
        scores = [evaluate(s.cohort, s.theta, s.kept_for).clients["nll"] for s in (one, other)]
        np.testing.assert_allclose(*scores, atol=1e-8)
        laid.append((one.cohort.network.channels_last, other.cohort.network.channels_last))
    assert laid == [(True, False), (False, False)]


def test_a_large_network_is_tried_on_less(monkeypatch):
    trial = backend._Trial(Network(nn.Linear(2, 2)), torch.zeros(2, 2))
    name = trial.name
    trial.fit()
    assert (trial.lanes, trial.times, len(trial.x)) == (8, 4, 32)
    monkeypatch.setattr(backend, "SLOW", 0)
    trial.fit()
    assert (trial.lanes, trial.times, len(trial.x)) == (4, 1, 8) and trial.name == name
    assert trial.seconds(Execution("vmap", 2)) > 0


class Branching(nn.Module):
    """Decides by the value of an activation: vmap cannot take it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        out = self.layer(x)
        return out if out.sum() > 0 else 2 * out


class Ending(nn.Module):
    """Does something with the outputs of a layer."""

    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(6, 3), end

    def forward(self, x):
        return self.end(self.layer(x))


class Exp(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Batched(Exp):
    generate_vmap_rule = True


class Old(torch.autograd.Function):
    """Neither vmap nor grad can take it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


PUT, DRAWN = torch.tensor([0, 1]), torch.rand(3)


def copied(out, h):
    out.copy_(h)
    return out


def put(out, h):
    out[:, PUT] = h[:, :2]
    return out


def filled(h):
    h[h < 0] = 0
    return h


LOOKS, SHAPE, WRITES = "looks at a value", "makes a tensor whose shape depends on values", "writes what differs"
VALUES, CUT, RANDOM = "takes values out of torch", "cuts a tensor off", "draws random numbers"
NUMBERS, HERE = "leave numbers tensors (no .item(), float() or int())", "Stay with torch's operations"
# What vmap cannot take, the code that the note quotes, what it calls that, what it tells to do; and that, done.
UNBATCHED = {
    "if": (lambda h: h if h.sum() > 0 else 2 * h, "h.sum() > 0", LOOKS, "Choose by torch.where",
           lambda h: torch.where(h.sum() > 0, h, 2 * h)),
    "item": (lambda h: h * h.max().item(), "h.max().item()", LOOKS, NUMBERS, lambda h: h * h.max()),
    "float": (lambda h: h * float(h.max()), "float(h.max())", LOOKS, NUMBERS, lambda h: h * h.max()),
    "range": (lambda h: h + len(range(int(h.sum()))), "int(h.sum())", LOOKS, NUMBERS, lambda h: h + h.sum().trunc()),
    "equal": (lambda h: h * torch.equal(h, h), "torch.equal(h, h)", LOOKS, NUMBERS, lambda h: h * (h == h).all()),
    "one_hot": (lambda h: h + nn.functional.one_hot(h.argmax(1))[:, :1], "nn.functional.one_hot(h.argmax(1))", LOOKS,
                "labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)",
                lambda h: h + (h.argmax(1).unsqueeze(-1) == torch.arange(3, device=h.device))[:, :1]),
    "tolist": (lambda h: h * max(h[0].tolist()), "h[0].tolist()", VALUES, HERE, lambda h: h * h[0].max()),
    "add_": (lambda h: torch.zeros(len(h), 3).add_(h), "torch.zeros(len(h), 3).add_(h)", WRITES, "out = out + h",
             lambda h: torch.zeros(len(h), 3) + h),
    "copy_": (lambda h: copied(torch.zeros(len(h), 3), h), "out.copy_(h)", WRITES, "h.new_zeros",
              lambda h: copied(h.new_zeros(len(h), 3), h)),
    "put": (lambda h: put(torch.zeros(len(h), 3), h), "out[:, PUT]", WRITES, "h.new_zeros",
            lambda h: put(h.new_zeros(len(h), 3), h)),
    "nonzero": (lambda h: h + torch.nonzero(h > 0).sum(), "torch.nonzero(h > 0)", SHAPE, "Keep the shape",
                lambda h: h + (h > 0).sum()),
    "mask": (lambda h: h + h[h > 0].sum(), "h[h > 0]", SHAPE, "h * mask", lambda h: h + (h * (h > 0)).sum()),
    "fill": (lambda h: filled(h), "h[h < 0]", SHAPE, "torch.where(mask, h, 0)", lambda h: torch.where(h < 0, 0, h)),
    "select": (lambda h: h + h.masked_select(h > 0).sum(), "h.masked_select(h > 0)", SHAPE, "torch.where(mask, h, 0)",
               lambda h: h + torch.where(h > 0, h, 0).sum()),
    "function": (lambda h: Exp.apply(h), "Exp.apply(h)", "applies Exp, an autograd.Function that cannot be batched",
                 "generate_vmap_rule = True", lambda h: Batched.apply(h)),
    "data": (lambda h: h + h.data, "h.data", CUT, "Use .detach()", lambda h: h + h.detach()),
    "generator": (lambda h: h + torch.rand(3, generator=torch.Generator().manual_seed(0)),
                  "torch.rand(3, generator=torch.Generator().manual_seed(0))", RANDOM, "as a buffer",
                  lambda h: h + DRAWN),
    "sparse": (lambda h: h + h.to_sparse().to_dense(), "h.to_sparse()", "fails (Could not run 'aten::view'",
               "Use other operations", lambda h: 2 * h),
}  # fmt: skip


@pytest.mark.parametrize("case", UNBATCHED)
@pytest.mark.slow
def test_a_module_that_cannot_be_batched_runs_client_by_client(case):
    end, code, what, fix, instead = UNBATCHED[case]
    fed, words = federation("mlr"), {"dtype": "float32", "rounds": 1}
    setup = fedabml.prepare(fed, Ending(end), **words)
    (note,) = (note for note in setup.notes if "cannot be batched over clients" in note)
    found = re.fullmatch(r".* clients: `(.*?)` \(test_setting\.py:(\d+)\) (.*), in `(.*?)`\. (.*)\.", note)
    name, line, said, quoted, advice = found.groups()
    assert code in linecache.getline(__file__, int(line)) and name in ("<lambda>", "copied", "put", "filled")
    assert quoted == code and said.startswith(what) and fix in advice
    sim = simulate(fed, Ending(end), backend="auto", **words)
    assert sim.cohort.backend == "loop" and torch.isfinite(sim.theta["mean"]).all()
    assert not torch.equal(sim.theta["mean"], sim.cohort.network.initial)
    with pytest.raises(InputError, match=re.escape(advice) + r"\. Or use the backend auto or loop") as refused:
        fedabml.train(fed, Ending(end), backend="vmap", **words)
    assert f"(test_setting.py:{line}) {what}" in str(refused.value)
    mended = simulate(fed, Ending(instead), backend="vmap", **words)
    assert torch.isfinite(mended.theta["mean"]).all()


def test_a_note_names_the_module_that_cannot_be_batched():
    (note,) = fedabml.prepare(federation("mlr"), Branching(), batch_size=4, participation=1.0).notes
    line = inspect.getsourcelines(Branching.forward)[1] + 2
    assert note == (
        "This model runs client by client, because it cannot be batched over clients: "
        f"`Branching.forward` (test_setting.py:{line}) looks at a value, in `out.sum() > 0`. "
        "Choose by torch.where (no if, no assert), and leave numbers tensors (no .item(), float() or int())."
    )


class First(nn.Module):
    """Of what a recurrent layer returns."""

    def forward(self, outputs):
        return outputs[0]


class Written(nn.Linear):
    """The steps of an LSTM, written out."""

    def __init__(self):
        super().__init__(1 + 3, 4 * 3)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 3)
        for now in x.unbind(1):
            i, f, g, o = super().forward(torch.cat([now.unsqueeze(1), h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


def test_a_note_names_a_layer_of_torch():
    setup = fedabml.prepare(federation("mlr"), nn.Sequential(nn.LSTM(6, 3), First()))
    assert setup.cohort.backend == "loop"
    assert ": the layer LSTM is recurrent (aten::lstm), which torch cannot batch. Write" in " ".join(setup.notes)
    simulate(federation("mlr"), nn.Sequential(nn.LSTM(6, 3), First()), rounds=1, backend="auto")
    for instead in (Written(), nn.GRUCell(6, 3), nn.RNNCell(6, 3)):  # as it says
        simulate(federation("mlr"), instead, rounds=1)


class Counting(Ending):
    """Keeps a mean of what it sees: in place, or not."""

    def __init__(self, inplace):
        super().__init__(None)
        self.inplace = inplace
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        h = self.layer(x)
        if self.inplace:
            self.seen += h.detach().mean(0)
        else:
            self.seen = 0.9 * self.seen + h.detach().mean(0)
        return h


def test_a_module_with_a_memory_is_not_batched():
    setup = fedabml.prepare(federation("mlr"), Counting(False))
    assert setup.cohort.backend == "loop"
    assert "reads what the model kept from an earlier call, in `0.9 * self.seen`." in " ".join(setup.notes)


class Into(Ending):
    """Writes its outputs into a tensor made from its inputs, which are a client's own, but of all its draws."""

    def forward(self, x):
        return copied(x.new_zeros(len(x), 3), self.layer(x))


def test_a_module_that_cannot_be_batched_over_draws_runs_client_by_client():
    fed, model = federation("mlr"), Into(None)
    (note,) = (n for n in fedabml.prepare(fed, model).notes if "cannot be batched over clients" in n)
    assert "writes what differs between clients into a tensor that does not, in `out.copy_(h)`." in note
    sim = simulate(fed, model, FedABML(s=2), rounds=1, backend="auto")
    assert sim.cohort.backend == "loop" and torch.isfinite(sim.theta["mean"]).all()


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_is_not_batched(norm):
    setup = fedabml.prepare(federation("mlr"), norm(nn.Linear(6, 3)))
    assert setup.cohort.backend == "loop"
    words = "SpectralNorm keeps vectors from one call to the next. Leave spectral_norm out."
    assert words in " ".join(setup.notes)


class Scaling(nn.Linear):
    """Changes its input."""

    def forward(self, x):
        x /= 255
        return super().forward(x)


@pytest.mark.parametrize("backend", ["auto", "vmap", "loop"])
def test_what_is_not_the_input_may_be_changed_in_place(backend):
    ends = []
    for inplace in (True, False):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 2, 4, 4), nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(32, 3)
        ends.append(simulate(federation("cnn"), nn.Sequential(*layers), rounds=2, backend=backend))
    assert_close(*ends, 1e-12)
    assert not torch.equal(ends[0].theta["mean"], ends[0].cohort.network.initial)


INPUT, LESS = "changes its input, or a tensor that it keeps", "forgets what its gradient needs, to compute it again"
UNTRAINED = {
    "input": (Scaling(6, 3), f"{INPUT}, in `x /= 255`. Leave the input as it is (x = x / 255, not x /= 255; inplace="),
    "inplace": (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), f"the layer ReLU {INPUT}. Leave the input as"),
    "checkpoint": (Ending(lambda h: checkpoint(torch.exp, h, use_reentrant=False)),
                   f"{LESS}, in `checkpoint(torch.exp, h, use_reentrant=False)`. Leave torch.utils.checkpoint out"),
    "reentrant": (Ending(lambda h: checkpoint(torch.exp, h, use_reentrant=True)),
                  f"{LESS}, in `checkpoint(torch.exp, h, use_reentrant=True)`. Leave torch.utils.checkpoint out"),
    "numpy": (Ending(lambda h: h * torch.from_numpy(h.detach().numpy())),
              "takes values out of torch, in `h.detach().numpy()`. Stay with torch's operations"),
    "array": (Ending(lambda h: h * torch.as_tensor(np.asarray(h.detach()))),
              "takes values out of torch, in `np.asarray(h.detach())`. Stay with torch's operations"),
    "memory": (Counting(True), f"{INPUT}, in `self.seen += h.detach().mean(0)`. Leave the input as it is (x = x / 255, "
               "not x /= 255; inplace=False). Have the model keep nothing"),
    "function": (Ending(lambda h: Old.apply(h)), "whose forward has a ctx, in `Old.apply(h)`. Give it a forward"),
    "unique": (Ending(lambda h: h + h.unique().sum()), "it uses _unique2, of which torch has no derivative. Detach"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a checkpoint
@pytest.mark.parametrize("case", UNTRAINED)
@pytest.mark.parametrize("backend", ["auto", "vmap", "loop"])
def test_a_module_that_has_no_gradient_is_refused(case, backend):
    model, words = UNTRAINED[case]
    with pytest.raises(InputError, match="^The gradient of this model cannot be taken: .*" + re.escape(words)):
        fedabml.train(federation("mlr"), model, rounds=1, backend=backend)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused():
    plain = nn.Linear(6, 3)
    script, trace = torch.jit.script(plain), torch.jit.trace(plain, torch.zeros(2, 6))
    for model in (script, trace, nn.Sequential(script)):
        with pytest.raises(InputError, match=r"made by torch\.jit\.script or .* Give the plain module"):
            fedabml.prepare(federation("mlr"), model)


class Distances(nn.Linear):
    def forward(self, x):
        return -torch.cdist(x, self.weight)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1).expand(-1, 2, -1)).mean(1)[:, :3]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize(("kind", "name"), [(lambda: Distances(6, 3), "_cdist_"), (Attending, "_scaled_dot_product_")])
@pytest.mark.slow
def test_a_module_that_cannot_be_derived_twice_is_refused_where_it_would_be(kind, name, backend):
    one = FedABML(prior_step="amortised", prior_every="batch", lr=0.01)
    words = {"rounds": 1, "backend": backend, "dtype": "float32"}
    with pytest.raises(
        InputError, match=rf"cannot differentiate {name}\w+ twice\. Use curvature hessian_free or first_order,"
    ):
        simulate(federation("mlr"), kind(), one, **words)
    for curvature in ("hessian_free", "first_order"):  # as it says
        simulate(federation("mlr"), kind(), dataclasses.replace(one, curvature=curvature), **words)


class Unsound(nn.Linear):
    """Fails where it is scored."""

    def __init__(self):
        super().__init__(6, 3)

    def forward(self, x):
        if not self.training:
            raise KeyError("its own words")
        return super().forward(x)


@pytest.mark.parametrize("backend", ["auto", "vmap", "loop"])
def test_a_module_that_is_broken_says_so_itself(backend):
    with pytest.raises(InputError, match=r"^The model cannot take a batch of shape \(2, 6\): mat1 and mat2"):
        fedabml.train(federation("mlr"), nn.Linear(5, 3), backend=backend)
    with pytest.raises(KeyError, match="its own words"):
        fedabml.train(federation("mlr"), Unsound(), backend=backend)


def test_chunks_fit_in_memory_and_are_never_empty():
    assert chunk_of(1 << 60, torch.device("cpu"), 10) == 1
    assert chunk_of(1, torch.device("cpu"), 10) == 10
    network = Network(nn.Linear(100, 10))
    lanes = [lane_bytes(network, FedABML(s=s), 50, 100, 4) for s in (1, 4)]
    assert 4 * network.layout.size < lanes[0] < lanes[1]


def test_the_server_takes_a_part_of_its_last_step_again(tmp_path):
    fed, heavy = federation("mlr"), FedAvg(lr=0.1, server_momentum=0.5, average=0.5)
    start, first = (simulate(fed, "mlr", FedAvg(lr=0.1), rounds=t).shared["mean"] for t in (0, 1))
    one = simulate(fed, "mlr", heavy, rounds=1)
    assert torch.equal(one.shared["mean"], start + (first - start)) and one.server.velocity["mean"].equal(first - start)
    plain = simulate(fed, "mlr", FedAvg(lr=0.1), rounds=0)
    after = Checkpoint(1, one.shared, one.server.average, {}, 0.0, None)
    second = Simulation(plain.cohort, state=after)
    second.run(2)
    two = simulate(fed, "mlr", heavy, rounds=2)
    expected = second.shared["mean"] + 0.5 * (first - start)
    torch.testing.assert_close(two.shared["mean"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        two.server.average["mean"], (one.server.average["mean"] + expected) / 2, rtol=0, atol=1e-12
    )
    # A run that is resumed knows the step; a checkpoint without it is refused.
    folder = Folder(tmp_path)
    folder.create({})
    two.save(folder.write_round, {"round": 2})
    go = lambda state: Simulation(two.cohort, state=state)
    resumed = go(Folder(tmp_path).load_latest())
    resumed.run(3)
    assert torch.equal(resumed.shared["mean"], simulate(fed, "mlr", heavy, rounds=3).shared["mean"])
    with pytest.raises(InputError, match="does not belong to this run"):
        go(Folder(tmp_path).load_latest()._replace(velocity={}))


@pytest.mark.slow
def test_batches_without_padding_need_no_mask_and_give_the_same_bits(monkeypatch):
    g = np.random.default_rng(1)
    clients = lambda sizes: [(g.normal(size=(n, 3)).astype(np.float32), g.integers(0, 3, n)) for n in sizes]
    kinds = {"even": [12] * 5, "short last": [13] * 5, "unequal": [12, 8, 12, 4, 12], "small": [3] * 5}
    for name, sizes in kinds.items():
        fed = fedabml.Federation.from_arrays(clients(sizes), classes=3)
        words = {"participation": 0.8, "epochs": 2, "batch_size": 4, "dtype": "float64", "chunk": 5, "backend": "vmap"}
        runs = []
        for known in (True, False):
            setup = fedabml.prepare(fed, "mlr", FedABML(lr=0.1, prior_every="batch"), rounds=3, **words)
            with monkeypatch.context() as patch:
                if not known:
                    patch.setattr(Lanes, "unpadded", False)
                lanes = Lanes.after_round(
                    setup.cohort, setup.cohort.algorithm.init(setup.cohort.network.initial, None), [0]
                )
                assert lanes.unpadded == (known and name in ("even", "small"))
                sim = Simulation(setup.cohort)
                sim.run(8)  # long enough for recorded steps
            runs.append(sim.shared)
        assert all(torch.equal(v, runs[1][k]) for k, v in runs[0].items())


def test_a_body_has_momentum_too_and_an_algorithm_may_have_its_own():
    fed = federation("mlp")
    plain, heavy = (simulate(fed, "mlp", make("fedbabu", server_momentum=b), rounds=2).shared["body"] for b in (0, 0.5))
    assert not torch.equal(plain, heavy)

    @dataclasses.dataclass(frozen=True)
    class Own(FedAvg):
        server_momentum: float = hyper(0.0, "something else", 0)
        server_momentum_of = ()

    own, none = (simulate(fed, "mlp", kind, rounds=2) for kind in (Own(server_momentum=0.5), FedAvg()))
    assert torch.equal(own.shared["mean"], none.shared["mean"]) and own.server.velocity == {}


def test_the_step_size_decays_with_the_rounds():
    fed, one = federation("mlr"), FedAvg(lr=0.1)
    decayed = simulate(fed, "mlr", FedAvg(lr=0.1, lr_decay=0.5), rounds=2)
    steps = [simulate(fed, "mlr", one, rounds=1)]
    after = Checkpoint(1, steps[0].shared, steps[0].server.average, {}, 0.0, None)
    halved = simulate(fed, "mlr", FedAvg(lr=0.05), rounds=0)
    resumed = Simulation(halved.cohort, state=after)
    resumed.run(2)
    assert torch.equal(decayed.shared["mean"], resumed.shared["mean"])
    # A client's own steps are no round: they keep their size.
    plain = simulate(fed, "mlr", one, rounds=0)
    models = [personalize(Lanes.after_round(s.cohort, decayed.shared, [0, 1], 2), {}).mean for s in (plain, decayed)]
    assert torch.equal(*models)


def test_what_a_client_keeps_may_be_other_than_numbers_with_a_point():
    losses = torch.tensor([1.0, 2.0, 3.0])
    kept = [torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 0)]
    wide = torch.tensor([[0.0], [torch.inf], [1.0]], dtype=torch.float64)
    flagged = _flagged(losses, [*kept, wide])
    assert flagged.dtype == losses.dtype and flagged.isnan().tolist() == [False, True, False]
    assert flagged[0] == 1 and flagged[2] == 3
