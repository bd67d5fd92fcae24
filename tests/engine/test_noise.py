"""Noise on activations estimates what noise on weights estimates, with less variance, for modules as they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedabml
from fedabml import FedABML, GaussianNoise, rng
from fedabml.algorithms.base import Batch
from fedabml.algorithms.pfedbayes import PFedBayes
from fedabml.engine.loss import ClientLoss
from fedabml.engine.noise import BIAS, OTHER, PLACES, VECTORS, Noise, _normal, uses
from fedabml.errors import InputError
from fedabml.gaussian import Gaussian, Point, Samples
from fedabml.likelihoods import Categorical
from fedabml.vectors import Network
from tests.algorithms.test_known_gaussian import closed_form, personalised, problem
from tests.engine.test_setting import Dropping, assert_close, federation, simulate

pytestmark = pytest.mark.slow  # in all; `make quick` has the rest of the suite

NOISY = pytest.mark.parametrize("estimator", ["local", "flipout"])
ALL = pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])


# -- modules of a user, as they come ----------------------------------------------------------------------------------
class Tokens(nn.Module):
    """A Linear over tokens, then a pool."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).mean(1))


def gradient_variance(loss, q, keys):
    """Return the variances over keys of ∇_m and of ∇_ν of `loss(q, key)`, summed over the entries."""
    grads = [torch.func.grad(loss)(q, key) for key in keys]
    mean, logstd = (torch.stack(column).var(0).sum() for column in zip(*grads, strict=True))
    return float(mean), float(logstd)


class Flat(Tokens):
    """The same, with tokens in the batch axis."""

    def forward(self, x):
        h = torch.tanh(self.a(x.reshape(-1, 3)))
        return self.b(h.view(*x.shape[:2], -1).mean(1))


class Sequence(Tokens):
    """The same, with the tokens' axis first."""

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.transpose(0, 1))).mean(0))


class Tied(nn.Module):
    """A weight that an example meets twice, the second time in another layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Otherwise(nn.Module):
    """A weight in a layer and in a penalty, one in a product, one as an input, one by its shape only."""

    def __init__(self):
        super().__init__()
        self.a, self.scale, self.token = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1, 4))
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x)) * self.scale + 0.1 * self.a.weight.sum(0)
        h = h + self.b(self.token.expand(len(x), -1))
        return self.c(h.view(-1, self.c.weight.shape[1]))


class Unseen(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class Hidden(nn.Module):
    """A weight used once in a layer, and once more where no interception looks."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(torch.tanh(Unseen.apply(torch.tanh(self.a(x)), self.a.weight)))


