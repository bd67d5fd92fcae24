"""One run in many processes, by torch.distributed: the rank of this one, and what ranks exchange.

`torchrun` starts the same command several times and sets every process's rank in the environment. Every process
computes the same draw, merge and scores; what differs is whose clients it works for. Rank 0 alone reads and writes the
run's folder and prints. What travels between processes are tensors and text, never pickles.

Texts, scores and kept states go through Gloo, on the host. The one large sum of a round goes through NCCL where every
process has a GPU of its own.
"""

from __future__ import annotations

import atexit
import heapq
import importlib
import inspect
import json
import os
import signal
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..errors import InputError, TrainingError, shortened
from ..files.paths import folder_lock

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
    from torch.distributed import Store

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # how long to wait for a process that neither answers nor ends
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PeerLost(TrainingError):
    """Another process of the run has ended or cannot be reached."""


class World:
    """The processes of a run: this one is `rank` of `size`, and `local` of the `local_size` on this machine.

    A `World` is one process alone: nothing is sent, and torch.distributed is not needed. `Processes` connects several.
    """

    rank, size, local, local_size = 0, 1, 0, 1
    host: Any = None  # the group for what lies on the host, once processes are connected
    fast: Any = None  # NCCL's group, where every process has a GPU of its own
    broken = False  # whether the connection to another process was lost

    # -- who does what ------------------------------------------------------------------------------------------------
    def assign_clients(self, clients: Sequence[int], counts: np.ndarray) -> list[list[int]]:
        """Return the clients of each process, with balanced numbers of samples; the result is the same in all.

        The largest clients go first, each to the process with the fewest samples so far.
        """
        if self.size == 1:
            return [sorted(clients)]
        shares: list[list[int]] = [[] for _ in range(self.size)]
        loads = [(0, rank) for rank in range(self.size)]
        for client in sorted(clients, key=lambda c: -counts[c]):
            load, rank = heapq.heappop(loads)
            shares[rank].append(client)
            heapq.heappush(loads, (load + int(counts[client]), rank))
        return [sorted(clients) for clients in shares]

    def device_name(self, device: str) -> str:
        """Return the name of this process's device."""
        if self.size == 1 or device == "cpu" or not _torch().cuda.is_available():
            return device
        if device not in ("auto", "cuda"):
            raise InputError(f"Every process has a GPU of its own: use --device cuda under torchrun, not '{device}'.")
        number = self.local % _torch().cuda.device_count()
        _torch().cuda.set_device(number)
        return f"cuda:{number}"

    def use_device(self, device: torch.device) -> None:
        """Prepare sums of tensors that lie on a device."""
        has_own_gpu = device.type == "cuda" and self.local_size <= _torch().cuda.device_count()
        flags = _torch().tensor([has_own_gpu, device.type == "cuda"], dtype=_torch().float64)
        with_own_gpu, with_gpu = self.sum(flags).tolist()
        if with_gpu not in (0, self.size):
            raise InputError(f"{with_gpu:.0f} of the {self.size} processes have a GPU. Give all of them one, or none.")
        if with_own_gpu == self.size and self.fast is None:  # two processes on one GPU cannot use NCCL
            self.fast = _dist().new_group(backend="nccl", timeout=PATIENCE)

    # -- what ranks exchange ------------------------------------------------------------------------------------------
    def broadcast_text(self, text: str) -> str:
        """Return the text of rank 0 in every process."""
        data = list(text.encode())
        size = int(self.broadcast(_torch().tensor([len(data)]))[0])
        values = data if self.rank == 0 else [0] * size
        return bytes(self.broadcast(_torch().tensor(values, dtype=_torch().uint8)).tolist()).decode() if size else ""

    def on_rank_0(self, act: Callable[[], T]) -> T | None:
        """Call `act` in rank 0 while the others wait and get None; an InputError or TrainingError is raised in all."""
        if self.size == 1:
            return act()
        result, error = None, None
        if self.rank == 0:
            try:
                result = act()
            except PeerLost:
                raise
            except (InputError, TrainingError) as caught:
                error = caught
        if text := self.broadcast_text(f"{error}" if error else ""):
            raise error or InputError(text)
        return result

    def decide(self, act: Callable[[], T]) -> T:
        """Call `act` in rank 0 and return its result, which must be JSON, in all processes."""
        return act() if self.size == 1 else json.loads(self.broadcast_text(json.dumps(self.on_rank_0(act))))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes, with the same bits in all of them."""
        if self.host is None:
            return tensor
        on_gpu = tensor.is_cuda and self.fast
        total = tensor.clone() if on_gpu else tensor.detach().cpu().clone()
        group = self.fast if on_gpu else self.host
        self._wait(lambda: _dist().all_reduce(total, group=group, async_op=True))
        return total.to(tensor.device)

    def minimum(self, number: int) -> int:
        """Return the minimum over processes."""
        numbers = _torch().zeros(self.size, dtype=_torch().float64)
        numbers[self.rank] = number
        return int(self.sum(numbers).min())

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, which lies on the host; the others pass one of the same shape and type."""
        self._wait(lambda: _dist().broadcast(tensor, 0, group=self.host, async_op=True))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes (of one shape, on the host) in rank 0, and nothing elsewhere."""
        tensors = [_torch().empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        self._wait(lambda: _dist().gather(tensor, tensors, 0, group=self.host, async_op=True))
        return tensors or []

    def scatter(self, tensors: list[Tensor], like: Tensor) -> Tensor:
        """Return one of rank 0's tensors, which has one like `like` for each process."""
        tensor = _torch().empty_like(like)
        self._wait(lambda: _dist().scatter(tensor, tensors or None, 0, group=self.host, async_op=True))
        return tensor

    def one_per_machine_first(self, act: Callable[[], T]) -> T:
        """Call `act` in one process of every machine before the others, so that a download is made once."""
        if self.local:
            self.sum(_torch().zeros(1))
            return act()
        result = act()
        self.sum(_torch().zeros(1))
        return result

    def _wait(self, start: Callable[[], Any]) -> None:
        """Wait in Python, so that signals are handled while another process keeps this one waiting."""
        pause = 1e-5
        try:
            work = start()
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
            work.wait()
        except RuntimeError as error:
            self.broken = True
            raise PeerLost(
                "Another process of this run has ended or cannot be reached, so this one stops, too. Every finished "
                "round is saved, where the run has a folder: start it again with --resume (resume=True), with any "
                "number of processes."
            ) from error
        except BaseException:
            self.broken = True
            raise


