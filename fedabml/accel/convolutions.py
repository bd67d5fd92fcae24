"""Convolutions and products of many clients, each with weights of its own, as batched matrix products.

`vmap` turns a convolution into one with a group per client, for which libraries have no good kernels. Here the patches
of every client's images are the rows of a matrix, and all clients' products are one batched product:

    y = P(x) w      ∂w = P(x)ᵀ g      ∂x = Pᵀ(g wᵀ)      P: the patches; Pᵀ adds every patch where it came from

The three are bilinear and each other's derivatives, so they can be differentiated any number of times. Their shapes are
x [lanes, n, channels, height, width], w [lanes, out, channels, a, b] and y, g [lanes, n, out, out height, out width]. A
further `vmap` makes more lanes or, where all share their images, more output channels.

A linear layer is x wᵀ, and its derivatives are such products, too: ∂x = g (wᵀ)ᵀ and ∂w = gᵀ (xᵀ)ᵀ, all by one kernel,
which reads operands of any strides and writes ∂w in the layout of the weights.

The engine enters `Products` on a GPU, and `narrow.Narrow` on a CPU, while a network runs; modules are not rewritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .operators import compiler_is_tracing, gpu_operator, triton_usable
from .pooling import max_pool2d
from .replacing import Replacing, pair

Pair = Sequence[int]

LIMIT = 1 << 30  # bytes of patches at once; with more, images are taken in turns
ALIGN = 8  # a patch is padded to a multiple of this length, which tensor cores need
LARGE = 3 << 29  # operations from which one lane's convolution fills a GPU
LONG = 512  # terms from which a sum is cut in pieces, where there are few such sums
BUSY = 512  # products that keep a GPU busy; with fewer, sums are cut in pieces
GRID = 65_000  # lanes that one kernel can have
SMALL = 1 << 27  # operations of a lane's matrix product from which a library is faster than our kernel


class Shape(NamedTuple):
    """Holds the geometry of a convolution, each entry (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    size: tuple[int, int]  # height and width of the images

    @property
    def out(self) -> tuple[int, int]:
        """Return the height and width of the outputs."""
        return tuple(  # type: ignore[return-value]
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for k, t, p, d, s in zip(self.kernel, self.stride, self.padding, self.dilation, self.size, strict=True)
        )


def _images_per_turn(x: Tensor, length: int, shape: Shape) -> list[int]:
    """Return how many images to take in each turn, for patches of a length within `LIMIT`."""
    lanes, n = x.shape[:2]
    bytes_per_image = lanes * shape.out[0] * shape.out[1] * length * x.element_size()
    turns = min(n, -(-n * bytes_per_image // LIMIT))
    return [n * (i + 1) // turns - n * i // turns for i in range(turns)]


def _image(x: Tensor, padding: Pair, channels: int = 0) -> Tensor:
    """Return padded images channels-last, [lanes, n, height, width, channels], with at least `channels` channels."""
    image, (top, left) = x.movedim(2, -1), padding
    missing_channels = max(0, channels - x.shape[2])
    if top or left or missing_channels:
        image = F.pad(image, (0, missing_channels, left, left, top, top))
    return image.contiguous()


def _channels(channels: int) -> int:
    """Return how many channels our kernels want, which read those of a pixel at once."""
    return -(-channels // 8) * 8 if channels > 4 else 4


def _patches(x: Tensor, shape: Shape) -> Tensor:
    """Return P(x), [lanes, n · out height · out width, kernel · channels, padded to a multiple of ALIGN]."""
    lanes, n, channels = x.shape[:3]
    (a, b), (down, right), (dy, dx) = shape.kernel, shape.stride, shape.dilation
    image = _image(x, shape.padding)
    steps = image.stride()
    view = image.as_strided(
        (lanes, n, *shape.out, a, b, channels),
        (*steps[:2], steps[2] * down, steps[3] * right, steps[2] * dy, steps[3] * dx, 1),
    )
    rows, length = n * shape.out[0] * shape.out[1], a * b * channels
    if length % ALIGN == 0 or compiler_is_tracing():
        return F.pad(view.reshape(lanes, rows, length), (0, -length % ALIGN))
    filled = x.new_zeros(lanes, n, *shape.out, -(-length // ALIGN) * ALIGN)  # one pass less over memory than F.pad
    filled[..., :length].unflatten(-1, (a, b, channels)).copy_(view)
    return filled.view(lanes, rows, -1)


def _rows(g: Tensor) -> Tensor:
    """Return outputs as rows, [lanes, n · height · width, out]."""
    return g.movedim(2, -1).flatten(1, 3)


def _rounds_products(x: Tensor) -> bool:
    """Return whether factors may be rounded to TF32 or bfloat16 before they are multiplied."""
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)


def _kernel_serves(x: Tensor, shape: Shape) -> bool:
    """Return whether our own kernels, which store no patches, can compute a convolution of this shape."""
    return _has_kernels(x) and shape.dilation == (1, 1) and len(x) <= GRID


def _has_kernels(x: Tensor) -> bool:
    """Return whether a tensor has a device and a type that our kernels support."""
    if not x.is_cuda or x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not triton_usable():
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0)  # with bf16, TF32 and room for tiles


def _large(x: Tensor, channels: int, out: int, shape: Shape) -> bool:
    """Return whether one lane alone keeps a GPU busy: then a library, lane by lane, is faster than patches."""
    places = shape.out[0] * shape.out[1] * shape.kernel[0] * shape.kernel[1]
    return x.is_cuda and 2 * x.shape[1] * places * channels * out >= LARGE


def _one_by_one(convolution: Callable[..., Tensor], *operands: Tensor, coarse: bool) -> Tensor:
    """Compute a convolution, or a derivative of it, lane by lane; channels-last where tensor cores are used."""
    if not coarse:
        return torch.stack([convolution(*lane) for lane in zip(*(t.contiguous() for t in operands), strict=True)])
    dense = [t.movedim(2, -1).contiguous().movedim(-1, 2) for t in operands]
    return torch.stack([convolution(*lane).movedim(1, -1) for lane in zip(*dense, strict=True)]).movedim(-1, 2)


def _derivative(g: Tensor, x: Tensor, w: Tensor, shape: Shape, which: int) -> Tensor:
    """Return ∂x (which = 0) or ∂w (which = 1) of one lane, by the library."""
    geometry = (shape.stride, shape.padding, shape.dilation, False, (0, 0), 1, [which == 0, which == 1, False])
    return torch.ops.aten.convolution_backward(g, x, w, None, *geometry)[which]


def _cat(parts: list[Tensor]) -> Tensor:
    """Return the results of all turns, without a copy if there was one turn."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _forward(x: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Return y, by our kernel, by a library lane by lane, or by products of patches."""
    if _kernel_serves(x, shape):
        return _convolve(x, w, shape)
    if _large(x, x.shape[2], w.shape[1], shape):
        return _one_by_one(lambda x, w: F.conv2d(x, w, None, *shape[1:4]), x, w, coarse=_rounds_products(x))
    matrix = w.movedim(1, -1).movedim(1, -2).flatten(1, 3)  # [lanes, kernel · channels, out]
    matrix = F.pad(matrix, (0, 0, 0, -matrix.shape[1] % ALIGN))
    turns = x.split(_images_per_turn(x, matrix.shape[1], shape), 1)
    out = _cat([torch.bmm(_patches(part, shape), matrix) for part in turns])
    return out.unflatten(1, (x.shape[1], *shape.out)).movedim(-1, 2)


def _convolve(x: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Return y by our kernel."""
    channels = _channels(x.shape[2])
    image, filled = _image(x, shape.padding, channels), F.pad(w, (0, 0, 0, 0, 0, channels - x.shape[2]))
    rows = filled.movedim(2, -1).flatten(2, 4).contiguous()  # [lanes, out, kernel · channels]
    out = torch.ops.fedabml.convolve(image, rows, shape.kernel, shape.stride, shape.out, _rounds_products(x))
    return out.unflatten(1, (x.shape[1], *shape.out)).movedim(-1, 2)


def _to_weights(x: Tensor, g: Tensor, shape: Shape) -> Tensor:
    """Return ∂w, in the same three ways as `_forward`."""
    (a, b), channels = shape.kernel, x.shape[2]
    if _kernel_serves(x, shape):
        image, rows = _image(x, shape.padding, _channels(channels)), _rows(g).contiguous()
        total = torch.ops.fedabml.to_weights(image, rows, shape.kernel, shape.stride, shape.out)
        total = total.unflatten(1, (a * b, -1))[:, :, :channels].flatten(1, 2)
    elif _large(x, x.shape[2], g.shape[2], shape):
        like = x.new_zeros(g.shape[2], channels, a, b)  # of the weights only the shape matters
        return _one_by_one(lambda x, g: _derivative(g, x, like, shape, 1), x, g, coarse=_rounds_products(x))
    else:
        turns = _images_per_turn(x, a * b * channels, shape)
        pairs = zip(x.split(turns, 1), g.split(turns, 1), strict=True)
        parts = [_product(_patches(images, shape), _rows(grads), images.shape[1]) for images, grads in pairs]
        total = sum(parts[1:], parts[0]).to(x.dtype)
    return total[:, : a * b * channels].unflatten(1, (a, b, channels)).movedim(-1, 1).movedim(-1, 2)


def _product(patches: Tensor, rows: Tensor, images: int) -> Tensor:
    """Return patchesᵀ rows, summed over images in pieces, so that there are enough products to keep a GPU busy."""
    lanes, length, out = len(rows), patches.shape[-1], rows.shape[-1]
    tiles = lanes * -(-length // 64) * -(-out // 64)
    pieces = next((k for k in range(1, images + 1) if images % k == 0 and k * tiles >= BUSY), images)
    patches, rows = (t.unflatten(1, (pieces, -1)).flatten(0, 1) for t in (patches, rows))
    sums = torch.promote_types(rows.dtype, torch.float32)
    return torch.bmm(patches.mT, rows).unflatten(0, (lanes, pieces)).sum(1, dtype=sums)


def _to_images(g: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Return ∂x, in the same three ways as `_forward`."""
    (height, width), (a, b) = shape.size, shape.kernel
    if _kernel_serves(g, shape) and shape.stride == (1, 1) and height * width <= 3 * shape.out[0] * shape.out[1]:
        top, left = shape.padding  # ∂x is a convolution with the kernel rotated by 180°
        back = Shape((a, b), (1, 1), (a - 1 - top, b - 1 - left), (1, 1), shape.out)
        return _convolve(g, w.flip(3, 4).movedim(1, 2), back)
    if _large(g, w.shape[2], w.shape[1], shape):
        like = g.new_zeros(g.shape[1], w.shape[2], height, width)
        return _one_by_one(lambda g, w: _derivative(g, like, w, shape, 0), g, w, coarse=_rounds_products(g))
    matrix = w.movedim(2, -1).flatten(2, 4)
    kernel = torch.ops.fedabml.gather if g.is_cuda and triton_usable() else _scatter
    parts = []
    for part in g.split(_images_per_turn(g, matrix.shape[2], shape), 1):
        patches = torch.bmm(_rows(part), matrix).flatten(0, 1)
        images = len(g) * part.shape[1]
        image = kernel(patches, images, w.shape[2], *shape, shape.out)
        parts.append(image.unflatten(0, (len(g), -1)).movedim(-1, 2))
    return _cat(parts)


def _scatter(
    patches: Tensor, images: int, channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair,
    out: Pair,
) -> Tensor:  # fmt: skip
    """Return Pᵀ of patches: every place of the kernel adds its part of the patches to the images."""
    parts = patches.view(images, *out, *kernel, channels)
    sums = torch.float32 if patches.dtype == torch.bfloat16 else patches.dtype
    image = patches.new_zeros(images, *(s + 2 * p for s, p in zip(size, padding, strict=True)), channels, dtype=sums)
    for at in itertools.product(*map(range, kernel)):
        ys, xs = (
            slice(i * d, i * d + t * (o - 1) + 1, t) for i, d, t, o in zip(at, dilation, stride, out, strict=True)
        )
        image[:, ys, xs] += parts[:, :, :, at[0], at[1]]
    (top, left), (height, width) = padding, size
    return image[:, top : top + height, left : left + width].to(patches.dtype)


gpu_operator(
    "gather(Tensor patches, SymInt images, SymInt channels, SymInt[] kernel, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt[] size, SymInt[] out) -> Tensor",
    lambda patches, images, channels, kernel, stride, padding, dilation, size, out: patches.new_empty(
        images, *size, channels
    ),
)
gpu_operator(
    "convolve(Tensor x, Tensor w, SymInt[] kernel, SymInt[] stride, SymInt[] out, bool coarse) -> Tensor",
    lambda x, w, kernel, stride, out, coarse: x.new_empty(len(x), x.shape[1] * out[0] * out[1], w.shape[1]),
)
gpu_operator(
    "to_weights(Tensor x, Tensor g, SymInt[] kernel, SymInt[] stride, SymInt[] out) -> Tensor",
    lambda x, g, kernel, stride, out: x.new_empty(len(x), kernel[0] * kernel[1] * x.shape[-1], g.shape[-1]),
)
gpu_operator(
    "multiply(Tensor a, Tensor b, bool coarse) -> Tensor",
    lambda a, b, coarse: a.new_empty(len(a), a.shape[1], b.shape[1]),
)


def _merge_lanes(info: Any, dims: Sequence[int | None], *operands: Tensor) -> list[Tensor]:
    """Return operands with the axis that vmap adds merged into their lanes."""
    wide = (
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(operands, dims, strict=False)
    )
    # If merging takes a copy, a transposed matrix stays transposed.
    return [x.mT.flatten(0, 1).mT if x.stride(-2) == 1 != x.stride(-1) else x.flatten(0, 1) for x in wide]


PRODUCTS = {"y": _forward, "w": _to_weights, "x": _to_images}
OPERANDS = {"y": "xw", "w": "xy", "x": "yw"}
CHANNELS = {"y": 2, "w": 1}  # the axis of the output channels


class Convolution(Function):
    """Computes one of the three products, by the name of its result: y of (x, w), w of (x, y) or x of (y, w).

    Each of x, w, y may also be a derivative by it. A product's derivatives by its operands are the other two products.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor, result: str, shape: Shape) -> Tensor:
        return PRODUCTS[result](a, b, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.result, ctx.shape = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        names = OPERANDS[ctx.result]
        tensors = {ctx.result: g, **dict(zip(names, ctx.saved_tensors, strict=True))}
        derivatives = []
        for name, needed in zip(names, ctx.needs_input_grad, strict=False):
            a, b = (tensors[operand] for operand in OPERANDS[name])
            derivatives.append(Convolution.apply(a, b, name, ctx.shape) if needed else None)
        return *derivatives, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, a: Tensor, b: Tensor, result: str, shape: Shape) -> Any:
        if dims[1] is None and result != "w":  # lanes that share weights, which may be frozen, are more images
            out = Convolution.apply(a.movedim(dims[0], 1).flatten(1, 2), b, result, shape)
            return out.unflatten(1, (info.batch_size, -1)), 1
        if dims[0] is not None or result == "x":
            out = Convolution.apply(*_merge_lanes(info, dims, a, b), result, shape)
            return out.unflatten(0, (info.batch_size, -1)), 0
        axis, at = (CHANNELS[name] for name in (OPERANDS[result][1], result))
        wide = b.movedim(dims[1], axis).flatten(axis, axis + 1)  # lanes that share images are more output channels
        return Convolution.apply(a, wide, result, shape).unflatten(at, (info.batch_size, -1)), at


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, by our kernel where it is faster."""
    if not _has_kernels(a) or 2 * a.shape[1] * b.shape[1] * a.shape[2] >= SMALL:
        return torch.bmm(a, b.mT)
    return torch.ops.fedabml.multiply(_dense(a), _dense(b), _rounds_products(a))


def _dense(x: Tensor) -> Tensor:
    """Return x itself if its rows or columns are contiguous, else a copy; compilers keep no layout of expanded ones."""
    return x if 1 in x.stride()[1:] and 0 not in x.stride() else x.contiguous()


class Multiply(Function):
    """Computes a bᵀ of lanes, [lanes, rows, length] and [lanes, outs, length]."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _multiply(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (a, b), (to_a, to_b) = ctx.saved_tensors, ctx.needs_input_grad
        return Multiply.apply(g, b.mT) if to_a else None, Multiply.apply(g.mT, a.mT) if to_b else None

    @staticmethod
    def vmap(info: Any, dims: Any, a: Tensor, b: Tensor) -> Any:
        lanes = info.batch_size
        if dims[1] is None:  # b is shared: a has more rows
            return Multiply.apply(a.movedim(dims[0], 1).flatten(1, 2), b).unflatten(1, (lanes, -1)), 1
        if dims[0] is None and b.numel() <= lanes * a.numel():  # a is shared: b has more rows, which takes a copy of b
            return Multiply.apply(a, b.movedim(dims[1], 1).flatten(1, 2)).unflatten(2, (lanes, -1)), 2
        return Multiply.apply(*_merge_lanes(info, dims, a, b)).unflatten(0, (lanes, -1)), 0


# -- functions that replace torch.nn.functional's, with the same arguments ---------------------------------------------
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Compute `torch.nn.functional.conv2d` of one client; its vmap is a batched matrix product."""
    if groups != 1 or input.ndim != 4 or isinstance(padding, str):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    shape = Shape(*map(pair, (weight.shape[2:], stride, padding, dilation, input.shape[2:])))
    out = Convolution.apply(input.unsqueeze(0), weight.unsqueeze(0), "y", shape).squeeze(0)
    return out if bias is None else out + bias.view(-1, 1, 1)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` of one client; its vmap is our product of lanes where there are kernels.

    Where there are none, a long sum is cut in pieces, so that there is more to compute at once. Products by tensor
    cores take too little time for that to pay.
    """
    if input.ndim > 1 and input.dtype == weight.dtype and _has_kernels(input):
        out = Multiply.apply(input.flatten(0, -2).unsqueeze(0), weight.unsqueeze(0))
        out = out.view(*input.shape[:-1], len(weight))
        return out if bias is None else out + bias
    length, exact = weight.shape[-1], input.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    pieces = next((k for k in (8, 7, 6, 5, 4) if length % k == 0), 1)
    if pieces == 1 or length < LONG or input.ndim != 2 or not exact:
        return F.linear(input, weight, bias)
    a, b = (t.unflatten(-1, (pieces, -1)).movedim(-2, 0) for t in (input, weight))
    out = torch.matmul(a, b.mT).sum(0)
    return out if bias is None else out + bias


class Products(Replacing):
    """Replaces `conv2d`, `linear` and, for a compiler, `max_pool2d`."""

    replacements: ClassVar = {F.conv2d: conv2d, F.linear: linear, F.max_pool2d: max_pool2d}
