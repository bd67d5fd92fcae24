"""The figures of a report: each function draws one figure from the runs, or none where they lack the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..data.rows import FEW_ROWS
from . import thin
from .canvas import PAGE, Axis, Look, finite, ticks
from .charts import Series, bars, histogram, line_chart, ranges, scatter, usual_radius
from .heat_map import Partition, heat_map
from .page import Figure
from .read import Client, Run

_TALL = replace(PAGE, height=350)
_BAND = " The band is the 95% confidence interval of the mean over seeds."
_LOOSE = "Where σ is as large as the mean, the prior hardly constrains a weight."
_WIDE = "Where the prior is wide, clients' models may differ; where it is narrow, all clients share what was learned."

Ends = Sequence[float | None]


def slot_of(runs: Sequence[Run], i: int, own: Look | None = None) -> int | None:
    """Return the run's entry in the page's legend; `None` where a picture in a look of its own has its own legend."""
    return i if len(runs) > 1 and own is None else None


def _axis(run: Run, label: str = "") -> Axis:
    return Axis(label or run.metric, "number" if run.regression else "percent")


def _word(run: Run) -> str:
    return "RMSE" if run.regression else "accuracy"


def loss(runs: Sequence[Run]) -> Figure | None:
    """Draw the training loss per round."""
    series = _curves(runs, "loss")
    if not series:
        return None
    svg = line_chart(series, title="Loss per round", x=Axis("round", "whole"), y=Axis("training loss"), look=PAGE)
    reading = "The mean training loss of the clients that took part in each round. It should fall and level off."
    return Figure("Loss per round", svg, reading)


def progress(runs: Sequence[Run], own: Look | None = None) -> Figure | None:
    """Draw accuracy (or RMSE) per evaluated round, with bands over seeds; a single run also shows its prior alone."""
    metric, series = runs[0].metric, _curves(runs, runs[0].metric, own)
    if len(runs) == 1 and series:
        series = [replace(series[0], name="personal models")]
        for key, name in ((f"prior_level_{metric}", "prior + label level"), (f"prior_{metric}", "prior alone")):
            series += [replace(s, name=name) for s in _curves(runs, key)]
    if not series:
        return None
    word = _word(runs[0])
    title = f"{word[0].upper()}{word[1:]} per round"
    y = _axis(runs[0], f"{runs[0].split} {word}, mean over clients")
    svg = line_chart(series, title=title, x=Axis("round", "whole"), y=y, look=own or PAGE)
    direction = "lower" if runs[0].regression else "higher"
    reading = (
        f"After an evaluated round every client personalises the shared model and is scored; {direction} is better."
    )
    reading += _BAND * any(s.low for s in series)
    if missed := sum(run.unscored for run in runs):
        reading += f" {missed} evaluation{'s' * (missed != 1)} failed and {'are' if missed > 1 else 'is'} left out."
    return Figure(title, svg, reading)


def _curves(runs: Sequence[Run], key: str, own: Look | None = None) -> list[Series]:
    series = []
    for i, run in enumerate(runs):
        x, y = run.curve(key)
        if any(value is not None for value in y):
            low, high = _band(y, run.curve(f"{key}_half")[1], 1.0 if key == "accuracy" else math.inf)
            series.append(Series(run.name, y, x, slot=slot_of(runs, i, own), low=low, high=high))
    return series


def _band(middle: Sequence[float | None], halves: Sequence[float | None], most: float) -> tuple[Ends, Ends]:
    """Return the ends of the intervals around all values, within 0 and `most`; empty where no width is known."""
    if not any(half is not None for half in halves):
        return (), ()
    pairs = [None if m is None or h is None else (m, h) for m, h in zip(middle, halves, strict=True)]
    return [p and max(p[0] - p[1], 0.0) for p in pairs], [p and min(p[0] + p[1], most) for p in pairs]


def _tip(run: Run, client: Client, *lines: str) -> str:
    sizes = (("training", finite(client.values.get("n_train"))), (run.split, run.rows(client)))
    return "\n".join([client.name, *lines, *(f"{n:.0f} {kind} samples" for kind, n in sizes if n is not None)])


def _sizes(run: Run, clients: Sequence[Client], count: int) -> list[float]:
    """Return the radii of clients' dots in a figure of `count` dots; small clients have smaller dots."""
    radius = usual_radius(count)
    return [radius / 2 if run.small(client) else radius for client in clients]