ALONE = World()


class Processes(World):
    """Several processes, connected by torch.distributed."""

    meeting = ""  # the name of the meeting at which they were connected, once they are

    def __init__(self, rank: int, size: int, local: int, local_size: int):
        self.rank, self.size, self.local, self.local_size = rank, size, local, local_size
        try:
            if _dist().is_initialized():  # a script of the user's own has done it, for whatever it needs
                self.host = _dist().new_group(backend="gloo", timeout=PATIENCE)
            else:
                store = _store(PATIENCE)
                Processes.meeting = _meet(store, rank, size)
                named = _dist().PrefixStore(Processes.meeting, store)
                _dist().init_process_group("gloo", store=named, rank=rank, world_size=size, timeout=PATIENCE)
                self.host = _dist().group.WORLD
                atexit.register(self.leave)
        except RuntimeError as error:
            why = shortened((str(error) or type(error).__name__).splitlines()[0])
            raise PeerLost(
                f"The {size} processes of this run did not find each other at {os.environ['MASTER_ADDR']}:"
                f"{os.environ['MASTER_PORT']} ({why}). docs/distributed.md says what torchrun needs."
            ) from error

    def leave(self) -> None:
        """Disconnect, unless the connection broke."""
        if not self.broken and _dist().is_initialized():
            _dist().destroy_process_group()


def _torch() -> Any:
    """Return torch, which the command line imports this module without."""
    return importlib.import_module("torch")


def _dist() -> Any:
    """Return torch.distributed."""
    return importlib.import_module("torch.distributed")


def _store(patience: timedelta) -> Store:
    """Return the store where processes meet: torchrun's, or one that rank 0 opens."""
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _dist().TCPStore(
        address, port, is_master=ours and not Processes.meeting, timeout=patience, wait_for_workers=False
    )


