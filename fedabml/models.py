"""The paper's networks as plain modules. A user's own `nn.Module` works the same way everywhere."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import rng
from .arguments import check, checks_arguments, whole
from .errors import InputError, nearest
from .files.limits import host_memory
from .files.paths import open_regular


def mlr(shape: Sequence[int], outputs: int) -> nn.Module:
    """Multinomial logistic regression (for regression data: a linear model)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: Sequence[int], outputs: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Fully connected, ReLU: 784→200→200→62 on EMNIST."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(
    shape: Sequence[int], outputs: int, channels: Sequence[int] = (64, 64), hidden: Sequence[int] = (120, 64)
) -> nn.Module:
    """Two 5×5 convolutions with pooling, then fully connected layers: 307,842 parameters on CIFAR-10."""
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise InputError(f"Model 'cnn' needs images of at least 16×16 pixels; this data has shape {tuple(shape)}.")
    layers: list[nn.Module] = []
    c, size = shape[0], list(shape[1:])
    for width in channels:
        layers += [nn.Conv2d(c, width, 5), nn.ReLU(), nn.MaxPool2d(2)]
        c, size = width, [(v - 4) // 2 for v in size]
    return nn.Sequential(*layers, mlp((c, *size), outputs, hidden))


def cnn100(shape: Sequence[int], outputs: int) -> nn.Module:
    """The CNN widened for CIFAR-100: 3→64→128, 3200→256→128→100; 1,075,044 parameters."""
    return cnn(shape, outputs, channels=(64, 128), hidden=(256, 128))


class _Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.GroupNorm(32, b), nn.ReLU()),
            *(nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.GroupNorm(32, b)),
        )
        self.skip = (
            nn.Identity()
            if a == b and stride == 1
            else nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.GroupNorm(32, b))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet18(shape: Sequence[int], outputs: int) -> nn.Module:
    """ResNet-18 with a 3×3 stem and GroupNorm (11.2 M parameters)."""
    if len(shape) != 3:
        raise InputError(f"Model 'resnet18' needs images; this data has shape {tuple(shape)}.")
    widths = [64, 64, 128, 256, 512]
    blocks: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        blocks += [_Block(a, b, 1 if i == 0 else 2), _Block(b, b, 1)]
    stem = [nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlr": mlr,
    "mlp": mlp,
    "cnn": cnn,
    "cnn100": cnn100,
    "resnet18": resnet18,
}


MOST_LAYERS = 1000  # of an option, such as `hidden`: a file that names more is not built to be measured


@checks_arguments
def build(
    name: str, shape: Sequence[int], outputs: int, seed: int = 0, most: int | None = None, **options: Any
) -> nn.Module:
    """A network by name, its initial weights a function of the seed alone.

    `most` bounds its parameters, as where a file says what to build; without it, what fits into memory is the bound.
    """
    if name not in MODELS:
        raise InputError(f"There is no model '{name}'.{nearest(name, MODELS)}")
    shape = tuple(whole(size, "A size in shape") for size in shape)
    outputs = whole(outputs, "outputs")
    for option, sizes in options.items():
        check(sizes, Sequence[int], f"Model '{name}': {option}")
        if len(sizes) > MOST_LAYERS:
            raise InputError(
                f"Model '{name}': {option} names {len(sizes):,} layers; at most {MOST_LAYERS:,} are built."
            )
    _check_size(name, shape, outputs, options, most)
    with Seeded(rng.number(seed, rng.INIT) & 0x7FFFFFFF):
        return MODELS[name](shape, outputs, **options)


def _check_size(name: str, shape: Sequence[int], outputs: int, options: dict[str, Any], most: int | None) -> None:
    """Refuses options that the network does not take, and one that is too large, before it costs memory."""
    try:
        with torch.device("meta"):  # which takes neither time nor memory nor random numbers
            parameters = sum(p.numel() for p in MODELS[name](shape, outputs, **options).parameters())
    except (TypeError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"Model '{name}' does not take these options: {reason}.") from error
    free = host_memory()[1] // 4  # bytes of a parameter; beside the network there will be a few vectors like it
    if most is not None and parameters > most:
        raise InputError(f"Model '{name}' with these options has {parameters:,} parameters, more than the file holds.")
    if 0 < free < 2 * parameters:
        raise InputError(
            f"Model '{name}' with these options has {parameters:,} parameters: too many for this machine's memory."
        )


class Seeded(TorchFunctionMode):
    """Within it, modules are made in float32 on the CPU, their weights drawn from a generator of their own.

    They have the bits that torch.manual_seed(seed) would give them, and neither torch's own generator nor its default
    type and device matter or change, in this thread and in others.
    """

    MADE = (torch.empty, torch.zeros, torch.ones)
    DRAWN = (
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
    )

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.MADE:
            kwargs |= {"dtype": kwargs.get("dtype") or torch.float32, "device": kwargs.get("device") or "cpu"}
        if func in self.DRAWN and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


@checks_arguments
def with_weights(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """A copy of a network with the weights of a .safetensors file, which must have the same names and shapes."""
    try:
        with open_regular(path):  # a FIFO or a device would be waited for
            weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"'{path}' cannot be read as weights ({error}). Only safetensors files are; save a module's with "
            "safetensors.torch.save_file(module.state_dict(), path). Pickled weights (.pt, .pth) are refused."
        ) from error
    for key, value in weights.items():
        if not value.is_floating_point() and key in dict(model.named_parameters()):
            raise InputError(f"The weights in '{path}' do not fit the model: '{key}' is {value.dtype}.")
    model = copy.deepcopy(model)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"The weights in '{path}' do not fit the model: {' '.join(str(error).split())}") from error
    return model
