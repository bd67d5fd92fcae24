"""The network in bfloat16: a round of every system goes where that of float32 goes, batched or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedabml
from fedabml.accel import process
from fedabml.accel.process import borrowed, set_products
from fedabml.algorithms import REGISTRY, make
from fedabml.engine import autotune
from fedabml.engine.lanes import Lanes
from fedabml.engine.rounds import Simulation
from fedabml.vectors import Network
from tests.tiers import nightly_but

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
SIZES = (6, 60, 13, 33, 25, 9)
OPTIONS = {"fedpop": {"gamma": 1e-3}, "pfedme": {"lam": 3.0}, "perfedavg": {"alpha": 0.05}}


def client(n, seed):
    """Images that tell their labels: of three channels, that of the label is half as bright.

    Where labels are drawn without a look at the images there is nothing to learn but how often each comes, which
    FedABML's label level knows: its mean goes nowhere in a round, and is no measure of errors.
    """
    g = np.random.default_rng([n, seed])
    x = g.integers(0, 256, (n, 3, 16, 16)).astype(np.uint8)
    y = g.choice(g.permutation(3)[:2], n)
    x[np.arange(n), y] //= 2
    return x, y


@pytest.fixture(scope="module")
def fed():
    train, test = ([client(n, i) for i, n in enumerate(sizes)] for sizes in (SIZES, (7,) * len(SIZES)))
    return fedabml.Federation.from_arrays(train, test, classes=3)


def simulate(fed, name, device, *, rounds=1, capture=True, **options):
    """A round of short steps. Of long ones a difference is not one of products: a unit answers to one more example."""
    words = {
        "rounds": 1, "participation": 0.67, "epochs": 1, "batch_size": 8, "seed": 6, "device": device,
        "backend": "vmap", "chunk": 6, "model_options": {"channels": (8, 16), "hidden": (32,)},
    }  # fmt: skip
    algorithm = make(name, **({"lr": 0.01} | OPTIONS.get(name, {})))
    setup = fedabml.prepare(fed, "cnn", algorithm, **(words | options))
    setup.cohort.executor.capture &= capture
    sim = Simulation(setup.cohort)
    sim.run(rounds)
    assert not setup.cohort.executor.refused, "capturing failed"
    return sim


def vector(sim, clients):
    """All that the server has, and what these clients keep."""
    kept = sim.kept_for(clients) if sim.cohort.algorithm.keeps else {}
    return torch.cat([v.double().flatten().cpu() for v in (*sim.shared.values(), *kept.values())])


def check_near(fed, name, device, **options):
    exact, coarse, start = (
        simulate(fed, name, device, rounds=rounds, dtype=dtype, **(options if dtype == "bf16" else {}))
        for rounds, dtype in ((1, "float32"), (1, "bf16"), (0, "float32"))
    )
    fine, clients = coarse.cohort.algorithm.needs_full_precision, sorted(exact.kept.states)
    exact, coarse, start = (vector(sim, clients) for sim in (exact, coarse, start))
    assert (exact != start).any()
    assert (exact != coarse).any() != fine
    assert (coarse - exact).norm() <= 0.15 * (exact - start).norm()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", nightly_but({"fedavg", "fedabml", "scaffold", "perfedavg"}, [*REGISTRY]))
def test_a_round_is_near_the_exact_one(fed, name, device):
    """A seventh of the way that a round goes is the tolerance: products have two digits, and their errors add up.

    Of a network of few units a round's mean may go nowhere, and the errors are all that is left. An algorithm that
    takes differences of gradients (`fine`) runs in float32, and has its bits.
    """
    check_near(fed, name, device)


@gpu
@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
def test_so_is_a_compiled_one(fed, name):
    check_near(fed, name, "cuda", compile=True)


def apart(fed, name, device, **other):
    """Of the way that a round goes, how far a run with other words ends from it."""
    found, plain, start = (
        simulate(fed, name, device, rounds=rounds, dtype="bf16", **words).shared["mean"]
        for rounds, words in ((1, other), (1, {}), (0, {}))
    )
    return (found - plain).norm() / (plain - start).norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
@pytest.mark.slow
def test_the_loop_goes_the_same_way(fed, name, device):
    """To a tenth of it: its convolutions are another library's."""
    assert 0 < apart(fed, name, device, backend="loop", capture=False, chunk=2) <= 0.1


@gpu
@pytest.mark.parametrize("name", ["fedavg", "fedabml"])
def test_so_do_steps_outside_graphs(fed, name):
    assert apart(fed, name, "cuda", capture=False) <= 0.01


class OneDNN:
    """Its switch, as torch has it."""

    def __init__(self, monkeypatch, on, arm, halves=True):
        self.on = on
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: self.on)
        monkeypatch.setattr(torch._C, "_set_mkldnn_enabled", lambda on: setattr(self, "on", on))
        monkeypatch.setattr(process, "uses_arm_library", lambda: arm)
        monkeypatch.setattr(process, "multiplies_bfloat16", lambda: halves)
        monkeypatch.setattr(process, "_onednn_off", False)
        monkeypatch.setattr(autotune, "uses_arm_library", lambda: arm)


@pytest.mark.parametrize("arm", [True, False])
def test_products_on_arm_are_torch_s_own_but_for_bfloat16_s(fed, monkeypatch, arm):
    """Whatever a run before it had asked for."""
    switch = OneDNN(monkeypatch, True, arm)
    for dtype, wanted in (("float32", False), ("bf16", True), ("float64", False)):
        with borrowed():
            setup = fedabml.prepare(fed, "cnn", make("fedavg"), dtype=dtype, backend="vmap", device="cpu")
            assert switch.on == (wanted or not arm)
            other = "float32" if wanted else "bf16"
            autotune.set_precision(other, torch.device("cpu"))
            Lanes.after_round(setup.cohort, {}, [0])
            assert switch.on == (wanted or not arm)
        assert switch.on and not process._onednn_off


def test_a_processor_without_products_of_bfloat16_has_torch_s_own(monkeypatch):
    switch = OneDNN(monkeypatch, True, True, halves=False)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        set_products(torch.device("cpu"), dtype, False)
        assert not switch.on


def test_who_has_switched_onednn_off_is_left_alone(monkeypatch):
    switch = OneDNN(monkeypatch, False, True)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        set_products(torch.device("cpu"), dtype, False)
        assert not switch.on
    switch.on = True  # it was asked for
    set_products(torch.device("cpu"), torch.float32, False)
    assert not switch.on
    set_products(torch.device("cpu"), torch.bfloat16, False)
    assert switch.on


def test_whose_products_were_tried_is_a_part_of_what_is_remembered(monkeypatch):
    network, x = Network(torch.nn.Linear(3, 2)), torch.zeros(2, 3)
    names = set()
    for arm, on in ((True, True), (True, False), (False, True), (False, False)):
        OneDNN(monkeypatch, on, arm)
        names.add(autotune._Trial(network, x).name)
    assert len(names) == 3
