"""The page of one run, or of several side by side: its tiles, tables, figures and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..evaluation.measures import (
    DECISIONS,
    FEW_OF_CLASS,
    FEW_ROWS,
    MEASURES,
    OF_POSITIVE,
    WORST_TENTH,
    Measure,
    client_measure,
    in_words,
    key_of_all,
    of_large,
)
from . import figures, thin, unseen
from .canvas import PAGE
from .page import Figure, PageData, Row, Section, Table, TableCell, Tile, document
from .read import Client, SavedRun
from .score_tables import BASE_NOTE, class_cells, score_cells

MISSING, TOO_FEW = "–", "too few test rows"
_TILES = (
    *("accuracy", "exact_match", "rmse", "nll", "ece", "auroc_pooled", "recall_pooled", "sensitivity_pooled"),
    *("coverage_pooled", "mae_pooled", "interval_width_pooled"),
    *("accuracy_worst_decile", "prior_accuracy", "prior_rmse", "prior_level_accuracy", "traffic", "seconds"),
)
_SAMPLES = {"n_train": "Train", "n_val": "Validation", "n_test": "Test"}
_CLIENT_MEASURES = (
    *("accuracy", "exact_match", "prior_accuracy", "prior_level_accuracy", "rmse", "prior_rmse"),
    *("base_accuracy", "base_rmse", *DECISIONS, "nll", "ece", "classwise_ece", "brier", "mae", "pinball", "coverage"),
    *("interval_width", "entropy", "mutual_information"),
)
_BASE = {
    f"base_{key}": replace(MEASURES[key], key=f"base_{key}", label="base rate", name=f"{word} of the base rate")
    for key, word in (("accuracy", "accuracy"), ("rmse", "RMSE"))
}
_LABEL_MEASURES = ("auroc", "average_precision", "f1", "recall", "precision", "classwise_ece")
MOST_LABELS = 200  # rows of the table of labels


def render(runs: Sequence[SavedRun], title: str | None = None, summary: Sequence[Section] = ()) -> str:
    """Return the report on one run, or the comparison of several, as a complete HTML document.

    `summary` replaces the table of several runs, for a caller that knows more about them.
    """
    first = [_tiles(runs[0]), *_scores(runs[0])] if len(runs) == 1 else summary or [_comparison(runs)]
    width, limit = figures.prior_width(runs), thin.room(len(runs)) // 2
    clients = [_client_table(run, len(runs) > 1, limit) for run in runs if run.clients]
    clients += [table for run in runs for table in _label_tables(run, len(runs) > 1)]
    uncertainty = [figures.reliability(runs), *figures.entropy(runs), *unseen.figures(runs), figures.coverage(runs)]
    sections = [
        *first,
        _section("Training", [figures.loss(runs), figures.progress(runs)]),
        _section("Clients", [figures.spread(runs), figures.personal_gain(runs), figures.duel(runs)], clients),
        _section("Uncertainty", uncertainty),
        _section("Prior and data" if width else "Data", [*width, *figures.partitions(runs)]),
        _section("Configuration", [], _configuration(runs)),
    ]
    return document(title or _title(runs), _subtitle(runs), sections, _data(runs))


def _section(heading: str, drawn: Sequence[Figure | None], tables: Sequence[Table] = ()) -> Section:
    return Section(heading, figures=[figure for figure in drawn if figure], tables=tables)


def _data(runs: Sequence[SavedRun]) -> PageData:
    if len(runs) == 1:
        return PageData(percent=not runs[0].regression)
    group = figures.comparable(runs)
    data: dict[str, Any] = {}
    if group:
        drawn, names = thin.sample(len(runs[group[0]].clients), thin.PER_RUN), figures.client_names(runs)[group[0]]
        scores = {i: [client.values.get(runs[0].metric) for client in runs[i].clients] for i in group}
        values = {i: [row[client] for client in drawn] for i, row in scores.items()}
        data = {"clients": [names[i] for i in drawn], "values": values, "tally": tally(scores, runs[0].regression)}
    marks = [PAGE.style(i)._asdict() for i in range(len(runs))]
    return PageData([run.name for run in runs], marks, not runs[0].regression, **data)


def tally(values: Mapping[int, Sequence[float | None]], regression: bool) -> dict[int, dict[int, list[int]]]:
    """Count for every pair of runs the clients that the first serves better, that the second does, and the others."""
    table = {i: (-1 if regression else 1) * np.array(row, float) for i, row in values.items()}  # None becomes NaN
    return {
        i: {j: [int((a > b).sum()), int((a < b).sum()), int((a == b).sum())] for j, b in table.items()}
        for i, a in table.items()
    }


def _title(runs: Sequence[SavedRun]) -> str:
    data = sorted({run.dataset for run in runs if run.dataset})
    subject = runs[0].algorithm if len(runs) == 1 else f"{len(runs)} runs"
    return f"{subject} on {', '.join(data)}" if data else subject


def _subtitle(runs: Sequence[SavedRun]) -> str:
    """Return the facts that all runs share, in a line."""
    parts = []
    forms = {"dataset": "{}", "model": "{}", "clients": "{} client", "rounds": "{} round", "seed": "seed {}"}
    for key, form in forms.items():
        values = {str(value) for run in runs if (value := run.fact(key)) is not None}
        if len(values) == 1:
            value, counted = values.pop(), form.startswith("{} ")
            written = f"{int(value):,}" if counted and value.isdecimal() else value
            parts.append(form.format(written) + "s" * (counted and value != "1"))
    return " · ".join(parts)


def _tiles(run: SavedRun) -> Section:
    """Show the first numbers large: the main measure always, the others where the run has them.

    Where the run has small clients, pooled measures and the worst decile of the others belong to them.
    """
    tiles, always, lead = [], {run.metric}, run.metric
    if run.small_clients:
        lead = f"{run.metric}_pooled"  # the mean counts a client of one row like one of a thousand
        always |= {f"{run.metric}_pooled", f"{run.metric}_worst_decile"}
    for key, measure in MEASURES.items():
        two_classes = key != "auroc_pooled" or run.number("recall_pooled") is not None
        if key in always or (key in _TILES and two_classes and run.number(key) is not None):
            value = _formatted(run, measure, run.number(key))
            css_class = "lead" if key == lead else "words" if value == TOO_FEW else ""
            measure = in_words(measure, run.summary)
            meaning = _with_clients(measure, _of_large(run, key))
            if (base := run.number(f"base_{key}")) is not None:
                meaning += f"; base rate {measure.format(base)}"
            tiles.append(Tile(measure.title, value, meaning, css_class))
    return Section(tiles=tiles, notes=_small_note(run))


def _scores(run: SavedRun) -> list[Section]:
    """List all measures of the run's models beside those of the prior and of the base rate; and its classes."""

    def form(measure: Measure, value: float | None) -> str:
        return MISSING if value is None else measure.format(value)

    head, rows = score_cells(run.summary, form)
    rows = [row for row in rows if any(cell.value is not None for cell in row)]
    sections = []
    if rows:
        table = Table(head, [Row(row) for row in rows], notes=[BASE_NOTE] * ("base rate" in head))
        sections.append(Section("Scores", tables=[table]))
    head, rows = class_cells(run.summary, form)
    if rows:
        note = f"All {run.split} samples of all clients together: a row per true class."
        hints = [MEASURES[key].meaning for key in ("recall", "precision", "f1")]
        hints = [*[""] * (len(head) - 3), "share of the class's samples that are found", *hints[1:]]
        sections.append(Section("Classes", tables=[Table(head, [Row(row) for row in rows], hints, notes=[note])]))
    return sections


