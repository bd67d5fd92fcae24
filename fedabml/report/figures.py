"""The figures of a report: each function draws one figure from the runs, or none where they lack the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..evaluation.measures import FEW_ROWS
from . import thin
from .canvas import PAGE, Axis, Theme, finite, ticks
from .charts import Series, bars, histogram, line_chart, ranges, scatter, usual_radius
from .heat_map import Partition, heat_map
from .page import Figure
from .read import Client, SavedRun, read_layers

_TALL = replace(PAGE, height=350)
_LOOSE = "Where σ is as large as the mean, the prior hardly constrains a weight."
_WIDE = "Where the prior is wide, clients' models may differ; where it is narrow, all clients share what was learned."

Dot = tuple[float, float, Client, str]  # x, y, the client and its name on the page


def _figure(
    chart: Callable[..., str], series: Sequence[Series], title: str, reading: str, **options: Any
) -> Figure | None:
    return Figure(title, chart(series, title=title, **options), reading) if series else None


def _slot(runs: Sequence[SavedRun], i: int, theme: Theme | None = None) -> int | None:
    """Return the run's entry in the page's legend; `None` where a picture in a theme of its own has its own legend."""
    return i if len(runs) > 1 and theme is None else None


def _axis(run: SavedRun, label: str = "") -> Axis:
    return Axis(label or run.metric, "number" if run.regression else "percent")


def _metric_word(run: SavedRun) -> str:
    return "RMSE" if run.regression else "accuracy"


def loss(runs: Sequence[SavedRun]) -> Figure | None:
    """Draw the training loss per round."""
    reading = "The mean training loss of the clients that took part in each round. It should fall and level off."
    axes = {"x": Axis("round", "whole"), "y": Axis("training loss")}
    return _figure(line_chart, _curves(runs, "loss"), "Loss per round", reading, theme=PAGE, **axes)


def progress(runs: Sequence[SavedRun], theme: Theme | None = None) -> Figure | None:
    """Draw accuracy (or RMSE) per evaluated round, with bands over seeds; a single run also shows its prior alone."""
    metric, word, series = runs[0].metric, _metric_word(runs[0]), _curves(runs, runs[0].metric, theme)
    if len(runs) == 1 and series:
        series = [replace(series[0], name="personal models")]
        for key, name in ((f"prior_level_{metric}", "prior + label level"), (f"prior_{metric}", "prior alone")):
            series += [replace(s, name=name) for s in _curves(runs, key)]
    direction = "lower" if runs[0].regression else "higher"
    reading = (
        f"After an evaluated round every client personalises the shared model and is scored; {direction} is better."
    )
    if any(s.low for s in series):
        reading += " The band is the 95% confidence interval of the mean over seeds."
    if missed := sum("eval_error" in line for run in runs for line in run.rounds):
        reading += f" {missed} evaluation{'s' * (missed != 1)} failed and {'are' if missed > 1 else 'is'} left out."
    axes = {"x": Axis("round", "whole"), "y": _axis(runs[0], f"{runs[0].split} {word}, mean over clients")}
    return _figure(line_chart, series, f"{word[0].upper()}{word[1:]} per round", reading, theme=theme or PAGE, **axes)


def _curves(runs: Sequence[SavedRun], key: str, theme: Theme | None = None) -> list[Series]:
    """Return every run's values per round, with a band of half width `key`_half where that is known."""
    series, ceiling = [], 1.0 if key == "accuracy" else math.inf
    for i, run in enumerate(runs):
        x, y = run.curve(key)
        middle, half = np.array(y, float), np.array(run.curve(f"{key}_half")[1], float)  # None becomes NaN: a gap
        band = {}
        if np.isfinite(half).any():
            band = {"low": np.maximum(middle - half, 0.0).tolist(), "high": np.minimum(middle + half, ceiling).tolist()}
        if np.isfinite(middle).any():
            series.append(Series(run.name, y, x, slot=_slot(runs, i, theme), **band))
    return series


def client_names(runs: Sequence[SavedRun]) -> list[list[str]]:
    """Return the names of every run's clients; where the runs' data differ, a name includes its run."""
    data = [(run.dataset, str(run.config.get("partition_hash"))) for run in runs]
    owners = [f" of {runs[data.index(key)].name}" if len({*data}) > 1 else "" for key in data]
    return [[f"{client.name}{owner}" for client in run.clients] for run, owner in zip(runs, owners, strict=True)]


