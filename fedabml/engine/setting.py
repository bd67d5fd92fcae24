"""What is trained (`Setting`), where and how (`Place`), and both with the data on the device (`Cohort`)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import rng
from ..accel import enabled
from ..accel.machine import to_device
from ..algorithms.base import Algorithm, Site, State
from ..data import Federation
from ..likelihoods import Likelihood
from ..vectors import Network
from . import augment
from . import policy as thresholds
from .backends import BACKENDS
from .executor import Executor
from .label_level import require_chosen
from .noise import Noise
from .policy import Policy
from .samples import Data
from .workers import ChunkLimit


@dataclass(frozen=True, eq=False)
class Setting:
    """What is trained: everything that the numbers of a run depend on."""

    algorithm: Algorithm
    network: Network
    likelihood: Likelihood
    federation: Federation
    batch_size: int
    seed: int = 0
    epochs: int = 1  # of a client in a round
    participation: float = 1.0  # the share of clients in a round
    identities: tuple[int, ...] | None = None  # what clients' keys are made of; None: their numbers in the federation
    specificity: float = 0.9  # at which the sensitivity of two classes is scored

    def __post_init__(self) -> None:
        require_chosen(self.algorithm)
        if self.identities is None:
            return
        count, clients = len(self.identities), self.federation.clients
        if count != clients or len(set(self.identities)) != count or min(self.identities) < 0:
            raise ValueError(f"{clients} clients need as many different identities of at least 0, not {count}.")


@dataclass(frozen=True)
class Place:
    """Where and how a run is executed; results differ between places by the rounding of sums alone."""

    device: torch.device
    dtype: torch.dtype
    network_dtype: torch.dtype | None = None  # of the network's own arithmetic, if another
    backend: str = "vmap"  # all clients of a chunk in one batched program, or "loop": one by one
    chunk: int = 1  # clients that run at once, at first
    workers: int = 1  # threads of a CPU that share a chunk
    compile: bool | None = False  # whether steps are compiled; None: decided later, on a GPU
    allow_tf32: bool = False  # whether a GPU may round what it multiplies (TF32)
    channels_last: bool = False  # how images lie in memory
    graphs: bool = True  # whether a GPU's steps are captured as CUDA graphs
    policy: Policy = field(default_factory=lambda: thresholds.DEFAULT)


class ClientTensors:
    """Device tensors of all clients: constants, sample numbers, roots of keys."""

    def __init__(self, setting: Setting, device: torch.device, dtype: torch.dtype, first_sample: int = 0):
        fed = setting.federation
        self.constants = Site(
            torch.as_tensor(fed.train.counts).to(device).to(dtype),
            torch.as_tensor(fed.label_counts("train")).to(device).to(dtype),
        )
        self.index = torch.as_tensor(fed.train.index).to(device) + first_sample
        self.offsets = torch.as_tensor(fed.train.offsets).to(device)
        self.counts, sizes = self.offsets.diff(), fed.train.counts
        self.equal_size = int(sizes.max()) if sizes.min() == sizes.max() else None  # of all clients, where they agree
        self.roots = rng.keys((setting.seed,), range(rng.PURPOSES), device)
        ids = setting.identities
        self.identities = None if ids is None else torch.as_tensor(ids, dtype=torch.int64).to(device)

    def identity(self, clients: Tensor) -> Tensor:
        """Return what the keys of some clients are made of; a negative number, which is no client's, stays."""
        if self.identities is None:
            return clients
        return torch.where(clients < 0, clients, self.identities.index_select(0, clients.clamp_min(0)))

    def site(self, clients: Tensor) -> Site:
        """Return the constants of some clients, a row each."""
        return Site(*(column.index_select(0, clients) for column in self.constants))

    def sizes(self, clients: Tensor) -> Tensor:
        """Return how many training samples some clients have."""
        return self.counts.index_select(0, clients)

    def rows(self, clients: Tensor, width: int) -> Tensor:
        """Return the numbers of some clients' training samples, [clients, width], padded with −1."""
        if width == self.equal_size:
            return self.index.view(-1, width).index_select(0, clients)
        number = torch.arange(width, device=clients.device)
        entries = self.offsets.index_select(0, clients).unsqueeze(-1) + number
        real = number < self.sizes(clients).unsqueeze(-1)
        return torch.where(real, self.index[entries.clamp_max(len(self.index) - 1)], -1)

    def keys(self, clients: Tensor, purpose: int, *path: Tensor | int) -> Tensor:
        """Return a key per client: rng.key(seed, purpose, *path, identity)."""
        root = self.roots[purpose]
        for part in path:
            root = rng.fold(root, part)
        return rng.fold(root, self.identity(clients))


