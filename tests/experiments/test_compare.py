"""Comparing algorithms: real runs on digits, what is written and printed, and going on after an interruption."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedabml.cli.compare import fitting, width
from fedabml.errors import InputError
from fedabml.experiments import runner
from fedabml.experiments.cell import Cell, Result, Score
from fedabml.experiments.compare import ComparisonRequest, compare, configs
from fedabml.experiments.comparison_tables import decision_grid, decision_notes, explained, grid
from fedabml.experiments.progress import CellProgress
from fedabml.experiments.ranking import make
from fedabml.experiments.runner import Callbacks
from fedabml.files.sealed import parse_sealed, write_json
from fedabml.runs.config import RunConfig
from tests.cli.command import MAX_WAIT, run
from tests.report.test_browser import CHROMIUM, tour

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
SMALL = shlex.split("--clients 8 --model mlr --rounds 2 --participation 0.5 --epochs 1 --batch-size 20")
THREE = ["--algorithms", "fedabml,fedavg,local", "--seeds", 3]


def refused(*words):
    """The paragraph of an error."""
    output = run("compare", *words, code=2).stderr
    assert output.startswith("Error: ") and output.count("\n") == 1 and "Traceback" not in output
    return output


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def lines(folder):
    return (folder / "cells.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished comparison and what it printed, not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "comparison"
    return out, run("compare", *SMALL, *THREE, "--out", out)


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of it."""
    shutil.copytree(whole[0], tmp_path / "done")
    return tmp_path / "done"


@pytest.fixture
def idle(monkeypatch):
    """No cell may run."""

    def run_together(group, on_round):
        raise AssertionError(f"{[cell.identity for cell in group]} ran again")
        yield

    monkeypatch.setattr(runner, "run_together", run_together)


# -- what it says -----------------------------------------------
def test_the_same_numbers_everywhere(whole):
    out, output = whole
    cells = [json.loads(line) for line in lines(out)]
    assert len(cells) == 9
    table, page = json.loads((out / "table.json").read_text()), (out / "table.md").read_text()
    assert table["seeds"] == [0, 1, 2] and len(set(table["partition_hashes"].values())) == 3
    flat = {row["algorithm"]: row for row in rows(out / "table.csv")}
    ordered = [row["accuracy"] for row in table["rows"]]
    assert ordered == sorted(ordered, reverse=True) and [row["best"] for row in table["rows"]] == [True, False, False]
    for row in table["rows"]:
        own = [cell for cell in cells if cell["label"] == row["label"]]
        for measure in ("accuracy", "accuracy_worst_decile", "nll", "ece", "brier"):
            values = [cell["scores"][0]["summary"][measure] for cell in own]
            half = stats.t.ppf(0.975, 2) * stats.sem(values)
            assert row[measure] == pytest.approx(np.mean(values)) and row[f"{measure}_half"] == pytest.approx(half)
            assert float(flat[row["label"]][measure]) == pytest.approx(row[measure], rel=1e-5)
        shown = f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_half']:.2f}"
        assert shown in page and shown in output.stdout and f"{row['nll']:.3f} ± {row['nll_half']:.3f}" in page
        assert (f"**{shown}**" in page) == (f"* {shown}" in output.stdout) == row["best"]
        assert (f"≈ {shown}" in page) == (f"≈ {shown}" in output.stdout) == row["alike"]
        behind = f"{100 * row['behind']:.2f} ± {100 * row['behind_half']:.2f}" if row["behind"] is not None else "–"
        assert f"{shown}{'**' * row['best']} | {behind} |" in page and (behind == "–") == row["best"]
        up, down = own[0]["facts"]["bytes_up"], own[0]["facts"]["bytes_down"]
        assert row["traffic_bytes"] == up + down and (row["traffic_bytes"] == 0) == (row["label"] == "local")
    assert page.startswith("# 3 algorithms on digits, 3 seeds") and table["command"] in page and "torch" in page
    assert all(digest in page for digest in table["partition_hashes"].values())
    for sentence in table["notes"]:
        assert sentence.replace("* best", "Bold: best") in page
    assert "t-tests over the 3 seeds and over 24 clients" in " ".join(output.stdout.split())


def test_the_tests_are_those_of_the_clients(whole):
    out, _ = whole
    cells = {(c["label"], c["config"].get("seed", 0)): c for c in map(json.loads, lines(out))}
    best, *others = json.loads((out / "table.json").read_text())["rows"]
    for row in others:
        both = (best["label"], row["label"])
        own = [[cells[label, seed]["scores"][0]["clients"]["accuracy"] for seed in range(3)] for label in both]
        d = np.subtract(*own)
        assert row["behind"] == pytest.approx(d.mean())
        assert row["behind_half"] == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem(d.mean(1)))
        assert row["p_seeds"] == pytest.approx(stats.ttest_1samp(d.mean(1), 0).pvalue)
        assert row["p_clients"] == pytest.approx(stats.ttest_1samp(d.ravel(), 0).pvalue)
    p = [max(row["p_seeds"], row["p_clients"]) for row in others]
    assert [row["p"] for row in others] == pytest.approx(stats_holm(p))
    assert [row["alike"] for row in others] == [row["p"] >= 0.05 for row in others]


def stats_holm(p):
    """Holm's steps for two."""
    low, high = min(2 * min(p), 1), max(p)
    return [low if value == min(p) else max(low, high) for value in p]


def test_who_is_harmed(whole):
    out, output = whole
    clients = rows(out / "clients.csv")
    assert len(clients) == 3 * 3 * 8 and list(clients[0])[:6] == [
        "algorithm",
        "seed",
        "client",
        "name",
        "accuracy",
        "nll",
    ]
    for row in json.loads((out / "table.json").read_text())["rows"]:
        own = [float(c["difference"]) for c in clients if c["algorithm"] == row["label"]]
        if row["label"] == "local":
            assert not any(own) and row["harm_share"] is None
            continue
        lost = [d for d in own if d < 0]
        assert (row["harm_worse"], row["harm_equal"]) == (len(lost), own.count(0))
        assert row["harm_better"] == 24 - len(lost) - own.count(0) and row["harm_share"] == len(lost) / 24
        assert row["harm_mean_loss"] == pytest.approx(-np.mean(lost) if lost else 0, abs=1e-5)
        worst = [most["here"] - most["alone"] for most in row["harm_most"]]
        assert worst == pytest.approx(sorted(lost)[:10], abs=1e-5)
        for most in row["harm_most"]:
            same = (c for c in clients if (c["algorithm"], c["name"]) == (row["label"], most["client"]))
            assert any(int(c["seed"]) == most["seed"] and float(c["accuracy"]) == most["here"] for c in same)
    assert "Clients against Local only" in output.stdout and "largest losses" in (out / "table.md").read_text()


