"""A recorded function does what it did, without its transforms; and torch's compiler is not loaded for nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedabml import FedABML, FedAvg, Federation, prepare, rng
from fedabml.accel import convolutions
from fedabml.accel.recorder import merge_duplicates, record, reuse_memory, split_fixed, store_operands
from fedabml.engine.rounds import Simulation
from tests.cli.command import MAX_WAIT

ROOT = Path(__file__).resolve().parents[2]


def gradient(w, x):
    """Of a small network's loss, for every lane, with noise, a constant from elsewhere and a split in it."""

    def loss(w, x, key):
        a, b = w.split([12, 8])
        hidden = torch.relu(x @ a.view(3, 4) + rng.normal(key, (5, 4), x.dtype))
        return (hidden @ b.view(4, 2) * CONSTANT).logsumexp(-1).mean()

    keys = rng.keys((1,), range(len(w)))
    slope, value = torch.vmap(torch.func.grad_and_value(loss), (0, None, 0))(w, x, keys)
    return {"w": w - 0.1 * slope, "least": slope.min(-1)}, value


CONSTANT = torch.tensor([1.0, -2.0])


def test_a_recorded_function_gives_the_same_bits_for_other_values():
    g = torch.Generator().manual_seed(0)
    draw = lambda: (torch.randn(6, 20, generator=g), torch.randn(5, 3, generator=g))
    tape = record(gradient, *draw())
    for _ in range(2):
        given = draw()
        (carry, value), (state, loss) = gradient(*given), tape(*given)
        assert torch.equal(value, loss) and torch.equal(carry["w"], state["w"])
        assert all(torch.equal(a, b) for a, b in zip(carry["least"], state["least"], strict=True))


