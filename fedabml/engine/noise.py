"""How the expectation of a loss under a Gaussian over weights is estimated: noise on weights, or on activations.

    weight    w = m + σ∘ε, one draw for the whole batch
    local     y = x mᵀ + ε∘√(x² σ²ᵀ), ε fresh for every example: the exact distribution of x wᵀ, where w meets an
              example once (a Linear on vectors)
    flipout   y = f(x, m) + t∘f(r∘x, σ∘ε), signs r, t of every example and channel: w = m + σ∘ε∘(t rᵀ) is a draw of its
              own for every example, and the same at all its places (a convolution, a Linear over tokens)

A loss that is a mean over examples asks only how the weights are distributed for one example, so all three have the
same expectation; the latter two vary less where errors add up because all examples share a draw. A bias has noise of
its own for every example and channel. A module is not rewritten: its calls of `linear` and `conv` are intercepted.
Weights that are used in any other way, or twice, or by a module that mixes the examples of a batch, are drawn as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .. import rng
from ..algorithms.base import Algorithm
from ..errors import InputError
from ..gaussian import Gaussian
from ..models.dropout import KeyedDropout
from ..vectors import LIKELIHOOD, Network

# How a parameter is used: the weight of a Linear on vectors, of a layer with several places, a bias, or otherwise.
VECTORS, PLACES, BIAS, OTHER = "vectors", "places", "bias", "other"
_STREAM = 1 << 20  # the noise's keys, apart from those of dropout, which counts its calls
_FLOOR = 1e-24  # of a variance, so that the derivatives of its root stay finite where all inputs are 0

# The layers that are intercepted: how many axes of places they have (None: any) and which axis the channels are.
_LAYERS: dict[Any, tuple[int | None, int]]
_LAYERS = {F.linear: (None, -1), F.conv1d: (1, 1), F.conv2d: (2, 1), F.conv3d: (3, 1)}
# What may be read of a tensor without using its values.
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_contiguous, Tensor.stride),
}


class _Call(NamedTuple):
    """A call of a layer with its operands."""

    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    channels: int  # their axis
    examples: bool  # whether x can be a batch, and not a single example
    places: bool  # whether the weight meets an example more than once

    @staticmethod
    def of(func: Any, args: Any, kwargs: Any) -> _Call:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, weight, bias = named.pop("input"), named.pop("weight"), named.pop("bias", None)
        axes, channels = _LAYERS[func]

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return func(x, weight, bias, *args[3:], **named)

        examples = x.ndim > 1 if axes is None else x.ndim == axes + 2
        return _Call(run, x, weight, bias, channels, examples, x.ndim > 2)

    def wide(self, rows: Tensor, ndim: int) -> Tensor:
        """Return numbers of examples and channels [examples, channels], shaped to fit a tensor with `ndim` axes."""
        ones = [1] * (ndim - 2)
        return rows.view(len(rows), *ones, -1) if self.channels == -1 else rows.view(len(rows), -1, *ones)


class _Interceptor(TorchFunctionMode):
    """Intercepts what reads the values of `tensors`, known by their identity: calls of layers, and anything else."""

    tensors: Mapping[int, Any]

    def on_layer(self, call: _Call) -> Tensor:
        raise NotImplementedError

    def on_other_use(self, tensor: int) -> None:
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LAYERS:
            return self.on_layer(_Call.of(func, args, kwargs))
        if func not in _HARMLESS:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.tensors:
                    self.on_other_use(id(leaf))
        return func(*args, **kwargs)


# -- what a module does with its parameters ---------------------------------------------------------------------------
class _Watch(_Interceptor):
    """Records every use of some tensors. Layers get them detached: a derivative that is left reveals an unseen use."""

    def __init__(self, names: Mapping[int, str], batch: int):
        self.tensors, self.batch = names, batch
        self.uses: dict[str, list[str]] = {name: [] for name in names.values()}

    def on_layer(self, call: _Call) -> Tensor:
        on_batch = call.examples and call.x.shape[0] == self.batch
        self._note(call.x, OTHER)
        weight = self._note(call.weight, (PLACES if call.places else VECTORS) if on_batch else OTHER)
        bias = None if call.bias is None else self._note(call.bias, BIAS if on_batch else OTHER)
        return call.run(call.x, weight, bias)

    def on_other_use(self, tensor: int) -> None:
        self.uses[self.tensors[tensor]].append(OTHER)

    def _note(self, tensor: Tensor, use: str) -> Tensor:
        if id(tensor) not in self.tensors:
            return tensor
        self.uses[self.tensors[id(tensor)]].append(use)
        return tensor if use == OTHER else tensor.detach()


@torch.enable_grad()
def uses(network: Network, shape: Sequence[int]) -> dict[str, str]:
    """Return how a module uses each of its parameters, by two runs on made-up inputs of a shape."""
    runs, outputs = [], []
    network.module.train()
    for batch in (2, 3):  # an axis that follows the size of the batch is the batch's
        x = torch.arange(batch).to(network.initial).view(-1, *[1] * len(shape)).expand(batch, *shape).contiguous()
        weights = network.weights(network.initial.clone().requires_grad_())
        watch = _Watch({id(tensor): name for name, tensor in weights.items()}, batch)
        try:
            with KeyedDropout(None), watch:
                out = network.forward(network.module, weights, network.as_input(x))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"The model cannot take {batch} examples of shape {tuple(shape)}, so how it uses its weights cannot be "
                f"found out ({str(error).splitlines()[0]}). Use estimator weight."
            ) from error
        left: Sequence[Tensor | None] = [None] * len(weights)
        if out.requires_grad:
            left = torch.autograd.grad(out.sum(), list(weights.values()), allow_unused=True)
        met = zip(watch.uses.items(), left, strict=True)
        runs.append({name: use[0] if rest is None and len(use) == 1 else OTHER for (name, use), rest in met})
        outputs.append(out.detach())
    two, three = outputs
    close = 1e-4 * float(two.abs().nan_to_num(0, 0, 0).max())
    if not torch.allclose(two, three[:2], rtol=1e-3, atol=close, equal_nan=True):
        return dict.fromkeys(network.layout.names, OTHER)  # an example's output depends on the others
    two_uses, three_uses = runs
    return {n: two_uses[n] if n in two_uses and two_uses[n] == three_uses[n] else OTHER for n in network.layout.names}


# -- noise ------------------------------------------------------------------------------------------------------------
def _normal(key: Tensor, rows: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return normal deviates [rows, *size]; those of a row do not depend on how many rows follow."""
    exact = torch.promote_types(dtype, torch.float32)
    if key.device.type != "cpu":
        return rng.normal(rng.folds(key, rows), size, exact).to(dtype)
    # A stream per row would be slow here. Of one stream torch draws an incomplete last sixteen anew: draw whole ones.
    count = rows * math.prod(size)
    return rng.normal(key, (-(-count // 16) * 16,), exact)[:count].view(rows, *size).to(dtype)


def _signs(key: Tensor, rows: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return ±1 with equal probabilities, [rows, count]."""
    exact = torch.promote_types(dtype, torch.float32)
    return 1 - 2 * (rng.uniform(key, (rows, count), exact) < 0.5).to(dtype)


class _Slot(NamedTuple):
    """A parameter that is not drawn: its deviation, for local its variance, and for flipout the shared ε."""

    std: Tensor
    variance: Tensor
    noise: Tensor | None


class _Noisy(_Interceptor):
    """Adds a parameter's noise where a layer uses it."""

    def __init__(self, slots: dict[int, _Slot], rows: int, key: Tensor, sign: Tensor | None):
        self.tensors, self.rows, self.sign = slots, rows, sign
        self.keys = iter(rng.folds(key, len(slots), 1).unbind(-1))  # of the calls, all at once
        self.left = set(slots)

    def on_layer(self, call: _Call) -> Tensor:
        weight, bias = self.tensors.get(id(call.weight)), self.tensors.get(id(call.bias))
        out = call.run(call.x, call.weight, call.bias)
        if weight is None and bias is None:
            return out
        noisy = {id(t) for t, slot in ((call.weight, weight), (call.bias, bias)) if slot is not None}
        if not noisy <= self.left or call.x.shape[0] != self.rows:
            self.on_other_use(0)
        self.left -= noisy
        key = next(self.keys)
        if weight is not None:
            if weight.noise is None:
                least = bias.variance if bias is not None else weight.variance.new_zeros(len(weight.variance))
                std = call.run(call.x * call.x, weight.variance, least + _FLOOR).sqrt()
                return torch.addcmul(out, self._signed(_normal(key, self.rows, out.shape[1:], out.dtype)), std)
            out = out + self._flipout(call, weight.noise * weight.std, key, out.ndim)
        if bias is not None:
            noise = self._signed(_normal(rng.fold(key, 1), self.rows, bias.std.shape, out.dtype))
            out = out + call.wide(noise * bias.std, out.ndim)
        return out

    def _flipout(self, call: _Call, step: Tensor, key: Tensor, ndim: int) -> Tensor:
        channels = [call.x.shape[call.channels], step.shape[0]]
        into, out = _signs(key, self.rows, sum(channels), call.x.dtype).split(channels, -1)
        return call.run(call.x * call.wide(into, call.x.ndim), step, None) * call.wide(out, ndim)

    def _signed(self, noise: Tensor) -> Tensor:
        return noise if self.sign is None else noise * self.sign

    def on_other_use(self, tensor: int) -> None:
        raise InputError(
            "The model uses its weights in another way than when it was tried, so noise on activations would be wrong "
            "(a forward pass that depends on the values of its inputs?). Use estimator weight."
        )


@dataclass(frozen=True)
class Noise:
    """How the weights' noise enters a loss: which parameters' noise is put on activations, and in which way."""

    estimator: str = "weight"
    antithetic: bool = False
    uses: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(algorithm: Algorithm, network: Network, shape: Sequence[int]) -> Noise:
        """Return an algorithm's noise for inputs of a shape; call it outside of torch.func's transforms."""
        if algorithm.estimator == "weight":
            return Noise("weight", algorithm.antithetic)
        by_name = uses(network.to("cpu", torch.float32), shape)  # where sums of other lengths round alike
        estimator = "weight" if set(by_name.values()) == {OTHER} else algorithm.estimator
        return Noise(estimator, algorithm.antithetic, by_name)

    @property
    def on_weights(self) -> bool:
        """Whether whole weight vectors are drawn."""
        return self.estimator == "weight"

    def draws(self, key: Tensor, samples: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the keys of `samples` passes and, if they come in pairs of opposite noise, its signs."""
        key = rng.fold(key, _STREAM)
        if not self.antithetic or samples == 1:
            return (rng.folds(key, samples),)
        numbers = torch.arange(samples, device=key.device)
        return rng.folds(key, -(-samples // 2))[numbers // 2], (1 - 2 * (numbers % 2)).to(dtype)

    def outputs(
        self, network: Network, q: Gaussian, x: Tensor, key: Tensor, dropout: Tensor, sign: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the network's outputs in one pass, and the likelihood's own entries of the vector, which are drawn."""
        layout = network.layout
        exact, std, variance = (layout.split(v) for v in (q.mean, q.logstd.exp(), (2 * q.logstd).exp()))
        flips = (PLACES, VECTORS) if self.estimator == "flipout" else (PLACES,)
        shared = {n: exact[n] for n in layout.names if self.uses[n] == OTHER or self.uses[n] in flips}
        drawn: dict[str, Tensor] = {}
        if shared:
            noise = rng.normal(rng.fold(key, 0), (sum(v.numel() for v in shared.values()),), q.mean.dtype)
            pieces = (noise if sign is None else noise * sign).split([v.numel() for v in shared.values()])
            drawn = {n: piece.view(v.shape) for (n, v), piece in zip(shared.items(), pieces, strict=True)}
        other = {n: exact[n] + drawn[n] * std[n] for n in layout.names if self.uses[n] == OTHER}
        tail = other.pop(LIKELIHOOD, q.mean[:0])

        def inside(t: Tensor) -> Tensor:
            return t.to(network.dtype)

        mean = {n: inside(other.get(n, exact[n])) for n in layout.names if n != LIKELIHOOD}
        slots = {
            id(mean[n]): _Slot(inside(std[n]), inside(variance[n]), inside(drawn[n]) if n in drawn else None)
            for n in mean
            if n not in other
        }
        with _Noisy(slots, x.shape[0], key, sign):
            return network.call(mean, x, dropout), tail


ON_WEIGHTS = Noise()
