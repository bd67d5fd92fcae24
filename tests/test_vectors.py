"""A network as a function of a flat vector: the same numbers as the module, and nothing of the module changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fedabml
from fedabml import rng
from fedabml.errors import InputError
from fedabml.vectors import LIKELIHOOD, Layout, Network, derived

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_split_and_flatten_are_inverse():
    layout = Layout(("a", "b", "c"), ((2, 3), (), (4,)))
    vector = torch.arange(11.0)
    parts = layout.split(vector)
    assert layout.size == 11 and layout.sizes == [6, 1, 4]
    assert {n: tuple(t.shape) for n, t in parts.items()} == {"a": (2, 3), "b": (), "c": (4,)}
    assert parts["a"][1].tolist() == [3, 4, 5] and parts["b"].item() == 6
    assert torch.equal(layout.flatten(parts), vector)
    assert torch.equal(torch.cat([parts[n].reshape(-1) for n in layout.names]), vector)


def test_a_vector_may_come_in_parts():
    layout = Layout(("a", "b", "c"), ((2, 3), (4,), (1, 2)))
    vector = torch.arange(12.0)
    for cuts in ((6, 6), (10, 2), (6, 4, 2), (12, 0), (0, 12)):
        parts = layout.split(*vector.split(cuts))
        assert all(torch.equal(parts[name], whole) for name, whole in layout.split(vector).items())
    with pytest.raises(ValueError):
        layout.split(vector[:5], vector[5:])  # inside of a


def test_calling_with_the_initial_vector_equals_the_module():
    module = mlp()
    network = Network(module)
    assert network.layout.names == tuple(n for n, _ in module.named_parameters())
    assert torch.equal(network(network.initial, X), module(X))


def test_calling_with_another_vector_equals_the_module_with_those_weights():
    module = mlp()
    network = Network(module)
    vector = torch.linspace(-1, 1, network.layout.size)
    nn.utils.vector_to_parameters(vector, module.parameters())
    assert torch.equal(network(vector, X), module(X))


def test_derivatives_pass_through_the_vector():
    module = mlp()
    network = Network(module)
    got = torch.func.grad(lambda w: network(w, X).square().sum())(network.initial)
    module(X).square().sum().backward()
    torch.testing.assert_close(got, torch.cat([p.grad.reshape(-1) for p in module.parameters()]))


def test_lanes_equal_single_calls():
    network = Network(mlp())
    vectors = torch.stack([network.initial, network.initial.flip(0), 0 * network.initial])
    together = torch.vmap(network, (0, None))(vectors, X)
    torch.testing.assert_close(together, torch.stack([network(v, X) for v in vectors]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


def test_tied_weights_are_one_entry():
    torch.manual_seed(1)
    module = Tied()
    network = Network(module)
    assert network.layout.size == 9 + 3 + 3
    vector = network.initial + 0.5
    w, b = vector[:9].reshape(3, 3), vector[9:12]
    expected = torch.tanh(X @ w.T + b) @ w.T + vector[12:]
    torch.testing.assert_close(network(vector, X), expected)
    back = network.to_module(vector)
    torch.testing.assert_close(back(X), expected)
    assert back.decode.weight is back.encode.weight


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(3.0))
        self.register_buffer("steps", torch.tensor(7))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x)) * self.scale


def test_frozen_parameters_and_buffers_are_constants():
    torch.manual_seed(2)
    module = Constant()
    network = Network(module)
    assert network.layout.names == ("last.weight", "last.bias")
    assert set(network.constants) == {"first.weight", "first.bias", "scale", "steps"}
    vector = torch.arange(10.0)
    expected = (module.first(X) @ vector[:8].reshape(2, 4).T + vector[8:]) * 3
    torch.testing.assert_close(network(vector, X), expected)
    back = network.to_module(vector)
    torch.testing.assert_close(back(X), expected)
    assert torch.equal(back.first.weight, module.first.weight) and back.steps.dtype == torch.int64
    assert {n for n, p in back.named_parameters() if p.requires_grad} == {"last.weight", "last.bias"}


def test_to_changes_a_copy():
    network = Network(Constant())
    double = network.to("cpu", torch.float64)
    assert double(double.initial, X.double()).dtype == torch.float64
    assert network.initial.dtype == torch.float32 and network.module.first.weight.dtype == torch.float32
    assert double.module.steps.dtype == torch.int64


def test_a_model_with_nothing_to_learn_is_refused():
    with pytest.raises(InputError, match="no trainable parameter"):
        Network(nn.ReLU())
    with pytest.raises(InputError, match="no trainable parameter"):
        Network(nn.Linear(2, 2).requires_grad_(False))


def test_weights_that_are_not_finite_are_refused():
    module = nn.Linear(2, 2)
    module.weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        Network(module)


def test_complex_weights_are_refused_by_name():
    with pytest.raises(InputError, match=r"'0\.weight' is complex \(torch\.complex64\); weights must be real"):
        Network(nn.Sequential(nn.Linear(21, 2, dtype=torch.complex64)))


# -- BatchNorm ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layer", "way"),
    [
        (nn.BatchNorm1d(4), r"fedabml\.replace_batchnorm\(model\)"),
        (nn.BatchNorm2d(4), r"fedabml\.replace_batchnorm\(model\)"),
        (nn.SyncBatchNorm(4), r"fedabml\.replace_batchnorm\(model\)"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "track_running_stats=False"),
    ],
)
def test_running_statistics_are_refused_with_the_way_out(layer, way):
    with pytest.raises(InputError, match=rf"'1' is a \w+Norm.*{way}"):
        Network(nn.Sequential(nn.Linear(4, 4), layer))


def test_norms_without_running_statistics_pass():
    Network(nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)))


def test_replace_batchnorm():
    inner = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48, eps=1e-3), nn.ReLU())
    module = nn.Sequential(inner, nn.Flatten(), nn.Linear(48, 10), nn.BatchNorm1d(10, affine=False))
    inner[1].weight.data.uniform_()
    before = copy.deepcopy(module.state_dict())
    out = fedabml.replace_batchnorm(module)
    norm = out[0][1]
    assert isinstance(norm, nn.GroupNorm) and isinstance(out[3], nn.GroupNorm)
    assert (norm.num_channels, norm.num_groups, norm.eps) == (48, 16, 1e-3)  # the largest count that divides 32 and 48
    assert torch.equal(norm.weight, inner[1].weight) and norm.weight is not inner[1].weight
    assert out[3].weight is None
    assert isinstance(inner[1], nn.BatchNorm2d), "the user's module must stay as it was"
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    Network(out)


@pytest.mark.parametrize("width", [8, 32, 64])
def test_replace_batchnorm_of_vectors_keeps_their_information(width):
    """A group of one feature is its own mean: it would give the same output for every input."""
    torch.manual_seed(0)
    module = fedabml.replace_batchnorm(nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width)))
    torch.testing.assert_close(module(X), F.layer_norm(module[0](X), (width,)))


def test_replace_batchnorm_keeps_the_place_and_type():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    module[1].requires_grad_(False)
    norm = fedabml.replace_batchnorm(module)[1]
    assert norm.weight.dtype == torch.float64 and not norm.weight.requires_grad


# -- dropout ------------------------------------------------------------------------------------------------------
class Functional(nn.Module):
    """Dropout by function, of units and of whole channels."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(1, 6, 1)

    def forward(self, x):
        h = self.conv(x)
        if self.kind == "dropout2d":
            return F.dropout2d(h, 0.5, self.training)
        return F.dropout(h, p=0.5, training=self.training)


