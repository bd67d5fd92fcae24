"""Tokens: inputs that a network looks up in an embedding. They are whole numbers and are not standardised.

A federation standardises its inputs before it knows the model. `take_tokens` finds out whether an embedding of the
model looks the inputs up and, if so, returns the federation with its original inputs. An embedding of positions, which
looks up the same numbers for all inputs, does not count.

Sequences of different lengths are filled up with the federation's `padding`. A module whose `forward` takes
`attention_mask` is given 1 for tokens and 0 for padding; any other module must handle the number itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..data import Federation
from ..errors import InputError
from ..vectors import Network, mask_parameter

CHUNK = 1 << 16  # samples checked at once
MOST_ROWS = 1 << 10  # rows that a model is tried on at once
SECONDS = 2.0  # after which no further rows are tried: a large model would take as long as an epoch


def take_tokens(fed: Federation, network: Network) -> tuple[Federation, Network, str]:
    """Return federation and network as they fit each other, and a note if inputs are no longer standardised."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    layer = next((name for name, part in network.module.named_modules() if isinstance(part, embeddings)), None)
    if fed.padding is not None and takes_mask(network.module) and padding_of(network) is None:
        raise InputError(
            f"The network was made without the federation's token of padding, {fed.padding}, so its attention_mask "
            "would be missing. Make the federation from sequences of one length, without padding."
        )
    raw = torch.as_tensor(fed.x[fed.train[0][:2]].astype(np.float32))
    if layer is not None and raw.ndim == 2 and (most := _longest(network, raw.long())) < raw.shape[1]:
        raise InputError(
            f"The model takes sequences of at most {most} tokens, but the federation's have {raw.shape[1]}. Cut longer "
            f"sequences to {most} tokens before you make the federation, or give a model with more positions."
        )
    if layer is None or not _looks_up(network, raw):
        if fed.padding is not None:
            failed = _call(network, raw.long())
            if failed is not None and _call(network, raw) is not None:
                reason = str(failed).split("\n")[0] or type(failed).__name__
                raise InputError(f"The model cannot take the federation's sequences of {raw.shape[1]} tokens: {reason}")
            raise InputError(
                f"The federation's sequences are filled up with the token {fed.padding}, but the model looks no inputs "
                "up in an embedding. Give a model with an nn.Embedding, or inputs of one length without padding."
            )
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
    check_tokens(network, fed.x, "The federation's inputs", lambda sample: _owner(fed, sample))
    if fed.padding is not None and not takes_mask(network.module):
        note = f"The model's forward takes no attention_mask, so it must handle the padding token {fed.padding} itself."
        return fed, network, note
    if not standardised:
        return fed, network, ""
    unscaled = replace(fed, shift=np.zeros((), np.float32), scale=np.ones((), np.float32))
    return unscaled, network, f"The inputs are not standardised: the model's layer '{layer}' looks them up."


def _longest(network: Network, raw: Tensor) -> int:
    """Return how many tokens a sequence may have of those in `raw`; all, too, where not even one can be looked up.

    The first token is repeated, so that a token without an entry further on does not count as too long a sequence.
    """

    def fits(length: int) -> bool:
        return _call(network, raw[:, :1].expand(-1, length)) is None

    length = raw.shape[1]
    if fits(length) or not fits(1):
        return length
    fine, too_long = 1, length
    while too_long - fine > 1:
        middle = (fine + too_long) // 2
        fine, too_long = (middle, too_long) if fits(middle) else (fine, middle)
    return fine


