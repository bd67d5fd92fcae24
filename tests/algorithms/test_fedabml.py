"""FedABML's steps: fixed points, closed forms, derivatives written a second time, and the paper's remarks."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor, nn

import fedabml
from fedabml import FedABML, FedAvg, InputError, Local, rng
from fedabml.algorithms.base import Batch, Site
from fedabml.algorithms.steps import (
    batch_fraction,
    euclidean_prior,
    lambert_w,
    natural_logstd,
    natural_prior,
    proximal_step,
)
from fedabml.engine.server import ServerState, client_weights, server_step, weighted_sum
from fedabml.gaussian import Gaussian, Point, kl, spread
from tests.algorithms import problem

D = 4
N = torch.tensor(20.0).double()
SITE = Site(N, torch.empty(0))
BATCH = Batch(torch.empty(1), torch.empty(1), torch.ones(1).double())  # a whole one, of a row that no loss looks at
KEY = rng.key(3)
g = torch.Generator().manual_seed(0)
ROOT = torch.randn(D, D, generator=g, dtype=torch.float64)
A = ROOT @ ROOT.T / D + torch.eye(D).double()
B = torch.randn(D, generator=g, dtype=torch.float64)
WIDE = {"lr": 0.05, "lam": 0.5, "nu0": -1.0}  # noise and a pull that show in two rounds


def quadratic(w: Tensor) -> Tensor:
    return 0.5 * w @ A @ w - B @ w


def rough(w: Tensor) -> Tensor:
    return quadratic(w) + torch.sin(3 * w).sum() + torch.tanh(w[0] * w[1])


def linear(w: Tensor) -> Tensor:
    return B @ w


def loss_of(f):
    """A loss of the contract from a function of the weights."""

    def loss(q, batch, key, samples=1):
        if isinstance(q, Point):
            return f(q.mean)
        return torch.stack([f(w) for w in q.draw(key, samples)]).mean()

    return loss


def theta_at(nu=-0.5, seed=1):
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(D, generator=g, dtype=torch.float64)
    return {"mean": mean, "logstd": nu + 0.2 * torch.randn(D, generator=g, dtype=torch.float64)}


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# -- the φ-step ----------------------------------------------------------------------------------------------------
def settle(algorithm, f, theta, steps=600, lr=0.1):
    phi = {**theta, **algorithm.zero_momentum(theta["mean"])}
    for _ in range(steps):
        phi, _ = algorithm.descend(phi, theta, BATCH, SITE, KEY, loss_of(f), lr)  # the same noise every time
    return phi


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("posterior_std", [pytest.param("fixed", marks=pytest.mark.slow), "sgd", "natural"])
def test_implicit_and_explicit_steps_have_the_same_fixed_point(posterior_std, momentum):
    theta = theta_at()
    options = {"lam": 5.0, "s": 3, "posterior_std": posterior_std, "momentum": momentum}
    a, b = (settle(FedABML(kl_step=kind, **options), quadratic, theta) for kind in ("implicit", "explicit"))
    close(a["mean"], b["mean"], 1e-9)
    close(a["logstd"], b["logstd"], 1e-9)

    def elbo(mean, logstd):
        q = Gaussian(mean, logstd)
        return loss_of(quadratic)(q, None, KEY, 3) + 5 / N * kl(q, Gaussian(**theta))

    slopes = torch.func.grad(elbo, (0, 1))(a["mean"], a["logstd"])
    assert slopes[0].abs().max() < 1e-7  # and it is a stationary point of the loss
    assert posterior_std == "fixed" or slopes[1].abs().max() < 1e-7


def test_a_step_by_hand():
    """One parameter, f = w: g = 1 and g_ν = ε·σ. κ = (λ/n)/σ_θ²."""
    theta = {"mean": torch.tensor([1.0]).double(), "logstd": torch.tensor([0.5]).double().log()}
    phi = {"mean": torch.tensor([3.0]).double(), "logstd": torch.tensor([0.25]).double().log()}
    site, loss = Site(torch.tensor(10.0).double(), torch.empty(0)), loss_of(lambda w: w.sum())
    noise = rng.normal(rng.fold(KEY, torch.arange(1)), (1,), torch.float64)[0]
    kappa = (2 / 10) / 0.25
    moved, value = FedABML(lam=2, s=1).descend(phi, theta, BATCH, site, KEY, loss, 0.1)
    close(moved["mean"], torch.tensor([(3 - 0.1 + 0.1 * kappa * 1) / (1 + 0.1 * kappa)], dtype=torch.float64))
    close(moved["logstd"], phi["logstd"] - 0.1 * (noise * 0.25 + 0.2 * (0.0625 / 0.25 - 1)))
    close(value, (3 + 0.25 * noise)[0])
    moved, _ = FedABML(lam=2, s=1, kl_step="explicit", lr_std=0.5).descend(phi, theta, BATCH, site, KEY, loss, 0.1)
    close(moved["mean"], torch.tensor([3 - 0.1 * (1 + kappa * 2)], dtype=torch.float64))
    close(moved["logstd"], phi["logstd"] - 0.5 * (noise * 0.25 + 0.2 * (0.0625 / 0.25 - 1)))


@pytest.mark.parametrize("kl_step", ["implicit", "explicit"])
def test_adam_is_torchs_on_the_mean_and_the_deviation(kl_step):
    """Both follow the gradient of the whole loss, the KL's pull included, and each has its own state."""
    theta = theta_at()
    algorithm = FedABML(optimiser="adam", lam=5.0, s=3, kl_step=kl_step)
    phi = {**theta, **algorithm.zero_momentum(theta["mean"])}
    mine = [theta[name].clone().requires_grad_() for name in ("mean", "logstd")]
    hand = torch.optim.Adam(mine, lr=0.05)
    for _ in range(7):
        phi, _ = algorithm.descend(phi, theta, BATCH, SITE, KEY, loss_of(quadratic), 0.05)
        hand.zero_grad()
        q = Gaussian(*mine)
        (loss_of(quadratic)(q, None, KEY, 3) + 5 / N * kl(q, Gaussian(**theta))).backward()
        hand.step()
    close(phi["mean"], mine[0].detach())
    close(phi["logstd"], mine[1].detach())
    assert (phi["mean"] - theta["mean"]).abs().min() > 0.01  # seven steps of about 0.05