@pytest.fixture
def dropping():
    torch.manual_seed(0)
    return Network(nn.Sequential(nn.Linear(3, 200), nn.Dropout(0.25), nn.Identity()))


def test_dropout_is_a_function_of_the_key(dropping):
    call = lambda *key: dropping(dropping.initial, X, rng.key(*key))
    torch.manual_seed(5)
    first = call(1)
    torch.manual_seed(6)
    assert torch.equal(call(1), first)
    assert not torch.equal(call(2), first)


def test_dropout_scales_and_drops_the_stated_share(dropping):
    plain = dropping(dropping.initial, X)
    out = dropping(dropping.initial, X, rng.key(3))
    dropped = out == 0
    assert abs(dropped.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / 800) ** 0.5
    torch.testing.assert_close(out[~dropped], plain[~dropped] / 0.75)
    assert not torch.equal(dropped[0], dropped[1])  # every example has its own mask


def test_two_dropout_layers_have_two_masks():
    network = Network(nn.Sequential(nn.Linear(3, 400), nn.Dropout(0.5), nn.Dropout(0.5)))
    out = network(network.initial, X, rng.key(0))
    assert abs((out == 0).double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / 1600) ** 0.5


def test_dropout_under_lanes_equals_single_calls(dropping):
    keys = rng.keys((1,), range(3))
    vectors = torch.stack([dropping.initial] * 3)
    together = torch.vmap(dropping, (0, None, 0))(vectors, X, keys)
    torch.testing.assert_close(together, torch.stack([dropping(dropping.initial, X, k) for k in keys]))


