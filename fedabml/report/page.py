"""The page around the figures: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from ..data.rows import FEW_ROWS
from ..evaluation.measures import MEASURES, Measure
from . import figures, thin, unseen
from .figures import Figure
from .frame import DARK, LIGHT, PAGE, Look, text
from .read import Run

MISSING, TOO_FEW = "–", "too few test rows"
_TILES = (
    *("accuracy", "rmse", "nll", "ece", "coverage_pooled", "accuracy_worst_decile"),
    *("prior_accuracy", "prior_rmse", "prior_level_accuracy", "traffic", "seconds"),
)

_SAMPLES = {"n_train": "Train", "n_val": "Validation", "n_test": "Test"}
_CLIENT_COLUMNS = (
    *("accuracy", "prior_accuracy", "prior_level_accuracy", "rmse", "prior_rmse"),
    *("nll", "ece", "brier", "coverage", "entropy", "mutual_information"),
)


def render(runs: Sequence[Run], title: str | None = None, summary: str = "") -> str:
    """The report on one run, or the comparison of several, as a complete HTML document; it may bring its summary."""
    title = title or _title(runs)
    width = figures.prior_width(runs)
    body = [
        _header(runs, title),
        "<main>",
        _tiles(runs[0]) if len(runs) == 1 else _legend(runs) + (summary or _comparison(runs)),
        section("Training", [figures.loss(runs), figures.progress(runs)]),
        section(
            "Clients",
            [figures.spread(runs), figures.personal_gain(runs), figures.duel(runs, _choices(runs))],
            _client_tables(runs),
        ),
        section(
            "Uncertainty",
            [figures.reliability(runs), *figures.entropy(runs), *unseen.figures(runs), figures.coverage(runs)],
        ),
        section("Prior and data" if width else "Data", [*width, *figures.partitions(runs)]),
        _configuration(runs),
        "</main>",
    ]
    return document(title, body, _data(runs))


def document(title: str, body: Iterable[str], data: Mapping[str, Any]) -> str:
    """A complete HTML document around the parts of its body; `data` are what the script needs."""
    after = [
        '<div id="tip" role="status" hidden></div>',
        f'<script type="application/json" id="data">{_safe_json(data)}</script>',
        f"<script>{_asset('page.js')}</script>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_colours()}{_asset('page.css')}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in (*body, *after) if part)
        + "\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("fedabml.report").joinpath(name).read_text(encoding="utf-8")


def _colours() -> str:
    """The pictures' two looks as CSS variables: light, dark by the system's wish, and dark by the button."""

    def variables(look: Look) -> str:
        named = {"ink": look.ink, "muted": look.muted, "grid": look.grid, "paper": look.paper}
        named |= {f"c{i}": colour for i, colour in enumerate(look.colours)}
        return "".join(f"--{name}:{value};" for name, value in named.items())

    light, dark = (
        f"color-scheme:light;{variables(LIGHT)}--back:#f4f6f8;",
        f"color-scheme:dark;{variables(DARK)}--back:#0e1115;",
    )
    wish = f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    return f":root{{{light}}}\n{wish}\n:root[data-theme=dark]{{{dark}}}\n"


def _safe_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    plain = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the script needs: the runs' names, the drawn clients' measure, and who serves how many clients better."""
    group, metric = figures.comparable(runs), runs[0].metric
    drawn = thin.sample(len(runs[group[0]].clients), thin.PER_RUN) if group else []
    names = figures.people(runs)[group[0]] if group else []
    every = {i: [client.values.get(metric) for client in runs[i].clients] for i in group}
    return {
        "runs": [run.name for run in runs] if len(runs) > 1 else [],
        "marks": [PAGE.style(i)._asdict() for i in range(len(runs))] if len(runs) > 1 else [],
        "percent": not runs[0].regression,
        "clients": [names[place] for place in drawn],
        "values": {i: [own[place] for place in drawn] for i, own in every.items()},
        "tally": _tally(every, runs[0].regression),
    }