def rows(count, width, y=()):
    """A minibatch of `count` rows, padded to the width."""
    y = torch.tensor([*y, *[0.0] * (width - len(y))]).double()
    return Batch(torch.empty(width, 0), y, (torch.arange(width) < count).double())


def test_the_share_of_a_whole_minibatch():
    """101 samples in batches of 50: the last has one row, a fiftieth. 7 samples are one whole batch."""
    of = lambda count, n: batch_fraction(rows(count, 50), torch.tensor(float(n)).double()).item()
    assert (of(50, 101), of(1, 101), of(7, 7), of(50, 50)) == (1.0, 0.02, 1.0, 1.0)


def test_a_short_minibatch_by_hand():
    """One row where four are whole: η = 0.1 becomes 0.025. f = w, λ/n = 0.2, κ = 0.8: m = (3 − 0.025 + 0.02)/1.02."""
    theta = {"mean": torch.tensor([1.0]).double(), "logstd": torch.tensor([0.5]).double().log()}
    phi = {"mean": torch.tensor([3.0]).double(), "logstd": torch.tensor([0.25]).double().log()}
    site, loss = Site(torch.tensor(10.0).double(), torch.empty(0)), loss_of(lambda w: w.sum())
    noise = rng.normal(rng.fold(KEY, torch.arange(1)), (1,), torch.float64)[0]
    step = lambda batch, **more: FedABML(lam=2, s=1, **more).descend(phi, theta, batch, site, KEY, loss, 0.1)[0]
    moved = step(rows(1, 4))
    close(moved["mean"], torch.tensor([2.995 / 1.02], dtype=torch.float64))
    close(moved["logstd"], phi["logstd"] - 0.025 * (noise * 0.25 - 0.15))
    moved = step(rows(1, 4), kl_step="explicit", lr_std=0.5)
    close(moved["mean"], torch.tensor([3 - 0.025 * (1 + 0.8 * 2)], dtype=torch.float64))
    close(moved["logstd"], phi["logstd"] - 0.125 * (noise * 0.25 - 0.15))
    for std in ("sgd", "natural"):  # on a whole one nothing changes, to the bit
        one, other = (step(rows(4, 4), posterior_std=std, short_batch=kind) for kind in ("rows", "whole"))
        assert torch.equal(one["mean"], other["mean"]) and torch.equal(one["logstd"], other["logstd"])


@pytest.mark.parametrize(("kind", "far"), [("rows", 0.5), ("whole", 1.0)])
def test_every_sample_counts_once(kind, far):
    """y = 0, 0, 0, 0, 10 in batches of two, f = ½ mean (w − y)², from w = 0 at η = 0.1.

    An epoch's steps should sum to η(n/b)·2 = 0.5, 2 being the mean of y; a whole step for the last sample makes it 1.
    """

    def loss(q, batch, key, samples=1):
        return 0.5 * ((q.mean - batch.y) ** 2 * batch.mask).sum() / batch.mask.sum()

    start, site = {"mean": torch.zeros(1).double()}, Site(torch.tensor(5.0).double(), torch.empty(0))
    algorithm = FedABML(posterior="point", short_batch=kind)
    epoch = [rows(2, 2, [0, 0]), rows(2, 2, [0, 0]), rows(1, 2, [10])]
    moved = [algorithm.descend(start, start, batch, site, KEY, loss, 0.1)[0]["mean"] for batch in epoch]
    close(sum(moved), torch.tensor([far]).double())


@pytest.mark.parametrize(("kind", "factor"), [("rows", 0.75), ("whole", 2.0)])
def test_one_sample_does_not_throw_a_client_off(kind, factor):
    """f = ½ mean h(w − 1)², h = 1 for two samples and 10 for a third, which is a batch alone; η = 0.5, b = 2.

    The first step takes w − 1 times 1 − η = ½; the second by its rows times 1 − (η/2)·10 = −1.5, and as a whole one's
    times 1 − η·10 = −4. So an epoch multiplies |w − 1| with ¾, or doubles it.
    """

    def loss(q, batch, key, samples=1):
        return 0.5 * (batch.y * (q.mean - 1) ** 2 * batch.mask).sum() / batch.mask.sum()

    site, phi = Site(torch.tensor(3.0).double(), torch.empty(0)), {"mean": torch.tensor([1.125]).double()}
    algorithm = FedABML(posterior="point", short_batch=kind)
    for _, batch in itertools.product(range(10), (rows(2, 2, [1, 1]), rows(1, 2, [10]))):
        phi, _ = algorithm.descend(phi, phi, batch, site, KEY, loss, 0.5)
    close((phi["mean"] - 1).abs(), torch.tensor([0.125 * factor**10], dtype=torch.float64))