def test_dropout_of_a_row_does_not_depend_on_the_padding_below_it(dropping):
    whole = dropping(dropping.initial, X, rng.key(1))
    assert torch.equal(dropping(dropping.initial, X[:2], rng.key(1)) == 0, whole[:2] == 0)


def test_dropout_is_off_without_a_key(dropping):
    linear = dropping.module[0]
    assert torch.equal(dropping(dropping.initial, X), linear(X))


@pytest.mark.parametrize("kind", ["dropout", "dropout2d"])
def test_functional_dropout(kind):
    network = Network(Functional(kind))
    x = torch.rand(50, 1, 3, 3, generator=torch.Generator().manual_seed(0)) + 1
    plain = network(network.initial, x)
    out = network(network.initial, x, rng.key(4))
    assert torch.equal(out, network(network.initial, x, rng.key(4)))
    share = (out == 0).flatten(2).double().mean(-1)  # of every channel of every example
    assert set(share.unique().tolist()) == {0, 1} if kind == "dropout2d" else len(share.unique()) > 2
    assert abs(share.mean().item() - 0.5) < 5 * 0.5 / 300**0.5
    torch.testing.assert_close(out[out != 0], 2 * plain[out != 0])
    assert not torch.equal(network(network.initial, x, rng.key(5)), out)


def test_dropout_of_everything_is_zero():
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.Dropout(1.0)))
    assert torch.equal(network(network.initial, X, rng.key(0)), torch.zeros(4, 4))