class Mixing(nn.Module):
    """Every example sees the mean of its batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h - h.mean(0))


class Pool(nn.Module):
    """The mean over places."""

    def forward(self, x):
        return x.flatten(2).mean(2)


def conv(cls, *args, bias=True, norm=False, **options):
    layers = [cls(2, 4, *args, bias=bias, **options), nn.Tanh(), *([nn.GroupNorm(2, 4)] if norm else [])]
    return nn.Sequential(*layers, Pool(), nn.Linear(4, 3, bias=bias))


MODULES = {
    "vectors": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)), (4,)),
    "tokens": (Tokens, (5, 3)),
    "flat tokens": (Flat, (5, 3)),
    "tokens first": (Sequence, (5, 3)),
    "conv1d": (lambda: conv(nn.Conv1d, 3, stride=2, padding=1), (2, 5)),
    "conv2d": (lambda: conv(nn.Conv2d, 3, stride=2, padding=1), (2, 4, 4)),
    "conv2d groups": (lambda: conv(nn.Conv2d, 3, stride=2, padding=1, groups=2), (2, 4, 4)),
    "conv2d no bias": (lambda: conv(nn.Conv2d, 3, stride=2, padding=1, bias=False), (2, 4, 4)),
    "conv2d dilated": (lambda: conv(nn.Conv2d, 2, dilation=2, padding=0), (2, 4, 4)),
    "conv2d circular": (lambda: conv(nn.Conv2d, 3, 2, padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv3d": (lambda: conv(nn.Conv3d, 3, stride=2, padding=1), (2, 3, 3, 3)),
    "norm": (lambda: conv(nn.Conv2d, 3, stride=2, padding=1, norm=True), (2, 4, 4)),
    "tied": (Tied, (4,)),
    "otherwise": (Otherwise, (4,)),
    "hidden": (Hidden, (4,)),
    "mixing": (Mixing, (4,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3)), (4,)),
}
USES = {
    "vectors": {"0.weight": VECTORS, "0.bias": BIAS, "2.weight": VECTORS, "2.bias": BIAS},
    "no bias": {"0.weight": VECTORS, "2.weight": VECTORS},
    "tokens": {"a.weight": PLACES, "a.bias": BIAS, "b.weight": VECTORS, "b.bias": BIAS},
    "flat tokens": {"a.weight": OTHER, "a.bias": OTHER, "b.weight": VECTORS, "b.bias": BIAS},
    "tokens first": {"a.weight": OTHER, "a.bias": OTHER, "b.weight": VECTORS, "b.bias": BIAS},
    "conv1d": {"0.weight": PLACES, "0.bias": BIAS, "3.weight": VECTORS, "3.bias": BIAS},
    "conv2d circular": {"0.weight": PLACES, "0.bias": BIAS, "3.weight": VECTORS, "3.bias": BIAS},
    "norm": {"0.weight": PLACES, "0.bias": BIAS, "2.weight": OTHER, "2.bias": OTHER, "4.weight": VECTORS,
             "4.bias": BIAS},
    "tied": {"a.weight": OTHER, "a.bias": BIAS, "b.bias": BIAS, "c.weight": VECTORS, "c.bias": BIAS},
    "otherwise": {"scale": OTHER, "token": OTHER, "a.weight": OTHER, "a.bias": BIAS, "b.weight": VECTORS,
                  "b.bias": BIAS, "c.weight": VECTORS, "c.bias": BIAS},
    "hidden": {"a.weight": OTHER, "b.weight": VECTORS, "b.bias": BIAS},
    "mixing": {"a.weight": OTHER, "a.bias": OTHER, "b.weight": OTHER, "b.bias": OTHER},
}  # fmt: skip


def network_of(name, tail=0):
    make, shape = MODULES[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Network(make(), tail).to("cpu", torch.float64), shape


def batch_of(shape, rows=4):
    """Positive inputs: what a weight does at the places of an example adds up, and apart it would cancel."""
    g = torch.Generator().manual_seed(1)
    x = torch.rand(rows, *shape, generator=g, dtype=torch.float64) + 0.5
    return Batch(x, torch.randint(3, (rows,), generator=g), torch.ones(rows, dtype=torch.float64))


def estimates(loss, q, batch, count, samples=1):
    """Loss, ∇_m and ∇_ν of every key: [keys, 1 + 2d]."""
    keys = rng.fold(rng.key(7), torch.arange(count))
    one = torch.func.grad_and_value(lambda q, key: loss(q, batch, key, samples))
    gradient, value = torch.vmap(one, (None, 0), chunk_size=1000)(q, keys)
    return torch.cat([value.unsqueeze(-1), *gradient], -1)


def deviations(a, b):
    """By how many standard errors the means of two estimates differ."""
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    return ((a.mean(0) - b.mean(0)) / error.clamp_min(1e-12)).abs()


# -- how a module uses its weights ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", USES)
def test_how_a_module_uses_its_weights_is_found_out(name):
    network, shape = network_of(name)
    assert uses(network, shape) == USES[name]


def test_attention_is_drawn_as_weights_and_its_feed_forward_is_not():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    found = uses(Network(nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))), (5, 8))
    assert {n for n, use in found.items() if use == OTHER} == {
        n for n in found if "self_attn" in n or "norm" in n
    }  # fmt: skip
    assert found["0.linear1.weight"] == found["0.linear2.weight"] == PLACES and found["2.weight"] == VECTORS


def test_the_likelihoods_own_entries_are_drawn():
    network, shape = network_of("vectors", tail=3)
    assert uses(network, shape)["likelihood"] == OTHER


def test_a_module_that_cannot_be_tried_says_so():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(50, 4))

    with pytest.raises(InputError, match=r"2 examples of shape \(4,\).*estimator weight"):
        uses(Network(Fixed(4, 3)), (4,))


def test_a_module_that_changes_its_mind_is_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x) if x.mean() > 0.9 else x @ self.a.weight.T

    class Twice(Fickle):
        def forward(self, x):
            return self.a(x) if x.min() < 0.5 or x.mean() > 3 else self.a(x) + self.a(x)

    batch = batch_of((4,))
    for module, shift in ((Fickle(), -1.0), (Twice(), 0.0)):
        network = Network(module).to("cpu", torch.float64)
        found = {"a.weight": VECTORS, "a.bias": BIAS}
        q = Gaussian(network.initial, 0 * network.initial - 1)
        loss = ClientLoss(network, Categorical(3), None, noise=Noise("local", False, found))
        with pytest.raises(InputError, match="another way"):
            loss(q, batch._replace(x=batch.x + shift), rng.key(0))


def test_what_has_no_weight_for_it_is_drawn_as_weights():
    network, shape = network_of("mixing")
    assert Noise.of(FedABML(estimator="local"), network, shape).on_weights
    assert not Noise.of(FedABML(estimator="local"), network_of("vectors")[0], (4,)).on_weights
    assert Noise.of(FedABML(), network, shape).on_weights


# -- the expectation --------------------------------------------------------------------------------------------------
@ALL
def test_a_linear_layer_with_squared_loss_has_the_closed_form(estimator):
    """E ½‖xwᵀ + b − y‖² = ½‖xmᵀ + m_b − y‖² + ½ Σ (x² σ² + σ_b²); its gradients by hand."""
    torch.manual_seed(0)
    network = Network(nn.Linear(3, 2)).to("cpu", torch.float64)
    x, y = torch.rand(5, 3).double() + 0.5, torch.randn(5, 2).double()
    q = Gaussian(network.initial, torch.linspace(-2, -0.5, 8).double())
    noise = Noise(estimator, False, uses(network, (3,)))
    loss = ClientLoss(network, GaussianNoise(2, 1.0, learn=False), None, noise=noise)
    found = estimates(loss, q, Batch(x, y, torch.ones(5).double()), 20_000)
    w, b = q.mean[:6].view(2, 3), q.mean[6:]
    sw, sb = (2 * q.logstd[:6]).exp().view(2, 3), (2 * q.logstd[6:]).exp()
    r = x @ w.T + b - y
    value = 0.5 * (r**2 + x**2 @ sw.T + sb).sum(1).mean() + math.log(2 * math.pi)
    slopes = [(r.T @ x / 5).flatten(), r.mean(0), (sw * (x**2).mean(0)).flatten(), sb]
    exact = torch.cat([value.view(1), *slopes])
    error = (found.var(0) / len(found)).sqrt()
    assert ((found.mean(0) - exact).abs() / error).max() < 4
    assert (error / exact.abs().clamp_min(0.1)).max() < 0.05  # the test could tell


CHECKED = [name for name in MODULES if name != "mixing"]


def setting(name, estimator, forced=None):
    network, shape = network_of(name)
    noise = Noise(estimator, False, {**uses(network, shape), **(forced or {})})
    q = Gaussian(network.initial, torch.full_like(network.initial, -0.7))
    return ClientLoss(network, Categorical(3), None, noise=noise), q, batch_of(shape)


@NOISY
@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.nightly
def test_loss_and_gradients_are_unbiased(name, estimator):
    count = 6000
    a, b = (estimates(*setting(name, e), count) for e in ("weight", estimator))
    assert deviations(a, b).max() < 4
    assert deviations(a, b).square().mean() < 1.6  # of many entries none is far off, and all together are not either


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv2d groups", "conv2d no bias", "conv3d", "tokens"])
def test_local_noise_at_every_place_would_be_biased(name):
    """What the tests of unbiasedness are there to find: places of an example that do not share their weight."""
    forced = {n: VECTORS for n, use in uses(*network_of(name)).items() if use == PLACES}
    assert forced
    a, b = (estimates(*setting(name, e, forced if e == "local" else {}), 6000) for e in ("weight", "local"))
    assert deviations(a, b).max() > 8


def test_a_learned_noise_level_is_drawn_without_bias():
    network, shape = network_of("vectors", tail=3)
    batch = batch_of(shape)._replace(y=torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double())
    q = Gaussian(network.initial, torch.full_like(network.initial, -0.9))
    noises = (Noise(e, False, uses(network, shape)) for e in ("weight", "local"))
    a, b = (estimates(ClientLoss(network, GaussianNoise(3), None, noise=n), q, batch, 6000) for n in noises)
    assert deviations(a, b).max() < 4
    assert b[:, -3:].std(0).min() > 0.01  # its ν has a gradient


# -- the variance -----------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_the_gradients_vary_less():
    network = Network(fedabml.models.build("mlp", (20,), 3, hidden=(16, 16))).to("cpu", torch.float64)
    q, batch = Gaussian(network.initial, torch.full_like(network.initial, -3.0)), batch_of((20,), 32)
    keys = rng.fold(rng.key(1), torch.arange(200))
    found = {}
    for estimator in ("weight", "local", "flipout"):
        noise = Noise(estimator, False, uses(network, (20,)))
        loss = ClientLoss(network, Categorical(3), None, noise=noise)
        found[estimator] = gradient_variance(lambda q, key: loss(q, batch, key), q, keys)
    for i in range(2):
        assert found["local"][i] <= found["weight"][i]
        assert found["flipout"][i] <= found["weight"][i]
    assert found["local"][0] < 0.5 * found["weight"][0]


@ALL
def test_antithetic_pairs_cancel_what_is_odd_in_the_noise(estimator):
    """For a linear model with squared loss ∇_m is linear in the noise: a pair gives its expectation exactly."""
    torch.manual_seed(0)
    network = Network(nn.Linear(3, 2)).to("cpu", torch.float64)
    x, y = torch.rand(5, 3).double(), torch.randn(5, 2).double()
    batch, q = Batch(x, y, torch.ones(5).double()), Gaussian(network.initial, torch.full((8,), -1.0).double())

    def slope(q, samples, antithetic, batched=True):
        noise = Noise(estimator, antithetic, uses(network, (3,)))
        loss = ClientLoss(network, GaussianNoise(2, 1.0, learn=False), None, batched, noise)
        return torch.func.grad(lambda q: loss(q, batch, rng.key(5), samples))(q).mean

    exact = slope(Point(q.mean), 1, False)
    for samples in (2, 4):
        torch.testing.assert_close(slope(q, samples, True), exact, rtol=0, atol=1e-12)
        assert (slope(q, samples, False) - exact).abs().max() > 1e-3
    assert torch.equal(slope(q, 1, True), slope(q, 1, False))
    assert (slope(q, 3, True) - exact).abs().max() > 1e-3  # the last has no partner
    torch.testing.assert_close(slope(q, 3, True, batched=False), slope(q, 3, True), rtol=0, atol=1e-12)


def test_antithetic_weights_are_mirrored():
    q = Gaussian(torch.arange(4.0), torch.tensor([-1.0, 0.0, 1.0, 0.5]))
    w = q.draw(rng.key(3), 5, antithetic=True)
    assert w.shape == (5, 4)
    torch.testing.assert_close(w[0] + w[1], 2 * q.mean)
    torch.testing.assert_close(w[2] + w[3], 2 * q.mean)
    assert not torch.allclose(w[0], w[2]) and not torch.allclose(w[0], w[4])
    torch.testing.assert_close(w[[0, 2, 4]], q.draw(rng.key(3), 3))


# -- keys, padding, engines -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rows_noise_does_not_depend_on_the_rows_that_follow(dtype):
    many = _normal(rng.key(3), 40, (7,), dtype)
    for rows in (1, 2, 3, 16, 23):
        assert torch.equal(_normal(rng.key(3), rows, (7,), dtype), many[:rows])
    assert abs(_normal(rng.key(4), 500, (7, 3), dtype).std() - 1) < 0.03


@NOISY
@pytest.mark.parametrize("name", ["vectors", "tokens", "norm", "dropout"])
def test_the_same_key_gives_the_same_noise_and_padding_none(name, estimator):
    loss, q, batch = setting(name, estimator)
    run = torch.func.grad_and_value(lambda q, batch, key: loss(q, batch, rng.key(key), 2), argnums=0)
    first, again, other = run(q, batch, 0), run(q, batch, 0), run(q, batch, 1)
    assert torch.equal(first[1], again[1]) and torch.equal(first[0].mean, again[0].mean)
    assert (first[1] - other[1]).abs() > 1e-4
    fill = torch.full((9, *batch.x.shape[1:]), 1e3).double()
    wide = Batch(torch.cat([batch.x, fill]), F.pad(batch.y, (0, 9)), F.pad(batch.mask, (0, 9)))
    padded = run(q, wide, 0)
    torch.testing.assert_close(padded, first, rtol=0, atol=1e-11)


def test_draws_and_layers_have_noise_of_their_own():
    """Two passes differ, two layers differ, and the rows of a batch differ."""
    network = Network(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))).to("cpu", torch.float64)
    nn.utils.vector_to_parameters(torch.zeros(21).double(), network.module.parameters())
    found, x = uses(network, (2,)), torch.ones(4, 2).double()
    mean = torch.zeros(21).double()
    logstd = torch.where(torch.arange(21) < 9, 0.0, -30.0).double()  # noise in the first layer alone
    mean[9:18] = torch.eye(3).double().flatten()  # which the second hands on
    noise = Noise("local", False, found)
    first, _ = noise.outputs(network, Gaussian(mean, logstd), x, rng.key(0), rng.key(1))
    assert len(first.flatten().unique()) == 12
    second, _ = noise.outputs(network, Gaussian(mean, logstd.flip(0)), x, rng.key(0), rng.key(1))
    assert not torch.isclose(first, second, atol=1e-3).any()


ESTIMATING = FedABML(
    lr=0.05, lam=0.5, nu0=-2.5, prior_every="batch", prior_std="learned", rho=0.5, personal_epochs=1, estimator="local"
)


@pytest.mark.parametrize("options", [{}, {"s": 1}, {"s": 3, "antithetic": True}, {"estimator": "flipout"}], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "linear", "dropout"])
@pytest.mark.nightly
def test_engines_and_chunks_agree_on_ragged_clients(kind, options):
    algorithm = FedABML(**(ESTIMATING.values() | options))
    torch.manual_seed(0)
    fed, model = federation("mlp" if kind == "dropout" else kind), Dropping() if kind == "dropout" else kind
    if kind == "linear":
        model = "mlp"  # and a learned noise level
    whole = simulate(fed, model, algorithm)
    for other in ({"backend": "loop"}, {"chunk": 1}, {"chunk": 2}):
        assert_close(simulate(fed, model, algorithm, **other), whole, 1e-9)
    weight = simulate(fed, model, FedABML(**(algorithm.values() | {"estimator": "weight"})))
    assert (weight.shared["mean"] - whole.shared["mean"]).abs().max() > 1e-6


@NOISY
def test_points_and_samples_are_left_alone(estimator):
    loss, q, batch = setting("norm", estimator)
    plain = ClientLoss(loss.network, loss.likelihood, None)
    chain = Samples(q.draw(rng.key(0), 3))
    for model in (Point(q.mean), chain):
        assert torch.equal(loss(model, batch, rng.key(1)), plain(model, batch, rng.key(1)))


def test_inputs_of_zero_have_finite_gradients():
    """√ has no derivative at 0, where a row of zeros puts the variance of a layer without a bias."""
    loss, q, batch = setting("no bias", "local")
    batch = batch._replace(x=0 * batch.x)
    slope = torch.func.grad(lambda q: loss(q, batch, rng.key(0)))
    for found in (*slope(q), *torch.func.grad(lambda q: slope(q).mean.square().sum())(q)):
        assert torch.isfinite(found).all()


# -- algorithms -------------------------------------------------------------------------------------------------------
@NOISY
def test_the_amortised_step_goes_through_it(estimator):
    """The exact total derivative is that of the differences of gradients, to their accuracy."""
    fed, words = federation("mlp"), {"prior_step": "amortised", "prior_every": "batch", "prior_std": "learned", "k": 2}
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    run = lambda **more: (
        simulate(
            fed, smooth, FedABML(lr=0.1, nu0=-2.0, estimator=estimator, average=0, **words, **more), rounds=1
        ).shared
    )
    exact, difference, first = (run(curvature=c, delta=1e-4) for c in ("exact", "hessian_free", "first_order"))
    for name in exact:
        torch.testing.assert_close(exact[name], difference[name], rtol=0, atol=1e-7)
    assert (exact["mean"] - first["mean"]).abs().max() > 1e-5


@pytest.mark.slow
def test_the_personalised_posterior_is_the_mean_field_solution():
    stages = [(0.05, 0.2, 150), (0.005, 0.005, 500)]
    mean, logstd = personalised(stages, posterior_std="natural", estimator="local")
    expected, precision = closed_form(*problem(), 0.3)
    np.testing.assert_array_less(np.abs(mean - expected) * precision**0.5, 0.1)
    np.testing.assert_allclose(np.exp(logstd), precision**-0.5, rtol=0.03)


def test_a_run_says_its_estimator_and_refuses_another():
    assert PFedBayes(estimator="local", antithetic=True).values()["estimator"] == "local"
    with pytest.raises(InputError, match="estimator"):
        FedABML(estimator="lokal")
    with pytest.raises(InputError, match="antithetic"):
        FedABML(antithetic=1)


@pytest.mark.nightly
def test_the_loss_compiles_in_one_graph():
    """No Python of it depends on values, so it can also be captured."""
    loss, q, batch = setting("norm", "local")
    lanes, keys = Gaussian(*(t.expand(3, -1).contiguous() for t in q)), rng.fold(rng.key(1), torch.arange(3))
    run = lambda q, keys: torch.vmap(torch.func.grad(lambda q, key: loss(q, batch, key, 2)))(q, keys)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(lanes, keys), run(lanes, keys), rtol=0, atol=1e-12)