def test_the_page_stands_alone(whole):
    page = (whole[0] / "report.html").read_text()
    assert "≈ not distinguishable" in page and "Means and intervals" in page and "Clients against Local only" in page
    assert "★" not in page and "client-3, seed 2" in page and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open the page")
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(whole, tmp_path, width):
    saw = tour(whole[0] / "report.html", tmp_path, width)
    assert int(saw["figures"]) == (whole[0] / "report.html").read_text().count("<figure") >= 3
    assert re.fullmatch(r"client-\d+, seed \d", saw["client"]) and int(saw["lit"]) == 2


def test_the_page_has_what_rows_lack_to_the_best(whole):
    page = (whole[0] / "report.html").read_text()
    summary = page[page.index('aria-label="Summary"') :]
    heads = re.findall(r'<th scope="col"><button type="button" title="">([^<]*)', summary[: summary.index("</thead>")])
    cells = [re.findall(r"<td([^>]*)>([^<]*)", line)[heads.index("behind") - 1] for line in _lines(summary)]
    written = (whole[0] / "table.md").read_text()
    rows = json.loads((whole[0] / "table.json").read_text())["rows"]
    assert cells.pop() == ("", "–")  # of the base rate
    for row, (attributes, words) in zip(rows, cells, strict=True):
        lead, half = row["behind"], row["behind_half"]
        assert words == ("–" if lead is None else f"{100 * lead:.2f} ± {100 * half:.2f}") and f"| {words} |" in written
        assert attributes == ("" if lead is None else f' data-v="{lead:.9g}"')
    assert cells[0][1] == "–" != cells[1][1] and "Behind: the best&#39;s lead over it ± half" in page