def test_what_is_not_used_is_not_done():
    def function(x):
        torch.exp(x)
        y = x.clone()
        y.add_(1)  # what changes a tensor stays
        return y * 2

    tape = record(function, torch.eye(3))
    names = [str(node.target) for node in tape.graph.nodes]
    assert not any("exp" in name for name in names)
    assert torch.equal(tape(torch.zeros(3, 3)), torch.full((3, 3), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "after", ["", "import torch._dynamo; torch._dynamo.config.suppress_errors", "torch._dynamo.reset()"]
)
@pytest.mark.nightly
def test_training_does_without_the_compiler_and_leaves_it_to_others(after):
    script = f"""
import sys, numpy as np, torch, fedabml
rows = [(np.zeros((60, 3), np.float32), np.arange(60) % 2)] * 4
fed = fedabml.Federation.from_arrays(rows, rows)
fedabml.train(fed, "mlr", fedabml.FedABML(), rounds=8, participation=1.0, batch_size=5, device="cpu", backend="vmap")
assert "torch._dynamo" not in sys.modules, "the compiler was loaded"
{after}
print(torch.func.grad(lambda x: x**2)(torch.tensor(3.0)).item())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=MAX_WAIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6.0"]


def test_what_does_not_change_is_done_once():
    """x is given anew, a and b are fixed: their product, asked for twice, is made once and before."""

    def function(x, a, b):
        return x * (a * b) + torch.exp(a * b), x + torch.sin(b)

    given = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    once, again = split_fixed(record(function, *given), range(1, 3))
    names = [[str(n.target) for n in part.graph.nodes if n.op == "call_function"] for part in (once, again)]
    assert sorted(names[0]) == ["aten.exp.default", "aten.mul.Tensor", "aten.sin.default"]
    assert sorted(names[1]) == ["aten.add.Tensor", "aten.add.Tensor", "aten.mul.Tensor"]
    for x in (given[0], 3 * given[0]):
        found = again(x, *given[1:], *once(*given[1:]))
        assert all(torch.equal(a, b) for a, b in zip(found, function(x, *given[1:]), strict=True))


def test_a_function_that_changes_tensors_stays_whole():
    def function(x, a):
        y = a.clone()
        y.add_(x)
        return y * a.clone()

    given = (torch.ones(2), torch.tensor([1.0, 2.0]))
    once, again = split_fixed(record(function, *given), range(1, 2))
    assert once(given[1]) == []
    assert torch.equal(again(*given), torch.tensor([2.0, 6.0]))


def test_results_take_the_place_of_operands_that_nothing_else_needs():
    """a·b is needed twice, its exponential, its view and the inputs are not free: only the last two have a place."""

    def function(a, b):
        c = a * b
        d = torch.addcmul(b, c.exp(), a)
        return torch.lerp(a, d, b), c, c.view(-1) + 1

    given = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    before = [t.clone() for t in given]
    _, again = split_fixed(record(function, *given), range(0))
    reuse_memory(again)
    placed = [str(n.target) for n in again.graph.nodes if "out" in n.kwargs]
    assert placed == ["aten.addcmul.out", "aten.lerp.Tensor_out"]
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(again(*given), function(*given), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_results_take_the_place_of_what_was_needed_before():
    """c is free after its last reader, though views have shown it; not where another view of it is read as well."""

    def function(a, b):
        c, d = a * b, a @ b
        return c.view(3, 3) @ b, torch.addcmul(b, c, a), d + d.t(), (b @ a).view(3, 3) * 2

    given = [torch.randn(3, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    before = [t.clone() for t in given]
    _, again = split_fixed(record(function, *given), range(0))
    reuse_memory(again)
    placed = [(str(n.target), str(n.kwargs["out"].target)) for n in again.graph.nodes if "out" in n.kwargs]
    assert placed == [("aten.addcmul.out", "aten.mul.Tensor"), ("aten.mul.out", "aten.mm.default")]
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(again(*given), function(*given), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_what_changes_nothing_is_left_out():
    def function(x, y):
        same = torch.ops.aten.mul.Scalar(x.view(2, 3).expand(2, 3).permute(0, 1), 1)
        return same + y, torch.ops.aten.mul.Scalar(x, 2).view(3, 2), x.t().permute(1, 0)

    given = (torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    _, again = split_fixed(record(function, *given), range(0))
    names = [str(n.target) for n in again.graph.nodes if n.op == "call_function"]
    assert sorted(set(names) - {"aten.t.default"}) == [
        *("aten.add.Tensor", "aten.mul.Scalar", "aten.permute.default", "aten.view.default")
    ]
    assert all(torch.equal(a, b) for a, b in zip(again(*given), function(*given), strict=True))


def _losses(compile, rounds=3, sizes=(40, 33, 12), workers=1, model="mlr"):
    g = np.random.default_rng(0)
    rows = [(g.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2) for n in sizes]
    words = {"batch_size": 5, "device": "cpu", "dtype": "float64", "backend": "vmap", "compile": compile, "epochs": 2}
    words |= {"workers": workers}
    setup = prepare(Federation.from_arrays(rows, rows), model, FedABML(lr=0.1), participation=1.0, **words)
    sim = Simulation(setup.cohort)
    return [sim.step()["loss"] for _ in range(rounds)], setup.cohort.executor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its compiler
@pytest.mark.nightly
def test_a_compiled_step_does_what_it_did(caplog):
    plain, _ = _losses(compile=False)
    fused, programs = _losses(compile=True)
    np.testing.assert_allclose(fused, plain, rtol=1e-9)
    assert "without torch.compile" not in caplog.text and "neither recorded" not in caplog.text
    assert 1 <= len(programs.recordings) <= 2  # clients of unequal size are padded: few shapes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.nightly
def test_threads_compile_beside_each_other(caplog):
    """Of three clients one thread has two and another one: a shape each, and one may be traced while the other runs."""
    plain, _ = _losses(compile=False, rounds=1, sizes=(400, 400, 400), workers=2)
    fused, programs = _losses(compile=True, rounds=1, sizes=(400, 400, 400), workers=2)
    np.testing.assert_allclose(fused, plain, rtol=1e-9)
    assert "without torch.compile" not in caplog.text and "neither recorded" not in caplog.text
    assert len(programs.recordings) == 2


NO_COMPILER = """InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug)"""
FAILS = {
    "something else": ("no luck here. None", "which fails: RuntimeError: no luck here. Leave compile out"),
    "no compiler": (
        NO_COMPILER,
        "which fails: there is no C++ compiler. Install one (Debian, Ubuntu: apt install g++)",
    ),
    "no headers": (
        "C++ compile error\n\nOutput:\nx.h:1: fatal error: Python.h: No such file",
        "apt install python3-dev",
    ),
    "old compiler": (
        "C++ compile error\n\nCommand:\ng++\n\nOutput:\nx.cpp:1: error: bad code\nmore",
        "the C++ compiler refuses the code (x.cpp:1: error: bad code). Install a newer compiler, or name another one",
    ),
    "no triton": ("Cannot find a working triton installation. Either", "Triton is missing. Install it (pip install"),
    "no gcc": ("Failed to find C compiler. Please specify via CC", "there is no C compiler. Install one"),
    "operation": (
        "backend='inductor' raised:\nLoweringException: AssertionError: bad layout\n  target: aten.sin.default\n  args",
        "it cannot take the operation aten.sin.default (LoweringException: AssertionError: bad layout). Use other",
    ),
}


@pytest.mark.parametrize("case", FAILS)
@pytest.mark.slow
def test_a_step_that_cannot_be_compiled_runs_as_it_is(case, monkeypatch, caplog):
    raised, said = FAILS[case]

    def broken(*args, **options):
        raise RuntimeError(raised)

    monkeypatch.setattr(torch, "compile", broken)
    words = {"rounds": 2, "sizes": (40, 40, 40), "workers": 2}
    plain, _ = _losses(compile=False, **words)
    fused, programs = _losses(compile=True, **words)
    np.testing.assert_allclose(fused, plain, rtol=1e-9)
    assert len(programs.recordings) == 2  # as many shapes, and one message
    (message,) = (r.message for r in caplog.records if "without torch.compile" in r.message)
    assert said in message and message.endswith(".") and "\n" not in message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.nightly
def test_without_a_compiler_a_run_says_so(monkeypatch, caplog):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    fused, _ = _losses(compile=True, rounds=1)
    assert np.isfinite(fused).all()
    assert "there is no C++ compiler. Install one" in caplog.text


class Switched(nn.Linear):
    """Looks at a value that is no client's: it can be batched, but not recorded."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("switch", torch.ones(()))

    def forward(self, x):
        return super().forward(x if self.switch > 0 else 2 * x)


