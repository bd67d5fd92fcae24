"""What tables that are typed by hand are recomputed from, cells by system and seed, and how a page's table is read."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import scipy.stats

from fedabml.experiments.paper import numbers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
TABLE1 = RESULTS / "table1"
RESNET = TABLE1 / "cifar100-resnet18"
LENT = {"CIFAR-10 (100,2)": "cifar10-2", "CIFAR-10 (100,5)": "cifar10-5"}  # the columns of results/fair
LENT |= {"EMNIST (150,3)": "emnist", "FashionMNIST (200,2)": "fashionmnist"}
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
    usual = "dirichlet" if algorithm == "fedabml" else "none"
    level = {usual: "", "sparse": numbers.SPARSE}.get(own["label_prior"], numbers.LABELS)
    return numbers.name(algorithm + level, "tuned")


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


def by_system(path, **wanted):
    """The summaries of a ledger's cells with these settings, {system: {seed: summary}}."""
    found = {}
    for config, (summary,) in read(path):
        if wanted.items() <= config.items():
            found.setdefault(system(config), {})[config["seed"]] = summary
    return found


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


def by_draw(path, **wanted):
    """The summaries of new clients of cells with these settings, {draw: {system: {seed: summary}}}."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        config = json.loads(cell["identity"])[0]
        if wanted.items() <= config.items() and not cell["error"]:
            for score in cell["scores"]:
                by_seed = found.setdefault(score["on"], {}).setdefault(system(config), {})
                by_seed[config["seed"]] = score["summary"]
    return found


def partitions(path, **wanted):
    """The hash of every seed's partition, of the cells with these settings."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        config = json.loads(cell["identity"])[0]
        if wanted.items() <= config.items():
            partition = cell["facts"]["partition_hash"]
            assert found.setdefault(config["seed"], partition) == partition
    return found


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


def prose(path):
    """The text of a page on one line, with plain signs, so that a sentence can be looked for."""
    return " ".join(path.read_text(encoding="utf-8").replace("−", "-").split())


def worded(difference, digits, way):
    """A difference and half of its interval as prose has them.

    `way` is "+" where the sign is shown. Where the words around the number tell it, `way` is "up" or "down", the
    direction that these words claim; a difference of the other sign is refused.
    """
    value, width = difference
    assert way in ("+", "up", "down")
    assert way == "+" or (value > 0) == (way == "up"), f"{value} is not {way}"
    shown = f"{value:+.{digits}f}" if way == "+" else f"{abs(value):.{digits}f}"
    return f"{shown} ± {width:.{digits}f}"


def differs(difference):
    """Whether the 95% interval of a difference excludes 0."""
    value, width = difference
    return abs(value) > width


def check_bold(pick, *cells):
    """Check that of these cells, which are of one measure, the best and no other is bold."""
    shown = [float(re.search(r"\d+\.\d+", cell)[0]) for cell in cells]
    assert ["**" in cell for cell in cells] == [value == pick(shown) for value in shown], cells


def best(name, measure):
    """The best rival of a column by a measure."""
    found = {own: cells for own, cells in scores(name).items() if not own.startswith("FedABML")}
    return (max if measure == "accuracy" else min)(found, key=lambda own: mean(found[own], measure))