def _meet(store: Store, rank: int, size: int) -> str:
    """Wait until all processes are there; return a name for their meeting that no other has had.

    torchrun may start processes anew (--max-restarts), and they then find in its store what those before them wrote.
    Rank 0 therefore announces the processes by names made at their start, until all have answered to theirs.
    """
    own_name, end = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    store.set(f"fedabml/name/{rank}", own_name)
    names = [f"fedabml/name/{other}" for other in range(size)]
    meeting, called = "", [""]
    while time.monotonic() < end:
        if rank == 0 and store.check(names):
            now = [name.decode() for name in store.multi_get(names)]
            if now != called:
                meeting, called = uuid.uuid4().hex, now
                store.set("fedabml/call", json.dumps([meeting, called]))
            if store.check([f"fedabml/{meeting}/{other}" for other in range(1, size)]):
                store.set(f"fedabml/{meeting}/all", "")
                return meeting
        elif rank and store.check(["fedabml/call"]):
            meeting, called = json.loads(store.get("fedabml/call"))
            if called[rank : rank + 1] == [own_name]:
                store.set(f"fedabml/{meeting}/{rank}", "")
                if store.check([f"fedabml/{meeting}/all"]):
                    return meeting
        time.sleep(0.01)
    raise RuntimeError("some of them never came")


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of processes from the environment; (0, 1) without torchrun."""
    if not all(name in os.environ for name in NEEDED):
        return 0, 1
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise InputError(
            f"RANK is '{os.environ['RANK']}' and WORLD_SIZE '{os.environ['WORLD_SIZE']}' in the environment: torchrun "
            "sets them. Unset them to run in one process."
        )
    return rank, size


def world() -> World:
    """Return the processes of this run; the first call connects them."""
    rank, size = rank_and_size()
    return ALONE if size == 1 else _connect(rank, size)


@cache
def _connect(rank: int, size: int) -> Processes:
    local, local_size = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", size)
    return Processes(rank, size, int(local), int(local_size))


def torchrun_job() -> tuple[str, int, int]:
    """Return torchrun's name for this job, if any, how often it has restarted its processes, and how often it may."""
    variables = ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")
    name, restarts, allowed = (os.environ.get(f"TORCHELASTIC_{variable}", "0") for variable in variables)
    return "" if name in ("0", "none") else name, int(restarts), int(allowed)


def refuse(command: str) -> None:
    """Refuse to run `command` in several processes."""
    if rank_and_size()[1] > 1:
        raise InputError(
            f"{command} runs in one process; only training is spread by torchrun. Call it without torchrun. Several "
            "comparisons may run at once, each on its GPU (CUDA_VISIBLE_DEVICES) and in its own folder."
        )


def agree(world: World, config: dict[str, Any], chunk: int) -> int:
    """Check that all processes have the same configuration and data; return the smallest of their chunks."""
    import torch

    names, text = sorted(config), json.dumps(config)
    first, own_config = json.loads(world.broadcast_text(text)), json.loads(text)
    table = torch.zeros(world.size, len(names) + 1, dtype=torch.float64)
    table[world.rank] = torch.tensor([*(float(first.get(name) != own_config[name]) for name in names), float(chunk)])
    table = world.sum(table)
    for rank, row in enumerate(table[:, :-1].tolist()):
        if differ := [name for name, other in zip(names, row, strict=True) if other]:
            raise InputError(
                f"Process {rank} differs from process 0 in {', '.join(differ)}. Start all processes with the same "
                "command, the same version of fedabml and the same data."
            )
    return int(table[:, -1].min())


def should_report(message: str, patience: float = 0.5) -> bool:
    """Return whether a process that is about to end should report why: of those that fail together, one reports.

    Rank 0 knows more, so the others give it `patience` seconds to report. From here on nothing interrupts this process,
    because torchrun ends all of them as soon as one has failed.
    """
    rank, size = rank_and_size()
    if size == 1:
        return True
    with suppress(ValueError):  # signals are the main thread's
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + (patience if rank else 0.0)
    try:
        store = _store(timedelta(seconds=3))
        meeting = Processes.meeting or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"fedabml/{meeting}/{zlib.crc32(message.encode())}"
        while time.monotonic() < end and not store.check([key]):
            time.sleep(0.02)
        return store.add(key, 1) == 1
    except Exception:  # the store is gone: better twice than never
        return True


def with_folder_lock(single_process: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function runs while rank 0 holds the lock of its folder, the argument `out`.

    There is no lock without `out`, or if the argument `closed` says that nothing is written. If
    `single_process` names the function, several processes are refused.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(call)

        @wraps(call)
        def locked(*args: P.args, **options: P.kwargs) -> T:
            try:
                arguments = signature.bind(*args, **options).arguments
            except TypeError:
                return call(*args, **options)  # its own error names the function
            if single_process:
                refuse(single_process)
            with ExitStack() as stack:
                if arguments.get("out") is not None and not arguments.get("closed"):
                    world().on_rank_0(lambda: stack.enter_context(folder_lock(arguments["out"])))
                return call(*args, **options)

        return locked

    return decorate
