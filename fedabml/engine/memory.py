"""How much memory there is, and what is done where it does not suffice: fewer clients run at once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from .setting import Cohort

log = logging.getLogger("fedabml")
T = TypeVar("T")
# How libraries say it that have no error of their own for it: the driver, cuBLAS and cuDNN, torch on a host.
SIGNS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without a wait for what that is at work on."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def fitting(cohorts: Sequence[Cohort], clients: int, work: Callable[[int], T]) -> T:
    """`work(chunk)` for so many clients, done anew with half the chunk while the device's memory does not suffice.

    The chunk that did is the cohorts' from then on. Once in a run it is done anew as it is, without all that was
    captured before: that may be what fills the memory, or another process did for a while.
    """
    while True:
        try:
            return work(cohorts[0].chunk)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)):
                raise
            why = str(error).splitlines()[0]
        held = any(cohort.programs.graphs for cohort in cohorts)  # here, because the error holds what was on the device
        if held and not cohorts[0].programs.relieved:
            cohorts[0].programs.relieved = True
            _freed(cohorts)
            log.info("The memory of %s was full (%s): what was captured is given back.", cohorts[0].device, why)
        else:
            _halve(cohorts, min(clients, cohorts[0].chunk), why)


def _freed(cohorts: Sequence[Cohort]) -> None:
    """Gives back what is captured, and forgets what could not be: that may have been for lack of memory."""
    for cohort in cohorts:
        cohort.programs.forget()
    gc.collect()
    if cohorts[0].device.type == "cuda":
        torch.cuda.empty_cache()


def _halve(cohorts: Sequence[Cohort], lanes: int, why: str) -> None:
    device = cohorts[0].device
    if lanes <= 1:
        raise InputError(
            f"The memory of {device} does not suffice for one client alone ({why}). A smaller batch_size, fewer weight "
            "samples (s) or a smaller model needs less; --device cpu takes the host's memory."
        )
    for cohort in cohorts:
        cohort.chunk = min(cohort.chunk, lanes // 2)
    _freed(cohorts)  # of sizes that will not come again
    log.warning(
        "The memory of %s does not suffice for %d clients at once (%s): the run goes on with %d.",
        *(device, lanes, why, lanes // 2),
    )