def _scored(runs: Sequence[SavedRun], key: str) -> list[list[tuple[float, Client, str]]]:
    """Return of every run the clients that have a measure, as (value, client, name on the page)."""
    return [
        [(v, client, name) for client, name in zip(run.clients, names, strict=True)
         if (v := client.values.get(key)) is not None]
        for run, names in zip(runs, client_names(runs), strict=True)
    ]  # fmt: skip


def _client_dots(
    runs: Sequence[SavedRun], rows: Sequence[Sequence[Dot]], choose: Callable[[int, int], list[int]], which: str,
    title: str, reading: str, tip: Callable[[float, float], str], **options: Any,
) -> Figure | None:  # fmt: skip
    """Draw a dot per client and run; of very many clients those that `choose` takes, which `which` describes.

    The dots of small clients are smaller. `tip` formats a dot's x and y for its hover text.
    """
    drawn = [[row[i] for i in choose(len(row), thin.room(len(runs)))] for row in rows]
    drawn_count, total = sum(map(len, drawn)), sum(map(len, rows))
    radius, series = usual_radius(drawn_count), []
    for i, (run, row) in enumerate(zip(runs, drawn, strict=True)):
        if row:
            x, y, clients, who = zip(*row, strict=True)
            tips = [_tip(run, client, f"{run.name}: {tip(a, b)}") for a, b, client, _ in row]
            sizes = [radius / 2 if run.small(client) else radius for client in clients]
            series.append(Series(run.name, y, x, tips, sizes, _slot(runs, i), who=who))
    if drawn_count < total:
        reading += f" {drawn_count:,} of {total:,} dots are drawn: {which}. The file clients.csv holds every client."
    if any(run.small_clients for run in runs):
        few_rows = f"fewer than {FEW_ROWS} {runs[0].split} rows"
        reading += f" Smaller dots are clients with {few_rows}; chance decides where they lie."
    return _figure(scatter, series, title, reading, theme=_TALL, **options)


def _tip(run: SavedRun, client: Client, line: str) -> str:
    sizes = (("training", client.values.get("n_train")), (run.split, run.rows(client)))
    return "\n".join([client.name, line, *(f"{n:.0f} {split} samples" for split, n in sizes if n is not None)])


def _ranked(
    runs: Sequence[SavedRun], key: str, title: str, x: str, y: Axis, reading: str, falling: bool = False, **options: Any
) -> Figure | None:
    """Draw every client's measure, sorted by it; of very many clients, both ends and even steps between them."""
    rows = []
    for row in _scored(runs, key):
        ranked = sorted(row, key=lambda scored: scored[0], reverse=falling)
        rows.append([(rank, *scored) for rank, scored in enumerate(ranked, 1)])
    options |= {"x": Axis(x, "whole"), "y": y, "tip": lambda rank, value: y.write(value)}
    return _client_dots(runs, rows, thin.ranks, "both ends, and even steps between", title, reading, **options)


def spread(runs: Sequence[SavedRun]) -> Figure | None:
    """Draw every client's accuracy (or RMSE), sorted."""
    y = _axis(runs[0], f"{runs[0].split} {_metric_word(runs[0])}")
    reading = "Each dot is a client. A flat row means that all clients do equally well; those at the left end do worst."
    x = "clients, from the worst-off to the best-off"
    return _ranked(runs, runs[0].metric, "Clients from worst to best", x, y, reading, falling=runs[0].regression)


def coverage(runs: Sequence[SavedRun]) -> Figure | None:
    """Draw every client's share of targets inside the 90% interval, sorted."""
    lowest = min([0.8, *(v for row in _scored(runs, "coverage") for v, *_ in row)])
    y = Axis(f"share of {runs[0].split} targets inside", "percent", (max(math.floor(lowest * 10) / 10, 0.0), 1.0))
    reading = (
        "Each dot is a client. On the dashed line the intervals are as wide as they claim; below it they are too "
        f"narrow, above it too wide. A client with few {runs[0].split} samples strays from the line by chance."
    )
    x = "clients, from the least covered to the most"
    return _ranked(runs, "coverage", "Coverage of the 90% interval", x, y, reading, level=0.9)