def _caveats(runs: Sequence[Run], shown: int, of: int, which: str) -> str:
    """Tell the reader which clients are drawn, and that chance decides where small clients lie."""
    thinned = f" {shown:,} of {of:,} dots are drawn: {which}. The file clients.csv holds every client." * (shown < of)
    few = f" Smaller dots are clients with fewer than {FEW_ROWS} {runs[0].split} rows; chance decides where they lie."
    return thinned + few * any(run.small_clients for run in runs)


def _ranked(
    runs: Sequence[Run], key: str, title: str, x: str, y: Axis, reading: str, falling: bool = False, **options: Any
) -> Figure | None:
    """Draw every client's measure, sorted by it; of very many clients, both ends and even steps between them."""
    most, series = thin.room(len(runs)), []
    rows = [
        sorted(_named(run, names, key), key=lambda each: each[0], reverse=falling)
        for run, names in zip(runs, people(runs), strict=True)
    ]
    chosen = [thin.ranks(len(row), most) for row in rows]
    dots, total = sum(map(len, chosen)), sum(map(len, rows))
    for i, (run, row, places) in enumerate(zip(runs, rows, chosen, strict=True)):
        if row:
            values, clients, who = zip(*(row[place] for place in places), strict=True)
            tips = [_tip(run, c, f"{run.name}: {y.write(v)}") for v, c in zip(values, clients, strict=True)]
            at, sizes = [place + 1.0 for place in places], _sizes(run, clients, dots)
            series.append(Series(run.name, values, at, tips, sizes, slot_of(runs, i), who=who))
    if not series:
        return None
    svg = scatter(series, title=title, x=Axis(x, "whole"), y=y, look=_TALL, **options)
    return Figure(title, svg, reading + _caveats(runs, dots, total, "both ends, and even steps between"))


def people(runs: Sequence[Run]) -> list[list[str]]:
    """Return the names of every run's clients; where the runs' data differ, a name includes its run."""
    data = [(run.dataset, str(run.config.get("partition_hash"))) for run in runs]
    owners = [f" of {runs[data.index(own)].name}" if len({*data}) > 1 else "" for own in data]
    return [[f"{client.name}{owner}" for client in run.clients] for run, owner in zip(runs, owners, strict=True)]


def _named(run: Run, names: Sequence[str], key: str) -> list[tuple[float, Client, str]]:
    """Return the clients of a run that have a measure, as (value, client, name on the page)."""
    found = zip(run.clients, names, strict=True)
    return [(v, client, name) for client, name in found if (v := client.values.get(key)) is not None]


def spread(runs: Sequence[Run]) -> Figure | None:
    """Draw every client's accuracy (or RMSE), sorted."""
    y = _axis(runs[0], f"{runs[0].split} {_word(runs[0])}")
    reading = "Each dot is a client. A flat row means that all clients do equally well; those at the left end do worst."
    x = "clients, from the worst-off to the best-off"
    return _ranked(runs, runs[0].metric, "Clients from worst to best", x, y, reading, falling=runs[0].regression)


def personal_gain(runs: Sequence[Run]) -> Figure | None:
    """Draw each client's personal model against the prior, with the client's label level where there is one."""
    metric, axis, most, series = runs[0].metric, _axis(runs[0]), thin.room(len(runs)), []
    level = any(c.values.get(f"prior_level_{metric}") is not None for run in runs for c in run.clients)
    keys = [f"prior_level_{metric}", f"prior_{metric}"][not level :]
    rows = [
        [(c, before, after, name) for after, c, name in _named(run, names, metric)
         if (before := next((v for key in keys if (v := c.values.get(key)) is not None), None)) is not None]
        for run, names in zip(runs, people(runs), strict=True)
    ]  # fmt: skip
    chosen = [[row[place] for place in thin.sample(len(row), most)] for row in rows]
    dots = sum(map(len, chosen))
    for i, (run, known) in enumerate(zip(runs, chosen, strict=True)):
        if known:
            clients, x, y, who = zip(*known, strict=True)
            tips = [_tip(run, c, f"{run.name}: {axis.write(b)} to {axis.write(a)}") for c, b, a, _ in known]
            series.append(Series(run.name, y, x, tips, _sizes(run, clients, dots), slot_of(runs, i), who=who))
    if not series:
        return None
    names = ("prior + label level" if level else "prior alone", "personal model")
    start, end = (replace(axis, label=f"{_word(runs[0])} of the {model}") for model in names)
    svg = scatter(series, title="What personalising gains", x=start, y=end, look=_TALL, diagonal=True)
    gain, harm = ("below", "above") if runs[0].regression else ("above", "below")
    reading = f"Each dot is a client. Clients {gain} the dashed line gain from personalising, clients {harm} it lose."
    if level:
        reading += " The prior already uses the client's own label frequencies (the label level)."
    reading += _caveats(runs, dots, sum(map(len, rows)), "a random sample")
    return Figure("What personalising gains", svg, reading)


