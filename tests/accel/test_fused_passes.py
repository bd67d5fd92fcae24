"""Fused passes give the bits of torch's operations, whatever is fused; and without a compiler all goes on as before."""

from __future__ import annotations

import logging
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fedabml import FedABML, FedAvg, Federation, prepare
from fedabml.accel import c_library, fused_passes, fusible
from fedabml.accel.recorder import record, reuse_memory, split_fixed
from fedabml.algorithms.ditto import Ditto
from fedabml.algorithms.pfedme import PFedMe
from fedabml.algorithms.scaffold import Scaffold
from fedabml.engine.rounds import Simulation

needs_compiler = pytest.mark.skipif(c_library.compiler() is None, reason="no C compiler here")


@pytest.fixture
def eager(monkeypatch, at_once):
    """However small, everything is fused, and at once."""
    monkeypatch.setattr(fusible, "LEAST", 2)
    monkeypatch.setattr(fused_passes, "WORTH", 1)
    monkeypatch.setattr(fused_passes, "CUT", 50)
    monkeypatch.setattr(fused_passes, "in_background", at_once)


def both(function, *given):
    """The recorded function without and with passes, and the passes."""
    _, tape = split_fixed(record(function, *given), range(0))
    passes = fused_passes.fused(tape)()
    reuse_memory(tape)
    return tape, passes, [node.target for node in passes.graph.nodes if hasattr(node.target, "makes")]


def draw(shape, g, dtype, strange=False):
    x = torch.randn(shape, generator=g, dtype=dtype)
    if strange and x.numel() > 9:
        at = torch.randperm(x.numel(), generator=g)[:9]
        odd = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 1e38, 0.5]
        x.view(-1)[at] = torch.tensor(odd, dtype=dtype)
    return x


SHAPES = [(3, 107), (5, 4, 33), (2, 3, 5, 19), (211,), (4, 1, 61)]


def random_function(seed, shape):
    """Thirty operations on earlier results, tensors to be broadcast, numbers, and pieces put together."""
    choose = np.random.default_rng(seed)
    kinds = choose.integers(0, 17, 30)
    picks, numbers = choose.random((30, 3)), choose.normal(size=30)

    def function(*given):
        known = list(given[:-2])
        for kind, pick, number in zip(kinds, picks, numbers.tolist(), strict=True):
            x, y, z = (known[int(p * len(known))] for p in pick)
            x = x if x.shape == shape else known[0]
            whole = [
                *(lambda: x + y, lambda: x - y, lambda: x * y, lambda: x / y, lambda: -x, lambda: x.reciprocal()),
                *(lambda: torch.addcmul(x, y, z, value=number), lambda: torch.addcdiv(y, x, z, value=number)),
                *(lambda: torch.lerp(x, y, z), lambda: torch.lerp(x, y, number), lambda: torch.relu(x)),
                *(lambda: torch.ops.aten.threshold_backward(x, known[0], 0), lambda: number * x, lambda: x + number),
                *(lambda: torch.add(x, known[0], alpha=number), lambda: torch.sub(x, y, alpha=number)),
                lambda: torch.cat([given[-2], given[-1]], -1) - x,
            ][kind]()
            known.append(torch.sin(whole) if pick[0] < 0.1 else whole)
        return known[-1], known[-6] * 2, known[-12].exp()

    return function


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strange", [pytest.param(False, marks=pytest.mark.slow), True])
def test_random_functions_have_the_same_bits(eager, shape, dtype, strange):
    fused = 0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        width = shape[-1] // 3
        shapes = [shape, shape, (*shape[:-1], 1), (*shape[:1], *(1 for _ in shape[1:])), shape[-1:], (), shape]
        shapes += [(*shape[:-1], width), (*shape[:-1], shape[-1] - width)]
        make = lambda: [draw(s, g, dtype, strange) for s in shapes]
        tape, passes, plans = both(random_function(seed, shape), *make())
        fused += sum(len(plan.nodes) for plan in plans)
        for _ in range(2):
            given = make()
            before = [t.clone() for t in given]
            assert fused_passes.same(tape(*given), passes(*given))
            assert fused_passes.same(given, before)
        wide = [t if t.dim() == 0 else torch.cat([t, t], 0)[: len(t)] for t in make()]  # the same layout, then others
        assert fused_passes.same(tape(*wide), passes(*wide))
        turned = [t.mT.contiguous().mT if t.dim() > 1 else t for t in make()]
        assert fused_passes.same(tape(*turned), passes(*turned))
    assert fused > 40


