"""Settings of the whole process: a library call borrows them and gives them back; the command line owns its process.

`borrowed` is what every public function runs in. It sets what results depend on (torch's default type and device) and
what makes the engine faster (torch's compiler is not loaded for nothing). At the end it restores that and all that the
engine changed on the way: the current GPU, cuDNN's and cuBLAS's switches, oneDNN on ARM, the number of threads. Calls
may be nested and may overlap in threads: the first sets, the last restores.

Two settings cannot be given back. glibc's `mallopt` (`keep_freed_memory`) has no inverse, so it is called only in a
process that is ours. OMP_WAIT_POLICY is read once, while torch is imported (`accel.threads_sleep_while_waiting`).
With `FEDABML_PLAIN=1` only the switches that decide results are set: default type and device, cuDNN and cuBLAS.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from . import enabled, owns_process, threads_sleep_while_waiting

with threads_sleep_while_waiting():
    import torch  # for whoever imports this module first

_LOCK = threading.RLock()
_undo = ExitStack()  # restores what the first of the running calls found
_calls = 0  # running calls
_saved = False  # whether there is something to restore
_at_return: list[Callable[[], bool]] = []  # what stops threads; each returns whether there were any


def stop_threads_with(stop: Callable[[], bool]) -> None:
    """Register a function that stops worker threads at the end of the last call and returns whether there were any."""
    _at_return.append(stop)


def _give_back_in_child() -> None:
    """End in a forked child the calls of the parent's threads, which the child does not have."""
    global _calls, _saved
    _LOCK.release()
    if _calls and not owns_process():
        _calls, _saved = 0, False
        _undo.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_give_back_in_child)


@contextmanager
def borrowed() -> Iterator[None]:
    """Give the process the engine's settings within this context; afterwards it has those that it had before."""
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
            _calls = max(_calls - 1, 0)  # a child that was forked during a call has begun anew
            if not _calls and not owns_process():
                _saved = False
                _undo.close()


def _save() -> None:
    """Remember every setting that a call may change, and set those that results depend on."""
    if enabled("process"):
        _undo.enter_context(without_compiler())
    _undo.callback(_stop_threads, torch.get_num_threads())
    _undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)
    _undo.callback(_restore_onednn, torch._C._get_mkldnn_enabled())
    if torch.cuda.is_available():
        for owner, name in (
            *((torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")),
            *((torch.backends.cuda.matmul, n) for n in ("allow_tf32", "allow_bf16_reduced_precision_reduction")),
        ):
            _undo.callback(setattr, owner, name, getattr(owner, name))
        _undo.callback(_return_to, torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _stop_threads(threads: int) -> None:
    stopped = [stop() for stop in _at_return]
    if any(stopped) or torch.get_num_threads() != threads:  # worker threads have set the number for all later ones
        torch.set_num_threads(threads)


def _return_to(device: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_device(device)


# -- products ---------------------------------------------------------------------------------------------------------
def set_products(device: torch.device, network: torch.dtype, allow_tf32: bool) -> None:
    """Choose how libraries multiply for a network that computes in a type, from now on and in the whole process.

    On a GPU float32 products are rounded to TF32 only if `allow_tf32`, sums of bfloat16 products stay in float32, and
    cuDNN chooses repeatable algorithms. On ARM torch's own products replace oneDNN's, which take 1.3 to 5 times as long
    for clients' small matrices (a Neoverse N1); bfloat16 keeps oneDNN where the processor has products
    of that type. A user who has switched oneDNN off is left alone.
    """
    if device.type == "cuda":  # these decide results, so `FEDABML_PLAIN` does not leave them out
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    elif enabled("process") and uses_arm_library():
        _set_onednn(network == torch.bfloat16 and multiplies_bfloat16())


@functools.cache
def uses_arm_library() -> bool:
    """Return whether this torch hands products on a CPU to ARM's library, by way of oneDNN."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_acl_supported", lambda: False)  # is_acl_available is newer
    return bool(supported())


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether oneDNN can multiply bfloat16 on this processor; torch's replacement prints a long warning."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_onednn_off = False  # whether oneDNN is off because we switched it off


def _set_onednn(wanted: bool) -> None:
    global _onednn_off
    on = torch._C._get_mkldnn_enabled()
    if on != wanted and (on or _onednn_off):
        torch._C._set_mkldnn_enabled(wanted)
        _onednn_off = not wanted


def _restore_onednn(on: bool) -> None:
    global _onednn_off
    if torch._C._get_mkldnn_enabled() != on:
        torch._C._set_mkldnn_enabled(on)
    _onednn_off = False


# -- memory -----------------------------------------------------------------------------------------------------------
@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed, rather than return it and request it again for every large tensor.

    On a CPU fresh pages cost as much as the arithmetic of a step. This calls glibc's `mallopt`. It does nothing in a
    process that is not ours, with another C library, and where the environment has its own settings (MALLOC_…).
    """
    if not owns_process() or not enabled("process") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    trim, pad, mmap, arenas = -1, -2, -3, -8
    for option, size in ((mmap, 1 << 30), (trim, (1 << 31) - 1), (pad, 1 << 26), (arenas, 1)):
        mallopt(option, size)


# -- torch's compiler -------------------------------------------------------------------------------------------------
class _LateCompiler(types.ModuleType):
    """Stands for `torch._dynamo` until somebody needs more of it than to switch off what it has not switched on."""

    compiled_autograd = types.SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)  # the module takes this one's place


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let `torch.func.grad` work without loading torch's compiler, which it would only tell to stay away.

    Loading it takes two seconds, longer than many runs.
    """
    if "torch._dynamo" in sys.modules or "_dynamo" in vars(torch):
        yield
        return
    torch._dynamo = late = _LateCompiler("torch._dynamo")
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is late:  # else somebody has needed the compiler, and it is there
            del torch._dynamo


# -- warnings ---------------------------------------------------------------------------------------------------------
_SLOW_BATCHING = re.compile("There is a performance drop because we have not yet implemented the batching rule")
_IGNORED: Any = ("ignore", _SLOW_BATCHING, UserWarning, None, 0)


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Suppress torch's warning that it batches an operation slowly, on which a user cannot act.

    One entry in the filters of `warnings` ignores exactly that warning, and is removed at the end.
    `warnings.catch_warnings` would restore the whole list and undo what other threads have changed in the meantime.
    """
    filters: Any = warnings.filters  # the list itself: it may be another one when the call ends
    filters.insert(0, _IGNORED)
    try:
        yield
    finally:
        with suppress(ValueError):  # a caller may have emptied the list meanwhile
            filters.remove(_IGNORED)
