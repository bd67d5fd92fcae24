"""Which configurations would Table 1's searches have chosen by validation NLL in place of accuracy?

    python examples/chosen_by_nll.py --out results/calibration

Every search recorded its trials with accuracy, NLL and ECE on validation rows (results/table1/COLUMN/search.jsonl), so
nothing is trained. For each column and system the trial and the personal option of the highest accuracy stand beside
those of the lowest NLL. The settings chosen by NLL are written to COLUMN.toml, and those of systems with a point in
place of the Gaussian, or with the label level of FedABML, to COLUMN-VARIANT.toml. They are for test runs:

    fedabml compare --algorithms fedabml,fedavg-ft --config results/calibration/COLUMN.toml --seeds 10,11,12,13,14
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedabml.algorithms import REGISTRY, make
from fedabml.experiments.cell import Result, Score
from fedabml.experiments.ledger import Ledger
from fedabml.files.paths import write
from fedabml.runs.config import read_toml, to_toml

TABLE1 = Path(__file__).resolve().parents[1] / "results/table1"
PAGE = "choices.md"
WORDS = {"": "", "point": "point posterior", "labels": "label level", "point+labels": "point posterior, label level"}
FORMER = {"newcomer": "initial"}  # of trials recorded before the option existed


@dataclass(frozen=True)
class Option:
    """A trained federation of a search, with one of the personal options that were scored on it."""

    result: Result
    score: Score

    @property
    def algorithm(self) -> str:
        return str(json.loads(self.result.identity)[0]["algorithm"])

    @property
    def trained(self) -> dict[str, Any]:
        """The hyperparameters of the training."""
        hyper: dict[str, Any] = json.loads(self.result.identity)[0][self.algorithm]
        return hyper

    @property
    def variant(self) -> str:
        """How the system differs from the algorithm of its name: `point`, `labels`, or nothing."""
        entry = REGISTRY[self.algorithm]
        usual = entry.defaults.get(
            "label_prior", {f.name: f.default for f in dataclasses.fields(entry.kind)}["label_prior"]
        )
        words = ["point"] * (self.trained.get("posterior") == "point")
        return "+".join(words + ["labels"] * (self.trained.get("label_prior", usual) != usual))

    def settings(self) -> dict[str, Any]:
        """Return the hyperparameters that are not today's defaults."""
        today = {f.name: f.default for f in dataclasses.fields(REGISTRY[self.algorithm].kind)}
        trained = self.trained | self.score.personal
        before = {name: value for name, value in FORMER.items() if name in today and name not in trained}
        values = {name: value for name, value in (trained | before).items() if name in today}
        make(self.algorithm, **values)  # raises InputError for a value that is no longer legal
        preset = REGISTRY[self.algorithm].defaults
        return {name: v for name, v in values.items() if v != preset.get(name, today[name])}

    def cells(self) -> list[str]:
        summary = self.score.summary
        return [f"{100 * summary['accuracy']:.2f}", f"{summary['nll']:.3f}", f"{summary['ece']:.3f}"]


def best(options: list[Option], by: Callable[[Option], float]) -> Option:
    """Return the option of the highest value; of equal ones the first."""
    return max(options, key=by)


def read(path: Path) -> dict[tuple[str, str], list[Option]]:
    """Return the options of a search by algorithm and variant; those of diverged models are left out."""
    systems: dict[tuple[str, str], list[Option]] = {}
    for result in Ledger(path).results.values():
        for option in (Option(result, score) for score in result.scores if score.error is None):
            if result.facts["split"] == "val":
                systems.setdefault((option.algorithm, option.variant), []).append(option)
    return systems


def column(name: str, out: Path) -> list[str]:
    """Write a column's settings, and return the part of the page that compares the choices."""
    systems = read(TABLE1 / name / "search.jsonl")
    lines = [
        f"## {name}",
        "",
        "| system | options | by accuracy: accuracy % | NLL | ECE | by NLL: accuracy % | NLL | ECE |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = []
    chosen: dict[str, dict[str, Any]] = {}  # by variant
    for (algorithm, variant), options in systems.items():
        right = best(options, lambda option: option.score.summary["accuracy"])
        likely = best(options, lambda option: -option.score.summary["nll"])
        same = " (the same)" * (right == likely)
        system = " + ".join(filter(None, [algorithm, WORDS[variant]]))
        cells = [system, str(len(options)), *right.cells(), *likely.cells()]
        rows.append((likely.score.summary["nll"], f"| {' | '.join(cells)}{same} |"))
        chosen.setdefault(variant, {})[algorithm] = likely.settings()
    setting = {k: v for k, v in read_toml(TABLE1 / name / "settings.toml").items() if not isinstance(v, dict)}
    for variant, tables in chosen.items():
        text = f"# Chosen by validation NLL: see {PAGE} beside this file.\n{to_toml(setting | tables)}"
        write(out / f"{'-'.join(filter(None, [name, variant]))}.toml", text)
    return [*lines, *(row for _, row in sorted(rows)), ""]


HEAD = """# Chosen by validation NLL

Table 1 chose each system's configuration by validation accuracy. A system with overconfident probabilities may do
better with another configuration. Every search recorded its trials with accuracy, NLL and ECE on validation rows (one
seed, held out from the training rows), so this page needs no further training. For every system it has the trial and
the personal option of the highest accuracy, and those of the lowest NLL. All systems had about the same number of
trials; *options* counts the trials times the personal options scored on each. The best of many options looks better
than it is, for every system alike. Rows are sorted by the lowest NLL. `fedabml-plain` is FedABML without the label
level; with a point posterior and a corrected drift it is FedCM + FT.
"""


def main() -> None:
    """Write the settings of all columns and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the settings and the page")
    out = parser.parse_args().out
    names = sorted(path.parent.name for path in TABLE1.glob("*/search.jsonl"))
    out.mkdir(parents=True, exist_ok=True)
    parts = [line for name in names for line in column(name, out)]
    write(out / PAGE, "\n".join([HEAD, *parts]))


if __name__ == "__main__":
    main()