@pytest.mark.parametrize("options", [{"backend": "vmap"}, {"backend": "loop"}, {"backend": "vmap", "chunk": 1}])
def test_short_minibatches_in_the_engine(options):
    """Plain SGD on the very minibatches of the engine, a step's size by its rows: of min(3, n)."""
    sim, _ = problem.simulate(
        FedABML(posterior="point", lr=0.1, average=0, server_momentum=0, rho=1), rounds=2, **options
    )
    w = problem.START
    for round in (1, 2):
        sent = []
        for client in problem.drawn(round):
            own, n = w.copy(), problem.SIZES[client]
            for ((x, y),) in problem.batches(client, round):
                own = own - 0.1 * len(x) / min(3, n) * problem.slope(own, x, y)
            sent.append(own)
        w = np.mean(sent, 0)
    problem.close(sim.shared["mean"], w)


def test_implicit_is_stable_where_explicit_diverges():
    """λ = 1, n = 500, ν = −5 give κ = 44, and at η = 0.1 an explicit step multiplies the distance by |1 − 4.4|."""
    site = Site(torch.tensor(500.0).double(), torch.empty(0))
    theta = {"mean": torch.zeros(D).double(), "logstd": torch.full((D,), -5.0).double()}
    assert (1 / 500) * np.exp(10) == pytest.approx(44, abs=0.1)
    far = {}
    for kind in ("implicit", "explicit"):
        algorithm = FedABML(lam=1, kl_step=kind, posterior_std="fixed", posterior="gaussian", s=1)
        phi = {"mean": torch.ones(D).double(), "logstd": theta["logstd"]}
        for _ in range(50):
            phi, _ = algorithm.descend(phi, theta, BATCH, site, KEY, loss_of(lambda w: 0 * w.sum()), 0.1)
        far[kind] = phi["mean"].abs().max().item()
    assert far["implicit"] < 1e-30
    assert far["explicit"] == pytest.approx(abs(1 - 0.1 * np.exp(10) / 500) ** 50, rel=1e-9) and far["explicit"] > 1e20


def test_pulled_without_a_pull_is_sgd_and_with_a_strong_one_stays_at_the_centre():
    m, direction, centre = torch.tensor([3.0]), torch.tensor([2.0]), torch.tensor([1.0])
    assert proximal_step(m, direction, centre, torch.tensor(0.0), 0.5).item() == 2
    assert proximal_step(m, direction, centre, torch.tensor(1e12), 0.5).item() == pytest.approx(1, abs=1e-6)


def test_natural_step_of_the_posterior_is_exact_at_rate_one_on_a_quadratic():
    """g_ν = h·σ², so 1/σ² = 1/σ_θ² + h/weight in one step, from anywhere."""
    h, weight, prior = torch.tensor([0.5, 3.0]).double(), 0.1, torch.tensor([-1.0, 0.3]).double()
    for start in (-3.0, 1.0):
        logstd = torch.full((2,), start).double()
        got = natural_logstd(logstd, h * torch.exp(2 * logstd), prior, weight, 1.0)
        torch.testing.assert_close(torch.exp(-2 * got), torch.exp(-2 * prior) + h / weight, rtol=1e-9, atol=0)


def test_natural_step_survives_a_negative_curvature():
    got = natural_logstd(torch.zeros(1), torch.tensor([-100.0]), torch.zeros(1), 0.1, 0.5)
    assert got.item() == pytest.approx(0.5 * np.log(2), abs=1e-6)  # half of the precision is left
    got = natural_logstd(torch.zeros(1), torch.tensor([-100.0]), torch.zeros(1), 0.1, 1.0)
    assert got.item() == pytest.approx(np.log(10), abs=1e-6)  # σ grows tenfold at most


# -- the θ-step ----------------------------------------------------------------------------------------------------
def pair(seed):
    g = torch.Generator().manual_seed(seed)
    new = lambda scale: scale * torch.randn(6, generator=g, dtype=torch.float64)
    return Gaussian(new(1), new(0.5)), Gaussian(new(1), new(0.5))


def test_natural_prior_formula():
    theta, q = pair(0)
    moved = natural_prior(theta, q, 0.3, 0.2)
    r = (torch.exp(2 * q.logstd) + (q.mean - theta.mean) ** 2) / torch.exp(2 * theta.logstd)
    close(moved.mean, theta.mean + 0.3 * (q.mean - theta.mean))
    close(moved.logstd, theta.logstd + 0.5 * torch.log(1 + 0.2 * (r - 1)))


