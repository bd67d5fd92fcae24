"""One run's clients: an algorithm, a network, a federation, and where and how they run."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import rng
from ..accel import enabled
from ..algorithms.base import Algorithm, Site, State
from ..data import Federation
from ..gaussian import Distribution
from ..likelihoods import Likelihood
from ..vectors import Network
from . import augment
from .client import Lanes, Part
from .executor import HEAVY, Programs
from .memory import uploaded
from .noise import Noise
from .samples import Data


class Tables:
    """What is known of all clients, on the device: constants, where their samples are, the roots of their keys."""

    def __init__(self, fed: Federation, seed: int, device: torch.device, dtype: torch.dtype, first: int = 0):
        put = lambda a: torch.as_tensor(a).to(device)  # noqa: E731
        self.constants = Site(*(put(a).to(dtype) for a in (fed.train.counts, fed.label_counts("train"))))
        self.index, self.offsets = put(fed.train.index) + first, put(fed.train.offsets)
        self.counts, sizes = self.offsets.diff(), fed.train.counts
        self.same = int(sizes.max()) if sizes.min() == sizes.max() else None  # how many samples, if all have as many
        self.roots = rng.keys((seed,), range(rng.PURPOSES), device)

    def site(self, clients: Tensor) -> Site:
        """The constants of some clients, a lane each."""
        return Site(*(column.index_select(0, clients) for column in self.constants))

    def sizes(self, clients: Tensor) -> Tensor:
        """How many training samples they have."""
        return self.counts.index_select(0, clients)

    def rows(self, clients: Tensor, width: int) -> Tensor:
        """Their training samples, [lanes, width], padded with −1."""
        if width == self.same:
            return self.index.view(-1, width).index_select(0, clients)
        number = torch.arange(width, device=clients.device)
        place = self.offsets.index_select(0, clients).unsqueeze(-1) + number
        own = number < self.sizes(clients).unsqueeze(-1)
        return torch.where(own, self.index[place.clamp_max(len(self.index) - 1)], -1)

    def keys(self, clients: Tensor, purpose: int, *path: Tensor | int) -> Tensor:
        """A key per client, as rng.key(seed, purpose, *path, client) would give."""
        root = self.roots[purpose]
        for part in path:
            root = rng.fold(root, part)
        return rng.fold(root, clients)


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
        inside: torch.dtype | None = None,  # of the network's own arithmetic
        fuse: bool | None = False,  # whether steps are compiled; None: on a GPU, where that pays
        workers: int = 1,  # threads, on a CPU
        coarse: bool = False,  # whether a GPU may round what it multiplies
        data: Data | None = None,  # where the federation's samples lie, if among those of others
        first: int = 0,  # the number that the federation's first sample has there
    ):
        augment.check(algorithm.augment, fed.x.shape[1:])
        self.algorithm, self.likelihood, self.fed = algorithm, likelihood, fed
        self.network = network.to(device, dtype, inside)
        self.data, self.first = data or Data.of(fed, device, dtype), first
        self.batch_size, self.seed, self.backend, self._chunk = batch_size, seed, backend, [chunk]
        self.device, self.dtype, self.workers = device, dtype, workers
        self.hyper = self._tensors(algorithm)
        # A captured or compiled program would read samples where they lay when it was made.
        here, batched = not self.data.hosted, backend == "vmap"
        cpu = device.type == "cpu"
        put_out = self.network.activations * min(batch_size, int(fed.train.counts.max()))
        self.programs = Programs(
            capture=here and not cpu and enabled("graphs"),
            fuse=bool(fuse) and here and batched,
            auto=fuse is None and here and batched and not cpu,
            trace=batched and cpu,
            heavy=not batched or put_out >= HEAVY,  # one by one every lane takes its time
        )
        self.coarse = coarse
        self.shortest, self.longest = int(fed.train.counts.min()), int(fed.train.counts.max())
        self.tables = Tables(fed, seed, device, dtype, first)

    @property
    def chunk(self) -> int:
        """How many clients run at once: one number for this cohort and all that `using` makes of it."""
        return self._chunk[0]

    @chunk.setter
    def chunk(self, size: int) -> None:
        self._chunk[0] = size

    def _tensors(self, algorithm: Algorithm) -> State:
        hyper = algorithm.continuous().items()
        return {k: torch.tensor(v, dtype=self.dtype, device=self.device) for k, v in hyper}

    def using(self, algorithm: Algorithm) -> Cohort:
        """The same clients, data and network under other hyperparameters."""
        other = copy.copy(self)
        other.algorithm, other.hyper = algorithm, other._tensors(algorithm)
        Noise.of(algorithm, self.network, self.fed.x.shape[1:])  # found out here, for threads must not
        return other

    def among(self, fed: Federation) -> Cohort:
        """The same algorithm and network, for the clients of another federation."""
        if fed is self.fed:
            return self
        same = Data.key(fed, self.device, self.dtype) == Data.key(self.fed, self.device, self.dtype)
        return Cohort(
            self.algorithm, self.network, self.likelihood, fed, batch_size=self.batch_size, seed=self.seed,
            device=self.device, dtype=self.dtype, backend=self.backend, chunk=self.chunk, inside=self.network.dtype,
            fuse=self.programs.fuse and self.programs.only is None, workers=self.workers, coarse=self.coarse,
            data=self.data if same else None, first=self.first if same else 0,
        )  # fmt: skip

    @staticmethod
    def join(cohorts: Sequence[Cohort]) -> None:
        """Lets the samples of cohorts whose data are alike lie in one array, as runs side by side need it."""
        if all(cohort.data is cohorts[0].data for cohort in cohorts):
            return
        whole, firsts = Data.joined([cohort.data for cohort in cohorts])
        for cohort, first in zip(cohorts, firsts, strict=True):
            cohort.data, cohort.first = whole, first
            cohort.tables = Tables(cohort.fed, cohort.seed, cohort.device, cohort.dtype, first)

    def lanes(self, shared: State, clients: Sequence[int], round: int = 0) -> Lanes:
        """Some clients side by side."""
        return Lanes([Part(self, shared, [int(c) for c in clients], round)])

    def numbers(self, clients: Sequence[int]) -> Tensor:
        """Clients on the device."""
        return uploaded(torch.as_tensor(clients, dtype=torch.int64), self.device)

    def site(self, clients: Sequence[int]) -> Site:
        """The constants of some clients, a lane each."""
        return self.tables.site(self.numbers(clients))

    def keys(self, purpose: int, round: int, clients: Sequence[int]) -> Tensor:
        """A key per client."""
        return self.tables.keys(self.numbers(clients), purpose, round)

    def weights(self, clients: Sequence[int]) -> Tensor:
        """The clients' shares of the server's mean."""
        if self.algorithm.weights == "uniform":
            return torch.full((len(clients),), 1 / len(clients), dtype=self.dtype, device=self.device)
        n = self.fed.train.counts[clients].astype(float)
        return uploaded(torch.as_tensor(n / n.sum()).to(self.dtype), self.device)

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