@needs_compiler
def test_what_stands_between_is_not_skipped(eager):
    """c needs a and, by way of an exponential, a: one pass for both would have to wait for itself."""

    def function(x, y):
        a = x * y
        b = a.exp()
        c = (a + b) * a
        return c - y, b

    given = [torch.randn(7, 90, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    tape, passes, plans = both(function, *given)
    assert [len(plan.nodes) for plan in plans] == [3]
    assert fused_passes.same(tape(*given), passes(*given))


@needs_compiler
def test_two_groups_do_not_wait_for_each_other(eager):
    def function(x, y):
        a, b = x * y, x + y
        c, d = a.sin(), b.cos()
        return a * d + a, b * c + b

    given = [torch.randn(7, 90, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    tape, passes, plans = both(function, *given)
    assert plans and fused_passes.same(tape(*given), passes(*given))


@needs_compiler
def test_pieces_are_read_where_they_lie(eager):
    def function(w, a, b, c):
        return w - 0.5 * torch.cat([(a @ b).reshape(3, 40), c], 1)

    g = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=g) for s in ((3, 107), (3, 4, 6), (3, 6, 10), (3, 67))]
    tape, passes, plans = both(function, *given)
    assert len(plans) == 1 and not any("cat" in str(node.target) for node in passes.graph.nodes)
    assert plans[0].cuts == [0, 40, 50, 100, 107]
    assert fused_passes.same(tape(*given), passes(*given))


@needs_compiler
def test_results_take_the_place_of_what_nothing_else_needs(eager):
    given = [torch.randn(7, 90, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    _, passes, _ = both(lambda x, y: x.exp() * y + x, *given)
    (node,) = (n for n in passes.graph.nodes if hasattr(n.target, "makes"))
    assert [str(n.target) for n in node.kwargs["out"]] == ["aten.exp.default"]


@needs_compiler
def test_many_threads_share_a_pass(eager, monkeypatch):
    monkeypatch.setattr(c_library, "THREADED", 2)
    given = [torch.randn(9, 1007, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    tape, passes, _ = both(lambda x, y: torch.lerp(x, y, 0.3) * x - y, *given)
    want, threads = tape(*given), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(passes(*given), want)
        with ThreadPoolExecutor(4) as crew:
            assert all(torch.equal(t, want) for t in crew.map(lambda _: passes(*given), range(40)))
    finally:
        torch.set_num_threads(threads)


ALGORITHMS = {
    "fedavg": FedAvg(lr=0.1),
    "fedabml": FedABML(lr=0.1),
    "fedabml5": FedABML(lr=0.1, s=5, estimator="local"),
    "weight": FedABML(lr=0.1, s=2, estimator="weight"),
    "ditto": Ditto(lr=0.1),
    "pfedme": PFedMe(lr=0.1),
    "scaffold": Scaffold(lr=0.1),
}


def trained(algorithm, dtype="float32", workers=1):
    g = np.random.default_rng(0)
    rows = [(g.normal(size=(n, 9)).astype(np.float32), np.arange(n) % 3) for n in (60, 60, 44)]
    words = {"batch_size": 5, "device": "cpu", "dtype": dtype, "backend": "vmap", "workers": workers, "epochs": 3}
    setup = prepare(Federation.from_arrays(rows, rows), "mlp", algorithm, participation=1.0, **words)
    sim = Simulation(setup.cohort)
    losses = [sim.step()["loss"] for _ in range(3)]
    return losses, {name: value.clone() for name, value in sim.shared.items()}, setup.cohort.executor


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in ("fedabml", "scaffold"))) for name in ALGORITHMS],
)
def test_fused_steps_have_the_same_bits(name, eager, monkeypatch, caplog):
    with caplog.at_level(logging.DEBUG, "fedabml"):
        losses, shared, programs = trained(ALGORITHMS[name])
    assert "not fused" not in caplog.text and "neither recorded" not in caplog.text
    graphs = [trace[1].current.graph for trace in programs.recordings.values() if trace is not None]
    assert graphs and all(any(hasattr(n.target, "makes") for n in graph.nodes) for graph in graphs)
    monkeypatch.setenv("CC", "no-such-compiler")
    before, plain, _ = trained(ALGORITHMS[name])
    assert losses == before and all(torch.equal(shared[k], plain[k]) for k in plain)


@needs_compiler
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.slow
def test_small_steps_need_no_compiler(small, eager, monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: asked.append(args) or 1 / 0)
    c_library._library.cache_clear()
    if small:
        monkeypatch.setattr(fused_passes, "WORTH", 1 << 24)
    trained(FedABML(lr=0.1))
    assert bool(asked) != small


@pytest.mark.parametrize("command", ["no-such-compiler", "false"])
def test_without_a_compiler_all_goes_on_as_before(command, eager, monkeypatch, caplog):
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr(c_library, "_FAILED", set())
    c_library._library.cache_clear()  # of what another test has compiled
    with caplog.at_level(logging.DEBUG, "fedabml"):
        losses, _, programs = trained(FedAvg(lr=0.1))
    assert all(np.isfinite(losses)) and any(trace is not None for trace in programs.recordings.values())
    assert ("not fused" in caplog.text) == (command == "false")


@needs_compiler
@pytest.mark.slow
def test_a_pass_that_differs_is_not_used(eager, monkeypatch, caplog):
    monkeypatch.setitem(fusible.EXPRESSIONS, "relu", "{self} < 0 ? 1 : {self}")
    with caplog.at_level(logging.DEBUG, "fedabml"):
        losses, _, _ = trained(FedAvg(lr=0.1))
    assert "differ in some bits" in caplog.text
    monkeypatch.undo()
    assert losses == trained(FedAvg(lr=0.1))[0]


@needs_compiler
def test_steps_go_on_while_the_compiler_works(eager, monkeypatch):
    given = [torch.randn(7, 90, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    _, tape = split_fixed(record(lambda x, y: torch.lerp(x, y, 0.3) * x - y, *given), range(0))
    want, later = tape(*given), Future()
    monkeypatch.setattr(fused_passes, "in_background", lambda work: works.append(work) or later)
    works = []
    quick = fused_passes.FusedFunction(tape)
    assert torch.equal(quick(*given), want) and quick.current is tape  # not done yet
    later.set_result(works[0]())
    for _ in range(fused_passes.TRIALS):
        assert quick.current is tape and torch.equal(quick(*given), want)
    assert quick.current is later.result() and torch.equal(quick(*given), want)


@needs_compiler
def test_the_compiler_works_in_the_background(monkeypatch):
    monkeypatch.setattr(fused_passes, "WORTH", 1)
    given = [torch.randn(70, 900, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    _, tape = split_fixed(record(lambda x, y: x * y - y, *given), range(0))
    want, quick = tape(*given), fused_passes.FusedFunction(tape)
    passes = quick.pending.result(60)
    for _ in range(fused_passes.TRIALS + 1):
        assert torch.equal(quick(*given), want)
    assert quick.current is passes


@needs_compiler
@pytest.mark.slow
def test_a_compiler_that_fails_is_asked_once(eager, monkeypatch):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(c_library, "_FAILED", set())
    asked, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: asked.append(args) or run(*args, **options))
    trained(FedAvg(lr=0.1))
    trained(FedABML(lr=0.1))
    assert len(asked) == 1 and c_library._FAILED


NEGATIVES = {
    "difference": lambda x, y: (-(x - y), (x - y) * -1, (x - y) / -1, 2 - (x - y)),
    "once rounded": lambda x, y: (
        -torch.addcmul(x, y, y, value=-1),
        torch.lerp(x, y, 0.5) * -1,
        -torch.lerp(y, x, 0.3),
    ),
    "scaled": lambda x, y: (-torch.add(x, y, alpha=-1), torch.sub(x, y, alpha=2) / -1, torch.add(x, 3, alpha=0.3) * x),
}


@needs_compiler
@pytest.mark.parametrize("name", NEGATIVES)
def test_zeros_keep_their_sign(name, eager):
    function = lambda x, y: tuple(1 / value for value in NEGATIVES[name](x * 1.0, y))
    x = draw((9, 77), torch.Generator().manual_seed(0), torch.float32)
    x[:, ::3] = 1.0
    for y in (x.clone(), -x, torch.ones_like(x), torch.zeros_like(x)):
        tape, passes, _ = both(function, x, y)
        assert fused_passes.same(tape(x, y), passes(x, y))


def test_the_sign_of_zero_is_a_bit():
    one, other = torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0])
    assert (
        fused_passes.same(one, one.clone())
        and not fused_passes.same(one, other)
        and not fused_passes.same(one, one + 1e-7)
    )


@needs_compiler
def test_pieces_that_lie_across_are_not_taken(eager):
    function = lambda x, a, b: (x * 2 - torch.cat([a.transpose(0, 1), b], -1)) * x
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=g) for s in ((4, 5, 107), (5, 4, 40), (4, 5, 67))]
    tape, passes, _ = both(function, *given)
    assert fused_passes.same(tape(*given), passes(*given))


@needs_compiler
@pytest.mark.parametrize(
    "late", [lambda y: y[:1].expand(9, 77), lambda y: y.mT.contiguous().mT, lambda y: y.repeat(1, 2)[:, ::2]]
)
def test_operands_may_lie_otherwise_later(late, eager):
    function = lambda x, y, s: (x * y - s.expand(9, 77)) * y
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=g) for s in ((9, 77), (9, 77), (9, 1))]
    tape, passes, plans = both(function, *given)
    given[1] = late(given[1])
    assert plans and fused_passes.same(tape(*given), passes(*given))