def test_natural_prior_rests_where_the_spread_is_one():
    _, q = pair(1)
    still = natural_prior(q, q, 0.7, 0.7)
    close(still.mean, q.mean)
    close(still.logstd, q.logstd)
    # With a mean that differs, r = 1 keeps ν although m moves.
    theta = Gaussian(q.mean + torch.sqrt(torch.exp(2 * q.logstd)), q.logstd + 0.5 * np.log(2))
    close(spread(q, theta), torch.ones(6).double())
    close(natural_prior(theta, q, 0.7, 0.7).logstd, theta.logstd)


@pytest.mark.parametrize(("rho_std", "rest"), [(0.1, 0.912), (0.3, 0.773)])
def test_clients_of_a_known_gaussian_and_where_the_priors_variance_rests(rho_std, rest):
    """Clients with m_i ~ N(0, 1) and σ_i → 0: the best σ_θ² is 1.

    `aggregate=moments` averages variances and reaches it. The mean of the clients' ν rests where
    E log(1 + ρ_ν(z²/σ_θ² − 1)) = 0, z ~ N(0, 1), which is below.
    """
    clients = 20_000
    z = torch.from_numpy(scipy.special.ndtri((np.arange(clients) + 0.5) / clients))
    z = z / z.square().mean().sqrt()  # the sample's own variance is 1, so the optimum is
    q = {"mean": z, "logstd": torch.full_like(z, -20.0)}
    words = {"rho": 0.0, "rho_std": rho_std, "prior_std": "learned", "label_prior": "none", "prior_every": "round"}
    averaged, moments = FedABML(**words), FedABML(**words, aggregate="moments")
    weights = client_weights(averaged, np.full(clients, N.item()), z)

    def after_a_round(algorithm, state, sent):
        update = weighted_sum(weights, {name: value.reshape(clients, 1) for name, value in sent.items()})
        return server_step(algorithm, state, update, clients, clients)

    theta = {"mean": torch.zeros(1).double(), "logstd": torch.zeros(1).double()}
    wide = dict(theta, logstd=theta["logstd"] + 0.5)
    of_mean, of_moments = ServerState(0, theta, theta, {}), ServerState(0, wide, wide, {})
    for _ in range(400):
        of_mean = after_a_round(averaged, of_mean, averaged.theta_step(of_mean.shared, q, N))
        of_moments = after_a_round(moments, of_moments, {"mean": z, "second": z.square()})
    variance = of_mean.shared["logstd"].mul(2).exp()
    assert variance.item() == pytest.approx(rest, abs=1e-3)
    assert torch.log1p(rho_std * (z.square() / variance - 1)).mean().item() == pytest.approx(0, abs=1e-9)
    assert of_moments.shared["logstd"].item() == pytest.approx(0, abs=1e-9)


def test_natural_prior_at_rate_one_jumps_to_the_optimum_of_nu():
    theta, q = pair(2)
    moved = natural_prior(theta, q, 0.0, 1.0)
    slope = torch.func.grad(lambda v: kl(q, Gaussian(theta.mean, v)))(moved.logstd)
    close(slope, torch.zeros(6).double(), 1e-12)


def test_a_hyper_prior_counts_as_clients_of_the_first_width():
    theta, q = pair(3)
    moved = natural_prior(theta, q, 0.0, 1.0, hyper=2.5, nu0=-1.3)
    with_hyper = lambda v: kl(q, Gaussian(theta.mean, v)) + 2.5 * (v + 0.5 * torch.exp(2 * (-1.3 - v))).sum()
    close(torch.func.grad(with_hyper)(moved.logstd), torch.zeros(6).double(), 1e-12)
    close(natural_prior(theta, q, 0.3, 0.2, hyper=1e15, nu0=theta.logstd).logstd, theta.logstd)  # nothing moves it


@pytest.mark.parametrize("aggregate", ["mean", "moments"])
def test_a_strong_hyper_prior_is_a_fixed_one(aggregate):
    words = {"aggregate": aggregate, "rho_std": 0.7, "average": 0.0, **WIDE}
    fixed, held, free = (
        problem.simulate(FedABML(prior_std=kind, hyper_prior=h, **words))[0].shared
        for kind, h in (("fixed", 0.0), ("learned", 1e12), ("learned", 0.0))
    )
    close(held["mean"], fixed["mean"], 1e-9)
    close(held["logstd"], fixed["logstd"], 1e-9)
    assert not torch.allclose(free["logstd"], fixed["logstd"], atol=1e-2)


def test_without_a_kl_a_posterior_that_starts_narrower_is_one_of_a_narrower_prior():
    words = {**WIDE, "lam": 0.0, "average": 0.0}
    gap = problem.simulate(FedABML(start_gap=-0.6, **words))[0].shared
    narrow = problem.simulate(FedABML(**words | {"nu0": WIDE["nu0"] - 0.6}))[0].shared
    close(gap["mean"], narrow["mean"], 1e-12)
    close(gap["logstd"], narrow["logstd"] + 0.6, 1e-12)  # the prior itself is as wide as it was
    pulled = problem.simulate(FedABML(start_gap=-0.6, **words | {"lam": 1.0}))[0].shared
    assert not torch.allclose(pulled["mean"], gap["mean"], atol=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        {"start_gap": -1.0, "posterior": "point"},
        {"start_gap": -1.0, "prior_step": "amortised", "prior_every": "batch"},
        {"hyper_prior": 1.0},
        {"hyper_prior": 1.0, "prior_std": "learned", "prior_step": "euclidean"},
    ],
)
def test_where_they_would_do_nothing_they_are_refused(words):
    with pytest.raises(InputError, match=next(iter(words))):
        FedABML(**words)


