"""Tokens: inputs that a network looks up in an embedding. They are whole numbers and are not standardised.

A federation standardises its inputs before it knows the model. `take_tokens` finds out whether an embedding of the
model looks the inputs up and, if so, returns the federation with its original inputs. An embedding of positions, which
looks up the same numbers for all inputs, does not count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..data import Federation
from ..errors import InputError
from ..vectors import Network

CHUNK = 1 << 16  # samples checked at once


def take_tokens(fed: Federation, network: Network) -> tuple[Federation, Network, str]:
    """Return federation and network as they fit each other, and a note if inputs are no longer standardised."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    layer = next((name for name, part in network.module.named_modules() if isinstance(part, embeddings)), None)
    raw = torch.as_tensor(fed.x[fed.train[0][:2]].astype(np.float32))
    if layer is None or not _looks_up(network, raw):
        return fed, network, ""
    standardised = bool(np.any(fed.shift != 0) or np.any(fed.scale != 1))
    if _has_fractions(fed.x):
        if standardised:
            raise InputError(
                f"The model's layer '{layer}' looks its inputs up, but the inputs have fractions and are standardised. "
                "Make the federation with normalize='none', scale the columns of measurements yourself, and let the "
                "model select the others, as x[:, :2].long()."
            )
        return fed, network, ""
    as_integers, as_floats = (_call(network, x) for x in (raw.long(), raw))
    network = network.with_tokens(as_integers is None or isinstance(as_integers, IndexError) or as_floats is not None)
    check_tokens(network, fed.x, "The federation's inputs")
    if not standardised:
        return fed, network, ""
    unscaled = replace(fed, shift=np.zeros((), np.float32), scale=np.ones((), np.float32))
    return unscaled, network, f"The inputs are not standardised: the model's layer '{layer}' looks them up."


def check_tokens(network: Network, x: np.ndarray, what: str) -> None:
    """Refuse inputs with fractions, or with numbers that have no entry in an embedding of the network."""
    if _has_fractions(x):
        raise InputError(f"{what}: some values have fractions, but the model looks its inputs up. Give whole numbers.")
    flat = x.reshape(len(x), -1)
    ends = torch.as_tensor(x[[int(flat.min(1).argmin()), int(flat.max(1).argmax())]].astype(np.float32))
    if isinstance(_call(network, network.as_input(ends)), IndexError):
        raise InputError(
            f"{what}: values range from {flat.min():g} to {flat.max():g}, but the embedding has no entry for some "
            "of them. Number tokens from 0, and give the embedding an entry for each."
        )


class _Lookups(TorchFunctionMode):
    """A mode that records what is looked up in embeddings."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.embedding, nn.functional.embedding_bag) and args:
            self.indices.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def _looks_up(network: Network, raw: Tensor) -> bool:
    """Return whether other inputs change what the network looks up."""
    seen = []
    for x in (raw, (raw == 0).float()):
        with _Lookups() as lookups:
            failed = _call(network, x.long())
        if failed is not None:
            with _Lookups() as lookups:
                _call(network, x)
        seen.append(lookups.indices)
    return len(seen[0]) != len(seen[1]) or not all(map(torch.equal, *seen))


def _call(network: Network, x: Tensor) -> Exception | None:
    """Call the module, and return the error that it raises, or None."""
    try:
        with torch.no_grad():
            network.module.eval()(x)
    except Exception as error:  # modules fail in many ways
        return error
    return None


def _has_fractions(x: np.ndarray) -> bool:
    parts = (x[start : start + CHUNK] for start in range(0, len(x), CHUNK))
    return x.dtype.kind not in "iub" and any((np.floor(part) != part).any() for part in parts)