class Cohort:
    """The clients of one run at one place: a setting, its data and network on the device, and an executor.

    The samples may lie among those of other federations, in `data`; `first_sample` is then the number of the first one.
    `noise`, if known, is how the weights' noise enters the loss. The functions of `engine/client.py` let clients work.
    """

    def __init__(
        self,
        setting: Setting,
        place: Place,
        data: Data | None = None,
        first_sample: int = 0,
        noise: Noise | None = None,
    ):
        fed, algorithm = setting.federation, setting.algorithm
        augment.check(algorithm.augment, fed.x.shape[1:])
        self.setting, self.place = setting, place
        self.algorithm, self.likelihood, self.fed = algorithm, setting.likelihood, fed
        self.batch_size, self.seed = setting.batch_size, setting.seed
        self.device, self.dtype, self.backend, self.workers = place.device, place.dtype, place.backend, place.workers
        self.batched = BACKENDS[place.backend].batched
        self.network = setting.network.to(place.device, place.dtype, place.network_dtype, place.channels_last)
        self.noise = noise or Noise.of(algorithm, setting.network, fed.x.shape[1:])
        weights = getattr(setting.likelihood, "weights", ())
        self.class_weights = torch.tensor(weights, dtype=place.dtype, device=place.device) if weights else None
        self.data = data or Data.of(fed, place.device, place.dtype)
        self.first_sample = first_sample  # number of this federation's first sample in `data`
        self.limit = ChunkLimit(place.chunk)
        self.shortest, self.longest = int(fed.train.counts.min()), int(fed.train.counts.max())
        # A captured or compiled program would read samples where they lay when it was made.
        on_device, batched, cpu = not self.data.hosted, self.batched, place.device.type == "cpu"
        outputs = self.network.activations * min(setting.batch_size, self.longest)
        self.executor = Executor(
            capture=on_device and not cpu and place.graphs and enabled("graphs"),
            compile=bool(place.compile) and on_device and batched,
            undecided=place.compile is None and on_device and batched and not cpu,
            record=batched and cpu,
            # One by one, or with this much to compute, every lane takes its time.
            lanes_cost_time=not batched or outputs >= place.policy.heavy_outputs,
            policy=place.policy,
        )
        self.client_tensors = ClientTensors(setting, place.device, place.dtype, first_sample)
        self.hyper = self._tensors(algorithm)

    @property
    def chunk(self) -> int:
        """How many clients run at once."""
        return self.limit.size

    def _tensors(self, algorithm: Algorithm) -> State:
        hyper = algorithm.continuous().items()
        return {k: torch.tensor(v, dtype=self.dtype, device=self.device) for k, v in hyper}

    def using(self, algorithm: Algorithm) -> Cohort:
        """Return the same clients, data, network, chunk and programs under other hyperparameters."""
        other = copy.copy(self)
        other.setting, other.algorithm = dataclasses.replace(self.setting, algorithm=algorithm), algorithm
        other.hyper = other._tensors(algorithm)
        if (algorithm.estimator, algorithm.antithetic) != (self.algorithm.estimator, self.algorithm.antithetic):
            other.noise = Noise.of(algorithm, self.network, self.fed.x.shape[1:])
        return other

    def among(self, fed: Federation, **options: object) -> Cohort:
        """Return the same algorithm and network for the clients of another federation; options change the place.

        Steps are compiled only if they are from the first round on.
        """
        if fed is self.fed and not options:
            return self
        same = Data.key(fed, self.device, self.dtype) == Data.key(self.fed, self.device, self.dtype)
        compile = self.executor.compile and self.executor.compiled_steps is None
        identities = self.setting.identities if fed is self.fed else None
        changes = {"chunk": self.chunk, "compile": compile} | options
        return Cohort(
            dataclasses.replace(self.setting, federation=fed, network=self.network, identities=identities),
            dataclasses.replace(self.place, **changes),  # type: ignore[arg-type]
            data=self.data if same else None,
            first_sample=self.first_sample if same else 0,
            noise=self.noise,
        )

    def at(self, **options: object) -> Cohort:
        """Return the same clients at a place that differs in these options."""
        return self.among(self.fed, **{"compile": self.place.compile} | options)

    @staticmethod
    def join(cohorts: Sequence[Cohort]) -> None:
        """Put the samples of cohorts with data of one kind into one array, as runs side by side need it."""
        if all(cohort.data is cohorts[0].data for cohort in cohorts):
            return
        data, first_samples = Data.joined([cohort.data for cohort in cohorts])
        for cohort, first_sample in zip(cohorts, first_samples, strict=True):
            cohort.data, cohort.first_sample = data, first_sample
            cohort.client_tensors = ClientTensors(cohort.setting, cohort.device, cohort.dtype, first_sample)

    def numbers(self, clients: Sequence[int]) -> Tensor:
        """Return the numbers of clients as a tensor on the device."""
        return to_device(torch.as_tensor(clients, dtype=torch.int64), self.device)

    def site(self, clients: Sequence[int]) -> Site:
        """Return the constants of some clients, a row each."""
        return self.client_tensors.site(self.numbers(clients))

    def keys(self, purpose: int, round: int, clients: Sequence[int]) -> Tensor:
        """Return a key per client."""
        return self.client_tensors.keys(self.numbers(clients), purpose, round)
