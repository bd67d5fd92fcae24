"""Settings of the whole process: a library call borrows them and gives them back; the command line's process is ours.

`borrowed` is what every public function runs in. It sets what the engine depends on (torch's default type and device)
and what makes it faster (torch's compiler is not loaded for nothing), and restores that and all that the engine
changes on the way: the current GPU, cuDNN's and cuBLAS's switches, oneDNN on ARM, the number of threads. Calls may be
nested and may overlap in threads: the first sets, the last restores.

Two settings cannot be given back. glibc's `mallopt` (`memory.hold_pages`) has no inverse, so it is called in a process
that is ours alone. OMP_WAIT_POLICY is read once, while torch is imported (`fedabml.asleep_while_waiting`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from .. import asleep_while_waiting, engine

with asleep_while_waiting():
    import torch

from ..accel.recorder import compiler_spared
from . import threads as crew
from .autotune import return_products

_LOCK = threading.RLock()
_undo = ExitStack()  # restores what the first of the calls under way has found
_calls = 0  # under way
_saved = False  # whether there is something to restore


def _give_back_in_child() -> None:
    """Ends in a forked child the calls of the parent's threads, which it does not have."""
    global _calls, _saved
    _LOCK.release()
    if _calls and not engine.process_is_ours:
        _calls, _saved = 0, False
        _undo.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_give_back_in_child)


@contextmanager
def borrowed() -> Iterator[None]:
    """While this lasts the process has the settings of the engine; afterwards those that it had before."""
    global _calls, _saved
    with _LOCK:
        if not _saved:
            _save()
        _calls, _saved = _calls + 1, True
    try:
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    finally:
        with _LOCK:
            _calls = max(_calls - 1, 0)  # a child that was forked in mid-call has begun anew
            if not _calls and not engine.process_is_ours:
                _saved = False
                _undo.close()


def _save() -> None:
    """Notes every setting that a call may change, and sets those that it depends on."""
    _undo.enter_context(compiler_spared())
    threads, kind = torch.get_num_threads(), torch.get_default_dtype()
    _undo.callback(_dismiss, threads)
    _undo.callback(torch.set_default_dtype, kind)
    torch.set_default_dtype(torch.float32)
    _undo.callback(return_products, torch._C._get_mkldnn_enabled())
    if torch.cuda.is_available():
        for owner, name in (
            *((torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")),
            *((torch.backends.cuda.matmul, n) for n in ("allow_tf32", "allow_bf16_reduced_precision_reduction")),
        ):
            _undo.callback(setattr, owner, name, getattr(owner, name))
        place = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        _undo.callback(_return_to, place)


def _dismiss(threads: int) -> None:
    if crew.dismiss():  # its threads have set it, which counts for all that come later
        torch.set_num_threads(threads)


def _return_to(device: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_device(device)