@needs_compiler
def test_what_is_given_away_is_there_for_the_trial(eager):
    function = lambda x, y, z: (torch.lerp(x, z, 0.3) * x, y * x + z)
    given = [torch.randn(7, 90, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    _, tape = split_fixed(record(function, *given), range(2, 2))
    quick, carry = fused_passes.FusedFunction(tape, 2), [t.clone() for t in given[:2]]
    for _ in range(fused_passes.TRIALS + 2):
        want = function(*[t.clone() for t in carry], given[2])
        carry = quick(*carry, given[2])
        assert fused_passes.same(carry, want)
    assert quick.current is not tape and torch.equal(
        given[2], torch.randn(7, 90, generator=torch.Generator().manual_seed(2))
    )


@needs_compiler
def test_refused_passes_stay_refused(eager):
    """A thread that has just seen them right does not put them to use after another has seen them wrong."""
    given = [torch.randn(7, 90, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    _, tape = split_fixed(record(lambda x, y: torch.lerp(x, y, 0.3) * x - y, *given), range(0))
    quick = fused_passes.FusedFunction(tape)
    quick.trials, right = 1, quick.pending.result()

    def meanwhile(*inputs):
        quick.pending = None  # what the other thread has done
        return right(*inputs)

    quick.pending = Future()
    quick.pending.set_result(meanwhile)
    quick(*given)
    assert quick.current is tape and quick.pending is None
