"""All samples on the device, in the type they are stored in; a minibatch is a gather."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ..algorithms.base import Batch
from ..data import Federation


class Data:
    """The samples of a federation, and how a network sees them."""

    def __init__(self, fed: Federation, device: torch.device, dtype: torch.dtype):
        self.source = fed.x, fed.y  # held, so that no other arrays can take their place in memory
        self.x = torch.as_tensor(fed.x).to(device)
        y = torch.as_tensor(fed.y)
        self.y = y.to(device) if fed.task == "classification" else y.to(device, dtype)
        put = lambda a: torch.as_tensor(np.asarray(a)).to(device, dtype)  # noqa: E731
        self.shift, self.inverse = put(fed.shift), 1 / put(fed.scale)
        if fed.task == "regression":
            self.y = (self.y - put(fed.y_shift)) / put(fed.y_scale)
        self.device, self.dtype = device, dtype

    @staticmethod
    def of(fed: Federation, device: torch.device, dtype: torch.dtype) -> Data:
        """The data of a federation; federations that divide the same arrays, alike normalised, share them."""
        statistics = (fed.shift, fed.scale, fed.y_shift, fed.y_scale)
        key = (id(fed.x), id(fed.y), str(device), dtype, *(np.asarray(a).tobytes() for a in statistics))
        found = _ALIVE.get(key)
        if found is None:
            found = _ALIVE[key] = Data(fed, device, dtype)
        return found

    def inputs(self, index: Tensor) -> Tensor:
        """The network's inputs for sample numbers of any shape."""
        return (self.x[index].to(self.dtype) - self.shift) * self.inverse

    def batch(self, index: Tensor) -> Batch:
        """A batch for sample numbers where −1 is padding."""
        own = index.clamp_min(0)
        return Batch(self.inputs(own), self.y[own], (index >= 0).to(self.dtype))


_ALIVE: WeakValueDictionary[tuple[object, ...], Data] = WeakValueDictionary()