def check_tokens(
    network: Network, x: np.ndarray, subject: str, describe: Callable[[int], str] = "row {}".format
) -> None:
    """Refuse inputs with fractions, or with numbers that have no entry in an embedding of the network.

    `describe(row)` names a row of x in errors.
    """
    if _has_fractions(x):
        raise InputError(
            f"{subject}: some values have fractions, but the model looks its inputs up. Give whole numbers."
        )
    flat = x.reshape(len(x), -1)
    rows, failed, lookup = _first_failure(network, x, flat)
    if lookup.layer and (named := rows[(flat[rows] == lookup.token).any(1)]).size:
        pairs = ((row, _try_rows(network, x, np.array([row, row]))[1].layer) for row in named)
        row = next((row for row, layer in pairs if layer == lookup.layer), named[0])
        raise InputError(
            f"{subject}: {describe(int(row))} has the token {lookup.token}, but the model's layer '{lookup.layer}' has "
            f"entries for 0..{lookup.entries - 1}. Number tokens from 0, and give the embedding an entry for each."
        )
    if isinstance(failed, IndexError):
        raise InputError(
            f"{subject}: values range from {flat.min():g} to {flat.max():g}, but the embedding has no entry for some "
            "of them. Number tokens from 0, and give the embedding an entry for each."
        )


def _first_failure(network: Network, x: np.ndarray, flat: np.ndarray) -> tuple[np.ndarray, Exception | None, _TooLarge]:
    """Try rows until some fail, and return these, their error and the embedding that lacks an entry.

    The rows with the smallest and the largest number come first, and decide for a model with one embedding. Those of
    every column follow, for models with several, and then all rows, in parts that double while there is time.
    """
    ends = [int(flat.min(1).argmin()), int(flat.max(1).argmax())]
    order = np.concatenate([ends, flat.argmin(0), flat.argmax(0), np.arange(len(x))])
    start, size, until = 0, 2, time.monotonic() + SECONDS
    while True:
        rows = order[start : start + size]
        failed, lookup = _try_rows(network, x, rows)
        start, size = start + size, min(2 * size, MOST_ROWS)
        if failed or lookup.layer or start >= len(order) or time.monotonic() > until:
            return np.unique(rows), failed, lookup


def _try_rows(network: Network, x: np.ndarray, rows: np.ndarray) -> tuple[Exception | None, _TooLarge]:
    """Call the network with rows of x, and return its error and the embedding that lacks an entry."""
    with _TooLarge(network.module) as lookup:
        failed = _call(network, network.as_input(torch.as_tensor(x[rows].astype(np.float32))))
    return failed, lookup


def padding_of(network: Network) -> int | None:
    """Return the token of padding that a network knows; None without one."""
    return getattr(network, "pad", None)


def takes_mask(module: nn.Module) -> bool:
    """Return whether a module's `forward` has a parameter `attention_mask`."""
    return mask_parameter(module) is not None


def _owner(fed: Federation, sample: int) -> str:
    """Return the name of a sample's client, for an error."""
    for rows in (fed.train, fed.val, fed.test):
        if len(place := np.flatnonzero(rows.index == sample)):
            return f"a sample of client '{fed.names[rows.owner[place[0]]]}'"
    return f"sample {sample}"


class _TooLarge:
    """A context that finds the first embedding of a module whose entries do not suffice for what it looks up."""

    def __init__(self, module: nn.Module):
        self.layer, self.entries, self.token = "", 0, 0
        self._layers = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)]

    def __enter__(self) -> _TooLarge:
        self._hooks = [
            part.register_forward_pre_hook(lambda part, args, name=name: self._note(name, part.num_embeddings, args[0]))
            for name, part in self._layers
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, entries: int, indices: Tensor) -> None:
        wrong = indices[(indices < 0) | (indices >= entries)]
        if not self.layer and wrong.numel():
            self.layer, self.entries, self.token = name or "embedding", entries, int(wrong[0])


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
            network.module.eval()(x, **network.mask_of(x))
    except Exception as error:  # modules fail in many ways
        return error
    return None


def _has_fractions(x: np.ndarray) -> bool:
    parts = (x[start : start + CHUNK] for start in range(0, len(x), CHUNK))
    return x.dtype.kind not in "iub" and any((np.floor(part) != part).any() for part in parts)
