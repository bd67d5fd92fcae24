"""Where and how a run executes: device, backend, and how many clients fit at once."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from .. import rng
from ..algorithms.base import Algorithm
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


def backend_of(name: str, network: Network, x: Tensor, device: torch.device) -> tuple[str, str]:
    """The backend and, where `auto` could not take the faster one, a note that says why.

    `auto` is one batched program, except for convolutions on a CPU, which run faster client by client, and for modules
    that vmap cannot take, found out by one batched gradient on the inputs `x`.
    """
    if name not in BACKENDS:
        raise InputError(f"There is no backend '{name}'.{nearest(name, BACKENDS)}")
    if name != "auto":
        return name, ""
    if device.type == "cpu" and any(isinstance(m, nn.modules.conv._ConvNd) for m in network.module.modules()):
        return "loop", ""
    two = network.initial.expand(2, -1)
    keys = rng.keys((0,), range(2))
    try:
        torch.vmap(torch.func.grad(lambda w, key: network(w, x, key).sum()))(two, keys)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return "loop", f"This model runs client by client, because it cannot be batched over clients: {reason}"
    return "vmap", ""


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