def comparable(runs: Sequence[Run]) -> list[int]:
    """Return the numbers of the largest group of runs that scored the same clients of the same partition."""
    groups: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        keys = tuple(client.key for client in run.clients)
        if keys and run.metric == runs[0].metric:
            groups.setdefault((run.dataset, str(run.config.get("partition_hash")), keys), []).append(i)
    group = max(groups.values(), key=len, default=[])
    return group if len(group) > 1 else []


def duel(runs: Sequence[Run]) -> Figure | None:
    """Draw two runs client by client; the page's script redraws the points when a reader chooses other runs."""
    group = comparable(runs)
    if not group:
        return None
    metric, axis = runs[0].metric, _axis(runs[0])
    values = [[c.values.get(metric) for c in runs[i].clients] for i in group]
    outer = ticks(*axis.cover(v for row in values for v in row))  # of all runs: the axes stay when the choice changes
    low, high = outer[0], outer[-1]
    x, y = (replace(axis, label=runs[i].name, span=(low, high)) for i in group[:2])
    names, drawn = people(runs)[group[0]], thin.sample(len(values[0]), thin.PER_RUN)
    who = [names[place] for place in drawn]
    points = Series("clients", [values[1][i] for i in drawn], [values[0][i] for i in drawn], tips=who, who=who)
    svg = scatter([points], title="Two runs, client by client", x=x, y=y, look=_TALL, diagonal=True)
    reading = (
        "Each dot is a client, scored under both runs. It has the colour and shape of the run that is better for it."
    )
    if len(drawn) < len(names):
        reading += f" {len(drawn):,} of {len(names):,} clients are drawn, at random; the counts above include all."
    return Figure("Two runs, client by client", svg, reading, choices=[(i, runs[i].name) for i in group])


def reliability(runs: Sequence[Run], own: Look | None = None) -> Figure | None:
    """Draw how often predictions of a given confidence are right."""
    series = []
    for i, run in enumerate(runs):
        bins = [
            (confidence, accuracy, finite(row.get("count")) or 0.0)
            for row in run.table("reliability")
            if (confidence := finite(row.get("confidence"))) is not None
            and (accuracy := finite(row.get("accuracy"))) is not None
            and row.get("count") != 0
        ]
        if bins:
            most = max(count for *_, count in bins) or 1.0
            tips = [f"{run.name}: {a:.1%} right at confidence {c:.1%}\n{n:.0f} predictions" for c, a, n in bins]
            sizes = [2.5 + 6.5 * (n / most) ** 0.5 for *_, n in bins]
            confidences, accuracies = [c for c, *_ in bins], [a for _, a, _ in bins]
            series.append(Series(run.name, accuracies, confidences, tips, sizes, slot_of(runs, i, own)))
    if not series:
        return None
    x, y = Axis("confidence of the prediction", "percent", (0.0, 1.0)), Axis("share that is right", "percent")
    look = replace(own or PAGE, height=_TALL.height)
    svg = scatter(series, title="Reliability", x=x, y=y, look=look, diagonal=True, connect=True)
    reading = (
        "On the dashed line confidence equals accuracy; below it the models are overconfident. "
        "Larger dots stand for more predictions."
    )
    return Figure("Reliability", svg, reading)


def coverage(runs: Sequence[Run]) -> Figure | None:
    """Draw every client's share of targets inside the 90% interval, sorted."""
    known = [v for run in runs for c in run.clients if (v := c.values.get("coverage")) is not None]
    least = min([0.8, *known])
    y = Axis(f"share of {runs[0].split} targets inside", "percent", (max(math.floor(least * 10) / 10, 0.0), 1.0))
    reading = (
        "Each dot is a client. On the dashed line the intervals are as wide as they claim; below it they are too "
        f"narrow, above it too wide. A client with few {runs[0].split} samples strays from the line by chance."
    )
    x = "clients, from the least covered to the most"
    return _ranked(runs, "coverage", "Coverage of the 90% interval", x, y, reading, level=0.9)


def entropy(runs: Sequence[Run]) -> list[Figure]:
    """Draw for each run how uncertain its right and its wrong predictions are."""
    reading = "Where uncertainty is useful, right predictions have a low entropy and wrong ones a high entropy."
    title, groups = "Entropy of right and wrong predictions", {"correct": "right", "wrong": "wrong"}
    found = [run.summary.get("entropy_histogram") for run in runs]
    drawn = [entropies(runs, i, each, groups, title, reading) for i, each in enumerate(found) if isinstance(each, dict)]
    return [figure for figure in drawn if figure]


