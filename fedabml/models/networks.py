"""The paper's networks as plain modules, and `build`, which makes one by name from a seed.

A network is a function (shape, outputs, options) → module; `shape` is that of one example without the batch axis, as
(784,) or (3, 32, 32), and the module maps [batch, *shape] to [batch, outputs].
"""

from __future__ import annotations

import copy
import inspect
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

from .. import rng
from ..arguments import check, checked_integer, checks_arguments
from ..errors import InputError, nearest
from ..files.limits import host_memory
from ..files.paths import open_regular
from ..files.user_code import UserCode
from .own import USER_NETWORKS


def mlr(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return multinomial logistic regression, f(x) = Wx + b; for regression data this is a linear model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: Sequence[int], outputs: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Return fully connected layers with ReLUs between them: 784→200→200→62 on EMNIST."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(
    shape: Sequence[int], outputs: int, channels: Sequence[int] = (64, 64), hidden: Sequence[int] = (120, 64)
) -> nn.Module:
    """Return 5×5 convolutions, each with ReLU and 2×2 pooling, then fully connected layers.

    On CIFAR-10 it has 307,842 parameters. Raises InputError for images of fewer than 16×16 pixels.
    """
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise InputError(f"Model 'cnn' needs images of at least 16×16 pixels; this data has shape {tuple(shape)}.")
    layers: list[nn.Module] = []
    c, size = shape[0], list(shape[1:])
    for width in channels:
        layers += [nn.Conv2d(c, width, 5), nn.ReLU(), nn.MaxPool2d(2)]
        c, size = width, [(v - 4) // 2 for v in size]
    return nn.Sequential(*layers, mlp((c, *size), outputs, hidden))


def cnn100(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return the CNN widened for CIFAR-100: 3→64→128, 3200→256→128→100; 1,075,044 parameters."""
    return cnn(shape, outputs, channels=(64, 128), hidden=(256, 128))


class _Block(nn.Module):
    """A residual block: y = ReLU(body(x) + skip(x)), with a 1×1 convolution as the skip where shapes differ."""

    def __init__(self, a: int, b: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.GroupNorm(32, b), nn.ReLU()),
            *(nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.GroupNorm(32, b)),
        )
        self.skip: nn.Module = nn.Identity()
        if a != b or stride != 1:
            self.skip = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.GroupNorm(32, b))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet18(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return ResNet-18 with a 3×3 stem and GroupNorm (11.2 M parameters); raises InputError unless x is an image."""
    if len(shape) != 3:
        raise InputError(f"Model 'resnet18' needs images; this data has shape {tuple(shape)}.")
    widths = [64, 64, 128, 256, 512]
    blocks: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        blocks += [_Block(a, b, 1 if i == 0 else 2), _Block(b, b, 1)]
    stem = [nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))


class _Text(nn.Module):
    """The mean of the tokens' vectors, without those of padding, through fully connected layers."""

    def __init__(self, vocabulary: int, width: int, outputs: int, hidden: Sequence[int]):
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocabulary, width), mlp((width,), outputs, hidden)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        vectors = self.tokens(x)
        real = torch.ones_like(x) if attention_mask is None else attention_mask
        weight = (real / real.sum(1, keepdim=True).clamp_min(1)).to(vectors.dtype)
        return self.layers((vectors * weight.unsqueeze(-1)).sum(1))


def text(
    shape: Sequence[int],
    outputs: int,
    vocabulary: Sequence[int] = (),
    width: Sequence[int] = (32,),
    hidden: Sequence[int] = (64,),
) -> nn.Module:
    """Return a bag of embedded tokens: the mean of their vectors of this width, then fully connected layers.

    Tokens are numbered from 0 and `vocabulary` says how many there are. Raises InputError unless x is a sequence.
    """
    if len(vocabulary) != 1 or len(width) != 1:
        raise InputError(
            "Model 'text' needs the number of different tokens: --set model_options.vocabulary=[5000] "
            "(model_options={'vocabulary': [5000]}); its width is one number, too."
        )
    if len(shape) != 1:
        raise InputError(f"Model 'text' needs sequences of tokens; this data has shape {tuple(shape)}.")
    return _Text(vocabulary[0], width[0], outputs, hidden)


MODELS: dict[str, Callable[..., nn.Module]] = {f.__name__: f for f in (mlr, mlp, cnn, cnn100, resnet18, text)}
MOST_LAYERS = 1000  # that an option such as `hidden` may name: building more only to count parameters takes too long


