"""Counters and histograms in Prometheus' text format, so that no further package is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable

# Names with their kind and help; a histogram has the upper ends of its buckets, too.
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
METRICS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "requests_total": ("counter", "Requests by path and HTTP status.", ()),
    "request_seconds": ("histogram", "Time of a request to /predict, from its first byte to its answer.", SECONDS),
    "rows_total": ("counter", "Rows predicted.", ()),
    "alarms_total": ("counter", "Rows whose input is unlike the client's data.", ()),
    "batch_rows": ("histogram", "Rows that were predicted together.", ROWS),
    "batch_requests": ("histogram", "Requests that were predicted together.", ROWS),
    "reloads_total": ("counter", "Newer posteriors, by result.", ()),
    "requests_in_flight": ("gauge", "Requests to /predict that are not answered yet.", ()),
    "posterior_info": ("gauge", "1 for the posterior in use, by digest.", ()),
}
PREFIX = "fedabml_"
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """The numbers of one service. Threads may count at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        self._buckets: dict[str, list[int]] = {n: [0] * (len(ends) + 1) for n, (_, _, ends) in METRICS.items()}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter, or to a gauge."""
        key = tuple(labels.items())
        with self._lock:
            self._values[name][key] = self._values[name].get(key, 0) + value

    def replace(self, name: str, value: float, **labels: str) -> None:
        """Give a gauge one value, in place of all that it had."""
        with self._lock:
            self._values[name] = {tuple(labels.items()): value}

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        ends = METRICS[name][2]
        with self._lock:
            self._buckets[name][sum(value > end for end in ends)] += 1
            self._values[name][()] = self._values[name].get((), 0) + value

    def value(self, name: str, **labels: str) -> float:
        """Return a counter or a gauge: the sum over all entries that have these labels."""
        with self._lock:
            wanted = set(labels.items())
            return sum(value for key, value in self._values[name].items() if wanted <= set(key))

    def text(self) -> str:
        """Return all of them in Prometheus' text format (version 0.0.4)."""
        with self._lock:
            return "\n".join(line for name in METRICS for line in self._lines(name)) + "\n"

    def _lines(self, name: str) -> Iterable[str]:
        kind, help, ends = METRICS[name]
        yield f"# HELP {PREFIX}{name} {help}"
        yield f"# TYPE {PREFIX}{name} {kind}"
        if kind != "histogram":
            for key, value in self._values[name].items() or [((), 0)] * (name != "posterior_info"):
                yield f"{PREFIX}{name}{_labels(key)} {value:.15g}"
            return
        below = 0
        for end, number in zip([*map("{:g}".format, ends), "+Inf"], self._buckets[name], strict=True):
            below += number
            yield f'{PREFIX}{name}_bucket{{le="{end}"}} {below}'
        yield f"{PREFIX}{name}_sum {self._values[name].get((), 0):.9g}"
        yield f"{PREFIX}{name}_count {below}"


def _labels(key: Labels) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in key) + "}" if key else ""
