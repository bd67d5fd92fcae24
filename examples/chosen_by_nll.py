"""Which configurations would Table 1's searches have chosen by validation NLL in place of accuracy?

    python examples/chosen_by_nll.py --out results/calibration

Every search recorded its trials with accuracy, NLL and ECE on validation rows (results/table1/COLUMN/search.jsonl, and
results/fair/search.jsonl for the rivals with the label level), so nothing is trained. For each column and system the
trial and the personal option of the highest accuracy stand beside those of the lowest NLL, in OUT/README.md. The
settings chosen by NLL are written to OUT/settings/COLUMN.toml, and those of systems with a point in place of the
Gaussian, or of rivals with the label level, to COLUMN-point.toml and COLUMN-labels.toml. They are for test runs:

    fedabml compare --algorithms fedabml --config results/calibration/settings/COLUMN.toml --seeds 10,11,12,13,14

The cells of test runs are in results/calibration/cells.jsonl; the page has a table of every column that has some.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedabml.algorithms import REGISTRY, make
from fedabml.experiments.cell import Result, Score
from fedabml.experiments.ledger import Ledger
from fedabml.experiments.paper import numbers
from fedabml.experiments.statistics import interval
from fedabml.files.paths import write
from fedabml.runs.config import read_toml, to_toml

RESULTS = Path(__file__).resolve().parents[1] / "results"
TABLE1, FAIR, TESTED = RESULTS / "table1", RESULTS / "fair/search.jsonl", RESULTS / "calibration/cells.jsonl"
TITLES = {
    "cifar10-2": "CIFAR-10 (100,2)",
    "cifar10-5": "CIFAR-10 (100,5)",
    "emnist": "EMNIST (150,3)",
    "fashionmnist": "FashionMNIST (200,2)",
    "cifar100-5-augmented": "CIFAR-100 (100,5), augmented",
    "cifar100-20-augmented": "CIFAR-100 (100,20), augmented",
    "cifar100-5": "CIFAR-100 (100,5)",
    "cifar100-20": "CIFAR-100 (100,20)",
}
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
    def setting(self) -> str:
        """The data, network, rounds, seed and scored rows: all but the algorithm and its personal options."""
        config, _, *study = json.loads(self.result.identity)
        setting = {k: v for k, v in config.items() if k not in ("algorithm", "lr", self.algorithm)}
        return json.dumps([setting, study])

    @property
    def column(self) -> str:
        """The column of Table 1, without augmented images."""
        config = json.loads(self.result.identity)[0]
        names = (config["dataset"], f"{config['dataset']}-{config['classes_per_client']}")
        return next(name for name in names if name in TITLES)

    @property
    def system(self) -> str:
        """The name that the pages have for the system."""
        if self.trained.get("posterior") == "point":
            return "FedCM+FT" + " + label level" * (self.algorithm == "fedabml")
        return numbers.name(self.algorithm + numbers.LABELS * (self.variant == "labels"), "tuned")

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


@functools.cache
def read(path: Path, split: str = "val") -> list[Option]:
    """Return the options of a ledger that were scored on rows of `split`; those of diverged models are left out."""
    results = [result for result in Ledger(path).results.values() if result.facts["split"] == split]
    return [Option(result, score) for result in results for score in result.scores if score.error is None]


def searched(name: str) -> dict[tuple[str, str], list[Option]]:
    """Return the options of a column's searches by algorithm and variant.

    Trials that confirmed a choice, on another seed or on all rows, are of another setting and are left out. So are
    FedABMLs with parts left out, which are no rivals.
    """
    options = read(TABLE1 / name / "search.jsonl")
    setting = Counter(option.setting for option in options).most_common(1)[0][0]
    systems: dict[tuple[str, str], list[Option]] = {}
    for option in [*options, *(rival for rival in read(FAIR) if rival.variant)]:
        if option.setting == setting:
            systems.setdefault((option.algorithm, option.variant), []).append(option)
    return systems


def column(name: str, out: Path) -> tuple[str, list[str]]:
    """Write a column's settings; return its row of the first table, and its own part of the page."""
    title = TITLES[name]
    lines = [
        f"## {title}",
        "",
        "| system | options | by accuracy: accuracy % | NLL | ECE | by NLL: accuracy % | NLL | ECE |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    choices = []
    chosen: dict[str, dict[str, Any]] = {}  # by variant
    for (algorithm, variant), options in searched(name).items():
        right = best(options, lambda option: option.score.summary["accuracy"])
        likely = best(options, lambda option: -option.score.summary["nll"])
        choices.append((likely.score.summary["nll"], right, likely, len(options)))
        chosen.setdefault(variant, {})[algorithm] = likely.settings()
    choices.sort(key=lambda choice: choice[0])
    for _, right, likely, count in choices:
        cells = right.cells() + (["the same", "", ""] if right == likely else likely.cells())
        lines.append(f"| {' | '.join([likely.system, str(count), *cells])} |")
    setting = {k: v for k, v in read_toml(TABLE1 / name / "settings.toml").items() if not isinstance(v, dict)}
    for variant, tables in chosen.items():
        text = f"# Chosen by validation NLL: see ../README.md.\n{to_toml(setting | tables)}"
        write(out / "settings" / f"{'-'.join(filter(None, [name, variant]))}.toml", text)
    own = next(c for c in choices if c[2].system.startswith("FedABML"))
    rival = next(c for c in choices if not c[2].system.startswith("FedABML"))
    words = [f"{likely.system} | {likely.score.summary['nll']:.3f}" for _, _, likely, _ in (own, rival)]
    return f"| {title} | {' | '.join(words)} |", [*lines, ""]


Scores = dict[int, dict[str, float]]  # the summaries of a system by seed


def by_system(options: list[Option], settings: set[str]) -> dict[str, Scores]:
    """Return the scores of the options of these settings."""
    systems: dict[str, Scores] = {}
    for option in options:
        if option.setting in settings:
            systems.setdefault(option.system, {})[option.result.seed] = option.score.summary
    return systems


def mean(scores: Scores, measure: str) -> float:
    return interval([summary[measure] for summary in scores.values()])[0]


def behind(own: Scores, first: Scores, measure: str) -> str:
    """Return the mean of own − first over the seeds that both have ± half of its 95% interval."""
    seeds = sorted(own.keys() & first.keys())
    difference, half = interval([own[seed][measure] - first[seed][measure] for seed in seeds])
    return "" if own is first else f"{difference:+.4f} ± {half:.4f}"


def tested(name: str) -> list[str]:
    """Return the part of the page on a column's test run, with Table 1's scores beside it; [] where there is none."""
    found = [option for option in read(TESTED, "test") if option.column == name]
    if not found:
        return []
    settings = {option.setting for option in found}
    chosen = by_system(found, settings)
    rivals = [rival for rival in read(FAIR.with_name("cells.jsonl"), "test") if rival.variant]
    before = by_system([*read(TABLE1 / name / "cells.jsonl", "test"), *rivals], settings)
    ranked = sorted(chosen, key=lambda system: mean(chosen[system], "nll"))
    first = chosen[next(system for system in ranked if system.startswith("FedABML"))]
    lines = []
    for system in ranked:
        own, cells = chosen[system], [system, f"{100 * mean(chosen[system], 'accuracy'):.2f}"]
        for measure in ("nll", "ece"):
            cells += [f"{mean(own, measure):.4f}", behind(own, first, measure)]
        cells += [f"{mean(before[system], measure):.4f}" for measure in ("nll", "ece")]
        lines.append(f"| {' | '.join(cells)} |")
    return [f"### Test run, {TITLES[name]}", "", *TEST_TABLE, *lines, ""]


TEST_TABLE = (
    "| system | accuracy % | NLL | behind | ECE | behind | chosen by accuracy: NLL | ECE |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)
TEST_HEAD = """## Test runs

The configurations of the lowest validation NLL, trained on all training data with seeds 10 to 14, and scored on test
rows ([cells.jsonl](cells.jsonl)). These partitions of Table 1 had been read before. "Behind" is the distance to the
FedABML of the lowest NLL ± half of its 95% interval, paired over seeds. The last two columns are Table 1's test scores
of the configurations of the highest accuracy. CIFAR-100 was not run.

```
S="--seeds 10,11,12,13,14"
C=results/calibration/settings
for d in cifar10-2 cifar10-5 emnist fashionmnist; do
  fedabml compare --algorithms fedabml,fedabml-plain,fedavg-ft,scaffold-ft --config $C/$d.toml $S --out OUT/nll-$d
  fedabml compare --algorithms fedavg-ft,scaffold-ft --config $C/$d-labels.toml $S --out OUT/nll-$d-labels
  fedabml compare --algorithms fedabml,fedabml-plain --config $C/$d-point.toml $S --out OUT/nll-$d-point
done
```

- CIFAR-10, bf16: FedABML + label level has the lowest NLL of both columns. The best rival with the level is behind by
  0.0085 ± 0.0038 on (100,2) and 0.0577 ± 0.0170 on (100,5), the best rival without it by 0.0320 ± 0.0132 and 0.1416 ±
  0.0232. FedABML + label level has the lowest ECE on (100,5). On (100,2) its ECE is not significantly different from
  that of SCAFFOLD + FT with the level (−0.0003 ± 0.0048) and of FedABML without it.
- Without the level FedABML's NLL is not significantly different from that of SCAFFOLD + FT with the level on (100,2)
  (0.0022 ± 0.0051 lower). It is lower than every other rival's of both columns, by 0.0257 ± 0.0129 or more.
- EMNIST and FashionMNIST, float32: rivals with the level have the lowest NLL, on EMNIST not significantly lower than
  FedABML's.
- CIFAR-10 and EMNIST were run on an H200, FashionMNIST on a CPU. On EMNIST and FashionMNIST equal choices have equal
  scores, except FedABML's on FashionMNIST: a CPU draws other weight noise, and the NLL differs by 0.0003.
- On CIFAR-10 (100,5) three systems have the configuration of the highest accuracy, and yet other scores: these runs are
  of another version, with compiled steps. Their mean NLL differs by at most 0.0035, their accuracy by 0.23 points.
"""
HEAD = """# Chosen by validation NLL

```
python examples/chosen_by_nll.py --out results/calibration
```

Table 1 chose each system's configuration by validation accuracy. A system with overconfident probabilities may do
better by NLL with another configuration. Every search recorded its trials with accuracy, NLL and ECE, so nothing was
trained for this page but the [test runs](#test-runs) of the [settings](settings). **All other scores are of validation
rows** of one seed, held out from training.

For every system there are the trial and the personal option of the highest accuracy, and those of the lowest NLL.
*Options* are the trials times the personal options that were scored on each; diverged ones are left out. The best of
many options looks better than it is, for every system alike. Rows are sorted by the lowest NLL. Systems with "+ label
level", other than FedABML, are rivals with FedABML's label level; those of SCAFFOLD and FedCM are of
[fair](../fair/README.md), which has them for four columns. ResNet-18 is left out: its searches had 12 and 20 rounds.

## The lowest NLL of each column

The lowest of FedABML's rows beside the lowest of all others.

| column | FedABML | NLL | best rival | NLL |
| --- | --- | ---: | --- | ---: |
"""


def main() -> None:
    """Write the settings of all columns and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the settings and the page")
    out = parser.parse_args().out
    (out / "settings").mkdir(parents=True, exist_ok=True)
    rows, parts = zip(*(column(name, out) for name in TITLES), strict=True)
    body = "\n".join(line for part in parts for line in part)
    runs = "\n".join([TEST_HEAD, *(line for name in TITLES for line in tested(name)), body.rstrip()])
    write(out / "README.md", HEAD + "\n".join(rows) + "\n\n" + runs + "\n")


if __name__ == "__main__":
    main()
