"""Convolutions as batched products: the values and derivatives of torch's own, under every nesting of transforms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedabml.accel import convolutions
from fedabml.accel.convolutions import Multiply, Products, Shape, conv2d
from fedabml.accel.operators import compiler_tracing

LANES, IMAGES, SAMPLES = 3, 4, 2
GEOMETRIES = [
    # channels, out, kernel, stride, padding, dilation, size
    (3, 4, (5, 5), 1, 0, 1, (12, 11)),
    (3, 8, (3, 3), 2, 1, 1, (9, 9)),
    (2, 3, (3, 2), (1, 2), (2, 0), 2, (8, 9)),
    (4, 5, (1, 1), 2, 0, 1, (7, 7)),
    (8, 8, (2, 2), 1, 1, 1, (4, 4)),
]


def problem(channels, out, kernel, size):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    return draw(LANES, IMAGES, channels, *size), draw(LANES, out, channels, *kernel), draw(LANES, out)


def same(a, b):
    for one, other in zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=["at once", "in turns", "one by one", "one by one, channels last"])
def way(request, monkeypatch):
    if request.param == "in turns":
        monkeypatch.setattr(convolutions, "LIMIT", 2000)
    if "one by one" in request.param:
        monkeypatch.setattr(convolutions, "_large", lambda *_: True)
        monkeypatch.setattr(convolutions, "_rounds_products", lambda *_: "last" in request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
class TestAgainstTorch:
    def test_values_and_gradients_of_lanes(self, geometry):
        channels, out, kernel, *options, size = geometry
        x, w, b = problem(channels, out, kernel, size)
        made = lambda way: torch.func.grad_and_value(
            lambda x, w, b: torch.tanh(way(x, w, b, *options)).pow(3).sum(), (0, 1, 2)
        )
        same(torch.vmap(made(conv2d))(x, w, b), torch.vmap(made(F.conv2d))(x, w, b))

    def test_samples_within_lanes_share_their_images(self, geometry):
        channels, out, kernel, *options, size = geometry
        x, w, b = problem(channels, out, kernel, size)
        noise = torch.randn(LANES, SAMPLES, *w.shape[1:], generator=torch.Generator().manual_seed(1)).double()

        def made(way):
            def one(x, w, b, noise):
                each = lambda e: torch.tanh(way(x, w + e, b, *options)).pow(3).sum()
                return torch.func.grad_and_value(lambda w: torch.vmap(each)(noise).mean())(w)

            return torch.vmap(one)

        same(made(conv2d)(x, w, b, noise), made(F.conv2d)(x, w, b, noise))

    def test_lanes_that_share_their_weights_do_not_copy_them(self, geometry, monkeypatch):
        channels, out, kernel, *options, size = geometry
        x, w, b = problem(channels, out, kernel, size)
        lanes = []
        for name in ("y", "x"):
            product = convolutions.PRODUCTS[name]
            watched = lambda a, b, shape, product=product: lanes.append(len(b)) or product(a, b, shape)
            monkeypatch.setitem(convolutions.PRODUCTS, name, watched)

        def made(way):
            value = lambda x: torch.tanh(way(x, w[0], b[0], *options)).pow(3).sum()
            return torch.func.grad_and_value(lambda x: torch.vmap(value)(x).sum())(x), torch.vmap(
                torch.func.grad(value)
            )(x)

        same(made(conv2d), made(F.conv2d))
        assert set(lanes) == {1}

    def test_second_derivatives(self, geometry):
        channels, out, kernel, *options, size = geometry
        x, w, b = problem(channels, out, kernel, size)

        def made(way):
            value = lambda x, w, b: torch.tanh(way(x, w, b, *options)).pow(3).sum()

            def one(x, w, b):
                pull = torch.func.vjp(lambda x, w: torch.func.grad(value, (0, 1))(x, w, b), x, w)[1]
                return pull((x.sin(), w.sin()))

            return torch.vmap(one)

        same(made(conv2d)(x, w, b), made(F.conv2d)(x, w, b))


def test_a_patch_is_worked_out_by_hand():
    x = torch.arange(9.0).view(1, 1, 1, 3, 3)
    shape = Shape((2, 2), (1, 1), (0, 0), (1, 1), (3, 3))
    patches = convolutions._patches(x, shape)[0, :, :4]
    assert patches.tolist() == [[0, 1, 3, 4], [1, 2, 4, 5], [3, 4, 6, 7], [4, 5, 7, 8]]
    back = convolutions._scatter(torch.ones(4, 4), 1, 1, *shape, shape.out)
    assert back[0, :, :, 0].tolist() == [[1, 2, 1], [2, 4, 2], [1, 2, 1]]  # how many patches hold each pixel


def test_a_module_is_not_rewritten_and_other_layers_are_left_alone():
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 3, 3, stride=2)),
        *(nn.Flatten(), nn.Linear(12, 2)),
    ).double()  # fmt: skip
    x = torch.randn(LANES, IMAGES, 2, 8, 8).double()
    call = lambda x: module(x)
    with Products():
        ours = torch.vmap(call)(x)
    same(ours, torch.vmap(call)(x))


def test_patches_are_the_same_where_no_tensor_may_change():
    x, shape = torch.randn(2, 3, 3, 8, 8), Shape((3, 3), (1, 1), (0, 0), (1, 1), (8, 8))
    filled = convolutions._patches(x, shape)
    with compiler_tracing():
        trace = make_fx(lambda x: convolutions._patches(x, shape))(x)
        assert filled.shape[-1] == 32 and torch.equal(convolutions._patches(x, shape), filled)
    assert not any(node.target._schema.is_mutable for node in trace.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("inputs", [784, 1600, 521])
def test_long_sums_in_pieces_are_the_same_sums(inputs):
    g = torch.Generator().manual_seed(inputs)
    x, w, b = (torch.randn(LANES, *size, generator=g) for size in ((5, inputs), (3, inputs), (3,)))

    def cost(function):
        value = lambda x, w, b: torch.tanh(function(x, w, b) / inputs**0.5).pow(2).sum()
        return torch.vmap(torch.func.grad_and_value(value, (0, 1, 2)))(x, w, b)

    (ours, value), (theirs, expected) = cost(convolutions.linear), cost(nn.functional.linear)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5)
    with Products():
        assert torch.equal(nn.functional.linear(x[0], w[0], bias=b[0]), convolutions.linear(x[0], w[0], b[0]))


@pytest.fixture
def ours(monkeypatch):
    """As where our kernel serves, but for the kernel itself."""
    monkeypatch.setattr(convolutions, "_has_kernels", lambda x: x.dtype == torch.float64)
    monkeypatch.setattr(convolutions, "SMALL", 0)


def matrices(*sizes):
    g = torch.Generator().manual_seed(2)
    return [torch.randn(*size, generator=g, dtype=torch.float64) for size in sizes]


def test_the_product_of_lanes_is_differentiated_as_torchs():
    a, b = (t.requires_grad_() for t in matrices((2, 3, 4), (2, 5, 4)))
    same(Multiply.apply(a, b), a @ b.mT)
    assert torch.autograd.gradcheck(Multiply.apply, (a, b))
    assert torch.autograd.gradgradcheck(Multiply.apply, (a, b))


@pytest.mark.usefixtures("ours")
class TestLinear:
    @pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (1, 2), (2, 1), (None, 1), (1, None)], ids=str)
    @pytest.mark.parametrize("samples", [False, True], ids=["lanes", "samples within lanes"])
    @pytest.mark.parametrize("rows", [6, 3])  # more than outputs, and fewer
    def test_values_and_gradients_of_lanes(self, dims, samples, rows):
        x, w, b, noise = matrices((rows, 7), (5, 7), (5,), (SAMPLES, 5, 7))
        lanes = lambda t, d: t if d is None else torch.stack([t * (i + 1) for i in range(LANES)], d)

        def made(way):
            value = lambda x, w: torch.tanh(way(x, w, b)).pow(3).sum()
            both = lambda x, w: torch.vmap(lambda e: value(x, w + e) + value(x * (1 + e.sum()), w))(noise).mean()
            return torch.vmap(torch.func.grad_and_value(both if samples else value, (0, 1)), dims)

        same(
            made(convolutions.linear)(lanes(x, dims[0]), lanes(w, dims[1])),
            made(F.linear)(lanes(x, dims[0]), lanes(w, dims[1])),
        )

    def test_second_derivatives(self):
        x, w, b = matrices((LANES, 6, 7), (LANES, 5, 7), (LANES, 5))

        def made(way):
            value = lambda x, w, b: torch.tanh(way(x, w, b)).pow(3).sum()

            def one(x, w, b):
                pull = torch.func.vjp(lambda x, w: torch.func.grad(value, (0, 1))(x, w, b), x, w)[1]
                return pull((x.sin(), w.sin()))

            return torch.vmap(one)

        same(made(convolutions.linear)(x, w, b), made(F.linear)(x, w, b))

    @pytest.mark.parametrize("rows", [(), (6,), (0,), (2, 3), (2, 3, 4)], ids=str)
    def test_any_axes_of_rows(self, rows):
        x, w, b = matrices((LANES, *rows, 7), (5, 7), (5,))
        for bias in (b, None):
            made = lambda way, bias=bias: torch.vmap(lambda x: way(x, w, bias))(x)
            assert made(convolutions.linear).shape == (LANES, *rows, 5)
            same(made(convolutions.linear), made(F.linear))

    def test_noise_on_activations_meets_it(self, monkeypatch):
        from fedabml.engine.noise import Noise, uses
        from fedabml.gaussian import Gaussian
        from fedabml.vectors import Network

        network = Network(nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).double())
        q = Gaussian(network.initial, torch.full_like(network.initial, -3.0))
        noise = Noise("local", uses=uses(network, (7,)))
        key, x = torch.tensor(1), matrices((6, 7))[0]
        calls = []
        monkeypatch.setattr(convolutions, "_multiply", lambda a, b: calls.append(a.shape) or torch.bmm(a, b.mT))
        with Products():
            ours = noise.outputs(network, q, x, key, key)[0]
        assert len(calls) == 4  # means and variances of two layers
        same(ours, noise.outputs(network, q, x, key, key)[0])


def test_what_the_kernel_cannot_read_is_copied():
    x = torch.zeros(2, 4, 6)
    for fine in (x, x.mT, x[:, 1:, :3], x[:, ::2]):
        assert convolutions._dense(fine) is fine
    for other in (x[:, ::2, ::2], x[:1].expand(2, 4, 6), x[:, :1].expand(2, 4, 6)):
        assert convolutions._dense(other).is_contiguous()


def test_bfloat16_sums_in_float32():
    patches = torch.ones(1 * 30 * 30, 9, dtype=torch.bfloat16) * 0.3
    image = convolutions._scatter(patches, 1, 1, (3, 3), (1, 1), (0, 0), (1, 1), (32, 32), (30, 30))
    assert image.dtype == torch.bfloat16
    assert image[0, 5, 5, 0].float() == pytest.approx(9 * float(patches[0, 0]), rel=2**-8)
