"""One run's clients: an algorithm, a network, a federation, and where and how they run."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..algorithms.base import Algorithm, Site, State
from ..data import Federation
from ..gaussian import Distribution
from ..likelihoods import Likelihood
from ..vectors import Network
from .data import Data
from .lanes import Lanes, Part
from .program import Programs


class Cohort:
    """The client side of one run. The work itself is done by `Lanes`, for some of its clients at a time."""

    def __init__(
        self,
        algorithm: Algorithm,
        network: Network,
        likelihood: Likelihood,
        fed: Federation,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        chunk: int,
    ):
        self.algorithm, self.likelihood, self.fed = algorithm, likelihood, fed
        self.network = network.to(device, dtype)
        self.data = Data.of(fed, device, dtype)
        self.batch_size, self.seed, self.backend, self.chunk = batch_size, seed, backend, chunk
        self.device, self.dtype = device, dtype
        self.hyper = self._tensors(algorithm)
        self.programs = Programs(capture=device.type == "cuda")
        self.longest = int(fed.train.counts.max())
        put = lambda a: torch.as_tensor(a).to(device)  # noqa: E731
        self._site = Site(*(put(a).to(dtype) for a in (fed.train.counts, fed.label_counts("train"))))
        self._index, self._offsets = put(fed.train.index), put(fed.train.offsets)

    def _tensors(self, algorithm: Algorithm) -> State:
        hyper = algorithm.continuous().items()
        return {k: torch.tensor(v, dtype=self.dtype, device=self.device) for k, v in hyper}

    def using(self, algorithm: Algorithm) -> Cohort:
        """The same clients, data and network under other hyperparameters."""
        other = copy.copy(self)
        other.algorithm, other.hyper = algorithm, other._tensors(algorithm)
        return other

    def lanes(self, shared: State, clients: Sequence[int], round: int = 0) -> Lanes:
        """Some clients side by side."""
        return Lanes([Part(self, shared, [int(c) for c in clients], round)])

    def site(self, clients: Sequence[int]) -> Site:
        """The constants of some clients, a lane each."""
        chosen = torch.as_tensor(clients, device=self.device)
        return Site(*(column[chosen] for column in self._site))

    def rows(self, clients: Sequence[int], width: int) -> Tensor:
        """The training samples of some clients, [lanes, width], padded with −1."""
        chosen = torch.as_tensor(clients, device=self.device)
        place = self._offsets[chosen].unsqueeze(-1) + torch.arange(width, device=self.device)
        own = place < self._offsets[chosen + 1].unsqueeze(-1)
        return torch.where(own, self._index[place.clamp_max(len(self._index) - 1)], -1)

    def keys(self, purpose: int, round: int, clients: Sequence[int]) -> Tensor:
        """A key per client."""
        return rng.keys((self.seed, purpose, round), clients, self.device)

    def weights(self, clients: Sequence[int]) -> Tensor:
        """The clients' shares of the server's mean."""
        by_samples = self.algorithm.weights == "samples"
        n = self.fed.train.counts[clients].astype(float) if by_samples else np.ones(len(clients))
        return torch.as_tensor(n / n.sum()).to(self.device, self.dtype)

    # -- the lanes' work for clients of this run alone ----------------------------------------------------------------
    def keep(self, shared: State, clients: Sequence[int]) -> State:
        """The kept state of clients that have none yet, a lane each."""
        return self.lanes(shared, clients).keep()

    def train(
        self, shared: State, kept: State, clients: Sequence[int], round: int, epochs: int
    ) -> tuple[State, State, Tensor]:
        """The local work of some of a round's clients: their updates, what they keep, their mean losses."""
        return self.lanes(shared, clients, round).train(kept, epochs)

    def personalise(self, shared: State, kept: State, clients: Sequence[int], round: int = 0) -> Distribution:
        """Every client's own distribution over weights, a lane each."""
        return self.lanes(shared, clients, round).personalise(kept)