def test_a_module_that_cannot_be_compiled_is_named(caplog):
    losses, _ = _losses(compile=True, model=Switched())
    assert np.isfinite(losses).all()
    (message,) = (r.message for r in caplog.records if r.levelname == "WARNING")
    assert "neither recorded nor compiled: `Switched.forward` (test_recorder.py:" in message
    assert "looks at a value, in `self.switch > 0`. Choose by torch.where" in message


@pytest.mark.parametrize("look", [float, bool, lambda t: t.item() > 3, lambda t: torch.equal(t, t)])
def test_a_function_that_looks_at_values_is_not_recorded(look):
    with pytest.raises(RuntimeError, match="looks at a tensor's value"):
        record(lambda x: x + 1 if look(x.sum()) else x, torch.ones(2))


@dataclass(frozen=True)
class Stops(FedAvg):
    """FedAvg that no longer moves after three rounds, and finds that out with an `if`."""

    def init(self, params, layout):
        return {"mean": params, "round": torch.zeros((), dtype=params.dtype)}

    def step(self, carry, shared, batches, site, key, loss):
        return self.sgd(carry, batches[0], key, loss, self.lr if float(shared["round"]) < 3 else 0 * self.lr)

    def merge(self, shared, update, sampled, clients):
        return {"mean": update["mean"], "round": shared["round"] + 1}


