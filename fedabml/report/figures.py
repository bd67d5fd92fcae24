"""The figures of a report: each function draws one from the runs, or nothing where they lack the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..data.rows import FEW_ROWS
from . import thin
from .canvas import Series, bars, histogram, line_chart, ranges, scatter, usual_radius
from .frame import PAGE, Axis, Look, finite, ticks
from .heat_map import Partition, heat_map
from .page import Figure
from .read import Client, Run

_TALL = replace(PAGE, height=350)
_BAND = " The band is the 95% interval of the mean over seeds."
_WIDE = "A wide layer is one where clients may differ; a narrow one is common knowledge that all of them share."

Ends = Sequence[float | None]


def slot_of(runs: Sequence[Run], i: int, own: Look | None = None) -> int | None:
    """The legend entry of a run: the page's, unless the picture, in a look of its own, has a legend, too."""
    return i if len(runs) > 1 and own is None else None


def _axis(run: Run, label: str = "") -> Axis:
    return Axis(label or run.metric, "number" if run.regression else "percent")


def _word(run: Run) -> str:
    return "RMSE" if run.regression else "accuracy"


def loss(runs: Sequence[Run]) -> Figure | None:
    """Training loss per round."""
    series = _curves(runs, "loss")
    if not series:
        return None
    svg = line_chart(series, title="Loss per round", x=Axis("round", "whole"), y=Axis("training loss"), look=PAGE)
    reading = "The mean training loss of the clients that took part in each round; it should fall and level off."
    return Figure("Loss per round", svg, reading)


def progress(runs: Sequence[Run], own: Look | None = None) -> Figure | None:
    """Accuracy (or RMSE) per evaluated round, of several seeds with bands; a single run also shows its prior alone."""
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
    reading = f"After the given round every client personalises the shared model and is tested; {direction} is better."
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
    """The ends of an interval around every value, from 0 to `most`; none where they are not known."""
    if not any(half is not None for half in halves):
        return (), ()
    pairs = [None if m is None or h is None else (m, h) for m, h in zip(middle, halves, strict=True)]
    return [p and max(p[0] - p[1], 0.0) for p in pairs], [p and min(p[0] + p[1], most) for p in pairs]


def _tip(run: Run, client: Client, *lines: str) -> str:
    sizes = (("training", finite(client.values.get("n_train"))), (run.split, run.rows(client)))
    return "\n".join([client.name, *lines, *(f"{n:.0f} {kind} samples" for kind, n in sizes if n is not None)])


def _sizes(run: Run, clients: Sequence[Client], count: int) -> list[float]:
    """Radii of the clients' dots, of which the figure has `count`: small clients have smaller dots."""
    radius = usual_radius(count)
    return [radius / 2 if run.small(client) else radius for client in clients]


def _caveats(runs: Sequence[Run], shown: int, of: int, which: str) -> str:
    """What a reader must know about the dots: which clients they are, and that chance moves the small ones."""
    thinned = f" Of {of:,} dots {shown:,} are drawn: {which}. The file clients.csv holds every client." * (shown < of)
    few = f" Smaller dots are clients with fewer than {FEW_ROWS} {runs[0].split} rows: chance decides their place."
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
    return Figure(title, svg, reading + _caveats(runs, dots, total, "both ends, and even steps between them"))


def people(runs: Sequence[Run]) -> list[list[str]]:
    """The names of every run's clients, alike for the same client alone: where data differ, they tell whose it is."""
    data = [(run.dataset, str(run.config.get("partition_hash"))) for run in runs]
    owners = [f" of {runs[data.index(own)].name}" if len({*data}) > 1 else "" for own in data]
    return [[f"{client.name}{owner}" for client in run.clients] for run, owner in zip(runs, owners, strict=True)]


def _named(run: Run, names: Sequence[str], key: str) -> list[tuple[float, Client, str]]:
    """The clients of a run that have a measure: the measure, the client, and its name on the page."""
    found = zip(run.clients, names, strict=True)
    return [(v, client, name) for client, name in found if (v := client.values.get(key)) is not None]


def spread(runs: Sequence[Run]) -> Figure | None:
    """Draw every client's accuracy (or RMSE), sorted."""
    y = _axis(runs[0], f"{runs[0].split} {_word(runs[0])}")
    reading = "One dot is one client. A flat row means that all clients are served alike; the left end is who is not."
    x = "clients, from the worst-off to the best-off"
    return _ranked(runs, runs[0].metric, "Clients from worst to best", x, y, reading, falling=runs[0].regression)