class Always(nn.Module):
    """Dropout that forgets to ask whether the module trains."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 50)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5)


def test_a_prediction_is_never_dropped_at_random():
    network = Network(Always())
    assert torch.equal(network(network.initial, X), network.module.linear(X))
    torch.vmap(network, (0, None))(torch.stack([network.initial] * 2), X)


def test_a_module_half_in_training_mode_predicts_without_dropout():
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5))
    module.training = False  # of the outer module alone
    network = Network(module)
    assert torch.equal(network(network.initial, X), module[0](X))


def test_probe_sees_whether_units_are_dropped():
    for module, drops in [(mlp(), False), (nn.Sequential(mlp(), nn.Dropout(0.1)), True), (Always(), True)]:
        network = Network(module)
        out = network.probe(X)
        assert network.dropout is drops and out.shape[0] == 4
    network = Network(mlp())
    network.probe(X)
    assert network.activations == 3 + 5 + 5 + 2  # the input, and what every layer gives out, per example


def test_probe_says_what_does_not_fit():
    with pytest.raises(InputError, match=r"cannot take a batch of shape \(4, 3\)"):
        Network(nn.Linear(7, 2)).probe(X)


class Random(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.linear, self.layer = nn.Linear(3, 4), layer

    def forward(self, x):
        return self.layer(self.linear(x).unsqueeze(1))


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.5), nn.RReLU()])
def test_noise_that_no_key_reaches_is_refused(layer):
    with pytest.raises(InputError, match=r"random numbers of its own"):
        Network(Random(layer)).probe(X)


def test_attention_without_its_own_dropout_passes():
    network = Network(Random(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)))
    assert network.probe(X).shape == (4, 1, 4)


# -- the user's module ---------------------------------------------------------------------------------------------
def test_the_users_module_is_never_changed():
    module = nn.Sequential(Constant(), nn.Dropout(0.5))
    module.eval()
    before = copy.deepcopy(module.state_dict())
    flags = {n: p.requires_grad for n, p in module.named_parameters()}
    network = Network(module)
    network.probe(X)
    network(network.initial + 1, X, rng.key(0))
    network.to_module(network.initial + 1)[0].last.weight.data.fill_(9)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    assert {n: p.requires_grad for n, p in module.named_parameters()} == flags
    assert not any(m.training for m in module.modules())
    module[0].last.weight.data.zero_()
    assert network.initial.abs().sum() > 0  # nor does a later change of it reach the network


def test_to_module_round_trip():
    network = Network(mlp())
    vector = torch.linspace(-1, 1, network.layout.size)
    module = network.to_module(vector)
    assert torch.equal(Network(module).initial, vector)
    assert torch.equal(module(X), network(vector, X))
    assert not module.training and all(p.requires_grad for p in module.parameters())


def test_to_module_leaves_out_the_learned_noise():
    network = Network(mlp(), tail=1)
    plain = Network(mlp())
    assert network.layout.names[-1] == LIKELIHOOD and network.layout.size == plain.layout.size + 1
    vector = torch.linspace(-1, 1, network.layout.size)
    assert network.tail(vector).tolist() == [1] and network.tail(network.initial).tolist() == [0]
    assert plain.tail(plain.initial).shape == (0,)
    module = network.to_module(vector)
    assert torch.equal(Network(module).initial, vector[:-1])
    assert torch.equal(module(X), network(vector, X))


class Seen(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_gradient_by_plain_autograd_is_that_of_the_transform():
    network = Network(nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2))).to("cpu", torch.float64)
    x, w = torch.randn(5, 3, dtype=torch.float64), network.initial
    of = lambda p: network(p["w"], x).square().sum()
    at = {"w": w, "unused": torch.ones(3, dtype=torch.float64)}
    with Seen() as plain:
        found, value = derived(of, at)
    expected, same = torch.func.grad_and_value(of)(at)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(value, same) and not value.requires_grad and not found["w"].requires_grad
    assert "native_group_norm_backward.default" in plain.names
    # Within a transform, and where a derivative is derived again, it is the transform's.
    many = torch.stack([w, 2 * w])
    rows = torch.vmap(lambda w: derived(lambda w: of({"w": w}), w)[0])(many)
    torch.testing.assert_close(rows[0], expected["w"], rtol=0, atol=1e-12)
    twice = torch.func.grad(lambda w: derived(lambda w: of({"w": w}), w)[0].square().sum())(w)
    again = torch.func.grad(lambda w: torch.func.grad(lambda w: of({"w": w}))(w).square().sum())(w)
    torch.testing.assert_close(twice, again, rtol=0, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(derived(of, at)[0], expected, rtol=0, atol=1e-12)


def test_features_are_the_last_hidden_layer_and_the_channels_means_of_each_size():
    """Channels are rectified; of the convolutions whose maps have one size, the last one counts."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 5, 2),
        nn.Flatten(), nn.Linear(45, 4), nn.Tanh(), nn.Linear(4, 2),
    )  # fmt: skip
    network, x = Network(module), torch.randn(6, 1, 8, 8)
    found = network.features(network.initial, x)
    first, second = module[:2](x).relu(), module[:5](x).relu()
    assert torch.equal(found.hidden, module[:8](x))
    assert [m.shape for m in found.maps] == [(6, 2), (6, 5)]
    assert torch.allclose(found.maps[0], first.mean((2, 3))) and torch.allclose(found.maps[1], second.mean((2, 3)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.module.modules())


def test_features_of_networks_without_convolutions_or_linear_layers():
    found = Network(mlp()).features(Network(mlp()).initial, X)
    assert found.maps == () and found.hidden.shape == (4, 5)
    steps = Network(nn.Conv1d(2, 3, 2))
    bare = steps.features(steps.initial, torch.ones(4, 2, 5))
    assert bare.hidden is None and [m.shape for m in bare.maps] == [(4, 3)]
