"""Choose where and how a run executes: device, types of numbers, backend, threads, and how many clients fit at once."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from timeit import repeat, timeit
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rng
from ..accel import PARTS, enabled
from ..accel.machine import free_bytes, hardware
from ..accel.operators import triton_usable
from ..accel.process import quiet_vmap, set_products, uses_arm_library
from ..algorithms.base import Algorithm
from ..errors import InputError, nearest
from ..files.paths import cache_dir
from ..files.sealed import read_json, write_json
from ..vectors import Network, derived
from .backends import BACKENDS, UNBATCHED
from .diagnose import refusal
from .workers import map_in_threads


def device_of(name: str) -> torch.device:
    """Return a device by name; `auto` is the GPU where there is one. Raise InputError where there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"There is no device '{name}'.{nearest(name, ['auto', 'cpu', 'cuda'])}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("Device 'cuda' was asked for, but this torch sees no GPU. Use --device cpu or auto.")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"Device '{name}' is not supported; use cpu or cuda.")
    if device.type == "cuda" and device.index is not None:
        if device.index >= torch.cuda.device_count():
            raise InputError(f"There is no device '{name}': this torch sees {torch.cuda.device_count()} GPU(s).")
        torch.cuda.set_device(device)  # graphs and streams are made for the current one
    return device


class Arithmetic(NamedTuple):
    """The type of all vectors, and of the network's own arithmetic."""

    vectors: torch.dtype
    network: torch.dtype


DTYPES = {
    "float32": Arithmetic(torch.float32, torch.float32),
    "tf32": Arithmetic(torch.float32, torch.float32),
    "bf16": Arithmetic(torch.float32, torch.bfloat16),
    "float64": Arithmetic(torch.float64, torch.float64),
}
REDUCED_PRECISION = ("tf32", "bf16")  # of them, those with products of few digits


def set_precision(name: str, device: torch.device) -> Arithmetic:
    """Return the types of numbers for a precision, and set how libraries multiply, in the whole process.

    float32 and float64 are computed without TF32, so that a GPU's results agree with a CPU's. `tf32` allows the faster,
    coarser arithmetic (three digits) in convolutions and matrix products. `bf16` is mixed precision: the network in
    bfloat16 (two digits); posteriors, noise, KL and averages in float32. The same run always gives the same bits;
    compiled, as long as torch's cache holds the kernels that it chose by their time.
    """
    if name not in DTYPES:
        raise InputError(f"There is no dtype '{name}'.{nearest(name, DTYPES)}")
    if device.type == "cuda":
        triton_usable()  # a trial, which inside of torch.func's transforms would fail
    set_products(device, DTYPES[name].network, name in REDUCED_PRECISION)
    return DTYPES[name]


LANES, ROWS = 8, 32  # the trial by which a backend is chosen
SLOW = 0.2  # seconds of one client of it, from which it is cut: choosing must not take longer than training


class Execution(NamedTuple):
    """How clients run: in one batched program or one by one, and in how many threads."""

    backend: str
    workers: int
    channels_last: bool = False  # how images lie in memory


def choose_backend(name: str, network: Network, x: Tensor, device: torch.device) -> tuple[Execution, str]:
    """Return how clients run and, where `auto` could not choose freely, a note that says why.

    On a GPU `auto` is one batched program. On a CPU it is the faster way, which is measured once by a gradient of a few
    clients, and remembered: batched or client by client (often faster for convolutions), in threads with clients of
    their own or in one that has all cores, and, client by client, with images channels-last or not. A module that vmap
    cannot take runs client by client everywhere; the note names the operation, and what to do.
    """
    if name != "auto" and name not in BACKENDS:
        raise InputError(f"There is no backend '{name}'.{nearest(name, ('auto', *BACKENDS))}")
    note = _why_unbatched(network, x, name)
    if note:
        name = UNBATCHED
    if device.type == "cuda":
        return Execution(next(iter(BACKENDS)) if name == "auto" else name, 1), note
    return _fastest(_Trial(network, x), tuple(BACKENDS) if name == "auto" else (name,)), note