def personal_gain(runs: Sequence[Run]) -> Figure | None:
    """Draw each client's personal model against the prior: with the client's label level, where there is one."""
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
    reading = f"One dot is one client. Dots {gain} the dashed line gained from personalising, dots {harm} it lost."
    if level:
        reading += " The label level alone, the client's own label frequencies, is counted with the prior."
    reading += _caveats(runs, dots, sum(map(len, rows)), "some clients, drawn at random")
    return Figure("What personalising gains", svg, reading)


def comparable(runs: Sequence[Run]) -> list[int]:
    """The largest group of runs (their places) that measured the same clients of the same partition."""
    groups: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        keys = tuple(client.key for client in run.clients)
        if keys and run.metric == runs[0].metric:
            groups.setdefault((run.dataset, str(run.config.get("partition_hash")), keys), []).append(i)
    group = max(groups.values(), key=len, default=[])
    return group if len(group) > 1 else []


def duel(runs: Sequence[Run]) -> Figure | None:
    """Two runs client by client. The page's script redraws the points when others are chosen."""
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
        "One dot is one client, tested under both runs; it has the colour and shape of the run that serves it better."
    )
    if len(drawn) < len(names):
        reading += f" {len(drawn):,} of {len(names):,} clients are drawn, at random; the counts above are of all."
    return Figure("Two runs, client by client", svg, reading, choices=[(i, runs[i].name) for i in group])


def reliability(runs: Sequence[Run], own: Look | None = None) -> Figure | None:
    """How often predictions of a given confidence are right."""
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
        "On the dashed line confidence is honest; below it the models are too sure. Larger dots, more predictions."
    )
    return Figure("Reliability", svg, reading)


def coverage(runs: Sequence[Run]) -> Figure | None:
    """Draw every client's share of targets inside the 90% interval, sorted."""
    known = [v for run in runs for c in run.clients if (v := c.values.get("coverage")) is not None]
    least = min([0.8, *known])
    y = Axis(f"share of {runs[0].split} targets inside", "percent", (max(math.floor(least * 10) / 10, 0.0), 1.0))
    reading = (
        "One dot is one client. On the dashed line the intervals are honest; below it they are too narrow, above it too"
        f" wide. A client with few {runs[0].split} samples strays from the line by chance."
    )
    x = "clients, from the least covered to the most"
    return _ranked(runs, "coverage", "Coverage of the 90% interval", x, y, reading, level=0.9)


def entropy(runs: Sequence[Run]) -> list[Figure]:
    """For each run, how unsure it was where it was right and where it was wrong."""
    figures = []
    for i, run in enumerate(runs):
        counts = run.summary.get("entropy_histogram")
        counts = counts if isinstance(counts, dict) else {}
        edges, right, wrong = ([finite(v) for v in counts.get(k) or []] for k in ("edges", "correct", "wrong"))
        known = [edge for edge in edges if edge is not None]
        if len(edges) < 2 or len(known) < len(edges) or not len(right) == len(wrong) == len(edges) - 1:
            continue
        series = [Series(name, shares(row)) for name, row in (("right", right), ("wrong", wrong))]
        heading = "Entropy, right and wrong" + (f": {run.name}" if len(runs) > 1 else "")
        x, y = Axis("entropy (nats)"), Axis("share of the right, of the wrong", "percent")
        own = (PAGE.style(i).colour, PAGE.ink if len(runs) > 1 else PAGE.colours[1])
        svg = histogram(known, series, title=heading, x=x, y=y, look=replace(_TALL, colours=own))
        reading = "Useful uncertainty piles up the wrong predictions at the right end and the right ones at the left."
        figures.append(Figure(heading, svg, reading, run=slot_of(runs, i)))
    return figures


def shares(counts: Sequence[float | None]) -> list[float]:
    """Counts as shares of their sum."""
    total = sum(c or 0.0 for c in counts)
    return [(c or 0.0) / total if total else 0.0 for c in counts]


def prior_width(runs: Sequence[Run]) -> list[Figure]:
    """How wide the prior is per layer, of the runs that have learned it: equal widths are as set.

    A single run shows quartiles of its prior, where they can be read; several are held side by side by their means.
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
    """The quartiles of the prior's σ per layer, and those of its means; none where σ was not learned."""
    layers = run.layers
    if not _differ([v for parts in layers.values() for v in parts["σ"]]):
        return []
    figures, half = [], "A dot is a layer's median, its line the middle half of its weights."
    for place, (name, heading, label, reading) in enumerate(
        (
            ("σ", "Where the prior is wide", "standard deviation σ of the prior", _WIDE),
            ("|mean|", "How large its means are", "|mean| of the prior", "Where σ is as large, it hardly binds."),
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
