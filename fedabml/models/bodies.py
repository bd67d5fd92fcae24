"""Frozen weights are held once: networks with equal ones share their memory, on every device.

Nothing writes to the frozen weights of a network. So its copies on a device, the networks of other runs with the same
body, and those of priors and posteriors that are read from files all have the same parameters, as long as one of them
lives. A parameter that is held carries its origin: its name, its kind and the digest of its values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..files.sealed import tensor_bytes


class ParameterIdentity(NamedTuple):
    """The name of a frozen parameter, its kind, and the digest of its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes


_HELD: WeakValueDictionary[tuple[ParameterIdentity, torch.device, torch.dtype], nn.Parameter] = WeakValueDictionary()


def hold(module: nn.Module, trained: Collection[str]) -> None:
    """Let a module take its parameters, without the `trained` ones, from networks that have equal ones.

    The memory of those that no network has is shared from now on, so it must belong to the module alone. An embedding
    with `max_norm` writes to its own weight when it is called, so it keeps it for itself.
    """
    written = {id(part.weight) for part in module.modules() if getattr(part, "max_norm", None) is not None}
    named = {name: p for name, p in module.named_parameters() if name not in trained and id(p) not in written}
    held = {id(p): _register(p, _identity(name, p)) for name, p in named.items()}
    for part in module.modules():
        part._parameters.update({name: held[id(p)] for name, p in part._parameters.items() if id(p) in held})


def copies(module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None) -> dict[int, Any]:
    """Return the memo with which `copy.deepcopy` gives a copied module parameters of the same memory.

    With a place, those that are held are there what other networks have of them.
    """
    if device is not None:
        device = torch.empty(0, device=device).device  # with its number
    return {id(p): _placed(p, device or p.device, dtype or p.dtype) for p in module.parameters()}


def _placed(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    origin: ParameterIdentity | None = getattr(parameter, "origin", None)
    if origin is None:
        return nn.Parameter(parameter.data, requires_grad=False)
    dtype = dtype if parameter.is_floating_point() or parameter.is_complex() else parameter.dtype
    if (device, dtype) == (parameter.device, parameter.dtype):
        return parameter
    held = _HELD.get((origin, device, dtype))
    if held is None:
        held = nn.Parameter(parameter.to(device, dtype), requires_grad=False)
        if parameter.dtype == origin.dtype:  # rounded values are no one else's
            held = _register(held, origin)
    return held


def _register(parameter: nn.Parameter, origin: ParameterIdentity) -> nn.Parameter:
    held = _HELD.setdefault((origin, parameter.device, parameter.dtype), parameter)
    held.origin = origin  # type: ignore[attr-defined]
    return held


def _identity(name: str, parameter: nn.Parameter) -> ParameterIdentity:
    digest = hashlib.sha256(tensor_bytes(parameter)).digest()
    return ParameterIdentity(name, tuple(parameter.shape), parameter.dtype, digest)