def entropies(
    runs: Sequence[Run], i: int, counts: Mapping[str, Any], groups: Mapping[str, str], title: str, reading: str
) -> Figure | None:
    """Draw the entropies of two groups of predictions of run `i` as histograms; none where the counts do not fit.

    `counts` holds the edges of the bins and the predictions of each group in each bin; `groups` names the groups.
    """
    edges, *rows = ([finite(v) for v in counts.get(key) or []] for key in ("edges", *groups))
    known = [edge for edge in edges if edge is not None]
    if len(known) < 2 or len(known) < len(edges) or any(len(row) != len(edges) - 1 for row in rows):
        return None
    several = len(runs) > 1
    heading = title + (f": {runs[i].name}" if several else "")
    series = []
    for name, row in zip(groups.values(), rows, strict=True):
        total = sum(count or 0.0 for count in row) or 1.0
        series.append(Series(name, [(count or 0.0) / total for count in row]))
    x, y = Axis("entropy (nats)"), Axis("share of the predictions of each group", "percent")
    colours = (PAGE.style(i).colour, PAGE.ink if several else PAGE.colours[1])
    svg = histogram(known, series, title=heading, x=x, y=y, look=replace(_TALL, colours=colours))
    return Figure(heading, svg, reading, run=slot_of(runs, i))


def prior_width(runs: Sequence[Run]) -> list[Figure]:
    """Draw how wide the prior is in each layer, for runs that learned it (a prior that was not has one width).

    A single run shows the quartiles of its prior where they can be read; several runs show their means.
    """
    if len(runs) == 1 and (own := _layers(runs[0])):
        return own
    rows = [{str(row.get("name")): finite(row.get("mean_std")) for row in run.table("prior_width")} for run in runs]
    rows = [row if _differ([v for v in row.values() if v is not None]) else {} for row in rows]
    layers = list(dict.fromkeys(name for row in rows for name in row))
    if not layers:
        return []
    series = [
        Series(run.name if len(runs) > 1 else "mean σ", [row.get(layer) for layer in layers], slot=slot_of(runs, i))
        for i, (run, row) in enumerate(zip(runs, rows, strict=True))
        if row
    ]
    x = Axis("mean standard deviation of the prior")
    svg = bars(layers, series, title="Where the prior is wide", x=x, look=PAGE)
    return [Figure("Where the prior is wide", svg, _WIDE)]


def _layers(run: Run) -> list[Figure]:
    """Draw the quartiles of the prior's σ and |mean| in each layer; nothing where σ was not learned."""
    layers = run.layers
    if not _differ([v for parts in layers.values() for v in parts["σ"]]):
        return []
    figures, half = [], "A dot is the median of a layer, its line the middle half of the weights."
    for place, (name, heading, label, reading) in enumerate(
        (
            ("σ", "Where the prior is wide", "standard deviation σ of the prior", _WIDE),
            ("|mean|", "How large the prior's means are", "|mean| of the prior", _LOOSE),
        )
    ):
        rows = [parts[name] for parts in layers.values()]
        ends = [v for row in rows for v in row]
        wide = min(ends) > 0 and max(ends) > 20 * min(ends)  # then powers of ten, else plain numbers
        low, middle, high = zip(*([math.log10(v) if wide else v for v in row] for row in rows), strict=True)
        look = replace(PAGE, colours=PAGE.colours[place:])
        series = [Series(name, middle, low=low, high=high)]
        svg = ranges(list(layers), series, title=heading, x=Axis(label, "power" if wide else "number"), look=look)
        figures.append(Figure(heading, svg, f"{reading} {half}"))
    return figures


def _differ(values: Sequence[float]) -> bool:
    return bool(values) and max(values) - min(values) > 1e-3 * max(map(abs, values))


def partitions(runs: Sequence[Run]) -> list[Figure]:
    """Draw who holds what, once for every distinct partition."""
    holders: dict[str, list[Run]] = {}
    for run in runs:
        if found := Partition.read(run.partition or run.manifest):
            holders.setdefault(heat_map(found, PAGE), []).append(run)
    figures = []
    for svg, group in holders.items():
        kind = group[0].partition_kind
        heading = "Who holds what" + (f": {kind}" if kind else "")
        held = "how many training samples it has" if group[0].regression else "the classes of its training samples"
        reading = f"Each row is a client and shows {held}. Clients with similar rows have similar data."
        reading += f" Used by {', '.join(run.name for run in group)}." * (len(holders) > 1)
        reading += f" {group[0].divided}" * bool(group[0].divided)
        figures.append(Figure(heading, svg, reading))
    return figures
