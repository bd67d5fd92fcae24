"""Draw the random numbers that torch draws on a CPU, with the same bits, several times as fast.

torch's generator on a CPU is the Mersenne Twister, one number at a time; with noise on weights it takes longer than all
else. `mersenne.c` makes 624 words and their deviates at once, which the installed compiler turns into vector
instructions. It is compiled in the background once many numbers were drawn, and must then reproduce torch's numbers in
a trial of some 30 ms. Where it does not (torch has other arithmetic on other processors), torch draws.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from . import c_library, enabled

log = logging.getLogger("fedabml")

WORTH = 1 << 24  # numbers drawn after which a second of compiling is likely to pay
LEAST = 16  # numbers in a row; torch draws fewer in another way
TRIALS = (16, 17, 31, 623, 624, 625, 640, 1263, 1 << 20)  # lengths of rows that are compared with torch's

SOURCE = Path(__file__).with_name("mersenne.c").read_text(encoding="utf-8")


class Twister:
    """Fills rows with torch's random numbers; any thread may call it."""

    def __init__(self) -> None:
        self.drawn = 0
        self.pending: Future[ctypes.CDLL] | None = None
        self.current: dict[str, Callable[..., None]] | None = None  # what passed the trial

    def fill(self, rows: Tensor, seeds: Tensor, distribution: str) -> bool:
        """Fill `rows` [k, n], a row for each of `seeds` [k], of which 32 bits count; return False if torch has to draw.

        `distribution` is "normal" or "uniform".
        """
        count, n = rows.shape
        if not enabled("twister") or rows.dtype != torch.float32 or n < LEAST:
            return False
        draw, seeds = self._functions_after(count * n).get(distribution), seeds.to(torch.int64).contiguous()
        if draw is None:
            return False

        def run(first: int, last: int) -> None:  # holding these tensors keeps them alive
            draw(seeds.data_ptr(), rows.data_ptr(), n, first, last)

        c_library.run_in_threads(run, count, count * n)
        return True

    def _functions_after(self, draws: int) -> dict[str, Callable[..., None]]:
        """Count `draws` more numbers and return the functions that may be used; none until the compiler is done."""
        if self.current is not None:
            return self.current
        self.drawn += draws
        if self.pending is None and self.drawn >= WORTH:
            self.pending = c_library.in_background(lambda: c_library.library(SOURCE))
        if self.pending is None or not self.pending.done():
            return {}
        try:
            self.current = _proven(self.pending.result())
        except Exception as error:  # torch draws the same numbers
            self.current = {}
            log.debug("Random numbers are drawn by torch: %s: %s", type(error).__name__, error)
        return self.current


def _proven(library: ctypes.CDLL) -> dict[str, Callable[..., None]]:
    """Return those of the compiled functions that give torch's numbers, by distribution."""
    proven = {}
    for distribution in ("normal", "uniform"):
        draw = getattr(library, f"{distribution}_rows")
        draw.argtypes, draw.restype = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3, None
        if all(_gives_torchs(draw, distribution, seed, size) for seed, size in enumerate(TRIALS, (1 << 32) - 3)):
            proven[distribution] = draw
        else:
            log.debug("Random numbers are drawn by torch: compiled %s ones differ", distribution)
    return proven


def _gives_torchs(draw: Callable[..., None], distribution: str, seed: int, size: int) -> bool:
    seeds, (ours, theirs) = torch.tensor([seed]), torch.empty(2, size, dtype=torch.float32)
    draw(seeds.data_ptr(), ours.data_ptr(), size, 0, 1)
    getattr(theirs, f"{distribution}_")(generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


TWISTER = Twister()