def _why_unbatched(network: Network, x: Tensor, name: str) -> str:
    """Return a note on what keeps a module from being batched; raise InputError if `vmap` was chosen or none works."""
    why, library = "", "transformers" if hasattr(network.module, "without_weights") else ""  # of a folder
    if name == "auto" or BACKENDS[name].batched:
        try:
            with quiet_vmap():
                _try_batched(network.to("cpu", torch.float32), x)
            return ""
        except Exception as error:  # modules fail in many ways
            why = refusal(error, library)
    try:
        _try_one(network.to("cpu", torch.float32), x)
    except Exception as error:
        again = network.to("cpu", torch.float32)
        for key in (rng.key(0), None):  # as in training, and as in scoring: a module that is broken says so itself
            again(again.initial, x, key)
        raise InputError(f"The gradient of this model cannot be taken: {refusal(error, library)}") from error
    if name != "auto" and BACKENDS[name].batched:
        raise InputError(
            f"This model cannot be batched over clients: {why} {'Use' if library else 'Or use'} the backend auto or "
            "loop: it then runs client by client."
        )
    return why and f"This model runs client by client, because it cannot be batched over clients: {why}"


def _try_one(network: Network, x: Tensor) -> None:
    """Take the gradient of one client, and predict."""
    _gradient(network)(network.initial, x, rng.key(0))
    network(network.initial, x)


def _try_batched(network: Network, x: Tensor) -> None:
    """Try two clients, and two draws of one client's weights, which have the same examples."""
    weights, keys = network.initial.expand(2, -1), rng.keys((0,), range(2))
    for examples, axis in ((x.expand(2, *x.shape), 0), (x, None)):
        torch.vmap(_gradient(network), (0, axis, 0))(weights, examples, keys)
        torch.vmap(network, (0, axis))(weights, examples)
    _try_one(network, x)  # nothing of these calls may be left in the module


