"""The measures of a run: what they are called, how they are written, and which way is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedabml.report.read import Run

MISSING = "–"


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
        return MISSING if value is None else self.write(value)

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
    Measure("accuracy", "Accuracy", "of the personalised models, mean over clients", percent, UP),
    Measure("rmse", "RMSE", "of the personalised models, mean over clients", decimals, 0),
    Measure("nll", "NLL", "negative log-likelihood; lower is better", decimals, 0),
    Measure("ece", "ECE", "calibration error; 0 is honest", decimals, 0),
    Measure("coverage", "Coverage", "of the 90% interval; 90% is honest", percent, 0.9),
    Measure("accuracy_worst_decile", "Worst decile", "accuracy of the worst-off tenth of clients", percent, UP),
    Measure("prior_accuracy", "Prior alone", "accuracy before any personal step", percent, UP),
    Measure("prior_rmse", "Prior alone", "RMSE before any personal step", decimals, 0),
    Measure("brier", "Brier", "squared error of the probabilities", decimals, 0),
    Measure("accuracy_pooled", "Pooled", "accuracy over all test samples together", percent, UP),
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
    "coverage",
    "accuracy_worst_decile",
    "prior_accuracy",
    "prior_rmse",
    "traffic",
    "seconds",
)