def test_natural_prior_is_the_natural_gradient_to_first_order():
    """The Fisher information of (m, ν) is (1/σ², 2), so the natural step is −(σ²·∂m, ½·∂ν)."""
    theta, q = pair(3)
    of_m, of_v = torch.func.grad(lambda m, v: kl(q, Gaussian(m, v)), (0, 1))(*theta)
    for rate in (1e-4, 1e-5):
        moved = natural_prior(theta, q, rate, rate)
        close((moved.mean - theta.mean) / rate, -torch.exp(2 * theta.logstd) * of_m, 1e-9)
        close((moved.logstd - theta.logstd) / rate, -0.5 * of_v, 1e3 * rate)


def test_euclidean_prior_is_a_gradient_step_on_the_kl():
    theta, q = pair(4)
    of_m, of_v = torch.func.grad(lambda m, v: kl(q, Gaussian(m, v)), (0, 1))(*theta)
    moved = euclidean_prior(theta, q, 0.07, implicit=False)
    close(moved.mean, theta.mean - 0.07 * of_m)
    close(moved.logstd, theta.logstd - 0.07 * of_v)


@pytest.mark.parametrize("rate", [1e-6, 0.07, 3.0, 400.0])
def test_implicit_euclidean_prior_solves_its_equations(rate):
    theta, q = pair(5)
    new = euclidean_prior(theta, q, rate, implicit=True)
    close(new.mean, theta.mean - rate * torch.exp(-2 * theta.logstd) * (new.mean - q.mean), 1e-9)
    big = torch.exp(2 * q.logstd) + (q.mean - theta.mean) ** 2
    torch.testing.assert_close(
        new.logstd, theta.logstd - rate * (1 - big * torch.exp(-2 * new.logstd)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_implicit_step_of_no_length_stays(dtype):
    theta, q = (Gaussian(*(t.to(dtype) for t in p)) for p in pair(6))
    new = euclidean_prior(theta, q, torch.tensor(0.0, dtype=dtype), implicit=True)
    torch.testing.assert_close(new, theta)


def test_lambert_equals_scipy():
    log_z = torch.linspace(-60, 300, 721).double()
    expected = scipy.special.lambertw(np.exp(log_z.numpy())).real
    np.testing.assert_allclose(lambert_w(log_z).numpy(), expected, rtol=1e-12)
    single = lambert_w(log_z.clamp(-60, 80).float()).numpy()
    np.testing.assert_allclose(single, scipy.special.lambertw(np.exp(log_z.clamp(-60, 80).numpy())).real, rtol=1e-5)


@pytest.mark.parametrize("step", ["natural", "euclidean"])
@pytest.mark.parametrize("std", ["fixed", "learned"])
def test_theta_step_uses_its_rates_and_leaves_a_fixed_width_alone(step, std):
    theta, phi = theta_at(seed=1), theta_at(seed=2)
    algorithm = FedABML(prior_step=step, prior_std=std, rho=0.4, rho_std=0.3, prior_lr=0.5, lam=2)
    moved = algorithm.theta_step(theta, phi, N)
    p, q = Gaussian(**theta), Gaussian(**phi)
    expected = natural_prior(p, q, 0.4, 0.3) if step == "natural" else euclidean_prior(p, q, 0.5 * 2 / N, True)
    close(moved["mean"], expected.mean)
    close(moved["logstd"], theta["logstd"] if std == "fixed" else expected.logstd)


# -- amortised -----------------------------------------------------------------------------------------------------
def unrolled(f, theta, *, k, lam, lr, s, point, implicit, momentum, std):
    """L(θ, φ_k(θ)) written once more, plainly, for autograd to differentiate."""
    m, v = theta["mean"], theta.get("logstd")
    m0, v0 = m, v
    weight, velocity = lam / N, torch.zeros(D).double()

    def expected(m, v, j):
        if point:
            return f(m)
        keys = rng.fold(rng.fold(KEY, j), torch.arange(s))
        return torch.stack([f(m + torch.exp(v) * rng.normal(key, (D,), torch.float64)) for key in keys]).mean()

    for j in range(k):
        if point:
            (gm,) = torch.autograd.grad(expected(m, v, j), (m,), create_graph=True)
            velocity = momentum * velocity + gm
            m = m - lr * velocity
            continue
        gm, gv = torch.autograd.grad(expected(m, v, j), (m, v), create_graph=True, materialize_grads=True)
        kappa = weight / torch.exp(v0) ** 2
        if implicit:
            velocity = momentum * velocity + gm
            far = lr / (1 - momentum)
            m_new = (m - lr * velocity + far * kappa * m0) / (1 + far * kappa)
        else:
            velocity = momentum * velocity + gm + kappa * (m - m0)
            m_new = m - lr * velocity
        ratio = torch.exp(2 * (v - v0))
        if std == "sgd":
            v = v - lr * (gv + weight * (ratio - 1))
        elif std == "natural":
            v = v - 0.5 * torch.log((1 - lr + lr * torch.clamp(ratio + gv / weight, min=0)).clamp_min(0.01))
        m = m_new
    value = expected(m, v, k)
    return value if point else value + weight * kl(Gaussian(m, v), Gaussian(m0, v0))


def total(f, theta, **options):
    leaves = {name: t.clone().requires_grad_() for name, t in theta.items()}
    value = unrolled(f, leaves, **options)
    slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True)), value.detach()