@checks_arguments
def build(
    name: str, shape: Sequence[int], outputs: int, seed: int = 0, most: int | None = None, **options: Any
) -> nn.Module:
    """Return a network by name, its initial weights a function of the seed alone.

    Arguments: the `shape` of one example; the number of `outputs`; `options` of the network, each a list of sizes;
    `most`, a bound on its parameters for a network that a file describes (otherwise memory is the bound). Raises
    InputError for an unknown name or option and for a network that is too large.
    """
    if name not in MODELS and name not in USER_NETWORKS:
        remedy = f" If it is your own, name its file: FILE.py:{name}." if name.isidentifier() else ""
        raise InputError(f"There is no model '{name}'.{nearest(name, (*MODELS, *USER_NETWORKS))}{remedy}")
    shape = tuple(checked_integer(size, "A size in shape") for size in shape)
    outputs = checked_integer(outputs, "outputs")
    if name in USER_NETWORKS:
        with Seeded(rng.number(seed, rng.INIT) & 0x7FFFFFFF):
            return _built(USER_NETWORKS[name], {"shape": shape, "outputs": outputs}, options)
    for option, sizes in options.items():
        check(sizes, Sequence[int], f"Model '{name}': {option}")
        if len(sizes) > MOST_LAYERS:
            raise InputError(
                f"Model '{name}': {option} names {len(sizes):,} layers; at most {MOST_LAYERS:,} are built."
            )
    _check_size(name, shape, outputs, options, most)
    with Seeded(rng.number(seed, rng.INIT) & 0x7FFFFFFF):
        return MODELS[name](shape, outputs, **options)


def _built(code: UserCode, from_data: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    """Call a user's class or function with `options`, and with `shape` and `outputs` if it has such parameters."""
    subject, parameters = f"'{code.typed}'", inspect.signature(code.value).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in options:
        if name not in parameters and not any_name:
            raise InputError(f"{subject} takes no option '{name}'.{nearest(name, parameters)}")
    arguments = {name: value for name, value in from_data.items() if name in parameters} | options
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and name not in arguments
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise InputError(
            f"{subject} needs a value for {', '.join(missing)}: --set model_options.{missing[0]}=… gives it one. "
            "Parameters that are called shape (of one example) and outputs get their values from the data."
        )
    try:
        module = code.value(**arguments)
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{subject} cannot be made with {', '.join(arguments) or 'no arguments'}: {reason}."
        ) from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{subject} must make a torch.nn.Module; it makes an object of type {type(module).__name__}.")
    return module


def _check_size(name: str, shape: Sequence[int], outputs: int, options: dict[str, Any], most: int | None) -> None:
    """Raise InputError for options that the network does not take, or if it is too large, before it takes memory."""
    try:
        with torch.device("meta"):  # there tensors take no time, no memory and no random numbers
            parameters = sum(p.numel() for p in MODELS[name](shape, outputs, **options).parameters())
    except (TypeError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"Model '{name}' does not take these options: {reason}.") from error
    free = host_memory()[1] // 4  # in parameters of 4 bytes; a run holds a few more vectors of this size
    if most is not None and parameters > most:
        raise InputError(f"Model '{name}' with these options has {parameters:,} parameters, more than the file holds.")
    if 0 < free < 2 * parameters:
        raise InputError(
            f"Model '{name}' with these options has {parameters:,} parameters: too many for this machine's memory."
        )


class Seeded(TorchFunctionMode):
    """A context in which modules are made in float32 on the CPU, with weights drawn from a generator of their own.

    The weights have the bits that torch.manual_seed(seed) would give them. Neither torch's own generator nor its
    default type and device matter or change, in this thread or in others.
    """

    RANDOM = (torch.rand, torch.randn)
    MADE = (torch.empty, torch.zeros, torch.ones, *RANDOM)
    DRAWN = (
        *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_),
        *(Tensor.uniform_, Tensor.normal_, *RANDOM, torch.randperm),  # of other functions, such as xavier_uniform_
    )

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.MADE:
            kwargs |= {"dtype": kwargs.get("dtype") or torch.float32, "device": kwargs.get("device") or "cpu"}
        filled = args[0].device if args and isinstance(args[0], Tensor) else kwargs.get("device") or "cpu"
        if func in self.DRAWN and kwargs.get("generator") is None and torch.device(filled).type == "cpu":
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


@checks_arguments
def with_weights(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Return a copy of a network with the weights of a .safetensors file, which must have the same names and shapes.

    Raises InputError if the file cannot be read or does not fit.
    """
    try:
        with open_regular(path):  # reading a FIFO or a device might never end
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
