"""Where and how a run executes: device, backend, and how many clients fit at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .. import rng
from ..algorithms.base import Algorithm
from ..data.files import write_aside
from ..errors import InputError, nearest
from ..vectors import Network

BACKENDS = ("auto", "vmap", "loop")


def device_of(name: str) -> torch.device:
    """A device by name; `auto` is the accelerator where there is one."""
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
    return device


DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The type of all arithmetic, and for a GPU what its libraries may do with it (process-wide settings of torch).

    float32 and float64 are meant: without TF32, a GPU's results agree with a CPU's. `tf32` allows the faster, coarser
    arithmetic (three digits) in convolutions and matrix products. Either way the same run gives the same bits.
    """
    if name not in DTYPES:
        raise InputError(f"There is no dtype '{name}'.{nearest(name, DTYPES)}")
    if device.type == "cuda":
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    return DTYPES[name]


LANES, ROWS = 8, 32  # the trial by which a backend is chosen


def backend_of(name: str, network: Network, x: Tensor, device: torch.device) -> tuple[str, str]:
    """The backend and, where `auto` could not take the faster one, a note that says why.

    `auto` on a GPU is one batched program; on a CPU the faster of the two, found out by a gradient of a few clients and
    remembered, because that is not always the batched one (convolutions often run faster client by client). A module
    that vmap cannot take runs client by client everywhere.
    """
    if name not in BACKENDS:
        raise InputError(f"There is no backend '{name}'.{nearest(name, BACKENDS)}")
    if name != "auto":
        return name, ""
    trial = _Trial(network, x)
    try:
        trial.batched(2)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return "loop", f"This model runs client by client, because it cannot be batched over clients: {reason}"
    return ("vmap" if device.type == "cuda" else _faster(trial)), ""


class _Trial:
    """The gradient of a network's outputs for a few clients, batched and one by one."""

    def __init__(self, network: Network, x: Tensor):
        self.network, self.x = network, x.repeat(ROWS // len(x), *[1] * (x.ndim - 1))
        self.gradient = torch.func.grad(lambda w, key: network(w, self.x, key).sum())
        self.weights, self.keys = network.initial.expand(LANES, -1).contiguous(), rng.keys((0,), range(LANES))

    def batched(self, lanes: int = LANES) -> None:
        torch.vmap(self.gradient)(self.weights[:lanes], self.keys[:lanes])

    def looped(self) -> None:
        for w, key in zip(self.weights, self.keys, strict=True):
            self.gradient(w, key)

    @property
    def name(self) -> str:
        """What the outcome depends on."""
        layers = [f"{type(m).__name__} {m.extra_repr()}" for m in self.network.module.modules()]
        words = (*layers, tuple(self.x.shape), torch.__version__, torch.get_num_threads(), platform.machine())
        return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _faster(trial: _Trial) -> str:
    """`vmap` or `loop`, whichever was faster the first time this was asked; ties go to the batched one."""
    file, name = cache_dir() / "backends.json", trial.name
    found = _known(file).get(name)
    if found is None:
        batched, looped = (min(_seconds(way) for _ in range(3)) for way in (trial.batched, trial.looped))
        known = {name: "loop" if looped < 0.95 * batched else "vmap"} | _known(file)  # who was first is right
        found = known[name]
        with contextlib.suppress(OSError):  # a home that cannot be written to costs a second the next time
            file.parent.mkdir(parents=True, exist_ok=True)
            with write_aside(file) as out:
                out.write(json.dumps(known, indent=1).encode())
    return found


def _known(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if v in ("vmap", "loop")} if isinstance(known, dict) else {}


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cache_dir() -> Path:
    """Where what was found out about this machine is kept: $FEDABML_CACHE, else ~/.cache/fedabml."""
    return Path(
        os.environ.get("FEDABML_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedabml"
    ).expanduser()


def lane_bytes(network: Network, algorithm: Algorithm, batch: int, activations: int, itemsize: int) -> int:
    """Roughly what one client of a chunk takes: vectors of the step, and activations kept for the backward pass."""
    samples = algorithm.samples_per_step
    vectors = network.layout.size * (10 + 5 * samples)
    return itemsize * (vectors + 3 * samples * batch * algorithm.batches_per_step * activations)


def free_bytes(device: torch.device) -> int:
    """Memory a chunk may take: half of what a GPU has free; on a CPU at most 1 GiB, beyond which nothing is gained."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        free = 1 << 31
    return min(free // 2, 1 << 30)


def chunk_of(lane: int, device: torch.device, clients: int) -> int:
    """How many clients run at once."""
    return max(1, min(clients, free_bytes(device) // max(1, lane)))