def amortised(f, theta, *, curvature="exact", k, lam, lr, s, point, implicit, momentum, std, delta=1e-3):
    algorithm = FedABML(
        prior_step="amortised", prior_every="batch", prior_std="learned", prior_lr=1.0, curvature=curvature, k=k,
        lam=lam, lr=lr, s=s, posterior="point" if point else "gaussian", kl_step="implicit" if implicit else "explicit",
        momentum=momentum, posterior_std=std, delta=delta,
    )  # fmt: skip
    moved, value = algorithm.amortised(theta, BATCH, SITE, KEY, loss_of(f))
    return {name: theta[name] - moved[name] for name in theta}, value  # with η' = 1 the step is the derivative


def start(point):
    theta = theta_at()
    return {"mean": theta["mean"]} if point else theta


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize(
    ("point", "implicit", "std"),
    [(True, True, "sgd"), *itertools.product([False], [True, False], ["fixed", "sgd", "natural"])],
)
def test_amortised_exact_equals_autograd_through_the_unrolled_steps(point, implicit, std, momentum, k):
    options = {
        "k": k,
        "lam": 3.0,
        "lr": 0.1,
        "s": 2,
        "point": point,
        "implicit": implicit,
        "momentum": momentum,
        "std": std,
    }
    got, value = amortised(rough, start(point), **options)
    expected, loss = total(rough, start(point), **options)
    if point:
        close(value, loss)
    else:
        assert value < loss  # what is reported leaves out the KL
    for name in expected:
        close(got[name], expected[name], 1e-11)


BASE = {"k": 2, "lam": 3.0, "lr": 0.1, "s": 2, "implicit": True, "momentum": 0.5, "std": "sgd"}


def test_amortised_exact_equals_differences():
    """Against central differences of the unrolled value itself, so that both derivations cannot share a slip."""
    theta, h = start(False), 1e-5
    got, _ = amortised(rough, theta, point=False, **BASE)
    for name, i in itertools.product(theta, range(D)):
        sides = []
        for sign in (1, -1):
            moved = {n: t.clone().requires_grad_() for n, t in theta.items()}
            moved[name].data[i] += sign * h
            sides.append(unrolled(rough, moved, point=False, **BASE).item())
        assert got[name][i].item() == pytest.approx((sides[0] - sides[1]) / (2 * h), abs=1e-7)


def test_hessian_free_is_exact_on_a_quadratic():
    for point in (True, False):
        # With a Gaussian the ν-gradient of a quadratic is not linear in ν, so the width is held.
        options = BASE | {"std": "fixed"}
        exact, _ = amortised(quadratic, start(point), point=point, **options)
        free, _ = amortised(quadratic, start(point), point=point, curvature="hessian_free", delta=0.1, **options)
        close(free["mean"], exact["mean"], 1e-11)


@pytest.mark.parametrize("point", [True, False])
def test_hessian_free_is_second_order_in_delta(point):
    exact, _ = amortised(rough, start(point), point=point, **BASE)
    errors = []
    for delta in (1e-2, 1e-3):
        free, _ = amortised(rough, start(point), point=point, curvature="hessian_free", delta=delta, **BASE)
        errors.append(max((free[n] - exact[n]).abs().max().item() for n in exact))
    assert 0 < errors[1] < 1e-4 and errors[0] / errors[1] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("point", [True, False])
def test_first_order_equals_exact_where_the_loss_is_linear(point):
    options = BASE | {"std": "fixed"}
    exact, _ = amortised(linear, start(point), point=point, **options)
    first, _ = amortised(linear, start(point), point=point, curvature="first_order", **options)
    close(first["mean"], exact["mean"])
    bent, _ = amortised(rough, start(point), point=point, **options)
    plain, _ = amortised(rough, start(point), point=point, curvature="first_order", **options)
    assert (bent["mean"] - plain["mean"]).abs().max() > 1e-3


def test_first_order_point_is_the_gradient_after_the_steps():
    """Dropping second derivatives leaves ∇f(w̃): first-order MAML."""
    theta = start(True)
    first, _ = amortised(rough, theta, curvature="first_order", point=True, **(BASE | {"k": 1, "momentum": 0.0}))
    close(first["mean"], torch.func.grad(rough)(theta["mean"] - 0.1 * torch.func.grad(rough)(theta["mean"])))


