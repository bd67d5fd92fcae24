"""pFedBayes against a plain loop, and its limit of a narrow posterior."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import lambertw

from fedabml import rng
from fedabml.algorithms import PFedBayes, PFedMe
from fedabml.engine.client import personalize
from fedabml.engine.lanes import Lanes
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    SEED,
    SIZES,
    START,
    assert_apart,
    batches,
    close,
    drawn,
    federation,
    models,
    simulate,
    slope,
    tuning,
)


def move(q, z, n, x, y, key, lr, lam, s, momentum, velocity, kl_step):
    """A step of q = (m, ν) towards the posterior under z, in plain numpy; the noise is the engine's."""
    (m, v), (zm, zv) = q, z
    noise = rng.normal(rng.fold(key, torch.arange(s)), (3,), torch.float64).numpy()
    slopes = [slope(m + np.exp(v) * e, x, y) for e in noise]
    g = np.mean(slopes, 0)
    gv = np.mean([d * e * np.exp(v) for d, e in zip(slopes, noise, strict=True)], 0)
    weight, kappa = lam / n, lam / n * np.exp(-2 * zv)
    if kl_step == "explicit":
        velocity = momentum * velocity + g + kappa * (m - zm)
        m = m - lr * velocity
    else:
        velocity = momentum * velocity + g
        far = lr / (1 - momentum)
        m = (m - lr * velocity + far * kappa * zm) / (1 + far * kappa)
    return (m, v - lr * (gv + weight * (np.exp(2 * (v - zv)) - 1))), velocity


def move_z(z, q, rate, kl_step):
    """A step of z on rate·KL[q ‖ z]."""
    (m, v), (zm, zv) = q, z
    if kl_step == "explicit":
        r = (np.exp(2 * v) + (m - zm) ** 2) * np.exp(-2 * zv)
        return zm - rate * (zm - m) * np.exp(-2 * zv), zv - rate * (1 - r)
    big, c = np.exp(2 * v) + (m - zm) ** 2, rate * np.exp(-2 * zv)
    start = zv - rate  # ν = start + rate·big·e^{−2ν}
    return (zm + c * m) / (1 + c), start + 0.5 * lambertw(2 * rate * big * np.exp(-2 * start)).real


@MOMENTA
@pytest.mark.parametrize(("kl_step", "beta"), [("implicit", 1.0), ("explicit", 0.6)])
def test_two_rounds_by_a_plain_loop(kl_step, beta, momentum):
    lr, lam, k, s, nu = 0.05, 0.5, 2, 2, -1.0
    words = {"lr": lr, "lam": lam, "k": k, "s": s, "nu0": nu, "kl_step": kl_step, "momentum": momentum}
    words["estimator"] = "weight"
    sim, lines = simulate(PFedBayes(beta=beta, personal_epochs=0, **words))
    first = (START, np.full(3, nu))
    shared, own = first, [first] * 4
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            z, q, velocity = shared, own[c], np.zeros(3)
            for number, ((x, y),) in enumerate(batches(c, t)):
                key = rng.fold(rng.fold(rng.key(SEED, rng.NOISE, t, c), 0), number)
                for j in range(k):
                    q, velocity = move(
                        q, z, SIZES[c], x, y, rng.fold(key, j), lr, lam, s, momentum, velocity, kl_step
                    )  # fmt: skip
                z = move_z(z, q, lr * lam / SIZES[c], kl_step)
            own[c] = q
            ends.append(z)
        means = np.mean(ends, 0)  # of the means, and of the ν
        shared = tuple((1 - beta) * old + beta * new for old, new in zip(shared, means, strict=True))
    close(sim.shared["mean"], shared[0], 1e-11)
    close(sim.shared["logstd"], shared[1], 1e-11)
    mine = models(sim)  # q_i is scored, unchanged
    close(mine.mean, [q[0] for q in own], 1e-11)
    close(mine.logstd, [q[1] for q in own], 1e-11)
    close(mine.mean[3], START, 0)  # never drawn
    assert set(sim.kept.states) == {0, 1, 2} and set(sim.kept.states[0]) == {"mean", "logstd"}
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (6 * 8, 6 * 8)

    tuned = sim.cohort.using(PFedBayes(personal_epochs=1, personal_lr=0.02, **words))
    with torch.no_grad():
        further = personalize(Lanes.after_round(tuned, sim.shared, CLIENTS), sim.kept_for(CLIENTS))
    for c in CLIENTS:  # further epochs go on with q_i under the z that is sent, one step a batch
        q, velocity = own[c], np.zeros(3)
        for number, ((x, y),) in enumerate(tuning(c, 1)):
            key = rng.fold(rng.fold(rng.key(SEED, rng.PERSONAL, 0, c), 0), number)
            q, velocity = move(q, shared, SIZES[c], x, y, key, 0.02, lam, s, momentum, velocity, kl_step)
        close(further.mean[c], q[0], 1e-11)
        close(further.logstd[c], q[1], 1e-11)


def test_kept_posteriors_are_apart():
    assert_apart(simulate(PFedBayes(lr=0.1))[0])


def narrow(nu, strength, n, **words):
    """A posterior so narrow that its samples are its mean, with κ = (λ/n)/σ² as given."""
    fixed = {"posterior_std": "fixed", "prior_std": "fixed", "nu0": nu, "s": 1}
    return PFedBayes(lam=strength * n * np.exp(2 * nu), **fixed, **words)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_narrow_posterior_is_a_proximal_point_method():
    """z held still: q_i settles at prox(z) = argmin f_i + κ/2 ‖w − z‖², where ∇f_i(w) = −κ(w − z)."""
    strength = 2.0
    fed = federation((6, 6, 6, 6))
    for kl_step in ("implicit", "explicit"):
        algorithm = narrow(-16.0, strength, 6, lr=0.15, k=300, prior_lr=0.0, kl_step=kl_step)
        sim, _ = simulate(algorithm, 1, fed=fed, batch_size=6, epochs=1)
        close(sim.shared["mean"], START, 0)
        for c in drawn(1):
            w, rows = sim.kept.states[c]["mean"].numpy(), fed.train[c]
            at = slope(w, fed.x[rows, 0].astype(float), fed.y[rows, 0].astype(float))
            close(at, -strength * (w - START), 1e-6)
            assert np.abs(w - START).max() > 0.01


@MOMENTA
def test_a_narrow_posterior_makes_the_first_round_pfedme(momentum):
    """Explicit steps with q_i = z at the start: θ is q's mean and w is z's; later rounds differ, for q_i lives on."""
    fed = federation((6, 6, 6, 6))
    words = {"lr": 0.05, "k": 2, "momentum": momentum}
    me, bayes = PFedMe(lam=3.0, **words), narrow(-16.0, 3.0, 6, kl_step="explicit", **words)
    a, b = (simulate(x, 1, fed=fed)[0].shared["mean"] for x in (me, bayes))
    close(a, b, 1e-5)
    a, b = (simulate(x, 2, fed=fed)[0].shared["mean"] for x in (me, bayes))
    assert (a - b).abs().max() > 1e-3