def personal_gain(runs: Sequence[SavedRun]) -> Figure | None:
    """Draw each client's personal model against the prior, with the client's label level where there is one."""
    metric, axis = runs[0].metric, _axis(runs[0])
    level = any(c.values.get(f"prior_level_{metric}") is not None for run in runs for c in run.clients)
    rows: list[list[Dot]] = [[] for _ in runs]
    for row, scored in zip(rows, _scored(runs, metric), strict=True):
        for after, client, name in scored:
            before = client.values.get(f"prior_level_{metric}")
            before = client.values.get(f"prior_{metric}") if before is None else before
            if before is not None:
                row.append((before, after, client, name))
    names = ("prior + label level" if level else "prior alone", "personal model")
    x, y = (replace(axis, label=f"{_metric_word(runs[0])} of the {model}") for model in names)
    gain, harm = ("below", "above") if runs[0].regression else ("above", "below")
    reading = f"Each dot is a client. Clients {gain} the dashed line gain from personalising, clients {harm} it lose."
    reading += " The prior already uses the client's own label frequencies (the label level)." * level

    def tip(before: float, after: float) -> str:
        return f"{axis.write(before)} to {axis.write(after)}"

    title, options = "What personalising gains", {"x": x, "y": y, "diagonal": True}
    return _client_dots(runs, rows, thin.sample, "a random sample", title, reading, tip, **options)


def comparable(runs: Sequence[SavedRun]) -> list[int]:
    """Return the numbers of the largest group of runs that scored the same clients of the same partition."""
    groups: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        keys = tuple(client.key for client in run.clients)
        if keys and run.metric == runs[0].metric:
            groups.setdefault((run.dataset, str(run.config.get("partition_hash")), keys), []).append(i)
    group = max(groups.values(), key=len, default=[])
    return group if len(group) > 1 else []


def duel(runs: Sequence[SavedRun]) -> Figure | None:
    """Draw two runs client by client; the page's script redraws the points when a reader chooses other runs."""
    group = comparable(runs)
    if not group:
        return None
    title, axis = "Two runs, client by client", _axis(runs[0])
    values = [[c.values.get(runs[0].metric) for c in runs[i].clients] for i in group]
    outer = ticks(*axis.cover(v for row in values for v in row))  # of all runs: the axes stay when the choice changes
    x, y = (replace(axis, label=runs[i].name, span=(outer[0], outer[-1])) for i in group[:2])
    names, drawn = client_names(runs)[group[0]], thin.sample(len(values[0]), thin.PER_RUN)
    who = [names[i] for i in drawn]
    points = Series("clients", [values[1][i] for i in drawn], [values[0][i] for i in drawn], tips=who, who=who)
    svg = scatter([points], title=title, x=x, y=y, theme=_TALL, diagonal=True)
    reading = (
        "Each dot is a client, scored under both runs. It has the colour and shape of the run that is better for it."
    )
    if len(drawn) < len(names):
        reading += f" {len(drawn):,} of {len(names):,} clients are drawn, at random; the counts above include all."
    return Figure(title, svg, reading, choices=[(i, runs[i].name) for i in group])


def reliability(runs: Sequence[SavedRun], theme: Theme | None = None) -> Figure | None:
    """Draw how often predictions of a given confidence are right."""
    series = []
    for i, run in enumerate(runs):
        table = [
            [finite(row.get(key)) for key in ("confidence", "accuracy", "count")] for row in run.table("reliability")
        ]
        bins = [(c, a, n or 0.0) for c, a, n in table if c is not None and a is not None and n != 0]
        if bins:
            largest = max(count for *_, count in bins) or 1.0
            tips = [f"{run.name}: {a:.1%} right at confidence {c:.1%}\n{n:.0f} predictions" for c, a, n in bins]
            sizes = [2.5 + 6.5 * (n / largest) ** 0.5 for *_, n in bins]
            confidences, accuracies, _ = zip(*bins, strict=True)
            series.append(Series(run.name, accuracies, confidences, tips, sizes, _slot(runs, i, theme)))
    reading = (
        "On the dashed line confidence equals accuracy; below it the models are overconfident. "
        "Larger dots stand for more predictions."
    )
    axes = {
        "x": Axis("confidence of the prediction", "percent", (0.0, 1.0)),
        "y": Axis("share that is right", "percent"),
    }
    tall = replace(theme or PAGE, height=_TALL.height)
    return _figure(scatter, series, "Reliability", reading, theme=tall, diagonal=True, connect=True, **axes)


def entropy(runs: Sequence[SavedRun]) -> list[Figure]:
    """Draw for each run how uncertain its right and its wrong predictions are."""
    reading = "Where uncertainty is useful, right predictions have a low entropy and wrong ones a high entropy."
    title, groups = "Entropy of right and wrong predictions", {"correct": "right", "wrong": "wrong"}
    counts = [run.summary.get("entropy_histogram") for run in runs]
    drawn = [entropies(runs, i, c, groups, title, reading) for i, c in enumerate(counts) if isinstance(c, dict)]
    return [figure for figure in drawn if figure]


