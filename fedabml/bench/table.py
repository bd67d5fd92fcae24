"""Records of races (`measure`) as tables of text, for a terminal and for Markdown.

A column is a heading and a function that makes a record's cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..files.sheets import markdown_table
from .measure import TITLES

Record = Mapping[str, Any]
Column = tuple[str, Callable[[Record], str]]


class MarkdownTable(NamedTuple):
    """Holds a title, headings, and rows of text."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @staticmethod
    def of(title: str, columns: Sequence[Column], records: Sequence[Record]) -> MarkdownTable:
        """Return a table with a row for every record."""
        rows = [tuple(cell(record) for _, cell in columns) for record in records]
        return MarkdownTable(title, tuple(heading for heading, _ in columns), rows)

    def markdown(self) -> str:
        """Return the table as a section of a Markdown page."""
        return f"## {self.title}\n\n{markdown_table(self.head, self.rows)}\n"


def duration(seconds: float) -> str:
    """Return a time with its unit: 1.50 s, 12.3 ms, 45.6 µs."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def times(ratio: float | None) -> str:
    """Return a ratio as 2.5×; a dash for None."""
    return "–" if ratio is None else f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def _first(side: str, heading: str) -> Column:
    return heading, lambda r: duration(r["first"][side])


def _warm(side: str) -> Column:
    return "warm round", lambda r: duration(r["warm"][side])


def _ratio(name: str, heading: str, bold: bool = False) -> Column:
    form = "**{}**" if bold else "{}"
    return heading, lambda r: form.format(times(r["ratio"].get(name)))


def _per_step(name: str, heading: str) -> Column:
    return heading, lambda r: duration(r["warm"][name] / r["steps"])


def _faster(record: Record) -> str:
    return times(record["ratio"]["loop"]) if record["agree"] else "losses differ"


WORKLOAD: Column = ("workload", lambda r: r["workload"])
ALGORITHM: Column = ("algorithm", lambda r: TITLES[r["algorithm"]])
PRECISION: Column = ("precision", lambda r: r["dtype"])
BRIEF = (
    *(WORKLOAD, ALGORITHM, _first("ours", "ours: first"), _warm("ours"), _first("loop", "loop: first"), _warm("loop")),
    *(("faster by", _faster), _ratio("loop_sgd", "than torch.optim"), _ratio("local", "with noise on activations")),
)
LOOP = (
    *(WORKLOAD, ALGORITHM, PRECISION, _first("ours", "ours: first round"), _warm("ours")),
    *(_first("loop", "loop: first round"), _warm("loop"), ("**faster by**", lambda r: f"**{_faster(r)}**")),
    *(_ratio("compiled", "compiled"), _ratio("local", "with noise on activations")),
    *(_ratio("loop_sgd", "than torch.optim"), _ratio("loop_bf16", "than the loop in bf16")),
    ("losses differ by", lambda r: f"{r['apart']:.0e}"),
)
STEP = (
    *(WORKLOAD, PRECISION, _per_step("fedavg", "FedAvg"), _per_step("fedabml", "FedABML")),
    *(_ratio("fedabml", "of FedAvg", bold=True), _ratio("fedabml compiled", "both compiled")),
    _per_step("fedabml-batch", "with a θ-step per minibatch"),
    *(_ratio("fedabml-batch", "of FedAvg", bold=True), _ratio("fedabml-batch compiled", "both compiled")),
)
GRAPHS = (
    *(WORKLOAD, ALGORITHM, _first("graphs", "graphs: first round"), _warm("graphs")),
    *(_first("launches", "without: first round"), _warm("launches"), _ratio("launches", "by")),
)


def brief(records: Sequence[Record]) -> MarkdownTable:
    """Return ours beside the eager loop, for a terminal."""
    return MarkdownTable.of("Against the eager loop", BRIEF, records)


def without(records: Sequence[Record]) -> MarkdownTable:
    """Return how many times as long a round takes without an accelerator, in wall-clock and in processor time."""
    parts = list(dict.fromkeys(part for r in records for part in r["ratio"]))

    def column(part: str) -> Column:
        return f"without {part} (processor)", lambda r: f"{times(r['ratio'][part])} ({times(r['cpu'][part])})"

    return MarkdownTable.of("Without accelerators", (WORKLOAD, ALGORITHM, _warm("all"), *map(column, parts)), records)


def tables(records: Sequence[Record]) -> list[MarkdownTable]:
    """Return the tables of races against the loop, between steps, and of graphs, where there are records."""
    steps = [r for r in records if r.get("kind") == "step"]
    hyper = sorted({", ".join(f"{k}={v}" for k, v in r["hyper"].items()) for r in steps})
    kinds = {
        "loop": ("Against the eager loop", LOOP),
        "step": (f"A step of the whole cohort, ours; FedABML at its defaults ({'; '.join(hyper)})", STEP),
        "graphs": ("Steps in CUDA graphs, and launched one by one (both ours, batched)", GRAPHS),
    }
    of_kind = {kind: [r for r in records if r.get("kind") == kind and "error" not in r] for kind in kinds}
    return [MarkdownTable.of(*kinds[kind], chosen) for kind, chosen in of_kind.items() if chosen]
