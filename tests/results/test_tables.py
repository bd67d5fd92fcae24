"""The tables that are typed by hand hold what their cells give: README.md, results/README.md and pages of results/."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from fedabml.experiments.paper import numbers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
TABLE1 = RESULTS / "table1"
LENT = {"CIFAR-10 (100,2)": "cifar10-2", "CIFAR-10 (100,5)": "cifar10-5"}  # the columns of results/fair
LENT |= {"EMNIST (150,3)": "emnist", "FashionMNIST (200,2)": "fashionmnist"}
README = {"CIFAR-10, 100 clients × 2 classes, CNN": "cifar10-2", "CIFAR-10, 100 × 5, CNN": "cifar10-5"}
README |= {"EMNIST, 150 × 3, MLP": "emnist", "FashionMNIST, 200 × 2, logistic regression": "fashionmnist"}
README |= {f"CIFAR-100, 100 × {n}, CNN, augmented": f"cifar100-{n}-augmented" for n in (5, 20)}
PLAIN, LEVEL = "FedABML, no label level", "FedABML + label level"


# -- cells ------------------------------------------------------------------------------------------------------------
def system(config):
    """The name of a system, without spaces around +, and with `+ label level` where it has one."""
    algorithm = config["algorithm"]
    own = config[algorithm]
    if own.get("posterior") == "point":
        return "FedCM+FT" + " + label level" * (own["label_prior"] != "none")
    if algorithm == "fedabml" and own["label_alpha"] != 0.1:
        return "FedABML, label_alpha"
    is_rival = algorithm not in ("fedabml", "fedabml-plain")
    return numbers.name(algorithm + numbers.LABELS * (is_rival and own["label_prior"] != "none"), "tuned")


@cache
def read(path):
    """The lines of a ledger: (configuration, summaries by personal option), without those of diverged runs."""
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cells = [(json.loads(result["identity"])[0], result) for result in results]
    return [
        (config, [score["summary"] for score in result["scores"] if score["error"] is None])
        for config, result in cells
        if not result["error"]
    ]


@cache
def scores(name):
    """The test scores of a column, {system: {seed: summary}}; a second search's cells replace those of the first."""
    dataset, _, classes = name.removesuffix("-augmented").partition("-")
    files = [TABLE1 / name / "cells.jsonl", *(TABLE1 / name).glob("label-alpha.jsonl")]
    lent = [cell for cell in read(RESULTS / "fair/cells.jsonl") if name in LENT.values() and not part(cell[0])]
    found = {}
    for config, (summary,) in [*(cell for file in files for cell in read(file)), *lent]:
        if config["dataset"] == dataset and (not classes or config["classes_per_client"] == int(classes)):
            found.setdefault(system(config), {})[config["seed"]] = summary
    return found


def part(config):
    """Which part of FedABML a cell of results/fair leaves out; empty for a rival."""
    own = config[config["algorithm"]]
    if system(config) != LEVEL:
        return ""
    left_out = {
        "without the KL (λ = 0)": own["lam"] == 0,
        "posterior width fixed": own["posterior_std"] == "fixed",
        "without the server's average": own["average"] == 0,
        "without the server's momentum": not own.get("server_momentum"),
        "without the correction of drift": not own.get("drift"),
    }
    (name,) = (name for name, is_left_out in left_out.items() if is_left_out)
    return name


def values(by_seed, measure):
    """A measure by seed; accuracy in percent."""
    return {seed: summary[measure] * (100 if measure == "accuracy" else 1) for seed, summary in by_seed.items()}


def mean(by_seed, measure):
    return float(np.mean(list(values(by_seed, measure).values())))


def half(differences):
    """Half of the 95% confidence interval of a mean."""
    differences = np.array(differences)
    quantile = scipy.stats.t.ppf(0.975, len(differences) - 1)
    return float(quantile * differences.std(ddof=1) / np.sqrt(len(differences)))


def paired(one, other, measure):
    """The mean of one − other over the seeds that both have, and half of its 95% interval."""
    one, other = values(one, measure), values(other, measure)
    differences = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    return float(np.mean(differences)), half(differences)


def paired_p(one, other):
    """The p-value of the paired t-test of two systems' accuracies."""
    one, other = values(one, "accuracy"), values(other, "accuracy")
    both = sorted(one.keys() & other.keys())
    return scipy.stats.ttest_rel([one[seed] for seed in both], [other[seed] for seed in both]).pvalue