def entropies(
    runs: Sequence[SavedRun], i: int, counts: Mapping[str, Any], groups: Mapping[str, str], title: str, reading: str
) -> Figure | None:
    """Draw the entropies of two groups of predictions of run `i` as histograms; none where the counts do not fit.

    `counts` holds the edges of the bins and the predictions of each group in each bin; `groups` names the groups.
    """
    edges, *rows = ([finite(v) for v in counts.get(key) or []] for key in ("edges", *groups))
    bin_edges = [edge for edge in edges if edge is not None]
    if len(bin_edges) < 2 or len(bin_edges) < len(edges) or any(len(row) != len(edges) - 1 for row in rows):
        return None
    is_one_of_several, series = len(runs) > 1, []
    title += f": {runs[i].name}" * is_one_of_several
    for name, row in zip(groups.values(), rows, strict=True):
        total = sum(count or 0.0 for count in row) or 1.0
        series.append(Series(name, [(count or 0.0) / total for count in row]))
    x, y = Axis("entropy (nats)"), Axis("share of the predictions of each group", "percent")
    theme = replace(_TALL, colours=(PAGE.style(i).colour, PAGE.ink if is_one_of_several else PAGE.colours[1]))
    return Figure(title, histogram(bin_edges, series, title=title, x=x, y=y, theme=theme), reading, run=_slot(runs, i))


def prior_width(runs: Sequence[SavedRun]) -> list[Figure]:
    """Draw how wide the prior is in each layer, for runs that learned it (a prior that was not has one width).

    A single run shows the quartiles of its prior where they can be read; several runs show their means.
    """
    if len(runs) == 1 and (quartiles := _layers(runs[0])):
        return quartiles
    rows = [{str(row.get("name")): finite(row.get("mean_std")) for row in run.table("prior_width")} for run in runs]
    rows = [row if _differ([v for v in row.values() if v is not None]) else {} for row in rows]
    layers = list(dict.fromkeys(name for row in rows for name in row))
    series = [
        Series(run.name if len(runs) > 1 else "mean σ", [row.get(layer) for layer in layers], slot=_slot(runs, i))
        for i, (run, row) in enumerate(zip(runs, rows, strict=True))
        if row
    ]
    x = Axis("mean standard deviation of the prior")
    figure = _figure(partial(bars, layers), series, "Where the prior is wide", _WIDE, x=x, theme=PAGE)
    return [figure] if figure else []


def _layers(run: SavedRun) -> list[Figure]:
    """Draw the quartiles of the prior's σ and |mean| in each layer; nothing where σ was not learned."""
    layers, figures = read_layers(run.folder), []
    if not _differ([v for parts in layers.values() for v in parts["σ"]]):
        return []
    for name, title, label, reading, theme in (
        ("σ", "Where the prior is wide", "standard deviation σ of the prior", _WIDE, PAGE),
        (
            "|mean|",
            "How large the prior's means are",
            "|mean| of the prior",
            _LOOSE,
            replace(PAGE, colours=PAGE.colours[1:]),
        ),
    ):
        rows = [parts[name] for parts in layers.values()]
        ends = [v for row in rows for v in row]
        is_logarithmic = min(ends) > 0 and max(ends) > 20 * min(ends)  # then the axis has powers of ten
        low, middle, high = zip(*([math.log10(v) if is_logarithmic else v for v in row] for row in rows), strict=True)
        series, x = [Series(name, middle, low=low, high=high)], Axis(label, "power" if is_logarithmic else "number")
        svg = ranges(list(layers), series, title=title, x=x, theme=theme)
        reading += " A dot is the median of a layer, its line the middle half of the weights."
        figures.append(Figure(title, svg, reading))
    return figures


def _differ(values: Sequence[float]) -> bool:
    return bool(values) and max(values) - min(values) > 1e-3 * max(map(abs, values))


def partitions(runs: Sequence[SavedRun]) -> list[Figure]:
    """Draw who holds what, once for every distinct partition."""
    holders: dict[str, list[SavedRun]] = {}
    for run in runs:
        if partition := Partition.read(run.partition or run.manifest):
            holders.setdefault(heat_map(partition, PAGE), []).append(run)
    figures = []
    for svg, group in holders.items():
        run = group[0]
        content = "how many training samples it has" if run.regression else "the classes of its training samples"
        reading = f"Each row is a client and shows {content}. Clients with similar rows have similar data."
        reading += f" Used by {', '.join(holder.name for holder in group)}." * (len(holders) > 1)
        reading += f" {run.divided}" * bool(run.divided)
        figures.append(Figure("Who holds what" + f": {run.partition_kind}" * bool(run.partition_kind), svg, reading))
    return figures
