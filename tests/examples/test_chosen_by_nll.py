"""Choices by validation NLL: read from the files a second time, and trials that are no rival's or of another seed."""

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "results/calibration"


@pytest.fixture
def chosen(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import chosen_by_nll

    return chosen_by_nll


def options(path, algorithm, *, classes, **hyper):
    """Return (NLL, accuracy, ECE, hyperparameters) of every option of seed 101 with these hyperparameters."""
    found = []
    for line in path.read_text().splitlines():
        result = json.loads(line)
        config = json.loads(result["identity"])[0]
        own = config.get(algorithm, {})
        is_search = config["seed"] == 101 and config["validation"] == 0.2 and config["classes_per_client"] == classes
        if is_search and own and hyper.items() <= own.items():
            for score in result["scores"]:
                if score["error"] is None:
                    summary = score["summary"]
                    row = (summary["nll"], summary["accuracy"], summary["ece"], own | score["personal"])
                    found.append(row)
    return found


@pytest.mark.parametrize(
    ("column", "classes", "file", "algorithm", "system", "hyper"),
    [
        ("cifar10-2", 2, "table1/cifar10-2", "fedabml-plain", "FedABML, no label level", {"posterior": "gaussian"}),
        ("cifar10-5", 5, "table1/cifar10-5", "fedavg-ft", "FedAvg+FT", {"label_prior": "none"}),
        ("cifar10-5", 5, "fair", "fedabml", "FedCM+FT + label level", {"posterior": "point"}),
        ("emnist", 3, "fair", "scaffold-ft", "SCAFFOLD+FT + label level", {"label_prior": "dirichlet"}),
    ],
)
def test_a_row_of_the_page_is_the_lowest_nll_of_the_file(column, classes, file, algorithm, system, hyper, chosen):
    found = options(ROOT / "results" / file / "search.jsonl", algorithm, classes=classes, **hyper)
    nll, accuracy, ece, settings = min(found, key=lambda row: row[0])
    section = (PAGE / "README.md").read_text().partition(f"## {chosen.TITLES[column]}\n")[2].partition("\n## ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| {system} |")]
    _, count, *by_accuracy, a, b, c = [cell.strip() for cell in line.strip("|").split("|")]
    assert int(count) == len(found)
    shown = by_accuracy if a == "the same" else [a, b, c]
    assert shown == [f"{100 * accuracy:.2f}", f"{nll:.3f}", f"{ece:.3f}"]
    variant = {"point": "-point", "dirichlet": "-labels"}.get((hyper.get("posterior") or hyper["label_prior"]), "")
    written = tomllib.loads((PAGE / f"settings/{column}{variant}.toml").read_text())[algorithm]
    assert written == {name: "none" if settings[name] is None else settings[name] for name in written}


@pytest.mark.slow
def test_the_page_and_its_settings_are_what_the_command_writes(chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["chosen_by_nll.py", "--out", str(tmp_path)])
    chosen.main()
    published = {path.relative_to(PAGE): path.read_text() for path in PAGE.rglob("*.*") if path.suffix != ".jsonl"}
    assert {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")} == published


def scores(path, dataset, algorithm, **hyper):
    """Return the test NLL by seed of an algorithm's cells of a dataset with these hyperparameters."""
    found = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        config = json.loads(result["identity"])[0]
        if config["dataset"] == dataset and hyper.items() <= config.get(algorithm, {}).items():
            (score,) = result["scores"]
            found[config["seed"]] = score["summary"]["nll"]
    assert len(found) == 5
    return found


@pytest.mark.parametrize(("dataset", "title"), [("emnist", "EMNIST (150,3)"), ("fashionmnist", "FashionMNIST (200,2)")])
@pytest.mark.parametrize(
    ("system", "algorithm", "hyper", "before"),
    [
        ("SCAFFOLD+FT + label level", "scaffold-ft", {"label_prior": "dirichlet"}, "fair"),
        ("FedABML, no label level", "fedabml-plain", {"posterior": "gaussian"}, "table1"),
    ],
)
def test_a_row_of_the_test_run_is_paired_with_fedabmls(dataset, title, system, algorithm, hyper, before):
    level, cells = {"label_prior": "dirichlet", "posterior": "gaussian"}, PAGE / "cells.jsonl"
    own, first = scores(cells, dataset, algorithm, **hyper), scores(cells, dataset, "fedabml", **level)
    section = (PAGE / "README.md").read_text().partition(f"### Test run, {title}\n")[2].partition("\n##")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| {system} |")]
    _, _, nll, behind, _, _, by_accuracy, _ = [cell.strip() for cell in line.strip("|").split("|")]
    differences = np.array([own[seed] - first[seed] for seed in sorted(own)])
    half = 2.776445 * differences.std(ddof=1) / np.sqrt(5)  # Student's quantile of four degrees of freedom
    assert (nll, behind) == (f"{np.mean(list(own.values())):.4f}", f"{differences.mean():+.4f} ± {half:.4f}")
    folder = ROOT / "results" / before / (dataset if before == "table1" else "")
    earlier = scores(folder / "cells.jsonl", dataset, algorithm, **hyper)
    assert by_accuracy == f"{np.mean(list(earlier.values())):.4f}"


def test_test_rows_other_seeds_and_parts_left_out_are_no_options(chosen, tmp_path, monkeypatch):
    """Each of four trials would be the lowest NLL: of test rows, of a second seed, of all rows, of FedABML's parts."""
    search = (ROOT / "results/table1/fashionmnist/search.jsonl").read_text().splitlines()
    lines = [line for line in search if '"label": "fedabml"' in line]
    trials = [json.loads(line) for line in lines]
    one = trials[0]

    def line(split="val", hyper=None, **config):
        trial = json.loads(json.dumps(one))
        whole, personal = json.loads(trial["identity"])
        whole |= config
        whole["fedabml"] |= hyper or {"lam": 0.5}
        trial |= {"identity": json.dumps([whole, personal]), "facts": trial["facts"] | {"split": split}}
        for score in trial["scores"]:
            score["summary"]["nll"] = 0.0
        return json.dumps(trial)

    others = [line(split="test"), line(seed=102), line(validation=0.0)]
    for folder, more in (("table1/fashionmnist", others), ("fair", [line(hyper={"average": 0.0}), *others])):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "search.jsonl").write_text("\n".join([*lines * (folder != "fair"), *more]) + "\n")
    monkeypatch.setattr(chosen, "TABLE1", tmp_path / "table1")
    monkeypatch.setattr(chosen, "FAIR", tmp_path / "fair/search.jsonl")
    found = chosen.searched("fashionmnist")
    assert sum(map(len, found.values())) == sum(len(trial["scores"]) for trial in trials)
    assert min(option.score.summary["nll"] for own in found.values() for option in own) > 0
    rival = line(hyper={"posterior": "point"})
    (tmp_path / "fair/search.jsonl").write_text(rival + "\n")
    chosen.read.cache_clear()
    own = chosen.searched("fashionmnist")["fedabml", "point"]
    assert {option.system for option in own} == {"FedCM+FT + label level"} and len(own) == len(one["scores"])
    chosen.read.cache_clear()