def _tally(values: Mapping[int, Sequence[float | None]], regression: bool) -> dict[int, dict[int, list[int]]]:
    """For every pair of runs the clients that the first serves better, that the second does, and the others."""
    table = {i: (-1 if regression else 1) * np.array(own, float) for i, own in values.items()}  # None becomes NaN
    return {
        i: {j: [int((a > b).sum()), int((a < b).sum()), int((a == b).sum())] for j, b in table.items()}
        for i, a in table.items()
    }


def _title(runs: Sequence[Run]) -> str:
    data = sorted({run.dataset for run in runs if run.dataset})
    place = f" on {', '.join(data)}" if data else ""
    return f"{runs[0].algorithm}{place}" if len(runs) == 1 else f"{len(runs)} runs{place}"


def _header(runs: Sequence[Run], title: str) -> str:
    """The title, the facts that all runs share, and the theme button."""
    facts = []
    for key, form in (
        ("dataset", "{}"),
        ("model", "{}"),
        ("clients", "{} client"),
        ("rounds", "{} round"),
        ("seed", "seed {}"),
    ):
        found = {str(value) for run in runs if (value := run.fact(key)) is not None}
        if len(found) == 1:
            value = found.pop()
            shown = f"{int(value):,}" if key in ("clients", "rounds") and value.isdecimal() else value
            facts.append(form.format(shown) + "s" * (key in ("clients", "rounds") and value != "1"))
    line = " · ".join(text(fact) for fact in facts)
    return heading(title, line)


def heading(title: str, line: str) -> str:
    """The page's head: its title, a line of HTML under it, and the theme button."""
    toggle = '<button id="theme" type="button" title="Light or dark">◐<span> theme</span></button>'
    return f"<header><div><h1>{text(title)}</h1><p>{line}</p></div>{toggle}</header>"


def _tiles(run: Run) -> str:
    """The first numbers, large. The leading measure is always there; others only where the run has them."""
    tiles = []
    for key, measure in MEASURES.items():
        if _has_tile(run, key):
            value = _shown(run, measure)
            kind = " lead" if key == run.metric else " words" if value == TOO_FEW else ""
            meaning = measure.meaning + f" with at least {FEW_ROWS} {run.split} rows" * _of_large(run, key)
            parts = f"<dt>{text(measure.title)}</dt><dd>{text(value)}</dd><p>{text(meaning)}</p>"
            tiles.append(f'<div class="tile{kind}">{parts}</div>')
    return f'<section aria-label="Summary"><dl class="tiles">{"".join(tiles)}</dl>{small_note(run)}</section>'


def _of_large(run: Run, key: str) -> bool:
    """Whether the run's value is taken over clients with enough rows alone."""
    return key == "accuracy_worst_decile" and bool(run.small_clients)


def _has_tile(run: Run, key: str) -> bool:
    """Whether a measure has a tile: the main one always, pooled ones only where the run has small clients."""
    if key in (f"{run.metric}_pooled", f"{run.metric}_worst_decile") and run.small_clients:
        return True
    return key in _TILES and (key == run.metric or run.number(key) is not None)


def _shown(run: Run, measure: Measure) -> str:
    """Format the run's value of a measure, or say why there is none."""
    value = run.number(measure.key)
    if value is None:
        return TOO_FEW if _of_large(run, measure.key) else MISSING
    return measure.format(value)


def best_runs(runs: Sequence[Run], measure: Measure) -> set[str]:
    """Return the names of the best runs by a measure, each among the runs on the same data."""
    winners = set[str]()
    for data in {run.dataset for run in runs} if measure.target is not None else ():
        known = [(run.name, v) for run in runs if run.dataset == data and (v := run.number(measure.key)) is not None]
        distances = {name: measure.distance(value) for name, value in known}
        least = min(distances.values(), default=0.0)
        winners |= {name for name, distance in distances.items() if distance == least < max(distances.values())}
    return winners


def small_note(run: Run) -> str:
    """A sentence on the clients with too few rows to be judged one by one; empty where there are none."""
    if not run.small_clients:
        return ""
    scored = sum(client.values.get(run.metric) is not None for client in run.clients)
    return (
        f'<p class="note">{run.small_clients:,} of {scored:,} clients (marked °) have fewer than {FEW_ROWS} '
        f"{run.split} rows: chance decides their measures. Pooled numbers count every row alike; means over clients do "
        "not.</p>"
    )