def _gradient(network: Network) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the gradient in the weights alone: as in training, the examples may not be changed."""
    return lambda w, x, key: torch.func.grad(lambda w: network(w, x, key).sum())(w)


class _Trial:
    """The gradient of a network's outputs for a few clients, batched and one by one."""

    def __init__(self, network: Network, x: Tensor):
        self.network, self.x = network, x.repeat(ROWS // len(x), *[1] * (x.ndim - 1))
        self.lanes, self.times = LANES, 4
        self.images = x.ndim == 4 and any(len(shape) == 4 for shape in network.layout.shapes)  # and convolutions
        self.weights, self.keys = network.initial.expand(LANES, -1).contiguous(), rng.keys((0,), range(LANES))

    def gradients(self, network: Network, backend: str, lanes: int) -> None:
        """Take the gradients of some clients."""

        def gradient(w: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return derived(lambda w: network(w, self.x, key).sum(), w)

        BACKENDS[backend].apply(gradient, (0, 0), (self.weights[:lanes], self.keys[:lanes]))

    def fit(self) -> None:
        """Leave less to do, where the network is large."""
        self.gradients(self.network, UNBATCHED, 1)
        if timeit(lambda: self.gradients(self.network, UNBATCHED, 1), number=1) > SLOW:
            self.x, self.lanes, self.times = self.x[: ROWS // 4], LANES // 2, 1

    def seconds(self, way: Execution) -> float:
        """Return what a client takes, at best; infinity where the module cannot take images that lie so."""
        network = self.network
        if way.channels_last:
            network = network.to("cpu", network.initial.dtype, network.dtype, channels_last=True)
        work = partial(self.gradients, network, way.backend)
        shares = [max(1, self.lanes // way.workers)] * way.workers
        try:
            if way.channels_last:  # a library for many images may lay its results out in another way than one for few
                network(self.weights[0], self.x[:2], self.keys[0])
            seconds = min(repeat(lambda: [*map_in_threads(work, shares, way.workers)], repeat=self.times, number=1))
        except RuntimeError:  # of a view, say
            if not way.channels_last:
                raise
            return math.inf
        return seconds / sum(shares)

    @property
    def name(self) -> str:
        """A digest of what the outcome depends on, the processor too: machines may share a home directory.

        A run's batch size and algorithm do not count, because the trial has its own minibatch and gradient.
        """
        layers = [f"{type(m).__name__} {m.extra_repr()}" for m in self.network.module.modules()]
        machine = torch.__version__, torch.get_num_threads(), platform.machine(), hardware(torch.device("cpu"))
        products = [torch._C._get_mkldnn_enabled()] * uses_arm_library()
        left_out = [part for part in PARTS if not enabled(part)]
        parts = (*layers, (ROWS, *self.x.shape[1:]), *machine, *products, *left_out)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _fastest(trial: _Trial, backends: tuple[str, ...]) -> Execution:
    """Return the way that was fastest when it was first measured. Ties go to the batched program, and to threads.

    Threads that do not wait for each other at every operation lose less where other programs run, too.
    """
    threads = min(torch.get_num_threads(), LANES) if enabled("threads") else 1
    ways = [Execution(backend, n) for backend in backends for n in sorted({threads, 1}, reverse=True)]
    if trial.images:
        ways += [way._replace(channels_last=True) for way in ways if not BACKENDS[way.backend].batched]
    if len(ways) == 1:
        return ways[0]
    file, name = choices_file(), f"{trial.name} {'|'.join([*backends, *['last'] * trial.images])}"
    choices = _read_choices(file)
    if name not in choices:
        trial.fit()
        times = {way: trial.seconds(way) for way in ways}
        best = next(way for way in ways if 0.95 * times[way] <= min(times.values()))
        choices = {name: best} | _read_choices(file)  # of several processes the first decides
        with contextlib.suppress(InputError):  # a home that cannot be written to costs a second the next time
            write_json(file, choices)
    return choices[name]


def _read_choices(file: Path) -> dict[str, Execution]:
    """Return the choices in the file that could have been made here; none where it cannot be read."""
    try:
        ways = {name: Execution(str(v[0]), int(v[1]), *map(bool, v[2:3])) for name, v in read_json(file).items()}
    except (ValueError, AttributeError, TypeError, LookupError, OverflowError):
        return {}
    return {name: way for name, way in ways.items() if way.backend in BACKENDS and 0 < way.workers <= LANES}


def choices_file() -> Path:
    """Return the file of the choices of `auto`. Without it they are measured anew."""
    return cache_dir() / "backends.json"


def lane_bytes(network: Network, algorithm: Algorithm, batch: int, inputs: int, itemsize: int) -> int:
    """Return roughly how many bytes one client of a chunk takes, for examples of `inputs` numbers (to a factor of two).

    Counted are vectors of the step, more of them for every weight sample, a step's minibatches, and the outputs of
    layers with their derivatives and noise. Noise on activations needs no weight samples: flipout has one shared noise
    vector, local reparameterisation none (but on convolutions it is flipout).
    """
    samples, outputs = algorithm.samples_per_step, max(0, network.activations - inputs)
    vectors = 8 + samples if algorithm.estimator == "local" else 1 + 4 * samples
    kept = samples * outputs * (2 if algorithm.estimator == "weight" else 2.5)
    examples = inputs * (1 + algorithm.batches_per_step) + kept
    return itemsize * int(vectors * network.layout.size + batch * examples)


def chunk_of(lane: int, device: torch.device, clients: int) -> int:
    """Return how many clients may run at once, for clients that take `lane` bytes."""
    return max(1, min(clients, free_bytes(device) // max(1, lane)))
