"""All samples on the device, in the type they are stored in; a minibatch is a gather.

Samples that would take too much of the device's memory stay on the host; those of a chunk's clients are moved.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ..accel.machine import free_bytes, to_device
from ..algorithms.base import Batch
from ..data import Federation


@dataclass(eq=False)
class Samples:
    """Normalised samples, from which minibatches are taken."""

    x: Tensor
    y: Tensor

    def inputs(self, index: Tensor) -> Tensor:
        """Return the network's inputs for sample numbers of any shape."""
        return select_rows(self.x, index)

    def batch(self, index: Tensor, unpadded: bool = False) -> Batch:
        """Return a batch for sample numbers in which −1 is padding, with a mask: 0 for padding, else 1.

        If the numbers are `unpadded`, the mask depends on nothing, and a recorded step computes once what follows.
        """
        numbers = index if unpadded else index.clamp_min(0)
        x, y = self.inputs(numbers), select_rows(self.y, numbers)
        mask = torch.ones(index.shape, dtype=x.dtype, device=x.device) if unpadded else (index >= 0).to(x.dtype)
        return Batch(x, y, mask)


class Data(Samples):
    """The samples of a federation, and how they are normalised for a network."""

    def __init__(self, fed: Federation, device: torch.device, dtype: torch.dtype):
        self.source: tuple[Any, ...] = fed.x, fed.y  # held, so that no other arrays can take their place in memory
        with warnings.catch_warnings():  # nothing writes to samples, so they may be a file opened for reading
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            x = torch.as_tensor(fed.x)
        self.hosted = too_large(x, device)
        self.x = x if self.hosted else x.to(device)
        y = torch.as_tensor(fed.model_targets())
        self.y = y.to(device) if y.dtype == torch.int64 else y.to(device, dtype)

        def put(values: object) -> Tensor:
            return torch.as_tensor(np.asarray(values)).to(device, dtype)

        self.shift, self.inverse = put(fed.shift), 1 / put(fed.scale)
        self.black = -self.shift * self.inverse  # 0, normalised
        if fed.task == "regression":
            self.y = (self.y - put(fed.y_shift)) / put(fed.y_scale)
        self.device, self.dtype = device, dtype

    @staticmethod
    def of(fed: Federation, device: torch.device, dtype: torch.dtype) -> Data:
        """Return the data of a federation; federations of the same arrays and normalisation share one object."""
        key = Data.key(fed, device, dtype)
        data = _ALIVE.get(key)
        if data is None:
            data = _ALIVE[key] = Data(fed, device, dtype)
        return data

    @staticmethod
    def key(fed: Federation, device: torch.device, dtype: torch.dtype) -> tuple[object, ...]:
        """Return what tells the data of two federations apart: their arrays, and how they are normalised."""
        statistics = (fed.shift, fed.scale, fed.y_shift, fed.y_scale)
        return id(fed.x), id(fed.y), str(device), dtype, fed.transform, *(np.asarray(a).tobytes() for a in statistics)

    def alike(self, other: Data) -> bool:
        """Return whether the samples of both may lie in one array: of one kind and normalisation, on the device."""
        types = [(d.device, d.dtype, *((t.shape[1:], t.dtype) for t in (d.x, d.y))) for d in (self, other)]
        return (
            not (self.hosted or other.hosted)
            and types[0] == types[1]
            and torch.equal(self.shift, other.shift)
            and torch.equal(self.inverse, other.inverse)
        )

    @property
    def nbytes(self) -> int:
        """How much memory the samples take."""
        return self.x.nbytes + self.y.nbytes

    @staticmethod
    def joined(parts: Sequence[Data]) -> tuple[Data, list[int]]:
        """Return the samples of several that are `alike` in one array, and the number of the first of each in it."""
        different = list(dict.fromkeys(parts))
        joined = copy.copy(different[0])
        joined.source = tuple(part.source for part in different)
        joined.x, joined.y = torch.cat([part.x for part in different]), torch.cat([part.y for part in different])
        ends = np.cumsum([0, *(len(part.x) for part in different)]).tolist()
        return joined, [ends[different.index(part)] for part in parts]

    def inputs(self, index: Tensor) -> Tensor:
        """Return the network's inputs for sample numbers of any shape."""
        x = self._moved(index) if self.hosted else select_rows(self.x, index)
        if self.device.type != "cpu":
            return (x.to(self.dtype) - self.shift) * self.inverse
        return (x.to(self.dtype) if x.dtype != self.dtype else x.clone()).sub_(self.shift).mul_(self.inverse)

    def _moved(self, index: Tensor) -> Tensor:
        """Return samples of the host on the device."""
        return to_device(select_rows(self.x, index.cpu()), self.device)

    def local(self, rows: Tensor, max_bytes: int) -> tuple[Samples, Tensor]:
        """Return where to take minibatches of these samples from, and their numbers there.

        On a CPU normalising a sample costs more than a step of a small model, so it is done once for all epochs, where
        the result has at most `max_bytes` bytes. A GPU does it on the way. Samples on the host are moved at once.
        """
        if self.hosted:
            real = rows >= 0
            moved = copy.copy(self)
            moved.x, moved.y, moved.hosted = self._moved(rows[real]), self.y[rows[real]], False
            return moved.local(torch.where(real, real.view(-1).cumsum(0).view(rows.shape) - 1, -1), max_bytes)
        if self.device.type != "cpu" or rows.numel() * self.x[0].numel() * self.dtype.itemsize > max_bytes:
            return self, rows
        index, numbers = rows.clamp_min(0).view(-1), torch.arange(rows.numel()).view(rows.shape)
        return Samples(self.inputs(index), self.y[index]), torch.where(rows >= 0, numbers, -1)


def too_large(samples: Tensor, device: torch.device) -> bool:
    """Return whether samples would take more than half of a device's free memory."""
    return device.type == "cuda" and samples.nbytes > free_bytes(device)


def select_rows(samples: Tensor, index: Tensor) -> Tensor:
    """Return samples[index], by copies of whole rows: on a CPU twice as fast."""
    return samples.index_select(0, index.reshape(-1)).view(*index.shape, *samples.shape[1:])


_ALIVE: WeakValueDictionary[tuple[object, ...], Data] = WeakValueDictionary()
