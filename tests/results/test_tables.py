"""The tables of README.md, results/README.md and the pages of Table 1 hold what their cells give."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedabml.experiments.paper import numbers
from tests.results.published import (
    LEVEL,
    PLAIN,
    RESNET,
    RESULTS,
    ROOT,
    TABLE1,
    best,
    by_draw,
    by_system,
    check,
    check_bold,
    half,
    mean,
    named,
    paired,
    paired_p,
    partitions,
    prose,
    scores,
    table,
    validated,
    values,
    worded,
)

README = {"CIFAR-10, 100 clients × 2 classes, CNN": "cifar10-2", "CIFAR-10, 100 × 5, CNN": "cifar10-5"}
README |= {"EMNIST, 150 × 3, MLP": "emnist", "FashionMNIST, 200 × 2, logistic regression": "fashionmnist"}
README |= {f"CIFAR-100, 100 × {n}, CNN, augmented": f"cifar100-{n}-augmented" for n in (5, 20)}


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


@pytest.mark.parametrize(("classes", "seeds"), [(5, "three"), (20, "two")])
def test_resnet_18_on_the_page_of_all_results(classes, seeds):
    found = by_system(RESNET / "cells.jsonl", classes_per_client=classes)
    wanted = f"CIFAR-100 (100,{classes}), ResNet-18, {seeds} seeds"
    (row,) = [row for row in table(RESULTS / "README.md", "experiment") if row[0] == wanted]
    assert [len(cells) for cells in found.values()] == [{"two": 2, "three": 3}[seeds]] * 2
    check(row[1], mean(found[PLAIN], "accuracy"))
    check(row[2], numbers.table1("fedabml", f"cifar100-{classes}"))
    check(row[3], mean(found["FedAvg+FT"], "accuracy"))
    check_bold(max, row[1], row[3])
    lead, width = paired(found[PLAIN], found["FedAvg+FT"], "accuracy")
    assert lead > 0 and row[4] == f"{'first' if seeds == 'three' and lead > width else 'highest mean'} (one rival)"


FEW = {"FashionMNIST": "fashionmnist-emnist", "EMNIST": "fashionmnist-emnist", "CIFAR-10 (100,5)": "cifar10-5"}


@pytest.mark.parametrize("column", FEW)
def test_five_random_samples_on_the_page_of_all_results(column):
    """The sparse level's rows are never bold: its form was chosen after these test data had been read."""
    dataset = column.partition(" ")[0].lower().replace("-", "")
    found = by_draw(RESULTS / "fewdata" / FEW[column] / "cells.jsonl", dataset=dataset)["5 random"]
    (row,) = [
        row for row in table(RESULTS / "README.md", "experiment") if row[0] == f"few data, {column}, 5 random samples"
    ]
    _, own, _, rival, verdict, _ = row
    ours = (PLAIN, LEVEL, "FedABML + sparse label level")
    ranked = sorted(found, key=lambda name: -mean(found[name], "accuracy"))
    better, other = (next(name for name in ranked if ("FedABML" in name) is is_own) for is_own in (True, False))
    assert named(rival) == other.replace("FedAvg+FT +", "FedAvg +")  # as the page of few data has it
    check(own, *(mean(found[name], "accuracy") for name in ours))
    check(rival, mean(found[other], "accuracy"))
    bold = ["**" in cell for cell in (*re.split(r" / |, sparse ", own), rival)]
    assert bold == [name == ranked[0] and "sparse" not in name for name in (*ours, other)]
    lead, width = paired(found[better], found[other], "accuracy")
    assert VERDICTS[verdict] == (lead > width) - (lead < -width)


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


@pytest.mark.parametrize("name", ["cifar10-2", "cifar10-5", "emnist", "fashionmnist"])
def test_the_note_on_newcomers_of_a_page(name):
    note = (TABLE1 / name / "README.md").read_text(encoding="utf-8").partition("had never been drawn")[2]
    note = " ".join(note.partition("newcomers.jsonl")[0].split())
    for own, cells in by_system(TABLE1 / name / "newcomers.jsonl").items():
        (shown,) = re.findall(rf"{own}(?: has)? (\S+ ± \S+ \([^)]*\))", note)
        accuracy = list(values(cells, "accuracy").values())
        check(shown, np.mean(accuracy), half(accuracy), mean(cells, "nll"))
    assert partitions(TABLE1 / name / "newcomers.jsonl") == partitions(TABLE1 / name / "cells.jsonl")


@pytest.mark.parametrize("name", ["cifar10-2", "cifar10-5"])
def test_what_the_other_start_of_newcomers_changes(name):
    """The note has every change that is larger than its interval, no other, and the nearest distance to FedABML."""
    before, other = scores(name), by_system(TABLE1 / name / "newcomers.jsonl")
    note = prose(TABLE1 / name / "README.md").partition("Changed by more than the interval are")[2]
    note = note.partition(" - Those runs")[0]
    changes = []
    for measure, digits in (("accuracy", 2), ("nll", 4), ("ece", 4)):
        differences = [paired(cells, before[own], measure) for own, cells in other.items()]
        changes += [worded(d, digits, "+") for d in differences if abs(d[0]) > d[1]]
    assert sorted(re.findall(r"[+-]\S+ ± [\d.]+\d", note)) == sorted(changes)
    leads = [paired(before[own], cells, "accuracy") for own in (PLAIN, LEVEL) for cells in other.values()]
    behind = [paired(cells, before[own], "nll") for own in (PLAIN, LEVEL) for cells in other.values()]
    assert all(distance > width for distance, width in leads + behind)
    lead = worded(min(leads), 2, "up")
    assert f"stay behind both FedABMLs by accuracy, by {lead} points or more, and by NLL." in note
