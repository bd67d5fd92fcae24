"""The measures of a run: what they are called, how they are written, and which way is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..data.rows import FEW_ROWS
from .read import Run

MISSING, TOO_FEW = "–", "too few test rows"


def percent(value: float) -> str:
    """A share, as 81.2%."""
    return f"{value:.1%}"


def decimals(value: float) -> str:
    """A number with three decimals and three significant digits, or in powers of ten where that takes many zeros."""
    if value == 0 or 1 <= abs(value) < 1e5:
        return f"{value:.3f}"
    return f"{value:#.3g}" if 1e-4 <= abs(value) < 1 else f"{value:.2e}"


def size(value: float) -> str:
    """Bytes in the unit that fits, as the terminal writes them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def duration(value: float) -> str:
    """Seconds as a person says them."""
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"


@dataclass(frozen=True)
class Measure:
    """A number of a run. `target` is what it should be near: infinity for more, 0 for less, `None` for neither."""

    key: str
    label: str
    meaning: str
    write: Callable[[float], str]
    target: float | None

    def show(self, run: Run) -> str:
        """The run's value in words."""
        value = run.number(self.key)
        if value is None:
            return TOO_FEW if self._of_large(run) else MISSING
        return self.write(value)

    def about(self, run: Run) -> str:
        """What the run's value means; it says where small clients are left out."""
        return self.meaning + f" with at least {FEW_ROWS} {run.split} rows" * self._of_large(run)

    def tile(self, run: Run) -> bool:
        """Whether the run's first numbers include it; pooled ones stand there where the run has small clients."""
        if self.key in (f"{run.metric}_pooled", f"{run.metric}_worst_decile") and run.small_clients:
            return True
        return self.key in TILES and (self.key == run.metric or run.number(self.key) is not None)

    def _of_large(self, run: Run) -> bool:
        return self.key.endswith("_worst_decile") and bool(run.small_clients)

    def best(self, runs: Sequence[Run]) -> set[str]:
        """Names of the best runs, each among the runs on the same data; none where there is nothing to compare."""
        winners = set[str]()
        for data in {run.dataset for run in runs}:
            known = {run.name: v for run in runs if run.dataset == data and (v := run.number(self.key)) is not None}
            if self.target is not None and len(known) > 1:
                loss = {name: -v if self.target == UP else abs(v - self.target) for name, v in known.items()}
                best = min(loss.values())
                winners |= {name for name, v in loss.items() if v == best < max(loss.values())}
        return winners


UP = float("inf")
MEASURES = (
    Measure("accuracy_pooled", "Accuracy, pooled", "over all samples together", percent, UP),
    Measure("rmse_pooled", "RMSE, pooled", "over all samples together", decimals, 0),
    Measure("accuracy", "Accuracy", "of the personalised models, mean over clients", percent, UP),
    Measure("rmse", "RMSE", "of the personalised models, mean over clients", decimals, 0),
    Measure("nll", "NLL", "negative log-likelihood; lower is better", decimals, 0),
    Measure("ece", "ECE", "calibration error; 0 is honest", decimals, 0),
    Measure("coverage_pooled", "Coverage", "of the 90% interval, all samples together; 90% is honest", percent, 0.9),
    Measure("accuracy_worst_decile", "Worst decile", "accuracy of the worst-off tenth of clients", percent, UP),
    Measure("prior_accuracy", "Prior alone", "accuracy before any personal step", percent, UP),
    Measure("prior_rmse", "Prior alone", "RMSE before any personal step", decimals, 0),
    Measure("prior_level_accuracy", "Prior + label level", "accuracy with the client's label frequencies", percent, UP),
    Measure("brier", "Brier", "squared error of the probabilities", decimals, 0),
    Measure("accuracy_last10", "Last 10", "mean accuracy of the last ten evaluations", percent, UP),
    Measure("rmse_last10", "Last 10", "mean RMSE of the last ten evaluations", decimals, 0),
    Measure("traffic", "Traffic", "up and down, per client and round", size, 0),
    Measure("seconds", "Time", "of the whole run", duration, 0),
    Measure("peak_memory_bytes", "Memory", "peak", size, 0),
)
TILES = (
    "accuracy",
    "rmse",
    "nll",
    "ece",
    "coverage_pooled",
    "accuracy_worst_decile",
    "prior_accuracy",
    "prior_rmse",
    "prior_level_accuracy",
    "traffic",
    "seconds",
)
