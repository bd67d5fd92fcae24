"""Records of races as tables: rows of words, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .measure import TITLES, floor

Record = Mapping[str, Any]


class Table(NamedTuple):
    """A table in words."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """For a file."""
        line = lambda cells: f"| {' | '.join(cells)} |"  # noqa: E731
        rule = "|" + "---|" * len(self.head)
        return "\n".join([f"## {self.title}", "", line(self.head), rule, *map(line, self.rows), ""])


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def times(ratio: float | None) -> str:
    """A ratio in words."""
    return "–" if ratio is None else f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def against_loop(records: Sequence[Record]) -> Table:
    """Ours and the eager loop."""
    head = (
        *("workload", "algorithm", "precision", "ours: first round", "warm round", "loop: first round", "warm round"),
        *("**faster by**", "compiled", "with noise on activations", "than torch.optim", "than the loop in bf16"),
        "losses differ by",
    )
    rows = []
    for r in records:
        ratio = r["ratio"]
        better = times(ratio["loop"]) if r["agree"] else "losses differ"
        rows.append((
            r["workload"], TITLES[r["algorithm"]], r["dtype"],
            duration(r["first"]["ours"]), duration(r["warm"]["ours"]), duration(r["first"]["loop"]),
            duration(r["warm"]["loop"]), f"**{better}**", times(ratio.get("compiled")), times(ratio.get("local")),
            times(ratio.get("loop_sgd")), times(ratio.get("loop_bf16")), f"{r['apart']:.0e}",
        ))  # fmt: skip
    return Table("Against the eager loop", head, rows)


def brief(records: Sequence[Record]) -> Table:
    """Ours and the eager loop, for a terminal."""
    head = (
        "workload",
        "algorithm",
        "ours: first",
        "warm round",
        "loop: first",
        "warm round",
        "faster by",
        "than torch.optim",
        "with noise on activations",
    )
    rows = [
        (
            r["workload"], TITLES[r["algorithm"]], duration(r["first"]["ours"]), duration(r["warm"]["ours"]),
            duration(r["first"]["loop"]), duration(r["warm"]["loop"]),
            times(r["ratio"]["loop"]) if r["agree"] else "losses differ", times(r["ratio"].get("loop_sgd")),
            times(r["ratio"].get("local")),
        )
        for r in records
    ]  # fmt: skip
    return Table("Against the eager loop", head, rows)


def per_step(records: Sequence[Record]) -> Table:
    """FedABML's step and FedAvg's."""
    head = (
        "workload",
        "precision",
        "FedAvg",
        "FedABML",
        "of FedAvg",
        "both compiled",
        "with a θ-step per minibatch",
        "of FedAvg",
        "both compiled",
    )
    rows = []
    for r in records:
        one = lambda name, r=r: duration(r["warm"][name] / r["steps"])  # noqa: E731
        rows.append((
            r["workload"], r["dtype"], one("fedavg"), one("fedabml"), f"**{times(r['ratio']['fedabml'])}**",
            times(r["ratio"].get("fedabml compiled")), one("fedabml-batch"),
            f"**{times(r['ratio']['fedabml-batch'])}**", times(r["ratio"].get("fedabml-batch compiled")),
        ))  # fmt: skip
    kinds = sorted({", ".join(f"{k}={v}" for k, v in r["hyper"].items()) for r in records})
    return Table(f"A step of the whole cohort, ours; FedABML at its defaults ({'; '.join(kinds)})", head, rows)


def rooflines(records: Sequence[Record], ceiling: Mapping[str, float]) -> Table:
    """What a step costs at the least, and what it took."""
    head = ("workload", "algorithm", "precision", "GFLOP", "MB", "at the least", "bound by", "measured", "reached")
    rows = []
    for r in records:
        least, binding = floor(r, ceiling)
        line = r["roofline"]
        rows.append((
            r["workload"], TITLES[r["algorithm"]], r["dtype"], f"{line['flops'] / 1e9:.3g}",
            f"{line['bytes'] / 1e6:.3g}", duration(least), binding, duration(line["seconds"]),
            f"{100 * least / line['seconds']:.2g} %",
        ))  # fmt: skip
    said = ", ".join(f"{v / 1e12:.3g} TFLOP/s {k}" for k, v in ceiling.items() if k != "bytes")
    title = f"A step of the whole cohort against this machine's ceilings ({said}; {ceiling['bytes'] / 1e9:.3g} GB/s)"
    return Table(title, head, rows)


def with_graphs(records: Sequence[Record]) -> Table:
    """Steps replayed from CUDA graphs and steps launched one by one, both ours."""
    head = ("workload", "algorithm", "graphs: first round", "warm round", "without: first round", "warm round", "by")
    rows = [
        (
            r["workload"], TITLES[r["algorithm"]], duration(r["first"]["graphs"]), duration(r["warm"]["graphs"]),
            duration(r["first"]["launches"]), duration(r["warm"]["launches"]), times(r["ratio"]["launches"]),
        )
        for r in records
    ]  # fmt: skip
    return Table("Steps in CUDA graphs, and launched one by one (both ours, batched)", head, rows)


def tables(records: Sequence[Record], ceiling: Mapping[str, float] | None) -> list[Table]:
    """All tables there are records for."""
    of = {
        kind: [r for r in records if r.get("kind") == kind and "error" not in r] for kind in ("loop", "step", "graphs")
    }
    made = []
    if of["loop"]:
        made.append(against_loop(of["loop"]))
    if of["step"]:
        made.append(per_step(of["step"]))
    if of["graphs"]:
        made.append(with_graphs(of["graphs"]))
    known = [r for r in of["loop"] if ceiling and r["dtype"] in ceiling]
    if ceiling and known:
        made.append(rooflines(known, ceiling))
    return made