def test_the_page_shows_how_reliable_the_rows_are(whole, finished, idle):
    results = [Result.of(line) for line in lines(finished)]
    for result in results:
        bins = np.array(result.scores[0].reliability)
        gaps = np.abs(bins[:, 0] - bins[:, 1]) @ bins[:, 2] / bins[:, 2].sum()
        assert gaps == pytest.approx(result.scores[0].summary["ece"], abs=1e-4)
    of = [np.array(r.scores[0].reliability) for r in results if r.label == "fedavg"]
    best = max(range(len(of[0])), key=lambda i: sum(bins[i, 2] for bins in of))
    count, right = sum(b[best, 2] for b in of), sum(b[best, 1] * b[best, 2] for b in of)
    tips = re.findall(r"fedavg: ([\d.]+)% right at confidence [\d.]+%&#10;(\d+) predictions", read_page(whole[0]))
    assert (f"{100 * right / count:.1f}", f"{count:.0f}") in tips

    content = (parse_sealed(line, "") for line in lines(finished))  # cells of a version that did not keep it
    old = [c | {"scores": [{k: v for k, v in s.items() if k != "reliability"} for s in c["scores"]]} for c in content]
    (finished / "cells.jsonl").write_text("".join(json.dumps(c) + "\n" for c in old))
    run("report", finished)
    assert "<h3>Reliability</h3>" not in read_page(finished) and "<h3>Reliability</h3>" in read_page(whole[0])


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A finished comparison whose rows were scored after rounds 2 and 4 of 5, too."""
    out = tmp_path_factory.mktemp("watched") / "comparison"
    run("compare", *SMALL, *WATCHED, "--eval-every", 2, "--out", out, "--quiet")
    return out


WATCHED = ["--algorithms", "fedavg,local", "--seeds", 3, "--rounds", 5]


def test_a_curve_is_in_the_table_and_on_the_page_with_its_bands(watched):
    cells, table = [json.loads(line) for line in lines(watched)], json.loads((watched / "table.json").read_text())
    for row in table["rows"]:
        own = [cell for cell in cells if cell["label"] == row["label"]]
        by_round = {t: [c["curve"][i]["accuracy"] for c in own] for i, t in enumerate((2, 4))}
        by_round[5] = [cell["scores"][0]["summary"]["accuracy"] for cell in own]
        assert [point["round"] for point in row["curve"]] == [2, 4, 5]
        for point, values in zip(row["curve"], by_round.values(), strict=True):
            assert point["accuracy"] == pytest.approx(np.mean(values))
            assert point["accuracy_half"] == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem(values))
        assert row["curve"][-1]["accuracy"] == pytest.approx(row["accuracy"])
        assert f"{row['label']}: {row['curve'][0]['accuracy']:.1%}" in read_page(watched)
    page = read_page(watched)
    assert "<h3>Accuracy per round</h3>" in page and page.count('fill-opacity=".18"') == 2
    assert (
        "The band is the 95% confidence interval of the mean over seeds." in page
        and " --eval-every 2 " in table["command"]
    )


def test_a_curve_of_a_regression_counts_clients_of_few_rows_as_the_table_does(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "sites").mkdir()
    for site, test in enumerate((2, 20, 20)):
        x = rng.normal(size=(20 + test, 2)).astype("float32")
        y = (x @ [1.0, site]).astype("float32")
        np.savez(tmp_path / f"sites/{site}.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    words = [
        "--data",
        tmp_path / "sites",
        *shlex.split("--model mlr --participation 1 --algorithms fedavg --epochs 1 --seeds 1"),
    ]
    for name, options in (("short", ["--rounds", 2]), ("long", ["--rounds", 4, "--eval-every", 2])):
        run("compare", *words, *options, "--out", tmp_path / name, "--quiet")
    short, long = (json.loads((tmp_path / name / "table.json").read_text())["rows"][0] for name in ("short", "long"))
    assert [point["round"] for point in long["curve"]] == [2, 4]
    assert [point["rmse"] for point in long["curve"]] == pytest.approx([short["rmse"], long["rmse"]])
    summary = json.loads(lines(tmp_path / "short")[0])["scores"][0]["summary"]
    assert short["rmse"] == summary["rmse_all"] != pytest.approx(summary["rmse"])


def test_to_watch_changes_no_number_and_unwatched_cells_keep_their_identity(watched, whole, tmp_path):
    run("compare", *SMALL, *WATCHED, "--out", "plain", "--quiet")
    assert (tmp_path / "plain/clients.csv").read_text() == (watched / "clients.csv").read_text()
    plain = ComparisonRequest.read(tmp_path / "plain")
    assert [cell.curve for cell in plain.cells()] == [()] * 6
    assert {json.loads(line)["identity"] for line in lines(tmp_path / "plain")} == {
        Cell("", cell.config).identity for cell in ComparisonRequest.read(watched).cells()
    }
    assert "<h3>Accuracy per round</h3>" not in read_page(whole[0]) and "<h3>Who holds what" in read_page(whole[0])
    late = configs(["local"], {"rounds": 5, "eval_every": 5})
    assert [cell.curve for cell in ComparisonRequest.of(late, 1).cells()] == [()]  # the last round is scored anyway


def test_a_watched_comparison_is_resumed_as_it_is(watched, idle, tmp_path):
    shutil.copytree(watched, tmp_path / "done")
    command = json.loads((watched / "comparison.json").read_text())["command"]
    for words in (["compare", "--resume", "--out", "done"], [*shlex.split(command)[1:-1], "done"]):
        assert "6 of 6 runs were finished before" in run(*words).stdout
        assert read_page(tmp_path / "done").count('fill-opacity=".18"') == 2
    output = refused("--resume", "--out", "done", "--eval-every", 3)
    assert "eval_every (was 2, now 3)" in output and "another folder" in output
    assert "eval_every (was 2, now 0)" in refused(*SMALL, *WATCHED, "--out", "done")


def test_a_round_that_a_seed_could_not_score_has_no_mean():
    def seen(seed, *curve):
        key, result = played("good", seed, [0.5 + seed / 10])
        return key, replace(result, config={"seed": seed, "rounds": 3}, curve=list(curve))

    fine, lost = [{"round": t, "accuracy": 0.1 * t} for t in (1, 2)], {"round": 2, "error": "It burst."}
    results = dict([seen(0, *fine), seen(1, *fine), seen(2, fine[0], lost)])
    own = {"good": RunConfig(algorithm="fedavg")}
    first, second, last = make(own, results, {}, range(3), same_clients=False).curve("good")
    assert first == {"round": 1, "accuracy": pytest.approx(0.1), "accuracy_half": pytest.approx(0, abs=1e-9)}
    assert second == {"round": 2, "eval_error": "It burst."}
    half = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5
    assert last == {"round": 3, "accuracy": pytest.approx(0.6), "accuracy_half": pytest.approx(half)}
    two = make(own, results, {}, range(2), same_clients=False).curve("good")
    assert [point["accuracy_half"] for point in two] == [None] * 3  # two seeds have no interval
    plain = dict(played("good", seed, [0.5]) for seed in range(3))
    assert make(own, plain, {}, range(3), same_clients=False).curve("good") == []


def test_the_page_shows_who_holds_what_in_the_first_seed(whole, finished, idle):
    page = read_page(whole[0])
    assert page.count("<h3>Who holds what: classes</h3>") == 1 and "This is seed 0; every other seed divides" in page
    assert "8 clients · 1,4" in page and "data-cells=" in page
    text = (finished / "manifest-0.json").read_text()
    (finished / "manifest-0.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    assert "manifest-0.json" in run("report", finished, code=2).stderr
    (finished / "manifest-0.json").unlink()  # as in a comparison of an older version
    run("report", finished)
    assert "Who holds what" not in read_page(finished)


def read_page(folder):
    return (folder / "report.html").read_text()


def test_its_report_is_drawn_anew_from_the_cells_alone(finished, idle, tmp_path, monkeypatch):
    monkeypatch.setattr("fedabml.experiments.study.load", lambda *_: pytest.fail("data were read"))
    before = {file.name: file.read_bytes() for file in finished.iterdir()}
    (finished / "report.html").unlink()
    assert f"report   {finished / 'report.html'}" in run("report", finished).stdout
    same = {file.name: file.read_bytes() for file in finished.iterdir()}
    pages = [files["report.html"].split(b"fedabml compare")[0] for files in (same, before)]  # the folder is another
    assert same.keys() == before.keys() and pages[0] == pages[1]
    assert all(same[name] == before[name] for name in before if name != "report.html")
    run("report", finished, "--out", tmp_path / "x.html", "--title", "Mine")
    assert "<title>Mine</title>" in (tmp_path / "x.html").read_text()


def test_its_report_is_refused_until_it_is_finished(finished, idle, tmp_path):
    run("train", *SMALL, "--out", tmp_path / "run", "--quiet")
    assert "report them separately" in refused_report(finished, tmp_path / "run")
    shutil.copytree(finished, tmp_path / "twin")
    assert "--title out" in refused_report(finished, tmp_path / "twin", "--title", "x")
    assert run("report", finished, tmp_path / "twin").stdout.count("report.html") == 2
    (finished / "cells.jsonl").write_text("".join(line + "\n" for line in lines(finished)[:-2]))
    output = refused_report(finished)
    assert "2 of 9 runs are missing" in output and f"fedabml compare --resume --out {finished}" in output
    (tmp_path / "twin/table.json").write_text('{"rows": [1]}')
    assert "table.json" in refused_report(tmp_path / "twin")


def test_a_row_that_was_refused_stays_so_in_its_report(tmp_path, monkeypatch):
    words = ["--algorithms", "local,fedavg,fedrep", "--seeds", 1, "--out", "run"]
    run("compare", *SMALL, *words)
    monkeypatch.setattr("fedabml.experiments.compare._refused", lambda *_: pytest.fail("rows were tried"))
    page = (tmp_path / "run/report.html").read_text()
    run("report", "run")
    assert (tmp_path / "run/report.html").read_text() == page and "– fedrep: " in page


def refused_report(*words):
    output = run("report", *words, code=2).stderr
    assert output.startswith("Error: ") and output.count("\n") == 1 and "Traceback" not in output
    return output


def _lines(section):
    return re.findall(r"<tr[ >].*?</tr>", section[section.index("<tbody>") : section.index("</tbody>")])


@pytest.mark.parametrize("width", [80, 110, 140])
def test_the_table_fits_the_terminal(finished, idle, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    output = run("compare", "--resume", "--out", finished).stdout
    assert "worse" in output and ("are in table.md" in output) == (width < 140)
    assert ("Behind: the best's lead" in output) == (width > 80) == ("and the differences to the best" not in output)
    if width > 80:
        head = next(line for line in output.splitlines() if "accuracy %" in line)
        words = ("behind", "worst tenth", "NLL", "ECE", "Brier", "traffic", "seconds", "worse")
        assert all(word in head for word in words)


def test_a_wide_table_is_shown_in_parts_that_fit():
    head, rows = ["name", *(f"measure {i}" for i in range(9))], [[f"row{i}", *["1.234"] * 9] for i in range(2)]
    parts = list(fitting(head, rows, 40))
    assert [name for part, _ in parts for name in part[1:]] == head[1:] and len(parts) == 3
    assert all(width(part, cells) <= 40 and cells[1][0] == "row1" for part, cells in parts)
    assert [len(part) for part, _ in fitting(head, rows, 5)] == [2] * 9  # at least one measure each


def test_a_live_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = ["--algorithms", "local,fedavg", "--seeds", 1, "--set", "fedavg.lr=1e38"]
    output = run("compare", *SMALL, *words, "--out", "bar").stdout
    assert "comparing" in output and "2/2" in output and "elapsed" in output and "remaining" in output
    assert "fedavg, seed 0: diverged" in output


def test_without_local_only_and_with_one_seed(tmp_path):
    output = " ".join(
        run("compare", *SMALL, "--algorithms", "fedavg,fedavg-ft", "--seeds", "4,", "--out", "c").stdout.split()
    )
    assert "needs Local only" in output and "seed 4 alone" in output and "give at least --seeds 3" in output
    assert "±" not in output and "harmed" not in (tmp_path / "c/table.md").read_text()
    assert rows(tmp_path / "c/clients.csv")[0]["local_accuracy"] == ""
    assert rows(tmp_path / "c/table.csv")[0]["accuracy_half"] == ""


def played(label, seed, accuracy, error=None):
    """A cell that was never run."""
    summary = dict.fromkeys(("accuracy", "accuracy_worst_decile", "nll", "ece", "brier"), 0.5)
    known = [a for a in accuracy if a is not None]
    scores = (
        [] if error else [Score({}, summary | {"accuracy": np.mean(known)}, {"accuracy": accuracy, "nll": accuracy})]
    )
    facts = {"bytes_up": 1, "bytes_down": 2, "seconds": 3.0, "split": "test", "partition_hash": "x"}
    return (label, seed), Result("", label, {"seed": seed}, scores, facts, error)


def test_the_base_rate_and_pooled_ranks_stand_beside_every_algorithm():
    """Means of ranks leave clients of few rows out, if every result can; one of before makes all of them plain."""
    ranks = {"auroc": 0.8, "auroc_all": 0.9, "auroc_pooled": 0.83, "base_auroc": 0.45, "base_auroc_all": 0.5,
             "base_auroc_pooled": 0.57, "clients_few_of_class": 1, "base_ece": 0.01, "sensitivity": None}  # fmt: skip

    def result(label, seed, base, **more):
        key, made = played(label, seed, [0.9, 0.8])
        summary = made.scores[0].summary | {"base_accuracy": base, "base_nll": 0.7} | ranks | more
        return key, replace(made, scores=[replace(made.scores[0], summary=summary)])

    results = dict(result(label, seed, 0.5 + seed / 10) for label in ("good", "local") for seed in range(2))
    own = {"good": RunConfig(algorithm="fedavg"), "local": RunConfig(algorithm="local")}
    found = make(own, results, {}, range(2), same_clients=True)
    head, cells = grid(found)
    last = dict(zip(head, cells[-1], strict=True))
    assert [row[0] for row in cells] == ["good", "local", "base rate"]
    assert (last["accuracy %"], last["NLL"], last["ECE"], last["worse"]) == ("55.00", "0.700", "0.010", "–")
    assert [row[head.index("worse")] for row in cells] == ["0%", "–", "–"]  # two seeds are no interval
    assert "takes the same clients with at least 3 seeds" in " ".join(explained(found))
    head, cells = decision_grid(found, brief=True)
    assert head == ["algorithm", "pooled AUROC", "AUROC"]  # what no client has is left out
    assert cells == [["good", "0.830", "0.800"], ["local", "0.830", "0.800"], ["base rate", "0.570", "0.450"]]
    assert "over clients of 5+ rows per class" in " ".join(decision_notes(found))
    key, former = result("local", 1, 0.6)
    summary = {k: v for k, v in former.scores[0].summary.items() if not k.endswith("_all") and k != "base_ece"}
    summary["auroc"] = 0.9
    former = replace(former, scores=[replace(former.scores[0], summary=summary)])
    found = make(own, results | {key: former}, {}, range(2), same_clients=True)
    assert decision_grid(found, brief=True)[1][0] == ["good", "0.830", "0.900"] and len(decision_notes(found)) == 1
    assert [record["harmed"] for record in found.records("algorithm")] == [None, None]


def test_a_table_worked_by_hand():
    results = dict([
        played("good", 0, [0.9, 0.8, None]), played("good", 1, [1.0, 0.8, 0.9]), played("good", 2, [0.9, 0.9, 0.9]),
        played("local", 0, [0.7, 0.7, None]), played("local", 2, [0.9, 0.5, 1.0]),
        played("local", 1, [], "It burst. Sorry."),
        played("lost", 0, [], "Gone."), played("lost", 1, [0.1] * 3), played("lost", 2, [], "Gone."),
        *(played("gone", seed, [], "Gone.") for seed in range(3)),
    ])  # fmt: skip
    algorithms = {"good": "fedavg", "local": "local", "lost": "fedavg", "gone": "fedavg", "headless": "fedrep"}
    own = {label: RunConfig(algorithm=name) for label, name in algorithms.items()}
    found = make(own, results, {"headless": "It has no head."}, range(3), same_clients=False)
    assert [row.label for row in found.rows] == ["good", "local", "lost", "gone", "headless"]
    good, local, lost, gone, _ = found.rows
    assert good.scores["accuracy"][0] == pytest.approx((0.85 + 0.9 + 0.9) / 3) and good.traffic == 3
    assert not any(row.best or row.not_significant for row in found.rows)  # one alone finished every seed
    assert local.scores["accuracy"][0] == pytest.approx((0.7 + 0.8) / 2) and set(local.diverged) == {1}
    harm = good.harm  # in seeds 0 and 2, without the client that has no data
    assert (harm.worse, harm.equal, harm.better, harm.share) == (1, 1, 3, 0.2) and harm.loss == pytest.approx(0.1)
    assert harm.worst == [(2, "client-2", 1.0, 0.9)]
    assert lost.harm is None and gone.harm is None  # no seed that Local only finished, too
    head, cells = grid(found)
    assert len({len(head), *map(len, cells)}) == 1
    assert cells[1][1].startswith("† 75.00 ± ") and cells[2][1] == "† 10.00" and cells[3][1] == "diverged"
    assert cells[4][1:] == ["–"] * 8
    output = " ".join(explained(found))
    assert "local diverged with seed 1; the numbers are of the others. It burst. Sorry." in output
    assert "gone diverged with seed 0, 1, 2. Gone." in output and "– headless: It has no head." in output


def test_the_smallest_gap_that_a_table_sees():
    spread = {
        "good": [0.0, 0.0, 0.0],
        "close": [0.01, 0.02, 0.03],
        "loose": [0.02, 0.05, 0.08],
        "wild": [0.0, 0.2, 0.4],
    }
    results = dict(
        played(label, seed, [0.9 - lag, 0.8 - lag, 0.7 - lag])
        for label, lags in spread.items()
        for seed, lag in enumerate(lags)
    )
    own = {label: RunConfig(algorithm="fedavg") for label in spread}
    found = make(own, results, {}, range(3), same_clients=False)
    # No rival differs significantly from the best. The median one is `loose`: its lags have a standard error of
    # 0.03/√3, and of three rivals it must pass 5 %/3.
    gap = 100 * stats.t.ppf(1 - 0.05 / 6, 2) * 0.03 / 3**0.5
    assert f" With 3 seeds a gap below about {gap:.1f} points is not seen." in " ".join(explained(found))
    head, cells = grid(found, lead=True)
    half = stats.t.ppf(0.975, 2) * 3 / 3**0.5
    assert head[2] == "behind" and [row[2] for row in cells][:1] == ["–"] and cells[2][2] == f"5.00 ± {half:.2f}"
    assert "behind" not in grid(found)[0] and "Behind" not in " ".join(explained(found))
    assert "Behind: the best's lead over it ± half" in " ".join(explained(found, lead=True))
    one = make(own, {k: r for k, r in results.items() if k[1] == 0}, {}, [0], same_clients=False)
    assert "is not seen" not in " ".join(explained(one)) and grid(one, lead=True)[1][2][2] == "1.00"


def test_the_bar_counts_every_cell_once():
    cells = [Cell("local", RunConfig(rounds=10, seed=seed)) for seed in range(2)]
    with CellProgress("x", quiet=True) as board:
        assert cells[0].estimated_rounds == 10 + (5 + 1) / (0.1 * 5)  # every client's five epochs and its predictions
        board.start(cells, 3)
        board.round(cells, 4)
        assert (board.total, board.finished, board.left) == (5, 3, 2 * (6 + 12))
        board.done(Result(cells[0].identity, "local", {}, [], {}, "It burst."))
        board.round(cells, 5)  # a finished cell of the group does not come back
        assert board.finished == 4 and board.left == 5 + 12


def test_time_left_counts_scoring(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedabml.experiments.progress.time", SimpleNamespace(perf_counter=lambda: now[0]))
    slow, fast = {"personal_epochs": 3, "personal_lr": 0.1}, {"personal_lr": 1.0}
    cell = Cell(
        "local", RunConfig(rounds=10, participation=0.5, epochs=2), ({**slow, "personal_epochs": 0}, slow, fast)
    )
    assert cell.estimated_rounds == 10 + (3 + 1) + (5 + 1)
    with CellProgress("x") as board:
        board.start([cell])
        for seconds, rounds in ((50.0, 5), (100.0, 10), (300.0, 15.0)):
            now[0] = seconds
            board.round([cell], rounds)
    assert capsys.readouterr().out.splitlines() == [
        "x: 0/1 done, now local, seed 0, round 5/10  elapsed 0:00:50  remaining 0:02:30",
        "x: 0/1 done, now local, seed 0, scoring  elapsed 0:01:40  remaining 0:01:40",
        "x: 0/1 done, now local, seed 0, scoring, 50% done  elapsed 0:05:00  remaining 0:01:40",
    ]


# -- never twice ------------------------------------------------
def test_the_same_again_runs_nothing(finished, idle):
    names = ("cells.jsonl", "clients.csv", "table.csv")
    before = [(finished / name).read_text() for name in names]
    for words in (["--resume", "--out", finished], [*SMALL, *THREE, "--out", finished]):
        assert "9 of 9 runs were finished before" in run("compare", *words).stdout
        assert [(finished / name).read_text() for name in names] == before
    run("compare", *SMALL, "--algorithms", "local,fedabml", "--seeds", "2,0", "--out", finished, "--resume", "--quiet")
    assert [(finished / name).read_text() for name in names] == before  # what is named less is not forgotten
    assert len(ComparisonRequest.read(finished).rows) == 3


def test_a_comparison_of_before_keeps_the_default_step_sizes_of_then(tmp_path):
    rows = configs(["fedabml", "ditto"], {"clients": 8, "fedabml": {"lr": 0.2}})
    content = ComparisonRequest.of(rows, 1).to_dict()
    write_json(tmp_path / "comparison.json", content)
    assert ComparisonRequest.read(tmp_path).rows["ditto"].hyper == {}
    del content["defaults"]
    write_json(tmp_path / "comparison.json", content)
    fedabml, ditto = (config.algorithm_object() for config in ComparisonRequest.read(tmp_path).rows.values())
    assert (fedabml.lr, fedabml.personal_lr, fedabml.personal_epochs) == (0.2, None, 5)
    assert (ditto.lr, ditto.personal_lr, ditto.personal_epochs) == (0.03, None, 0)
    more = ComparisonRequest.of(configs(["ditto", "local"], {"clients": 8}), 1).joined(
        ComparisonRequest.read(tmp_path), tmp_path, True
    )
    local = more.rows["local"].algorithm_object()
    assert (len(more.rows), local.lr, local.personal_lr) == (3, 0.03, None)


def test_other_cells_than_asked_for(finished, idle):
    output = refused(*SMALL, *THREE, "--rounds", 5, "--set", "fedabml.lam=0.5", "--out", finished)
    assert "rows.fedabml.lam (was unset, now 0.5)" in output and "rounds (was 2, now 5)" in output
    assert "clients (was 8, now 9)" in refused("--resume", "--out", finished, "--clients", 9)
    assert "rounds (was 2, now 4)" in refused(
        *SMALL, "--algorithms", "ditto", "--rounds", 4, "--out", finished, "--resume"
    )
    output = refused(*SMALL, "--algorithms", "fedabml,ditto", "--seeds", 4, "--out", finished)
    assert "seeds (was [0, 1, 2], now [0, 1, 2, 3])" in output and "Extend it with --resume" in output
    assert "algorithms (was ['fedabml', 'fedavg', 'local'], now ['ditto', 'fedabml'])" in output
    assert len(lines(finished)) == 9


def test_more_seeds_and_algorithms_are_added(finished):
    run("compare", "--resume", "--out", finished, "--algorithms", "local,fedavg-ft,fedabml", "--seeds", 4, "--quiet")
    added = [json.loads(line) for line in lines(finished)[9:]]
    assert {(r["label"], r["config"].get("seed", 0)) for r in added} == {
        *(("fedavg-ft", seed) for seed in range(4)), ("local", 3), ("fedabml", 3), ("fedavg", 3),
    }  # fmt: skip
    table = json.loads((finished / "table.json").read_text())
    assert {row["label"] for row in table["rows"]} == {"local", "fedavg", "fedavg-ft", "fedabml"}  # old and new
    assert table["seeds"] == [0, 1, 2, 3] and all(len(row["by_seed"]["accuracy"]) == 4 for row in table["rows"])
    assert "--algorithms fedabml,fedavg,local,fedavg-ft --seeds 4 " in table["command"]


def test_ctrl_c_says_how_to_go_on(whole, monkeypatch, tmp_path):
    honest = runner.run_together

    def run_together(group, on_round):
        if group[0].label == "fedavg":
            raise KeyboardInterrupt
        return honest(group, on_round)

    monkeypatch.setattr(runner, "run_together", run_together)
    output = run("compare", *SMALL, *THREE, "--out", "my comparison", code=130).stderr
    assert "Stopped. 3 of 9 runs are finished" in output and not (tmp_path / "my comparison/table.md").exists()
    monkeypatch.setattr(runner, "run_together", honest)
    command = shlex.split(output.partition("To go on: ")[2])
    assert command == ["fedabml", "compare", "--resume", "--out", "my comparison"]
    assert "3 of 9 runs were finished before" in run(*command[1:]).stdout
    assert (tmp_path / "my comparison/clients.csv").read_text() == (whole[0] / "clients.csv").read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_in_the_middle_and_resumed_is_the_same_table(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = ["compare", *SMALL, "--algorithms", "local,fedabml,ditto", "--seeds", "2"]
    start = lambda out: subprocess.Popen(
        [sys.executable, "-m", "fedabml", *map(str, words), "--quiet", "--out", out], cwd=tmp_path, env=env
    )
    process, path = start("parts"), tmp_path / "parts" / "cells.jsonl"
    end = time.monotonic() + MAX_WAIT
    while not (path.exists() and len(path.read_bytes().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "parts/table.md").exists()
    path.write_bytes(path.read_bytes()[:-7])  # as if the kill had come in the middle of a line
    again, other = start("parts"), start("whole")
    assert again.wait(MAX_WAIT) == other.wait(MAX_WAIT) == 0
    parts, whole = (grid_of(tmp_path / name) for name in ("parts", "whole"))
    assert parts == whole and len(lines(tmp_path / "parts")) == 6


def grid_of(folder):
    """The table without the seconds, in the digits that are shown."""
    shown = ("algorithm", "accuracy", "nll", "ece", "brier", "traffic_bytes", "best", "alike", "harm_worse")
    short = lambda word: f"{float(word):.4f}" if word.replace(".", "", 1).isdecimal() else word
    return [{name: short(row[name]) for name in shown} for row in rows(folder / "table.csv")]


def test_own_data_are_described_by_their_own_clients(tmp_path):
    rng, lines = np.random.default_rng(0), ["site,a,b,y"]
    for i in range(12):  # twelve hospitals; the first three have few rows
        rows_of = 15 if i < 3 else 60
        a, b = rng.normal(i / 6, 1, rows_of), rng.normal(0, 1, rows_of)
        lines += [f"hospital {i:02},{u:.3f},{v:.3f},{int(u + v > i / 6)}" for u, v in zip(a, b, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    words = ["--data", "t.csv", "--client-column", "site", "--target-column", "y", "--model", "mlr", "--rounds", 1]
    run("compare", *words, "--algorithms", "fedavg,local", "--seeds", 1, "--out", "c")
    page, table = (tmp_path / "c/report.html").read_text(), json.loads((tmp_path / "c/table.json").read_text())
    head = page[page.index("<header>") : page.index("</header>")]
    assert "12 clients" in head and "100" not in head
    assert "classes_<wbr>per" not in page and "dirichlet" not in page
    assert "clients" not in table["setting"] and table["setting"]["client_column"] == "site"
    cell = json.loads((tmp_path / "c/cells.jsonl").read_text().splitlines()[0])
    assert cell["facts"]["rows"] == [3] * 3 + [12] * 9
    text = (tmp_path / "c/table.md").read_text()
    assert "| pooled accuracy % |" in text and "3 of 12 clients have fewer than 10 test rows" in text
    for row in table["rows"]:
        own = [float(r["accuracy"]) for r in rows(tmp_path / "c/clients.csv") if r["algorithm"] == row["label"]]
        assert row["accuracy_worst_decile"] == pytest.approx(min(own[3:]), abs=1e-4)
        assert row["accuracy_pooled"] == pytest.approx((3 * sum(own[:3]) + 12 * sum(own[3:])) / 117, abs=1e-4)
    assert "hospital 00, seed" not in page and ">hospital 00 °</th>" in page and "Table of 12 clients: local" in page


def test_the_worst_tenth_of_small_clients_is_left_out():
    few = lambda key, result: (key, replace(result, facts=result.facts | {"rows": [1, 3]}))
    results = dict(few(*played(name, 0, [0.0, v])) for name, v in (("good", 0.9), ("local", 0.8)))
    for result in results.values():
        result.scores[0].summary["accuracy_pooled"] = 0.5
    own = {"good": RunConfig(algorithm="fedavg"), "local": RunConfig(algorithm="local")}
    found = make(own, results, {}, [0], same_clients=False)
    assert "worst tenth" not in grid(found)[0] and "pooled accuracy %" in grid(found)[0]
    assert "2 of 2 clients have fewer than 10 test rows" in " ".join(explained(found))


# -- what does not work out -------------------------------------
@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_without_a_head(tmp_path):
    done = run("compare", *SMALL, "--algorithms", "all", "--rounds", 1, "--seeds", 1, "--out", "all")
    output = " ".join(done.stdout.split())
    assert (
        "– fedrep, fedbabu, fedpop: The model has no layer before its head" in output
        and "8 clients, mlr, 1 round" in output
    )
    assert "1 rounds" not in output and "--set ALGORITHM.head=PREFIX" in output
    noted = " ".join(done.stderr.split())
    assert "fedrep, fedbabu, fedpop cannot be compared here: The model has no layer" in noted
    table = {row["algorithm"]: row for row in rows(tmp_path / "all/table.csv")}
    assert "no layer before" in table["fedrep"]["refused"] and table["fedrep"]["accuracy"] == ""
    assert len([row for row in table.values() if row["accuracy"]]) == len(table) - 3
    run("compare", "--resume", "--out", "all", "--quiet")
    command = json.loads((tmp_path / "all/comparison.json").read_text())["command"]
    words = [*shlex.split(command)[1:-1], "again", "--finished", "all/cells.jsonl", "--quiet"]
    run(*words)  # it names all of them, and that is as good
    assert grid_of(tmp_path / "again") == grid_of(tmp_path / "all")
    output = refused(*SMALL, "--algorithms", "fedpop,fedrep", "--out", "named")
    assert "The model has no layer before its head" in output and not (tmp_path / "named").exists()


def test_a_row_that_diverges_is_a_result(tmp_path):
    words = ["--algorithms", "local,fedavg,fedavg-ft", "--seeds", 2, "--set", "fedavg.lr=1e38", "--out", "run"]
    output = run("compare", *SMALL, *words).stdout
    assert "† fedavg diverged with seed 0, 1. Training diverged in round" in " ".join(output.split())
    last = json.loads((tmp_path / "run/table.json").read_text())["rows"][-1]
    assert last["label"] == "fedavg" and last["accuracy"] is None and set(last["diverged"]) == {"0", "1"}
    assert "| fedavg | diverged |" in (tmp_path / "run/table.md").read_text()


def test_everything_diverges(tmp_path):
    words = ["--algorithms", "fedavg,fedavg-ft", "--seeds", 1, "--lr", 1e38, "--out", "run"]
    assert run("compare", *SMALL, *words).stdout.count("diverged with seed 0") == 2
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--algorithms all"),
        (["--algorithms", ","], "there is no algorithm"),
        (["--algorithms", "local,fedabl"], "Did you mean 'fedabml'"),
        (["--algorithms", "local,local"], "named twice"),
        (
            ["--algorithms", "local,fedavg-ft", "--set", "fedavg.lr=1"],
            "not among the named algorithms. Did you mean 'fedavg-ft'",
        ),
        (["--algorithms", "local,fedabml", "--set", "fedabml.lamb=1"], "Did you mean 'lam'"),
        (["--algorithms", "local,fedabml", "--set", "fedabml.lam=-1"], "at least 0"),
        (["--algorithms", "local,fedabml", "--set", "roundz=1"], "Did you mean 'rounds'"),
        (["--algorithms", "local", "--set", "seed=1"], "use --seeds"),
        (["--algorithms", "local", "--set", "evaluate=false"], "every client is scored"),
        (
            ["--algorithms", "local,fedabml,ditto", "--set", "lam=2"],
            "such as fedabml.lam=…; fedabml, ditto",
        ),
        (["--algorithms", "local,ditto", "--set", "lam=2"], "such as ditto.lam=…."),
        (["--algorithms", "all,local"], "all already names every algorithm"),
        (["--algorithms", "local", "--seeds", "many"], "such as 0,3,7"),
        (["--algorithms", "local", "--seeds", "0"], "such as 0,3,7"),
        (["--algorithms", "local", "--seeds", "1,1"], "each once"),
        (["--algorithms", "local", "--seeds", "1,-2"], "at least 0"),
        (["--algorithms", "local", "--clients", 0], "clients"),
        (["--algorithms", "local", "--eval-every", -1], "eval_every must be a whole number, 0 or more"),
        (["--algorithms", "all", "--set", "model_options.width=3"], "width"),
        (["--algorithms", "local", "--preset", "papier"], "Did you mean 'paper'"),
        (["--resume", "--out", "nowhere"], "holds nothing to resume"),
    ],
)
def test_bad_words(words, message, tmp_path):
    assert message in refused(*words)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_taken(tmp_path, finished):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("1")
    assert "folder of its own" in refused(*SMALL, "--algorithms", "local", "--out", "thesis")
    for content in ("{", "[]", "{}", '{"setting": {"roundz": 1}, "rows": {"a": {}}, "seeds": []}'):
        (finished / "comparison.json").write_text(content)
        assert refused("--resume", "--out", finished)


def test_data_that_changed_since(tmp_path):
    def data(seed):
        x = np.random.default_rng(seed).normal(size=36)
        return pd.DataFrame({"site": np.repeat(["a", "b", "c"], 12), "x": x, "y": np.arange(36) % 2})

    data(0).to_csv(tmp_path / "t.csv", index=False)
    words = ["--data", "t.csv", "--client-column", "site", "--target-column", "y", "--model", "mlr", "--rounds", 1]
    run("compare", *words, "--algorithms", "local", "--seeds", 2, "--out", "run", "--quiet")
    data(1).to_csv(tmp_path / "t.csv", index=False)
    assert "data have changed" in refused("--resume", "--out", "run", "--algorithms", "local,fedavg")
    assert len(lines(tmp_path / "run")) == 2


# -- settings ---------------------------------------------------
@pytest.mark.nightly
def test_each_algorithm_has_its_own_table(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(
        'clients = 8\nmodel = "mlr"\nrounds = 1\nseed = 7\nalgorithm = "ditto"\neval_every = 3\nlr = 0.02\n'
        'algorithms = ["fedabml", "fedavg-ft", "local"]\nseeds = [0, 2]\nout = "here"\n'
        "[fedabml]\nlam = 0.5\n[fedavg-ft]\nlr = 0.07\n[ditto]\nlam = 0.1\n"
    )
    run("compare", "--config", "run.toml", "--set", "fedabml.k=2", "--batch-size", 20, "--quiet")
    saved = ComparisonRequest.read(tmp_path / "here")
    assert saved.seeds == (0, 2) and saved.setting.batch_size == 20 and saved.setting.eval_every == 3
    hyper = {label: config.hyper for label, config in saved.rows.items()}
    assert hyper == {"fedabml": {"lr": 0.02, "lam": 0.5, "k": 2}, "fedavg-ft": {"lr": 0.07}, "local": {"lr": 0.02}}
    command = json.loads((tmp_path / "here/comparison.json").read_text())["command"]
    run(*shlex.split(command)[1:-1], "again", "--quiet")  # the command it tells makes the same comparison
    assert ComparisonRequest.read(tmp_path / "again") == saved
    assert (tmp_path / "again/clients.csv").read_text() == (tmp_path / "here/clients.csv").read_text()


def test_a_preset_lies_under_flags(tmp_path):
    words = ["--preset", "paper", "--clients", 8, "--model", "mlr", "--rounds", 1, "--set", "fedprox.mu=0.1"]
    run("compare", *words, "--algorithms", "fedprox,ditto", "--seeds", 1, "--out", "run", "--quiet")
    saved = ComparisonRequest.read(tmp_path / "run")
    assert (saved.setting.rounds, saved.setting.participation, saved.setting.epochs) == (1, 0.1, 5)
    assert saved.rows["fedprox"].hyper["mu"] == 0.1 and saved.rows["ditto"].hyper["lam"] == 0.75
    assert "lam=0.75" in run("train", "--preset", "paper", "--algorithm", "ditto", "--dry-run").stdout


def test_regression_on_a_table_from_anywhere(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(["north", "south", "west", "east"], 25), "x": rng.normal(size=100)})
    frame["y"] = frame["x"] * np.repeat([1, 2, 3, 4], 25) + 0.1 * rng.normal(size=100)
    frame.to_csv(tmp_path / "t.csv", index=False)
    words = ["--data", "t.csv", "--client-column", "site", "--target-column", "y", "--model", "mlr", "--rounds", 2]
    output = run("compare", *words, "--participation", 1, "--algorithms", "local,fedavg", "--seeds", 3).stdout
    out = tmp_path / "runs/t-comparison"
    table = rows(out / "table.csv")
    assert [float(row["rmse"]) for row in table] == sorted(float(row["rmse"]) for row in table)
    assert {"rmse", "nll", "coverage"} <= table[0].keys() and "accuracy" not in table[0]
    assert "best RMSE" in output and "over 4 clients" in " ".join(output.split())  # the same four in every seed
    clients = rows(out / "clients.csv")
    assert {row["name"] for row in clients} == {"north", "south", "west", "east"}
    fedavg = next(row for row in table if row["algorithm"] == "fedavg")
    worse = [c for c in clients if c["algorithm"] == "fedavg" and float(c["difference"]) > 0]  # a larger error
    assert int(fedavg["harm_worse"]) == len(worse)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "6 of 6 runs were finished" in run("compare", "--resume", "--out", out).stdout


def test_seeds_are_written_as_they_are_requested():
    for seeds, flag in (((0, 1, 2), "3"), ((0, 3, 7), "0,3,7"), ((4,), "4,"), ((0,), "1")):
        assert f"--seeds {flag} " in ComparisonRequest(configs(["local"]), seeds).command(Path("out"))


# -- from Python ------------------------------------------------
def test_two_settings_of_one_algorithm_from_python(tmp_path):
    common = RunConfig(clients=8, model="mlr", rounds=1, batch_size=20, algorithm="fedabml")
    own = {"cold": common.with_changes(hyper={"lam": 0.001}), "exact": common.with_changes(hyper={"lam": 1.0})}
    labels = []
    callbacks = Callbacks(done=lambda result: labels.append(result.label))
    found = compare(own, [3], out=tmp_path / "lib", callbacks=callbacks)
    assert {row.label for row in found.rows} == {"cold", "exact"} == set(labels) and found.local is None
    assert (
        [cells[0] for cells in grid(found)[1]][2:] == ["base rate"]
        and found.rows[0].best
        and found.values("cold", 3, "accuracy").shape == (8,)
    )
    with pytest.raises(InputError, match=r"different settings.*rounds = 1 and 2"):
        compare(own | {"longer": common.with_changes(rounds=2)}, 1, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert "labels of its own" in refused("--resume", "--out", tmp_path / "lib")


def test_configurations_by_algorithm():
    own = configs(
        ["local", "ditto"], {"rounds": 3, "seed": 5, "algorithm": "fedavg", "ditto": {"lam": 0.3}}, {"lr": 0.2}
    )
    assert {name: (c.algorithm, c.rounds, c.seed, c.hyper) for name, c in own.items()} == {
        "local": ("local", 3, 0, {"lr": 0.2}),
        "ditto": ("ditto", 3, 0, {"lam": 0.3, "lr": 0.2}),
    }