def _legend(runs: Sequence[Run]) -> str:
    buttons = (
        f'<button type="button" data-legend="{i}" aria-pressed="true">{swatch(i)}{text(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    return f'<nav class="legend" aria-label="Runs; press a name to hide or show it">{"".join(buttons)}</nav>'


def swatch(run: int) -> str:
    """A run's colour and shape, as its legend entry and its rows show them."""
    style = PAGE.style(run)
    width = 11 if style.plain else 20
    size = f'viewBox="0 0 {width} 11" width="{width}" height="11"'
    return f'<i><svg {size} aria-hidden="true">{style.key(0, 0)}</svg></i>'


def _comparison(runs: Sequence[Run]) -> str:
    shown = [m for m in MEASURES.values() if any(run.number(m.key) is not None for run in runs)]
    facts = [key for key in ("dataset", "model", "seed", "rounds") if len({str(run.fact(key)) for run in runs}) > 1]
    best = {measure.key: best_runs(runs, measure) for measure in shown}
    head = [("Run", ""), *((key.capitalize(), "") for key in facts), *((m.title, m.meaning) for m in shown)]
    rows = []
    for i, run in enumerate(runs):
        cells = [f'<th scope="row" data-v="{i}">{swatch(i)}{text(run.name)}</th>']
        cells += [f"<td>{text(run.fact(key) if run.fact(key) is not None else MISSING)}</td>" for key in facts]
        cells += [_cell(measure, run, run.name in best[measure.key]) for measure in shown]
        rows.append(f'<tr data-run="{i}">{"".join(cells)}</tr>')
    note = "★ marks the best of a column among runs on the same data. Press a heading to sort, a run's name to hide it."
    if len({run.dataset for run in runs}) > 1:
        note += " The runs are not all on the same data: the charts show them together, but only like data compare."
    return f'<section aria-label="Summary">{table(head, rows)}<p class="note">{note}</p></section>'


def _cell(measure: Measure, run: Run, best: bool) -> str:
    value, star = run.number(measure.key), '<b aria-label="best">★</b>' if best else ""
    attributes = "" if value is None else f' data-v="{value:.9g}"'
    return f"<td{' class=best' if best else ''}{attributes}>{text(_shown(run, measure))}{star}</td>"


def table(head: Iterable[tuple[str, str]], rows: Iterable[str], kind: str = "") -> str:
    """A table that sorts by its headings and scrolls sideways where it is too wide."""
    cells = (
        f'<th scope="col"><button type="button" title="{text(hint)}">{text(name)}</button></th>' for name, hint in head
    )
    return (
        '<p class="more" aria-hidden="true" hidden>scroll →</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="sortable {kind}">'
        f"<thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def section(heading: str, content: Iterable[Figure | None], after: str = "") -> str:
    drawn = "".join(_figure(figure) for figure in content if figure)
    return f'<section><h2>{heading}</h2><div class="grid">{drawn}</div>{after}</section>' if drawn or after else ""


def _figure(figure: Figure) -> str:
    run = "" if figure.run is None else f' data-run="{figure.run}"'
    caption = f"<figcaption>{text(figure.reading)}</figcaption>"
    return f"<figure{run}><h3>{text(figure.heading)}</h3>{figure.controls}{figure.svg}{caption}</figure>"


def _choices(runs: Sequence[Run]) -> str:
    def select(name: str, label: str, chosen: int) -> str:
        options = "".join(
            f'<option value="{i}"{" selected" if i == chosen else ""}>{text(runs[i].name)}</option>' for i in group
        )
        return f'<label>{label} <select id="{name}">{options}</select></label>'

    group = figures.comparable(runs)
    if not group:
        return ""
    choose = select("across", "across", group[0]) + select("up", "up", group[1])
    return f'<p class="choose">{choose}</p><p class="choose" id="score" role="status"></p>'


def _client_tables(runs: Sequence[Run]) -> str:
    most = thin.room(len(runs)) // 2
    return "".join(_client_table(run, len(runs) > 1, most) for run in runs if run.clients)


def _client_table(run: Run, named: bool, most: int) -> str:
    columns: dict[str, tuple[str, Callable[[float], str]]] = {k: (v, "{:.0f}".format) for k, v in _SAMPLES.items()}
    columns |= {key: (MEASURES[key].title, MEASURES[key].format) for key in _CLIENT_COLUMNS}
    shown = [(key, *c) for key, c in columns.items() if any(each.values.get(key) is not None for each in run.clients)]
    rows = []
    places = thin.ends_and_sample([client.values.get(run.metric) for client in run.clients], most)
    for i in places:
        client = run.clients[i]
        cells = [f'<th scope="row" data-v="{i}">{text(client.name)}{" °" * run.small(client)}</th>']
        for key, _, write in shown:
            value = client.values.get(key)
            cells.append(f"<td>{MISSING}</td>" if value is None else f'<td data-v="{value:.9g}">{write(value)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    count = f"{len(run.clients):,} client{'s' * (len(run.clients) != 1)}"
    each = run.fact("clients")  # of a comparison's row: in each of its seeds
    seeds = f" ({each} in each seed)" if isinstance(each, int) and each < len(run.clients) else ""
    heading = f"Table of {count}{seeds}{': ' + run.name if named else ''}"
    made, note = table([("Client", ""), *((label, "") for _, label, _ in shown)], rows), ""
    if len(places) < len(run.clients):
        note = (
            f'<p class="note">The table shows {len(places):,} of {count}: the worst-off, the best-off and some of the '
            "others, drawn at random. The file clients.csv holds every client.</p>"
        )
    return f"<details><summary>{text(heading)}</summary>{note}{made}{small_note(run)}{_chance(run)}</details>"


def _chance(run: Run) -> str:
    """What the calibration error of a single client is worth."""
    counts = sorted(n for c in run.clients if c.values.get("ece") is not None and (n := run.rows(c)))
    if not counts:
        return ""
    n = counts[len(counts) // 2]
    return (
        '<p class="note">The ECE of one client is biased upwards: with n rows an error of about 1/√n is chance'
        f" (about {n**-0.5:.2g} for the {n:.0f} {run.split} rows of the client in the middle).</p>"
    )


def _configuration(runs: Sequence[Run]) -> str:
    """The settings of config.json, the digest of the prior and the facts of the manifest, a column per run.

    Rows that differ are marked.
    What the command line asked for (`run.`) is left out: the settings say what came of it, and the command is shown.
    """
    prior = [{key: run.summary[key] for key in ("prior_digest",) if key in run.summary} for run in runs]
    flat = [
        dict(_flatten({**run.config, **own})) | dict(_flatten(run.manifest, "manifest.", lists=False))
        for run, own in zip(runs, prior, strict=True)
    ]
    every = dict.fromkeys(key for row in flat for key in row)
    keys = [key for key in every if key != "command" and not key.startswith("run.")]
    rows = []
    for key in keys:
        values = [row.get(key, MISSING) for row in flat]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        rows.append(
            f'<tr{differs}><th scope="row">{_breakable(key)}</th>{"".join(f"<td>{text(v)}</td>" for v in values)}</tr>'
        )
    commands = "".join(f"<pre>{text(row['command'])}</pre>" for row in flat if "command" in row)
    if not rows and not commands:
        return ""
    head = [("Setting", ""), *((run.name if len(runs) > 1 else "Value", "") for run in runs)]
    note = '<p class="note">Bold rows are settings in which the runs differ.</p>' if len(runs) > 1 else ""
    inner = f"<summary>Settings, versions and command</summary>{commands}{note}{table(head, rows, 'config')}"
    return f"<section><h2>Configuration</h2><details>{inner}</details></section>"


def _breakable(key: str) -> str:
    """A dotted name that may go on in the next line after each of its parts."""
    return re.sub(r"([._])", r"\1<wbr>", text(key))


def _flatten(value: Mapping[str, Any], prefix: str = "", lists: bool = True) -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{key}.", lists)
        elif lists or not isinstance(item, list):
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item)
