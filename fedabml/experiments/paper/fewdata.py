"""Few data, the paper's motivation: new clients with 5 to 500 training samples.

Four fifths of the clients train; the others come with n_i samples each, personalise what was learned, and are scored on
all of their test data. The samples are drawn in two ways: stratified, so that every label of the client gives its
share, and at random, as real newcomers have them: five random samples of five labels rarely show all five. Local only,
which has nothing to learn from others, takes 50 epochs on its n_i samples. The paper claims that a Bayesian prior helps
most where data are few. Under `tuned` FedAvg also has a row with the label level, and FedAvg and FedABML have one with
the sparse level, which expects classes that few samples have not shown yet (`fedabml.engine.label_level`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...evaluation.measures import MEASURES
from ...report.charts import Axis, line_chart
from ...runs.config import JsonDict
from ..cell import Cell
from .experiment import Context, Done, Experiment, by_column
from .findings import Findings, Mean, Picture, Sheet, band, by, number, pivot, power
from .newcomers import RANDOM, Newcomers
from .settings import TITLES, systems

SHARE, SIZES, QUICK_SIZES = 0.8, (5, 10, 25, 50, 100, 500), (4, 8, 16)
ALONE = 50  # epochs of Local only
# New clients with few of the embedded digits: one hyperparameter of each method, the best of four values on validation
# data (docs/research.md). FedAvg+FT, Per-FedAvg and pFedMe are best at their default.
EMBEDDED_HYPER: dict[str, JsonDict] = {
    "fedabml": {"label_alpha": 3.0},
    "fedabml-plain": {"personal_lr": 0.01},
    "local": {"personal_lr": 0.1},
}
SHOWN_MEASURES = ("accuracy", "nll", "ece")
BY_LABEL, AT_RANDOM = "stratified draws", "random draws"


class FewData(Experiment):
    """New clients with few data."""

    title = "Few data: new clients with few samples"
    claim = "A Bayesian prior learned from others helps most where a client has few data."
    columns = ("cifar10-5", "emnist", "fashionmnist")
    algorithms = ("fedabml", "fedabml-plain", "fedavg-ft", "perfedavg", "pfedme", "local")

    def cells(self, context: Context) -> list[Cell]:
        study, cells = Newcomers(SHARE, QUICK_SIZES if context.request.quick else SIZES), []
        # The paper's FedABML has no label level.
        levels, sparse = (("fedavg-ft",), ("fedabml", "fedavg-ft")) if context.request.protocol == "tuned" else ((), ())
        for column, name, config in systems(context, self, levels=levels, sparse=sparse):
            if column == "digits" and context.request.protocol == "paper":
                config = config.with_changes(hyper=config.hyper | EMBEDDED_HYPER.get(name, {}))
            if name == "local":  # a new client has only its own epochs, whatever others did in rounds
                config = config.with_changes(rounds=0, hyper=config.hyper | {"personal_epochs": ALONE})
            cells += context.seeded(f"{column} {name}", config, study=study)
        return cells

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        conclusions, sheets, pictures, records = [], [], [], []
        for column, groups in by_column(finished).items():
            column_records = [record for name, cells in groups.items() for record in _records(column, name, cells)]
            for draws, drawn in by(column_records, "draws").items():
                best = [
                    max(same, key=lambda r: (r["accuracy"], r["algorithm"])) for same in by(drawn, "samples").values()
                ]
                firsts = "; ".join(f"{r['samples']}: {context.named(r)}" for r in best)
                where = f"{TITLES[column]}, {draws}"
                conclusions.append(f"{where}, highest mean accuracy by the number of samples: {firsts}.")
                views = [_views(context, drawn, key) for key in SHOWN_MEASURES]
                sheets += [sheet for sheet, _ in views]
                pictures += [picture for _, picture in views]
            if AT_RANDOM not in by(column_records, "draws"):
                context.note(f"{TITLES[column]}: these cells were stored before random draws existed.")
            records += column_records
        return Findings(conclusions, sheets, pictures, records)


def _records(column: str, name: str, cells: Sequence[Done]) -> list[JsonDict]:
    """Return the records of a system, one for every number of samples and way to draw them."""
    records, by_seed = [], {d.result.seed: {score.on: score for score in d.result.scores} for d in cells}
    for on in dict.fromkeys(on for scores in by_seed.values() for on in scores):  # stored cells may lack random draws
        scores = {seed: scores[on] for seed, scores in by_seed.items() if on in scores}
        values = {
            key: {n: math.nan if s.error else s.summary[key] for n, s in scores.items()} for key in SHOWN_MEASURES
        }
        draws = AT_RANDOM if on.endswith(RANDOM) else BY_LABEL
        record = {"column": column, "algorithm": name, "draws": draws, "samples": int(on.removesuffix(RANDOM))}
        records.append(record | {key: Mean(of_seeds) for key, of_seeds in values.items()})
    return records


def _views(context: Context, records: Sequence[JsonDict], key: str) -> tuple[Sheet, Picture]:
    """Return the table and the picture of a measure against the number of samples, in one column with one draw."""
    measure, column, draws = MEASURES[key], records[0]["column"], records[0]["draws"]
    title, suffix = f"{TITLES[column]}, {draws}", "-random" if draws == AT_RANDOM else ""

    def cell(record: JsonDict) -> str:
        return number(record[key].times(measure.factor), measure.digits)

    grid = pivot(records, "samples", context.named, lambda r: str(r["samples"]), cell)
    series = []
    for line in by(records, "algorithm").values():
        x, means = [power(r["samples"]) for r in line], [r[key] for r in line]
        series.append(band(context.named(line[0]), x, means, greatest=math.inf if key == "nll" else 1.0))
    y = Axis(measure.label, "percent" if key == "accuracy" else "number")
    axes = {"x": Axis("training samples of a new client", "power"), "y": y}
    caption = f"{measure.label} of new clients against the number of their training samples, on a logarithmic axis."
    picture = Picture(f"{key}-{column}{suffix}", f"{measure.label}, {title}", caption, line_chart, series, axes)
    return Sheet(f"{title}: {measure.heading}", *grid), picture