def _with_clients(measure: Measure, clients: str) -> str:
    """Return a measure's meaning with the clients that count in it, where not all do."""
    link = " " if measure.meaning.endswith("clients") else "; over clients "
    return f"{measure.meaning}{link}{clients}" if clients else measure.meaning


def _of_large(run: SavedRun, key: str) -> str:
    """Say which clients count in the run's value, where some of few rows do not; else nothing."""
    if key == WORST_TENTH:
        return f"with at least {FEW_ROWS} {run.split} rows" * bool(run.small_clients)
    return of_large(key, run.summary)


def _formatted(run: SavedRun, measure: Measure, value: float | None) -> str:
    """Format the run's value of a measure, or the reason why there is none."""
    if value is None:
        return TOO_FEW if _of_large(run, measure.key) else MISSING
    return measure.format(value)


def _small_note(run: SavedRun) -> list[str]:
    """Explain the clients that have too few rows to be judged one by one, if there are any."""
    if not run.small_clients:
        return []
    scored = sum(client.values.get(run.metric) is not None for client in run.clients)
    return [
        f"{run.small_clients:,} of {scored:,} clients (marked °) have fewer than {FEW_ROWS} {run.split} rows, so "
        "chance decides their own measures. Pooled numbers count every row alike; means over clients do not."
    ]


