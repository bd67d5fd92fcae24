"""Per-FedAvg against a plain loop, exact Hessians, and the paper's first remark."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedabml import rng
from fedabml.algorithms import FedABML, FedAvg, PerFedAvg
from fedabml.algorithms.base import Site
from fedabml.engine.autotune import set_precision
from fedabml.runs import prepare as preparing
from fedabml.runs.prepare import prepare
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    START,
    batches,
    close,
    descend,
    drawn,
    federation,
    models,
    simulate,
    slope,
    tuning,
)

SITE, KEY = Site(torch.tensor(20.0).double(), torch.empty(0)), rng.key(3)
g = torch.Generator().manual_seed(0)
ROOT = torch.randn(3, 3, generator=g, dtype=torch.float64)
A, B = ROOT @ ROOT.T + torch.eye(3), torch.randn(3, generator=g, dtype=torch.float64)


def quadratic(w):
    return 0.5 * w @ A @ w - B @ w


def rough(w):
    return quadratic(w) + torch.sin(3 * w).sum() + torch.tanh(w[0] * w[1])


def one_step(algorithm, losses, w, number=1):
    """The algorithm's own steps on batches that are themselves functions of the weights."""
    shared = {"mean": w}
    carry = algorithm.begin(shared, {}, SITE, KEY)
    for _ in range(number):
        carry, value = algorithm.step(carry, shared, tuple(losses), SITE, KEY, lambda q, f, key, samples=1: f(q.mean))
    return algorithm.end(carry, shared, {}, SITE, torch.tensor(float(number)))[0]["mean"], value


@MOMENTA
def test_two_rounds_by_a_plain_loop(momentum):
    lr, alpha, delta = 0.1, 0.2, 0.05
    sim, lines = simulate(PerFedAvg(lr=lr, alpha=alpha, delta=delta, momentum=momentum), epochs=4)
    w = START
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            v, velocity = w, 0.0
            for one, two, three in batches(c, t, epochs=4, per_step=3):
                outer = slope(v - alpha * slope(v, *one), *two)
                curved = (slope(v + delta * outer, *three) - slope(v - delta * outer, *three)) / (2 * delta)
                velocity = momentum * velocity + outer - alpha * curved
                v = v - lr * velocity
            ends.append(v)
        w = np.mean(ends, 0)
    close(sim.shared["mean"], w)
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (3 * 8, 3 * 8) and sim.kept.states == {}


def test_the_three_batches_have_their_parts():
    """w̃ from the first, its gradient from the second, the curvature from the third; the loss is the first's."""
    w, weights = torch.tensor([0.3, -1.0, 0.5]).double(), (1.0, 0.7, 2.0)
    losses = [lambda w, i=i: weights[i] * rough(w + i) for i in range(3)]
    moved, value = one_step(PerFedAvg(lr=0.3, alpha=0.1, delta=1e-5), losses, w)
    outer = torch.func.grad(losses[1])(w - 0.1 * torch.func.grad(losses[0])(w))
    expected = w - 0.3 * (outer - 0.1 * torch.func.jacrev(torch.func.grad(losses[2]))(w) @ outer)
    close(moved, expected, 1e-6)
    close(value, losses[0](w))


@pytest.mark.parametrize("delta", [1e-3, 1.0, 50.0])
def test_on_a_quadratic_the_difference_is_the_hessian(delta):
    w = torch.tensor([0.3, -1.0, 0.5]).double()
    moved, _ = one_step(PerFedAvg(lr=0.3, alpha=0.1, delta=delta), [quadratic] * 3, w)
    after = A @ (w - 0.1 * (A @ w - B)) - B
    close(moved, w - 0.3 * (after - 0.1 * A @ after), 1e-10)
    # That is a gradient step on F(w) = f(w − α∇f(w)), the objective of the paper.
    close(moved, w - 0.3 * torch.func.grad(lambda w: quadratic(w - 0.1 * torch.func.grad(quadratic)(w)))(w), 1e-10)


def test_the_difference_is_second_order():
    w = torch.tensor([0.3, -1.0, 0.5]).double()
    exact = w - 0.3 * torch.func.grad(lambda w: rough(w - 0.1 * torch.func.grad(rough)(w)))(w)
    errors = [
        (one_step(PerFedAvg(lr=0.3, alpha=0.1, delta=d), [rough] * 3, w)[0] - exact).abs().max() for d in (1e-2, 1e-3)
    ]
    assert 0 < errors[1] < 1e-4 and errors[0] / errors[1] == pytest.approx(100, rel=0.05)


def test_without_adaptation_it_is_sgd_on_the_second_batch():
    sim, _ = simulate(PerFedAvg(lr=0.1, alpha=0), 1, batch_size=9, epochs=3)
    plain, _ = simulate(FedAvg(lr=0.1), 1, batch_size=9, epochs=1)
    close(sim.shared["mean"], plain.shared["mean"])