# -- the remarks of the paper ---------------------------------------------------------------------------------------
def test_remark_1_amortised_point_is_per_fedavg():
    """w ← w − β(I − αH(w))∇f(w̃), w̃ = w − α∇f(w); its Hessian-free form to O(δ²), exactly on a quadratic."""
    w, alpha, beta = theta_at()["mean"], 0.1, 0.3
    words = {
        "prior_step": "amortised",
        "prior_every": "batch",
        "posterior": "point",
        "k": 1,
        "lr": alpha,
        "prior_lr": beta,
    }
    for f, exactly in [(rough, False), (quadratic, True)]:
        slope, hessian = torch.func.grad(f), torch.func.jacrev(torch.func.grad(f))
        after = slope(w - alpha * slope(w))
        expected = w - beta * (after - alpha * hessian(w) @ after)
        site_step = lambda a, f=f: a.step(
            a.begin({"mean": w}, {}, SITE, KEY), {"mean": w}, (BATCH,), SITE, KEY, loss_of(f)
        )
        carry, _ = site_step(FedABML(**words))
        update, kept = FedABML(**words).end(carry, {"mean": w}, {}, SITE, torch.tensor(1.0))
        close(update["mean"], expected)
        assert kept == {}
        delta = 1e-3
        free, _ = site_step(FedABML(curvature="hessian_free", delta=delta, **words))
        reach = delta / after.norm()  # the difference is taken δ to either side
        h = (slope(w + reach * after) - slope(w - reach * after)) / (2 * reach)
        close(free["prior.mean"], w - beta * (after - alpha * h), 1e-11)
        assert (free["prior.mean"] - expected).abs().max() < (1e-11 if exactly else 1e-5)


def test_remark_2_explicit_steps_are_pfedme():
    """pFedMe: θ ← θ − η(∇f(θ) + λ'(θ − w)) k times, then w ← w − η'λ'(w − θ), with λ' = (λ/n)/σ²."""
    w, nu, lam, lr, k = theta_at()["mean"], -1.0, 0.7, 0.05, 5
    strength = lam / N * np.exp(-2 * nu)
    theta = w
    for _ in range(k):
        theta = theta - lr * (A @ theta - B + strength * (theta - w))
    expected = w - 0.2 * strength * (w - theta)

    class NoNoise(FedABML):
        """The expectation of a quadratic's gradient needs no samples: ∇f at the mean."""

        def gradient(self, phi, batch, key, loss):
            slope = torch.func.grad(quadratic)(phi["mean"])
            return {"mean": slope, "logstd": torch.zeros_like(slope)}, quadratic(phi["mean"])

    algorithm = NoNoise(
        prior_step="euclidean", prior_every="batch", kl_step="explicit", posterior_std="fixed", k=k, lr=lr,
        prior_lr=0.2, lam=lam, nu0=nu,
    )  # fmt: skip
    shared = {"mean": w, "logstd": torch.full((D,), nu).double()}
    carry = algorithm.begin(shared, {}, SITE, KEY)
    carry, _ = algorithm.step(carry, shared, (BATCH,), SITE, KEY, loss_of(quadratic))
    close(carry["mean"], theta)
    close(algorithm.end(carry, shared, {}, SITE, torch.tensor(1.0))[0]["mean"], expected)


def test_remark_2_in_the_limit_of_a_narrow_posterior():
    """With the sampled gradient itself: the distance to pFedMe's inner loop falls in proportion to σ."""
    w, lr, strength = theta_at()["mean"], 0.05, 2.0
    theta = w
    for _ in range(3):
        theta = theta - lr * (torch.func.grad(rough)(theta) + strength * (theta - w))
    gaps = []
    for nu in (-5.0, -8.0):
        lam = strength * N.item() * np.exp(2 * nu)
        algorithm = FedABML(kl_step="explicit", posterior_std="fixed", k=3, lr=lr, lam=lam, nu0=nu, s=1)
        shared = {"mean": w, "logstd": torch.full((D,), nu).double()}
        carry = algorithm.begin(shared, {}, SITE, KEY)
        carry, _ = algorithm.step(carry, shared, (BATCH,), SITE, KEY, loss_of(rough))
        gaps.append((carry["mean"] - theta).abs().max().item())
    assert gaps[1] < 1e-3 and gaps[0] / gaps[1] == pytest.approx(np.exp(3), rel=0.1)


# -- the server ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("std", ["fixed", "learned"])
@pytest.mark.parametrize(("rho", "rho_std"), [(1.0, 1.0), (0.6, 0.3)])
def test_moments_of_the_clients_posteriors(std, rho, rho_std):
    algorithm = FedABML(aggregate="moments", prior_std=std, rho=rho, rho_std=rho_std)
    shared = theta_at(seed=9)
    clients = [theta_at(nu=-1 - 0.1 * i, seed=20 + i) for i in range(5)]
    updates = [algorithm.end(c, shared, {}, SITE, torch.tensor(1.0))[0] for c in clients]
    mean = {name: torch.stack([u[name] for u in updates]).mean(0) for name in updates[0]}
    merged = algorithm.merge(shared, mean, 5, 5)
    means, stds = (torch.stack([c[n] for c in clients]) for n in ("mean", "logstd"))
    variance = torch.exp(2 * stds).mean(0) + means.var(0, unbiased=False)
    close(merged["mean"], (1 - rho) * shared["mean"] + rho * means.mean(0))
    damped = (1 - rho_std) * torch.exp(2 * shared["logstd"]) + rho_std * variance
    close(merged["logstd"], shared["logstd"] if std == "fixed" else 0.5 * torch.log(damped), 1e-11)


def federation(sizes=(30, 17), task="classification"):
    g = np.random.default_rng(0)
    return fedabml.Federation.from_arrays(
        [(g.normal(size=(n, 5)).astype(np.float32), g.integers(0, 3, n)) for n in sizes], classes=3
    )


