"""The parts of this machine, and how a run would be executed on it and why. `forecast` estimates time and memory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ..accel.c_library import compiler
from ..accel.process import uses_arm_library
from ..data.files import data_dir
from ..data.sources import datasets
from ..engine.autotune import REDUCED_PRECISION
from ..engine.executor import Executor
from ..files.formats import size
from ..files.limits import host_memory
from ..version import __version__
from .prepare import Setup

EXTRAS = {
    "pandas": "tables (CSV): pip install 'fedabml[tables]'",
    "pyarrow": "tables (Parquet): pip install 'fedabml[tables]'",
    "optuna": "fedabml tune: pip install 'fedabml[tune]'",
    "transformers": "Hugging Face folders: pip install 'fedabml[huggingface]'",
}
PRECISIONS = {
    "float32": "full float32; a GPU's TF32 is off, so that results agree with a CPU's",
    "tf32": "a GPU rounds products to 10 bits: faster, three digits",
    "bf16": "the network in bfloat16, two digits; posteriors, noise and averages in float32",
    "float64": "for checks; slow on most accelerators",
}
ESTIMATORS = {
    "weight": "draws whole weight vectors",
    "local": "noise on the outputs of Linear layers, flipout on others: the same expectation, less variance",
    "flipout": "noise with random signs per example: the same expectation, less variance",
}
LabelledLines = list[tuple[str, str]]


def versions() -> LabelledLines:
    """Return the versions of fedabml, Python and the packages it uses."""
    rows = [
        ("fedabml", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"),
        ("torch", torch.__version__ + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", no CUDA")),
        ("numpy", np.__version__),
    ]
    for name, purpose in EXTRAS.items():
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, f"not installed; for {purpose}"))
    return rows


def devices() -> tuple[LabelledLines, list[str]]:
    """Return processors, memory and accelerators, and notes on what is wrong with them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows, notes = [("CPU", f"{cores} core(s) for this process, {torch.get_num_threads()} thread(s) of torch")], []
    total, free = host_memory()
    if total:
        rows.append(("memory", f"{size(total)}, {size(free)} free"))
    command = compiler()
    fused = f"{command[0]}: large steps on the CPU are fused" if command else "none: the CPU's steps are slower"
    rows.append(("C compiler", fused))
    if torch.get_num_threads() < cores:
        notes.append(f"torch uses {torch.get_num_threads()} of {cores} cores. Set OMP_NUM_THREADS to use more.")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores:
        notes.append(f"The machine is busy: a load of {load:.1f} on {cores} core(s). Runs and estimates will be slow.")
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if not torch.version.cuda else "torch finds no driver or no device"
        return [*rows, ("GPU", f"none: {reason}")], notes
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        rows.append((f"GPU {i}", f"{torch.cuda.get_device_name(i)}, {size(total)}, {size(free)} free"))
    problem = graphs()
    rows.append(("CUDA graphs", problem or "usable: one launch runs a whole step"))
    rows.append(("noise", "one kernel (Triton)" if find_spec("triton") else "tensor operations (no Triton here)"))
    if problem:
        notes.append(f"CUDA graphs do not work here, so small models will be several times slower: {problem}")
    return rows, notes


def graphs() -> str:
    """Return why CUDA graphs cannot be used; an empty text if they can."""
    try:
        x = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if x[0].item() == 1 else "a replayed graph gave a wrong result"


def dataset_lines(folder: str | None) -> LabelledLines:
    """Return the folder of datasets, and which datasets it holds."""
    catalogue = datasets(folder)
    present = [d["name"] for d in catalogue if d["present"]]
    absent = [d["name"] for d in catalogue if not d["present"]]
    rows = [("data folder", str(data_dir(folder))), ("datasets here", ", ".join(present) or "none")]
    return rows + ([("not here", f"{', '.join(absent)} (fedabml data get NAME)")] if absent else [])


def choices(setup: Setup, options: dict[str, Any]) -> LabelledLines:
    """Return the choices that `prepare` made for a run, with reasons. `options` are the keys of its configuration."""
    cohort, device, hyper = setup.cohort, setup.cohort.device, setup.cohort.algorithm.values()
    cpu, batched = device.type == "cpu", cohort.batched
    if options.get("backend", "auto") != "auto":
        backend_reason = "as requested"
    elif any("cannot be batched" in note for note in setup.notes):
        backend_reason = "auto: this model cannot be batched over clients"
    elif not cpu:
        backend_reason = "auto: one batched program for all clients of a chunk"
    else:
        lanes = "one batched program for a chunk" if batched else "one client at a time"
        backend_reason = f"auto: the faster one for this model on this machine, {lanes}"
    auto = "auto: there is no accelerator" if cpu else "auto: the accelerator"
    rows = [
        ("device", f"{device} ({auto if options.get('device', 'auto') == 'auto' else 'as requested'})"),
        ("backend", f"{cohort.backend} ({backend_reason}{', images channels-last' * cohort.network.channels_last})"),
    ]
    if cpu and cohort.workers == 1:
        rows.append(("threads", f"{torch.get_num_threads()}, all on the same clients"))
    elif cpu:
        rows.append(("threads", f"{cohort.workers}, each with its own clients (faster for this model on this machine)"))
    dtype, requested = setup.config["dtype"], options.get("dtype")
    if requested in REDUCED_PRECISION and cohort.algorithm.needs_full_precision:
        rows.append(("precision", f"float32, not {requested}: the algorithm takes small differences of gradients"))
    else:
        rows.append(("precision", f"{dtype} ({PRECISIONS[dtype]})"))
    if cpu and uses_arm_library() and not torch._C._get_mkldnn_enabled():
        rows.append(("products", "torch's own; oneDNN, slow for small products on ARM, is off in this process"))
    if "s" in hyper:
        name = hyper.get("estimator", "weight")
        meaning = ESTIMATORS.get(name, "see the algorithm")
        rows.append(("estimator", f"{name}, {hyper['s']} sample(s) per gradient ({meaning})"))
    rows.append(("samples", "on the host, moved to the device when needed" if cohort.data.hosted else "on the device"))
    return [*rows, ("steps", _execution(cohort.executor))]


def _execution(executor: Executor) -> str:
    """Describe how the steps are executed."""
    compiling = ", compiled (the first round waits for the compiler)" * executor.compile
    compiling += f", compiled after round {executor.policy.decide_round} if that pays" * executor.undecided
    if executor.capture:
        return f"CUDA graphs, replayed{compiling}"
    if not executor.record:
        return "launched one by one"
    compiling = compiling or "; the C compiler fuses large ones" * bool(compiler())
    return f"recorded after {executor.policy.record_after} runs, and replayed{compiling}"