# -- what is scored -------------------------------------------------------------------------------------------------
@MOMENTA
def test_the_personal_model_is_w_after_whole_epochs_of_sgd(momentum):
    """E epochs are E passes over the training data, though a training step takes three batches."""
    sim, _ = simulate(PerFedAvg(lr=0.1, momentum=momentum, personal_epochs=3, personal_lr=0.05))
    w = sim.shared["mean"].numpy()
    for c in CLIENTS:
        close(models(sim).mean[c], descend(w, tuning(c, 3), 0.05, momentum))


def test_one_alpha_step_on_all_data():
    """The paper's own score: personal_lr = α, one epoch, one batch."""
    sim, _ = simulate(PerFedAvg(lr=0.1, alpha=0.2, personal_epochs=1, personal_lr=0.2), batch_size=9)
    w, fed = sim.shared["mean"].numpy(), federation()
    for c in CLIENTS:
        rows = fed.train[c]
        close(models(sim).mean[c], w - 0.2 * slope(w, fed.x[rows, 0].astype(float), fed.y[rows, 0].astype(float)))


# -- the paper's first remark ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("f", [quadratic, rough])
def test_remark_1_step_by_step(f):
    """FedABML amortised, a point, k = 1, against this class: exactly on a quadratic, to O(δ²) otherwise."""
    w, alpha, beta = torch.tensor([0.3, -1.0, 0.5]).double(), 0.1, 0.2
    words = {"prior_step": "amortised", "prior_every": "batch", "posterior": "point", "lr": alpha, "prior_lr": beta}
    words["short_batch"] = "whole"  # the batches here have no rows
    gaps = []
    for delta in (1e-1, 1e-2):
        a, b = w, w
        for number in range(1, 6):
            a, _ = one_step(PerFedAvg(lr=beta, alpha=alpha, delta=delta), [f] * 3, a)
            b, _ = one_step(FedABML(**words), [f], b)
            at_once, _ = one_step(FedABML(**words), [f], w, number)
            close(at_once, b)  # steps in a row are steps one by one
        gaps.append((a - b).abs().max().item())
    assert max(gaps) < 1e-12 if f is quadratic else 50 < gaps[0] / gaps[1] < 200


def test_remark_1_with_the_same_difference_the_two_agree_for_every_loss():
    """FedABML takes δ as a distance, Per-FedAvg as a multiple of g: with δ‖g‖ in the one they are the same."""
    w, alpha, beta, delta = torch.tensor([0.3, -1.0, 0.5]).double(), 0.1, 0.2, 0.05
    length = torch.func.grad(rough)(w - alpha * torch.func.grad(rough)(w)).norm().item()
    free = FedABML(
        prior_step="amortised", prior_every="batch", posterior="point", lr=alpha, prior_lr=beta,
        curvature="hessian_free", delta=delta * length, short_batch="whole",
    )  # fmt: skip
    close(one_step(PerFedAvg(lr=beta, alpha=alpha, delta=delta), [rough] * 3, w)[0], one_step(free, [rough], w)[0])


def test_remark_1_through_the_engine():
    """Full batches of real data: three epochs of Per-FedAvg are one epoch of FedABML."""
    free = PerFedAvg(lr=0.2, alpha=0.1, delta=1e-4)
    meta = FedABML(
        prior_step="amortised", prior_every="batch", posterior="point", lr=0.1, prior_lr=0.2, average=0,
        label_prior="none", server_momentum=0,
    )  # fmt: skip
    a, _ = simulate(free, 3, batch_size=9, epochs=6)
    b, _ = simulate(meta, 3, batch_size=9, epochs=2)
    close(a.shared["mean"], b.shared["mean"], 1e-7)
    assert np.abs(a.shared["mean"].numpy() - START).max() > 0.1


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_differences_of_gradients_have_all_digits(dtype, monkeypatch):
    """Where products have two digits, (∇f(w + δg) − ∇f(w − δg))/2δ is their errors, a thousand times as large."""
    fed, requested = federation(), []
    set_and_record = lambda name, device: requested.append(name) or set_precision(name, device)
    monkeypatch.setattr(preparing, "set_precision", set_and_record)
    words = {"device": "cpu", "batch_size": 5, "rounds": 1}
    for algorithm, full_precision in (
        (PerFedAvg(alpha=0.05), True),
        (FedABML(prior_step="amortised", prior_every="batch", curvature="hessian_free"), True),
        (FedABML(prior_step="amortised", prior_every="batch"), False),
        (FedABML(curvature="hessian_free"), False),
        (FedAvg(), False),
    ):
        setup = prepare(fed, "mlr", algorithm, dtype=dtype, **words)
        used = "float32" if full_precision else dtype
        assert setup.config["dtype"] == used == requested[-1] and setup.cohort.place.allow_tf32 == (not full_precision)
        assert setup.cohort.among(dataclasses.replace(fed)).place.allow_tf32 == (not full_precision)
        assert setup.cohort.network.dtype == (torch.bfloat16 if used == "bf16" else torch.float32)
        assert any("differences of gradients" in note for note in setup.notes) == full_precision
        assert not any("differences" in n for n in prepare(fed, "mlr", algorithm, dtype="float32", **words).notes)