@pytest.mark.parametrize("every", ["batch", "round"])
def test_points_with_the_full_natural_step_are_fedavg(every):
    """ρ = 1, k = 1 and a point leave nothing of the Bayesian part: FedAvg, up to the rounding of θ + (φ − θ)."""
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    options = {
        "rounds": 3, "participation": 0.5, "epochs": 2, "batch_size": 8, "seed": 1, "device": "cpu",
        "evaluate": False, "dtype": "float64",
    }  # fmt: skip
    words = {"posterior": "point", "rho": 1, "k": 1, "label_prior": "none", "average": 0, "short_batch": "whole"}
    words["server_momentum"] = 0
    point = FedABML(lr=0.1, prior_every=every, **words)
    a = fedabml.train(federation(), module, point, **options)
    b = fedabml.train(federation(), module, FedAvg(lr=0.1), **options)
    close(a.prior.shared["mean"], b.prior.shared["mean"], 1e-14)
    assert [line["clients"] for line in a.history] == [line["clients"] for line in b.history]
    assert a.summary["bytes_up"] == b.summary["bytes_up"]


def test_a_gaussian_sends_twice_as_much():
    options = {"rounds": 1, "participation": 1, "epochs": 1, "device": "cpu", "evaluate": False}
    for algorithm, numbers in [(FedABML(), 2), (FedABML(posterior="point"), 1), (FedAvg(), 1), (Local(), 0)]:
        line = fedabml.train(federation(), nn.Linear(5, 3), algorithm, **options).history[0]
        assert (line["bytes_up"], line["bytes_down"]) == (numbers * 18 * 4, numbers * 18 * 4)


def test_with_rho_one_every_batch_the_kl_never_pulls_the_mean():
    """Then it is FedAvg with weight noise, whatever λ is."""
    theta = theta_at()
    results = []
    for lam in (0.0, 50.0):
        algorithm = FedABML(prior_every="batch", rho=1, k=1, lam=lam, lr=0.1, posterior_std="fixed")
        carry = algorithm.begin(theta, {}, SITE, KEY)
        carry, _ = algorithm.step(carry, theta, (BATCH,), SITE, KEY, loss_of(rough))
        results.append(carry)
    # The implicit step shrinks the gradient by 1/(1 + ηκ), the explicit pull is zero at φ = θ.
    kappa = 50 / N * torch.exp(-2 * theta["logstd"])
    moved = [r["prior.mean"] - theta["mean"] for r in results]
    close(moved[1], moved[0] / (1 + 0.1 * kappa))


# -- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"posterior": "point", "prior_step": "euclidean"}, "neither KL nor variance"),
        ({"posterior": "point", "aggregate": "moments"}, "neither KL nor variance"),
        ({"prior_step": "amortised", "prior_every": "round"}, "set prior_every batch"),
        ({"aggregate": "moments", "prior_every": "batch"}, "set prior_step natural and prior_every round"),
        ({"aggregate": "moments", "prior_step": "euclidean"}, "set prior_step natural and prior_every round"),
        ({"aggregate": "moments", "prior_step": "amortised", "prior_every": "batch"}, "aggregate moments"),
        ({"posterior_std": "natural", "lam": 0}, "lam > 0"),
        ({"posterior_std": "natural", "lr_std": 1.5}, "between 0 and 1"),
        ({"posterior_std": "natural", "lr": 2.0}, "between 0 and 1"),
        ({"posterior_std": "natural", "personal_lr": 2.0}, "between 0 and 1"),
    ],
)
def test_contradictory_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        FedABML(**options)


def outside(field):
    meta = field.metadata
    if meta["choices"]:
        yield from ["nonsense", None, 3]
        return
    if np.isfinite(meta["low"]):
        yield meta["low"] - 1
        yield -1e30
    if np.isfinite(meta["high"]):
        yield meta["high"] + 1
    yield from [float("nan"), float("inf"), "0.1", [1], *([] if field.type == "bool" else [True])]
    if str(field.type).startswith("int"):
        yield meta["low"] + 0.5
    if "None" not in str(field.type):
        yield None


FIELDS = [(kind, field) for kind in (FedABML, FedAvg, Local) for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=[f"{k.__name__}-{f.name}" for k, f in FIELDS])
def test_every_hyperparameter_out_of_range_is_refused(kind, field):
    meta = field.metadata
    assert meta["doc"] and (meta["choices"] or field.type == "bool" or np.isfinite(meta["low"]))
    for value in outside(field):
        with pytest.raises(InputError, match=f"'{field.name}'") as error:
            kind(**{field.name: value})
        if meta["choices"]:
            assert any(choice in str(error.value) for choice in meta["choices"])
        elif field.type == "bool":
            assert "true or false" in str(error.value)
        elif "number; it is" not in str(error.value):  # not of the wrong kind, so out of its range
            assert f"{meta['low']:g}" in str(error.value)
    kind(**{field.name: field.default})


def test_numbers_take_the_type_of_their_field():
    algorithm = FedABML(lr=1, k=np.int64(2), lam=np.float32(0.5))
    assert (type(algorithm.lr), type(algorithm.k), type(algorithm.lam)) == (float, int, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.lr = 2