@pytest.mark.slow
def test_a_step_that_decides_by_values_decides_anew_in_every_round():
    g = np.random.default_rng(0)
    rows = [(g.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2) for _ in range(4)]
    fed = Federation.from_arrays(rows, rows)
    losses = []
    for backend in ("loop", "vmap"):
        setup = prepare(fed, "mlr", Stops(lr=0.1), participation=1.0, batch_size=5, device="cpu", backend=backend)
        sim = Simulation(setup.cohort)
        losses.append([sim.step()["loss"] for _ in range(6)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0][4] == pytest.approx(losses[0][5], abs=1e-6) and losses[0][1] < losses[0][0]


def test_random_numbers_of_torchs_are_neither_merged_nor_moved():
    def function(x, a):
        return x + torch.randn_like(a) - torch.randn_like(a)

    given = (torch.zeros(8), torch.zeros(8))
    once, again = split_fixed(record(function, *given), range(1, 2))
    first, second = (again(*given, *once(given[1])) for _ in range(2))
    assert first.abs().max() > 0 and not torch.equal(first, second)


def test_what_products_read_is_settled_once(monkeypatch):
    from torch.fx.experimental.proxy_tensor import make_fx

    library = torch.library.Library("fedabml", "IMPL")
    library.impl("multiply", lambda a, b, coarse: torch.bmm(a, b.mT), "CPU")  # as on a GPU
    monkeypatch.setattr(convolutions, "_has_kernels", lambda x: True)

    def one(w, x):
        def cost(w):
            a, b = w.exp().split([12, 8])
            hidden = torch.relu(convolutions.linear(x.square().sort(0).values, a.view(4, 3), None))
            return convolutions.linear(hidden, b.view(2, 4), None).logsumexp(-1).mean()

        return torch.func.grad(cost)(w)

    given = torch.randn(6, 20), torch.randn(6, 5, 3)
    try:
        trace = make_fx(torch.vmap(one))(*given)
        merge_duplicates(trace.graph)
        store_operands(trace.graph)
        trace.recompile()
        settled = [n.args[0] for n in trace.graph.nodes if "force_stride" in str(n.target)]
        names = [str(n.target) for n in settled]
        # The weights, the batch (one of two results), the hidden layer, and what comes back to both layers.
        assert len(settled) == len(set(settled)) == 5, names
        assert sum("exp" in name for name in names) == 1 and sum("getitem" in name for name in names) == 1
        assert sum("multiply" in str(n.target) for n in trace.graph.nodes) == 5  # of the batch no derivative is taken
        assert torch.equal(trace(*given), torch.vmap(one)(*given))
    finally:
        library._destroy()


def test_results_take_the_place_of_inputs_that_are_given_away():
    given = [torch.randn(5, 40, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    _, tape = split_fixed(record(lambda x, y, z: (x * z, y + x), *given), range(2, 2))
    want = tape(*given)
    assert reuse_memory(tape, owned=2) == 2
    mine = [t.clone() for t in given[:2]]
    found = tape(*mine, given[2])
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert found[1].data_ptr() == mine[1].data_ptr()  # y is needed by nothing else
    assert torch.equal(given[2], torch.randn(5, 40, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    "function", [lambda x, y, z: (z, x * y), lambda x, y, z: (w := x * y, w), lambda x, y, z: (y, y)]
)
def test_nothing_is_given_away_where_results_are_not_ones_own(function):
    """Otherwise the next call would write to somebody else's tensor, or to one of its results through another."""
    given = [torch.randn(5, 40, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    _, tape = split_fixed(record(function, *given), range(2, 2))
    before = [t.clone() for t in given]
    assert reuse_memory(tape, owned=2) == 0
    tape(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_pieces_of_a_result_keep_it():
    def function(x):
        h = x.exp()
        a, b = torch.unsafe_chunk(h, 2, -1)
        k = h * 2
        return a + b, k

    given = torch.randn(5, 40)
    _, tape = split_fixed(record(function, given), range(0))
    reuse_memory(tape)
    assert all(torch.equal(a, b) for a, b in zip(tape(given), function(given), strict=True))


def test_axes_exchanged_twice_are_left_alone():
    given = torch.randn(5, 40), torch.randn(40, 5)
    tape = record(lambda x, y: x.transpose(0, 1).transpose(0, 1) + y.transpose(0, 1), *given)
    want = tape(*given)
    merge_duplicates(tape.graph)
    tape.recompile()
    assert sum("transpose" in str(node.target) for node in tape.graph.nodes) == 1
    assert torch.equal(tape(*given), want)