def validated(name, wanted):
    """The best validation accuracy of a system's search, in percent."""
    searched = [cell for cell in read(TABLE1 / name / "search.jsonl") if system(cell[0]) == wanted]
    return 100 * max(summary["accuracy"] for _, summaries in searched for summary in summaries)


# -- pages ------------------------------------------------------------------------------------------------------------
def tables(path):
    """The tables of a page, each a list of its rows, which are lists of cells; the first is the head."""
    blocks = re.findall(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for i, row in enumerate(table) if i != 1] for table in rows]


def table(path, *head):
    """The rows of the one table whose head begins so."""
    (found,) = [rows[1:] for rows in tables(path) if rows[0][: len(head)] == list(head)]
    return found


def named(cell):
    """A system's name in a cell, as `system` has it."""
    name = re.sub(r", (four|five) seeds| \d.*$", "", re.sub("[*`]", "", cell))
    name = re.sub(r"(,| with| with the) label level$| \+ level$", " + label level", name)
    return re.sub(r"(?<=\w) \+ FT", "+FT", name)


def check(shown, *expected):
    """Compare the numbers of a cell, in order, with values: every one rounded to the digits that are shown."""
    found = re.findall(r"[-−+]?\d+\.\d+", shown)
    assert found and len(found) == len(expected), f"{shown!r}: {expected}"
    for text, value in zip(found, expected, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(float(text.replace("−", "-")) - value) <= 0.5001 * 10**-digits, f"{shown!r}: {expected}"


def check_bold(pick, *cells):
    """Check that of these cells, which are of one measure, the best and no other is bold."""
    shown = [float(re.search(r"\d+\.\d+", cell)[0]) for cell in cells]
    assert ["**" in cell for cell in cells] == [value == pick(shown) for value in shown], cells


def best(name, measure):
    """The best rival of a column by a measure."""
    found = {own: cells for own, cells in scores(name).items() if not own.startswith("FedABML")}
    return (max if measure == "accuracy" else min)(found, key=lambda own: mean(found[own], measure))


# -- README.md and results/README.md ----------------------------------------------------------------------------------
def test_the_readme_has_a_row_for_every_column():
    assert [row[0] for row in table(ROOT / "README.md", "setting", "FedABML")] == list(README)


@pytest.mark.parametrize("setting", README)
def test_a_row_of_the_readme(setting):
    """FedABML is the one that validation accuracy chooses; the rivals are the best by test accuracy and by test NLL."""
    (row,) = [row[1:] for row in table(ROOT / "README.md", "setting", "FedABML") if row[0] == setting]
    own, rival, likely, paper = row
    name, found = README[setting], scores(README[setting])
    chosen = max((PLAIN, LEVEL), key=lambda system: validated(name, system))
    check(own, mean(found[chosen], "accuracy"), mean(found[chosen], "nll"))
    assert (named(rival), named(likely)) == (best(name, "accuracy"), best(name, "nll"))
    check(rival, mean(found[named(rival)], "accuracy"))
    check(likely, mean(found[named(likely)], "nll"))
    check(paper, numbers.table1("fedabml", name.removesuffix("-augmented")))
    accuracy, nll = own.split(", NLL ")
    check_bold(max, accuracy, rival)
    check_bold(min, nll, likely)
    assert [len(found[system]) for system in (chosen, named(rival))] == [5, 5]
    assert len(found[named(likely)]) == (4 if "four seeds" in likely else 5)


PAGES = ("cifar10-2", "cifar10-5", "emnist", "fashionmnist")
PAGES += tuple(f"cifar100-{n}{kind}" for n in (5, 20) for kind in ("", "-augmented"))
VERDICTS = {"first": 1, "not sig. different": 0, "second": -1}


@pytest.mark.parametrize("name", PAGES)
def test_a_row_of_table_1_on_the_page_of_all_results(name):
    (row,) = [row for row in table(RESULTS / "README.md", "experiment") if f"](table1/{name}/README.md)" in row[-1]]
    _, own, paper, rival, verdict, _ = row
    found = scores(name)
    check(own, *(mean(found[system], "accuracy") for system in (PLAIN, LEVEL)))
    check(paper, numbers.table1("fedabml", name.removesuffix("-augmented")))
    assert named(rival) == best(name, "accuracy")
    check(rival, mean(found[named(rival)], "accuracy"))
    check_bold(max, *own.split(" / "), rival)
    better = max((PLAIN, LEVEL), key=lambda system: mean(found[system], "accuracy"))
    assert better == max((PLAIN, LEVEL), key=lambda system: validated(name, system))
    lead, width = paired(found[better], found[named(rival)], "accuracy")
    assert VERDICTS[verdict] == (lead > width) - (lead < -width)


@pytest.mark.parametrize("classes", [5, 20])
def test_resnet_18_on_its_page_and_on_that_of_all_results(classes):
    cells = read(TABLE1 / "cifar100-resnet18/cells.jsonl")
    found = {system(c): {0: summary} for c, (summary,) in cells if c["classes_per_client"] == classes}
    (row,) = [r for r in table(RESULTS / "README.md", "experiment") if f"(100,{classes}), ResNet-18, one seed" in r[0]]
    check(row[1], mean(found[PLAIN], "accuracy"))
    check(row[2], numbers.table1("fedabml", f"cifar100-{classes}"))
    check(row[3], mean(found["FedAvg+FT"], "accuracy"))
    check_bold(max, row[1], row[3])
    rows = [
        row[:1] + row[1 + 3 * (classes == 20) :][:3] for row in table(TABLE1 / "cifar100-resnet18/README.md", "system")
    ]
    assert len(rows) == 4
    for own, accuracy, nll, ece in rows[:2]:
        for shown, measure in ((accuracy, "accuracy"), (nll, "nll"), (ece, "ece")):
            check(shown, mean(found[named(own)], measure))
    for own, accuracy, *_ in rows[2:]:
        algorithm = {"FedABML": "fedabml", "FedAvg+FT": "fedavg-ft"}[named(own.removeprefix("paper's "))]
        check(accuracy, numbers.table1(algorithm, f"cifar100-{classes}"))
    for pick, *shown in zip((max, min, min), *(row[1:] for row in rows[:2]), strict=True):
        check_bold(pick, *shown)


# -- pages of table1 --------------------------------------------------------------------------------------------------
def level_with(first, found):
    """The systems that are not significantly different from `first` by paired t-tests over seeds, Holm-corrected."""
    p = {own: paired_p(first, cells) for own, cells in found.items() if cells is not first}
    ascending = sorted(p, key=p.get)
    steps = [(len(p) - i) * p[own] for i, own in enumerate(ascending)]
    return {own for i, own in enumerate(ascending) if max(steps[: i + 1]) > 0.05}


@pytest.mark.parametrize("name", PAGES[5::2])
def test_a_page_with_augmented_images(name):
    found = scores(name)
    *rows, paper = table(TABLE1 / name / "README.md", "system", "accuracy %", "behind")
    assert {named(row[0]) for row in rows} == found.keys()
    first = found[named(rows[0][0])]
    for own, accuracy, behind, nll, ece, validation in rows:
        cells = found[named(own)]
        check(accuracy, mean(cells, "accuracy"), half(list(values(cells, "accuracy").values())))
        check(nll, mean(cells, "nll"))
        check(ece, mean(cells, "ece"))
        check(validation, validated(name, named(own)))
        if cells is not first:
            lead, width = paired(first, cells, "accuracy")
            check(behind, lead, width)
        assert len(cells) == (4 if "four seeds" in own else 5)
    marked = [named(own) for own, accuracy, *_ in rows if "≈" in accuracy]
    assert marked == [named(own) for own, *_ in rows if named(own) in level_with(first, found)]
    for pick, column in ((max, 1), (min, 3), (min, 4)):
        check_bold(pick, *(row[column] for row in rows))
    check(paper[1], numbers.table1("fedabml", name.removesuffix("-augmented")))


@pytest.mark.parametrize("name", PAGES[:4])
def test_the_rows_under_the_notes_of_a_page(name):
    rows = table(TABLE1 / name / "README.md", "more rows")
    assert len(rows) >= 2
    for own, accuracy, nll, ece in rows:
        cells = scores(name)[named(own)]
        check(accuracy, mean(cells, "accuracy"), half(list(values(cells, "accuracy").values())))
        check(nll, mean(cells, "nll"))
        check(ece, mean(cells, "ece"))


# -- results/fair -----------------------------------------------------------------------------------------------------
FAIR = RESULTS / "fair/README.md"


def check_beside(row, cells, of):
    """Check accuracy, difference, NLL, difference, ECE and perhaps its difference from `of`; its own row has none."""
    for measure, shown, difference in zip(("accuracy", "nll", "ece"), row[::2], [*row[1::2], ""], strict=False):
        check(shown, mean(cells, measure))
        if difference:
            check(difference, *paired(cells, of, measure))
    assert bool(row[1]) == (cells is not of)


def test_rivals_with_the_label_level():
    name, seen = "", []
    for column, own, *row in table(FAIR, "column", "row"):
        name = LENT.get(column, name)
        wanted = LEVEL if own == "FedABML" else named(own)
        check_beside(row, scores(name)[wanted], scores(name)[LEVEL])
        seen.append((name, wanted))
    assert len(seen) == len(set(seen)) == 12


def test_parts_of_fedabml_left_out():
    found = {"FedABML": scores("cifar10-5")[LEVEL]}
    for config, (summary,) in read(RESULTS / "fair/cells.jsonl"):
        if left_out := part(config):
            found.setdefault(left_out, {})[config["seed"]] = summary
    rows = table(FAIR, "row", "accuracy")
    assert [own for own, *_ in rows] == list(found)
    for own, *row in rows:
        check_beside(row, found[own], found["FedABML"])


def test_the_papers_optimiser():
    ours = {}
    for config, (summary,) in read(RESULTS / "fair/optimiser.jsonl"):
        own = config[config["algorithm"]]
        cells = ours.setdefault((str(own["momentum"]), config["classes_per_client"]), {})
        cells[config["algorithm"]] = 100 * summary["accuracy"]
    *rows, paper = table(FAIR, "momentum")
    for momentum, *row in rows:
        for i, classes in enumerate((2, 5)):
            cells = ours[momentum, classes]
            distances = [abs(cells[a] - numbers.table1(a, f"cifar10-{classes}")) for a in cells if a != "fedabml"]
            assert len(distances) == 14
            check(row[i], np.mean(distances))
            check(row[2 + i], cells["fedabml"])
            check(row[4 + i], cells["pfedbayes"])
    pairs = [(algorithm, classes) for algorithm in ("fedabml", "pfedbayes") for classes in (2, 5)]
    for shown, (algorithm, classes) in zip(paper[3:], pairs, strict=True):
        check(shown, numbers.table1(algorithm, f"cifar10-{classes}"))


# -- results/objections.md --------------------------------------------------------------------------------------------
def test_the_chosen_settings_that_diverged_are_those_of_the_objections():
    diverged = {}
    for path in RESULTS.rglob("cells.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if '"error": "Training diverged' in line and (cell := json.loads(line))["facts"]["split"] == "test":
                folder = path.parent.relative_to(RESULTS).as_posix()
                diverged.setdefault((folder, json.loads(cell["identity"])[0]["algorithm"]), []).append(1)
    assert sorted(map(len, diverged.values())) == [1] * 5 + [3] * 2
    (row,) = [row for row in table(RESULTS / "objections.md", "objection") if row[0].startswith("`tune` may")]
    assert set(re.findall(r"\]\(([^)]*)/README.md\)", row[2])) == {folder for folder, _ in diverged}


def test_temperature_scaling():
    """Every row: NLL and ECE, what the calibration changes, and the calibrated distance to FedABML with the level."""
    path = RESULTS / "temperature/cells.jsonl"
    cells = {}
    for config, (summary,) in read(path):
        cells.setdefault(system(config), {})[config["seed"]] = summary
    rows = table(RESULTS / "temperature/README.md", "system", "accuracy %")
    assert {named(name) for name, *_ in rows} == cells.keys()
    for name, accuracy, nll, nll_change, nll_ahead, ece, ece_change, ece_ahead in rows:
        own = cells[named(name)]
        check(accuracy, mean(own, "accuracy"))
        for shown, change, ahead, measure in ((nll, nll_change, nll_ahead, "nll"), (ece, ece_change, ece_ahead, "ece")):
            after = {seed: {measure: summary[f"{measure}_calibrated"]} for seed, summary in own.items()}
            first = {seed: {measure: summary[f"{measure}_calibrated"]} for seed, summary in cells[LEVEL].items()}
            check(shown, mean(own, measure))
            check(change, *paired(after, own, measure))
            if named(name) != LEVEL:
                check(ahead, *paired(after, first, measure))