def _comparison(runs: Sequence[SavedRun]) -> Section:
    """Show every measure of every run, with a star at the best."""
    mixed = len({tuple(run.classes) for run in runs if len(run.classes) == 2}) > 1
    of_one = [m.key for m in MEASURES.values() if mixed and client_measure(m.key) in OF_POSITIVE]
    known = (
        m for m in MEASURES.values() if m.key not in of_one and any(_compared(run, m.key) is not None for run in runs)
    )
    shared = runs[0].summary if len({tuple(run.classes) for run in runs}) == 1 else {}
    measures = [in_words(measure, shared) for measure in known]
    settings = [key for key in ("dataset", "model", "seed", "rounds") if len({str(run.fact(key)) for run in runs}) > 1]
    best = {measure.key: _best_runs(runs, measure) for measure in measures}
    rows = []
    for i, run in enumerate(runs):
        cells = [
            TableCell(run.name, i),
            *(TableCell(str(MISSING if run.fact(k) is None else run.fact(k))) for k in settings),
        ]
        for measure in measures:
            star = run.name in best[measure.key]
            value = _compared(run, measure.key)
            cells.append(TableCell(_formatted(run, measure, value) + " ★" * star, value, star))
        rows.append(Row(cells, run=i))
    notes = ["★ marks the best run of a column among runs on the same data. Press a heading to sort by it."]
    bases = [_base_rate(runs, measure) for measure in measures]
    if any(base is not None for base in bases):
        values = zip(measures, bases, strict=True)
        cells = [TableCell(MISSING if base is None else measure.format(base), base) for measure, base in values]
        rows.append(Row([TableCell("base rate"), *[TableCell(MISSING)] * len(settings), *cells]))
        notes.append(BASE_NOTE)
    head = ["Run", *(key.capitalize() for key in settings), *(measure.title for measure in measures)]
    who = {m.key: next((who for r in runs if not r.regression and (who := _of_large(r, m.key))), "") for m in measures}
    hints = [*[""] * (1 + len(settings)), *(_with_clients(m, who[m.key]) for m in measures)]
    if len({run.dataset for run in runs}) > 1:
        notes.append("The runs use different data: the charts show them together, but their numbers do not compare.")
    if any(run.number(key) is not None for key in of_one for run in runs):
        notes.append("The runs have different positive classes: recall and other measures of this class are left out.")
    return Section(tables=[Table(head, rows, hints)], notes=notes)


def _compared(run: SavedRun, key: str) -> float | None:
    """Return the run's measure as several runs have it: of a regression over all clients, as earlier versions have."""
    return run.number(key_of_all(key, run.summary) if run.regression else key)


def _base_rate(runs: Sequence[SavedRun], measure: Measure) -> float | None:
    """Return the base rate's measure if it is the same for all runs, as it is on the same data."""
    values = {_compared(run, f"base_{measure.key}") for run in runs}
    return values.pop() if len(values) == 1 else None


def _best_runs(runs: Sequence[SavedRun], measure: Measure) -> set[str]:
    """Return the names of the best runs by a measure, each among the runs on the same data."""
    winners = set[str]()
    for data in {run.dataset for run in runs} if measure.target is not None else ():
        same = (run for run in runs if run.dataset == data)
        scores = [(run.name, value) for run in same if (value := _compared(run, measure.key)) is not None]
        distances = {name: measure.distance(value) for name, value in scores}
        least = min(distances.values(), default=0.0)
        winners |= {name for name, distance in distances.items() if distance == least < max(distances.values())}
    return winners


def _client_table(run: SavedRun, several: bool, limit: int) -> Table:
    """List a run's clients; of more than `limit` the worst-off, the best-off and some of the others."""
    of_class = {f"rows[{name}]": f"Rows of {name}" for name in run.classes if len(run.classes) == 2}
    counts = _SAMPLES | of_class
    keys = [key for key in (*counts, *_CLIENT_MEASURES) if any(c.values.get(key) is not None for c in run.clients)]
    listed, rows = thin.ends_and_sample([client.values.get(run.metric) for client in run.clients], limit), []
    measures = MEASURES | _BASE
    formats = {key: measures[key].format if key in measures else "{:.0f}".format for key in keys}
    for i in listed:
        client = run.clients[i]
        few = run.few_of_class(client)
        texts = {key: _with_interval(client, key, formats[key]) for key in keys}
        texts |= {key: f"{text} °" for key, text in texts.items() if few and key in DECISIONS and text != MISSING}
        cells = [TableCell(texts[key], client.values.get(key)) for key in keys]
        rows.append(Row([TableCell(client.name + " °" * run.small(client), i), *cells]))
    count = f"{len(run.clients):,} client{'s' * (len(run.clients) != 1)}"
    clients_per_seed = run.fact("clients")  # in a comparison of several seeds: the clients of one seed
    seeds = (
        f" ({clients_per_seed} in each seed)"
        if isinstance(clients_per_seed, int) and clients_per_seed < len(run.clients)
        else ""
    )
    notes = [*_small_note(run), *_chance(run)]
    if any(client.values.get(f"{key}_low") is not None for client in run.clients for key in keys):
        wilson = "coverage" if run.regression else "accuracy and recall" if len(run.classes) == 2 else "accuracy"
        notes.append(f"Parentheses hold 95% intervals over rows: Wilson's of {wilson}, bootstrap ones of the others.")
    if marked := sum(map(run.few_of_class, run.clients)):
        notes.append(
            f"{marked:,} of {count} {'has' if marked == 1 else 'have'} fewer than {FEW_OF_CLASS} {run.split} rows of a "
            "class. The measures of their ranks and decisions are marked °. They count in the pooled numbers, but in "
            "no mean over clients."
        )
    if len(listed) < len(run.clients):
        notes.append(
            f"The table shows {len(listed):,} of {count}: the worst-off, the best-off and a random sample of the "
            "others. The file clients.csv holds every client."
        )
    worded = {key: in_words(measures[key], run.summary) for key in keys if key not in counts}
    if "base_accuracy" in keys and "recall" in keys:
        notes.append(
            "The base rate ranks nothing, so its AUROC is 0.5 at every client. It finds all rows of the client's "
            "commonest class, and none of the other."
        )
    head = ["Client", *(worded[key].title if key in worded else counts[key] for key in keys)]
    hints = ["", *(worded[key].name if key in worded else "" for key in keys)]
    return Table(head, rows, hints, fold=f"Table of {count}{seeds}" + f": {run.name}" * several, notes=notes)


def _with_interval(client: Client, key: str, form: Callable[[float], str]) -> str:
    """Format a client's measure, with its 95% interval in parentheses where it has one."""
    value, low, high = (client.values.get(key + end) for end in ("", "_low", "_high"))
    if value is None:
        return MISSING
    return form(value) if low is None or high is None else f"{form(value)} ({form(low)}–{form(high)})"


def _label_tables(run: SavedRun, several: bool) -> list[Table]:
    """List the labels of a task with several, scored on the samples of all clients together; none for other tasks."""
    labels = run.summary.get("labels")
    if not isinstance(labels, list) or not all(isinstance(label, dict) for label in labels):
        return []
    rows = []
    for label in labels[:MOST_LABELS]:
        numbers = [label.get(key) for key in ("label", "samples", "positives")]
        counts = [TableCell(f"{n:,}", n) if isinstance(n, int) else TableCell(MISSING) for n in numbers]
        values = [(key, label.get(f"{key}_pooled")) for key in _LABEL_MEASURES]
        named_values = [(key, value if isinstance(value, int | float) else None) for key, value in values]
        cells = [
            TableCell(MISSING if value is None else MEASURES[key].format(value), value) for key, value in named_values
        ]
        rows.append(Row([*counts, *cells]))
    head = ["Label", "Samples", "Positive", *(MEASURES[key].title for key in _LABEL_MEASURES)]
    fold = f"Table of {len(labels)} labels, all samples pooled" + f": {run.name}" * several
    hints = ["", "", "", *(MEASURES[key].meaning for key in _LABEL_MEASURES)]
    return [Table(head, rows, hints, fold=fold)] if rows else []


def _chance(run: SavedRun) -> list[str]:
    """Explain how large a calibration error of a single client is mere chance."""
    counts = sorted(n for c in run.clients if c.values.get("ece") is not None and (n := run.rows(c)))
    if not counts:
        return []
    n = counts[len(counts) // 2]
    return [
        "The ECE of a single client is biased upwards: with n rows, an error of about 1/√n is chance "
        f"(about {n**-0.5:.2g} for {n:.0f} {run.split} rows, the median of the clients)."
    ]


def _configuration(runs: Sequence[SavedRun]) -> list[Table]:
    """List the settings of config.json, the prior's digest and the facts of the manifest, one column per run.

    What the command line asked for (`run.`) is left out: the settings show what came of it, and the command is shown.
    """
    columns = []
    for run in runs:
        prior = {key: run.summary[key] for key in ("prior_digest",) if key in run.summary}
        settings = dict(_flatten({**run.config, **prior}))
        columns.append(settings | dict(_flatten(run.manifest, "manifest.", lists=False)))
    commands = [column.pop("command") for column in columns if "command" in column]
    keys = dict.fromkeys(key for column in columns for key in column if not key.startswith("run."))
    rows = []
    for key in keys:
        values = [column.get(key, MISSING) for column in columns]
        rows.append(Row([TableCell(key), *map(TableCell, values)], differs=len(set(values)) > 1))
    if not rows and not commands:
        return []
    several, fold = len(runs) > 1, "Settings, versions and command"
    head = ["Setting", *(run.name if several else "Value" for run in runs)]
    notes = ["Settings in which the runs differ are bold."] if several else []
    return [Table(head, rows, css_class="config", fold=fold, commands=commands, notes=notes)]


def _flatten(value: Mapping[str, Any], prefix: str = "", lists: bool = True) -> Iterable[tuple[str, str]]:
    """Yield the entries of nested objects under dotted names."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{key}.", lists)
        elif lists or not isinstance(item, list):
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item)
