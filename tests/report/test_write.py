"""The page: what it says, what it survives, what it refuses."""

from __future__ import annotations

import csv
import html
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedabml.errors import InputError
from fedabml.report import write
from fedabml.report.figures import client_names
from fedabml.report.read import read_runs

MakeRun = Callable[..., Path]
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


class Outline(HTMLParser):
    """Tags that stay open, headings, and the elements that would fetch or run something."""

    VOID = frozenset({"meta", "img", "br", "wbr", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def page_of(out: Path) -> tuple[str, Outline]:
    page = out.read_text(encoding="utf-8")
    outline = Outline(page)
    assert outline.open == []
    return page, outline


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_one_run_gives_every_section(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    assert write([make_run()], out) == out
    page, outline = page_of(out)
    assert outline.headings == [
        "fedabml on digits", "Scores", "Training", "Loss per round", "Accuracy per round", "Clients",
        "Clients from worst to best", "What personalising gains", "Uncertainty", "Reliability",
        "Entropy of right and wrong predictions", "Prior and data", "Where the prior is wide",
        "Who holds what: dirichlet", "Configuration",
    ]  # fmt: skip
    assert "fedabml train --algorithm fedabml --seed 0" in page and "versions.<wbr>torch" in page
    assert "manifest.<wbr>partition.<wbr>alpha" in page and "counts" not in page
    assert "781 KiB" in page  # 400 kB up and 400 kB down
    assert "about 0.22 for 20 test rows" in page  # the calibration error of one client that is chance
    assert page.count("<figcaption>") == page.count("<figure") == 8
    assert sorted(p.name for p in out.parent.iterdir()) == ["report.html"]


def test_the_page_needs_nothing_else(make_run: MakeRun, tmp_path: Path) -> None:
    page, outline = page_of(write([make_run("a"), make_run("b", algorithm="fedavg")], tmp_path / "r.html"))
    assert not {"link", "img", "iframe", "object"} & set(outline.tags)
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in page and "src=" not in page


def test_a_comparison_marks_the_best_of_each_column(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run("a", algorithm="good", nll=0.4, accuracy=0.9, seconds=9.0),
        make_run("b", algorithm="quick", nll=0.5, accuracy=0.8, seconds=3.0),
        make_run("c", algorithm="lost", nll=None, accuracy=float("nan"), seconds=9.0),
    ]
    page, outline = page_of(write(runs, tmp_path / "r.html", title="Which one?"))
    assert outline.headings[0] == "Which one?"
    best = re.findall(r'<td class="best" data-v="([^"]*)">', page)
    assert {"0.9", "0.4", "3"} <= set(best) and not {"0.8", "0.5", "9"} & set(best)
    assert "Two runs, client by client" in outline.headings
    assert [page.count(f'data-legend="{i}"') for i in range(4)] == [1, 1, 1, 0]
    assert outline.headings.count("Who holds what: dirichlet") == 1  # one partition, drawn once


def test_measures_of_different_positive_classes_do_not_compete(make_run: MakeRun, tmp_path: Path) -> None:
    scores = {"recall": 0.974, "f1_pooled": 0.5, "auroc": 0.8}
    runs = [make_run(names[1], class_names=names, **scores) for names in (["no", "yes"], ["yes", "no"])]
    alike = make_run("alike", class_names=["no", "yes"], **scores)
    page = write(runs, tmp_path / "r.html").read_text()
    assert 'data-v="0.974"' not in page and 'data-v="0.5"' not in page and 'data-v="0.8"' in page
    assert "different positive classes" in page
    page = write([runs[0], alike], tmp_path / "r.html").read_text()
    assert 'data-v="0.974"' in page and "different positive classes" not in page


def test_several_regressions_are_compared_over_all_clients(make_run: MakeRun, tmp_path: Path) -> None:
    of_all = {"rmse": 0.625, "base_rmse": 0.875}
    runs = [make_run("old", regression=True, **of_all)]
    new = {f"{key}_all": value for key, value in of_all.items()} | {"rmse": 0.4375, "base_rmse": 0.75}
    runs += [make_run("new", regression=True, clients_small=1, **new)]
    page = write(runs, tmp_path / "r.html").read_text()
    assert page.count('data-v="0.625"') == 2 and page.count('data-v="0.875"') == 1
    assert 'data-v="0.4375"' not in page and "rows or more" not in page


def test_runs_on_other_data_do_not_compete_or_meet_client_by_client(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", dataset="digits"), make_run("b", dataset="cifar10", accuracy=0.2)]
    page, outline = page_of(write(runs, tmp_path / "r.html"))
    assert 'class="best"' not in page
    assert "Two runs, client by client" not in outline.headings


def test_other_clients_do_not_meet(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", clients=10), make_run("b", algorithm="fedavg", clients=12)]
    assert "Two runs, client by client" not in page_of(write(runs, tmp_path / "r.html"))[1].headings


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([{"algorithm": "x"}, {"algorithm": "y"}], ["x", "y"]),
        ([{"seed": 1}, {"seed": 2}], ["fedabml, seed 1", "fedabml, seed 2"]),
        ([{"dataset": "u"}, {"dataset": "v"}], ["fedabml, u", "fedabml, v"]),
        ([{}, {}], ["run0", "run1"]),
    ],
)
def test_runs_are_named_by_what_sets_them_apart(
    make_run: MakeRun, tmp_path: Path, options: list[dict[str, object]], names: list[str]
) -> None:
    runs = [make_run(f"run{i}", **o) for i, o in enumerate(options)]
    page, _ = page_of(write(runs, tmp_path / "r.html"))
    assert re.findall(r"data-legend=.*?</i>(.*?)</button>", page) == names


def test_the_same_folder_twice_gets_two_names(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert "(1)</button>" in page_of(write([run, run], tmp_path / "r.html"))[0]


def test_strings_from_files_never_become_markup(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", algorithm=EVIL, dataset=EVIL), make_run("b", algorithm="b", dataset=EVIL)]
    for run in runs:
        edit(run / "config.json", command=EVIL, model=EVIL, **{EVIL: EVIL})
        edit(run / "summary.json", prior_width=[{"name": EVIL, "mean_std": 0.1}])
        table = (run / "clients.csv").read_text().replace("clinic 0", '"' + EVIL.replace('"', '""') + '"')
        (run / "clients.csv").write_text(table)
    page, outline = page_of(write(runs, tmp_path / "r.html", title=EVIL))
    assert outline.tags.count("script") == 2 and "img" not in outline.tags
    assert "alert(1)>" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data and json.loads(data[1])["runs"][0] == json.loads(data[1])["clients"][0] == EVIL


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize(("clients", "rounds"), [(1, 1), (3, 2), (1000, 3)])
@pytest.mark.slow
def test_any_number_of_clients_and_rounds(
    make_run: MakeRun, tmp_path: Path, clients: int, rounds: int, regression: bool
) -> None:
    runs = [make_run(a, algorithm=a, clients=clients, rounds=rounds, regression=regression) for a in "ab"]
    for chosen in (runs[:1], runs):
        page, outline = page_of(write(chosen, tmp_path / "r.html"))
        assert ("RMSE per round" if regression else "Accuracy per round") in outline.headings
        assert not re.search(r'="[^"]*\b(nan|inf|NaN|Infinity)\b', page)
    assert f"Table of {clients:,} client" in page


def test_numbers_that_are_missing_or_not_finite(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(clients=3, accuracy=float("nan"), nll=None, ece=float("inf"), prior_accuracy=None, reliability=None)
    (run / "metrics.jsonl").write_text(
        '{"round": 1, "loss": NaN}\n\n{"round": 2, "loss": 1.5, "eval": {"accuracy": null}}\n'
    )
    (run / "clients.csv").write_text(
        "client,name,n_train,accuracy,prior_accuracy\n0,,10,nan,\n1,b,,0.5,0.25\n2,c,3,None,0.1\n"
    )
    page, outline = page_of(write([run], tmp_path / "r.html"))
    assert "<dd>–</dd>" in page and "Accuracy per round" not in outline.headings
    assert "client 0" in page and "Loss per round" in outline.headings
    assert page.count('<th scope="row" data-v') == 3 and page.count("<td>–</td>") == 4  # the others have a number
    assert not re.search(r'="[^"]*\b(nan|inf|NaN|Infinity)\b', page)


def test_a_bare_run_is_reported_from_what_there_is(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for name in ("metrics.jsonl", "clients.csv", "manifest.json"):
        (run / name).unlink()
    for name in ("config.json", "summary.json"):
        (run / name).write_text("{}")
    page_of(write([run, make_run("b", regression=True)], tmp_path / "r.html"))
    page, outline = page_of(write([run], tmp_path / "r.html"))
    assert outline.headings == ["run"] and "<figure" not in page


def test_a_regression_shows_the_coverage_of_every_client(make_run: MakeRun, tmp_path: Path) -> None:
    page, outline = page_of(write([make_run(regression=True)], tmp_path / "r.html"))
    after = outline.headings[outline.headings.index("Uncertainty") :]
    assert after[1] == "Coverage of the 90% interval" and "Prior and data" in after
    assert 'data-tip="clinic 3&#10;fedabml: 80.0%&#10;43 training samples&#10;20 test samples"' in page
    assert "RMSE of the prior alone" in page and "biased" not in page


def test_tasks_are_not_mixed(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a"), make_run("b", regression=True)]
    with pytest.raises(InputError, match="Report them apart") as error:
        write(runs, tmp_path / "r.html")
    assert f"{runs[0]} is a classification" in str(error.value) and not (tmp_path / "r.html").exists()


def test_a_width_that_was_not_learned_is_not_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    fixed = [{"name": n, "mean_std": s} for n, s in (("fc1.weight", 0.0497870), ("fc1.bias", 0.0497871))]
    runs = [make_run("a", prior_width=fixed), make_run("b", algorithm="b", prior_width=None)]
    for chosen in (runs[:1], runs[1:], runs):
        _, outline = page_of(write(chosen, tmp_path / "r.html"))
        assert "Where the prior is wide" not in outline.headings and "Data" in outline.headings
    _, outline = page_of(write([*runs, make_run("c", algorithm="c")], tmp_path / "r.html"))
    assert "Where the prior is wide" in outline.headings


LAYOUT = [["fc1.weight", [3, 2]], ["fc1.bias", [3]], ["likelihood", [1]]]


def save_prior(run: Path, logstd: list[float] | None, layout: object = LAYOUT, kind: str = "fedabml") -> None:
    tensors = {"shared.mean": np.array([-4.0, 1, 2, -3, 5, 0, 0.1, 0.2, 0.3, 9], np.float32)}
    if logstd is not None:
        tensors["shared.logstd"] = np.log(np.array(logstd, np.float32))
    save_file(tensors, run / "shared.safetensors", {kind: json.dumps({"layout": layout})})


def test_a_single_run_shows_the_quartiles_of_its_prior(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    save_prior(run, [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.5, 0.7, 0.6, 99])
    page, outline = page_of(write([run], tmp_path / "r.html"))
    assert {"Where the prior is wide", "How large the prior's means are"} <= set(outline.headings)
    tips = [html.unescape(tip) for tip in re.findall(r'data-tip="((?:fc|likelihood)[^"]*)"', page)]
    assert tips == [
        "fc1.weight\nσ: 0.035 (0.0225 to 0.0475)", "fc1.bias\nσ: 0.6 (0.55 to 0.65)",
        "fc1.weight\n|mean|: 2.5 (1.25 to 3.75)", "fc1.bias\n|mean|: 0.2 (0.15 to 0.25)",
    ]  # fmt: skip
    both = page_of(write([run, make_run("b", algorithm="b")], tmp_path / "r.html"))[1]
    assert "How large the prior's means are" not in both.headings and "Where the prior is wide" in both.headings


def test_a_prior_that_is_a_point_or_was_not_learned_has_no_quartiles(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(prior_width=None)
    for logstd in (None, [0.05] * 10, [0.1, math.nan, *[0.2] * 8]):
        save_prior(run, logstd)
        headings = page_of(write([run], tmp_path / "r.html"))[1].headings
        assert not {"Where the prior is wide", "How large the prior's means are"} & set(headings)


@pytest.mark.parametrize("change", [{"layout": LAYOUT[:1]}, {"layout": 3}, {"kind": "other"}])
def test_a_prior_that_is_damaged_is_named(make_run: MakeRun, tmp_path: Path, change: dict[str, Any]) -> None:
    run = make_run()
    save_prior(run, **{"logstd": [0.05] * 10} | change)
    with pytest.raises(InputError, match=r"shared\.safetensors"):
        write([run], tmp_path / "r.html")
    (run / "shared.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"shared\.safetensors"):
        write([run], tmp_path / "r.html")


def test_settings_are_listed_once(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    edit(run / "config.json", run={"rounds": 30, "fedabml": {"lr": 0.1}}, runs_of="x")
    page, _ = page_of(write([run], tmp_path / "r.html"))
    assert "run.<wbr>" not in page and "runs_<wbr>of" in page and "algorithm.<wbr>hyper.<wbr>lr" in page


def test_an_evaluation_that_failed_is_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    lines = [{"round": 1, "loss": 2.0, "eval": {"accuracy": 0.5}}, {"round": 2, "loss": 1.0, "eval_error": "diverged"}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, _ = page_of(write([run], tmp_path / "r.html"))
    assert "1 evaluation failed and is left out." in page
    assert 'data-tip="round 1&#10;personal models: 50.0%"' in page and "round 2&#10;personal" not in page


def test_a_curve_over_seeds_has_a_band_that_ends_where_accuracies_do(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    lines = [
        {"round": t, "accuracy": 0.5 + t / 10, "accuracy_half": half}
        for t, half in ((1, 0.9), (2, 0.3), (3, None), (4, 0.2))
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, _ = page_of(write([run], tmp_path / "r.html"))
    assert page.count('fill-opacity=".18"') == 1 == page.count('stroke-opacity=".18"')  # a band, a gap, one alone
    assert "The band is the 95% confidence interval" in page
    assert "120%" not in page and ">100%<" in page and ">0%<" in page
    assert "The band is" not in page_of(write([make_run("b")], tmp_path / "r.html"))[0]


def test_a_partition_is_drawn_from_the_manifest_in_the_colours_of_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (run / "partition.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>')
    page, outline = page_of(write([run], tmp_path / "r.html"))
    assert "Who holds what: dirichlet" in outline.headings and "alert(1)" not in page
    drawing = page[page.index("<h3>Who holds what") :]
    drawing = drawing[: drawing.index("</figure>")]
    colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', drawing))
    assert "var(--c0)" in colours and all(colour.startswith("var(--") for colour in colours)
    assert "20 clients · 670 training samples, 1 to 51 each" in drawing


def test_a_run_whose_manifest_lists_nothing_has_no_heat_map(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    edit(run / "manifest.json", counts=None, sizes=None, rows=None)
    (run / "partition.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    assert "Who holds what: dirichlet" not in page_of(write([run], tmp_path / "r.html"))[1].headings


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "missing"),
        ("summary.json", None, "missing"),
        ("config.json", "{", "not valid JSON"),
        ("summary.json", "[1]", "not a JSON object"),
        ("summary.json", '{"reliability": 3}', "'reliability'"),
        ("manifest.json", "nope", "not valid JSON"),
        ("metrics.jsonl", '{"round": 1}\n{"round"', "line 2"),
        ("metrics.jsonl", '{"loss": 1}', "no round number"),
        ("clients.csv", "a,b\n1,2\n", "no column 'client'"),
        ("clients.csv", "client,name,accuracy\n0,a\n", "line 2"),
        ("clients.csv", "client,name,accuracy\n0,a,often\n", "'often'"),
        ("config.json", b"\xff\xfe{", "UTF-8"),
    ],
)
def test_a_missing_or_damaged_file_is_named(
    make_run: MakeRun, tmp_path: Path, name: str, content: str | bytes | None, says: str
) -> None:
    run, out = make_run(), tmp_path / "r.html"
    out.write_text("older")
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        write([run], out)
    assert name in str(error.value) and says in str(error.value)
    assert out.read_text() == "older"


def test_places_that_cannot_be_used(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="at least one"):
        write([], tmp_path / "r.html")
    with pytest.raises(InputError, match="not a run folder"):
        write([tmp_path / "nowhere"], tmp_path / "r.html")
    with pytest.raises(InputError, match="is a folder"):
        write([run], tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        write([run], tmp_path / "file" / "r.html")


def test_a_run_of_an_earlier_version_has_the_keys_of_today(make_run):
    (run,) = read_runs([make_run("old", auroc=0.9, auroc_large=0.8)])
    assert (run.summary["auroc"], run.summary["auroc_all"]) == (0.8, 0.9) and "auroc_large" not in run.summary


def test_clients_of_other_partitions_are_others(make_run: MakeRun) -> None:
    runs = read_runs([make_run(name, algorithm=name, clients=n) for name, n in (("a", 3), ("b", 3), ("c", 4))])
    assert client_names(runs[:2]) == [["clinic 0", "clinic 1", "clinic 2"]] * 2
    assert client_names(runs)[1] == ["clinic 0 of a", "clinic 1 of a", "clinic 2 of a"]
    assert client_names(runs)[2][0] == "clinic 0 of c"


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


@pytest.mark.nightly
def test_a_page_of_very_many_clients_is_a_few_megabytes(make_run: MakeRun, tmp_path: Path) -> None:
    count = 100_000
    run = make_run(clients=count, rounds=3)
    page, _ = page_of(write([run], tmp_path / "one.html"))
    assert len(page) < 2_000_000
    assert "2,000 of 100,000 dots are drawn" in page and "The table shows 1,000 of 100,000 clients" in page
    assert page.count("clients.csv holds every client") == 3  # two figures and the table
    with (run / "clients.csv").open(newline="") as file:
        order = sorted(csv.DictReader(file), key=lambda row: float(row["accuracy"]))
    for row in (order[0], order[-1]):  # the worst-off and the best-off are in the figure and in the table
        assert f'data-client="{row["name"]}"' in page and f">{row['name']}</th>" in page


@pytest.mark.slow
def test_two_runs_of_many_clients_are_counted_whole(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(a, algorithm=a, clients=5_000, rounds=3, skill=s) for a, s in (("a", 0.9), ("b", 0.85))]
    page, _ = page_of(write(runs, tmp_path / "two.html"))
    assert len(page) < 4_000_000 and "2,000 of 5,000 clients are drawn" in page
    values = [[c.values["accuracy"] or 0.0 for c in run.clients] for run in read_runs(runs)]
    better, worse, alike = data_of(page)["tally"]["0"]["1"]
    assert better == sum(a > b for a, b in zip(*values, strict=True)) and better + worse + alike == 5_000
    assert len(data_of(page)["clients"]) == 2_000


def tiles_of(page: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><p>(.*?)</p>", page)
    return {html.unescape(name): (value, html.unescape(words)) for name, value, words in found}


def lead_of(page: str) -> str:
    """Return the label of the largest tile."""
    return re.findall(r'class="tile lead">\s*<[^>]*>([^<]*)<', page)[0]


def test_a_tile_of_a_regression_says_which_clients_count(make_run: MakeRun, tmp_path: Path) -> None:
    scores = {"nll": 0.5, "nll_all": 0.6, "rmse": 0.4, "rmse_all": 0.7}
    run = make_run("durations", regression=True, clients_small=1, clients_scored=3, **scores)
    page, _ = page_of(write([run], tmp_path / "r.html"))
    meanings = " ".join(meaning for _, meaning in tiles_of(page).values())
    assert "lower is better; over clients of 10 rows or more" in meanings and "better of 10" not in page


def test_clients_of_few_rows_are_marked_and_decide_no_tile(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("some", clients=40, rows=(9, 10, 30, 100), accuracy_worst_decile=0.0)
    page, _ = page_of(write([run], tmp_path / "r.html"))
    tiles = tiles_of(page)
    large = sorted(c.values["accuracy"] or 0.0 for c in read_runs([run])[0].clients if c.values["n_test"] != 9)
    assert tiles["Worst tenth"] == (
        f"{np.mean(large[:3]):.1%}", "mean accuracy of the worst-off tenth of clients with at least 10 test rows"
    )  # fmt: skip
    assert next(iter(tiles)) == "Pooled accuracy" == lead_of(page)
    assert "10 of 40 clients (marked °) have fewer than 10 test rows" in page
    assert ">clinic 0 °</th>" in page and ">clinic 1</th>" in page
    assert "Smaller dots are clients with fewer than 10 test rows" in page
    sizes = [re.findall(rf'<circle [^>]*r="([\d.]+)"[^>]*data-client="clinic {i}"', page) for i in (0, 1)]
    assert sizes == [["2.0"] * 2, ["4.0"] * 2]
    all_small = tiles_of(page_of(write([make_run("tiny", rows=(1, 3))], tmp_path / "r.html"))[0])
    assert all_small["Worst tenth"][0] == "too few test rows"
    none_small = tiles_of(page_of(write([make_run("plain")], tmp_path / "r.html"))[0])
    assert lead_of((tmp_path / "r.html").read_text("utf-8")) == "Accuracy"
    assert next(iter(none_small)) == "Accuracy" and "at least" not in none_small["Worst tenth"][1]


def test_coverage_is_counted_over_all_rows(make_run: MakeRun, tmp_path: Path) -> None:
    tiles = tiles_of(page_of(write([make_run(regression=True, rows=(1, 50))], tmp_path / "r.html"))[0])
    assert tiles["Coverage"][0] == "87.0%" and tiles["Pooled RMSE"][0] == "0.710"


def test_the_prior_is_shown_with_and_without_the_label_level(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(level=True, prior_level_accuracy=0.625)
    page, _ = page_of(write([run], tmp_path / "r.html"))
    assert tiles_of(page)["Prior + label level"][0] == "62.5%" and "Prior alone" in tiles_of(page)
    assert "accuracy of the prior + label level" in page and 'aria-label="prior + label level"' in page
    assert 'title="accuracy of the prior + label level">Prior + label level</button>' in page
    plain, _ = page_of(write([make_run("plain")], tmp_path / "r.html"))
    assert "label level" not in plain and "accuracy of the prior alone" in plain


OF_CLASSES = {
    "class_names": ["no", "yes"], "confusion": [[70, 5], [20, 5]], "recall_by_class": [0.9333, 0.2],
    "precision_by_class": [0.7778, 0.5], "f1_by_class": [0.8485, None],
}  # fmt: skip


def table_of(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table of a section, as text."""
    section = page[page.index(f"<h2>{heading}</h2>") :]
    lines = re.findall(r"<tr[ >].*?</tr>", section[: section.index("</table>")], re.DOTALL)
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", line, re.DOTALL)]
            for line in lines]  # fmt: skip


def test_a_run_shows_all_measures_beside_the_base_rate(make_run: MakeRun, tmp_path: Path) -> None:
    measures = {"auroc": 0.9, "auroc_large": 0.8, "auroc_pooled": 0.83, "base_auroc": 0.5, "base_auroc_large": 0.4321,
                "clients_few_of_class": 7, "clients_scored": 20, "base_auroc_pooled": 0.57, "base_nll": 0.6,
                "base_accuracy": 0.7, "classwise_ece": 0.04, "average_precision": 0.51,
                "recall_pooled": 0.2}  # fmt: skip
    run = make_run("clinics", **measures)
    page, _ = page_of(write([run], tmp_path / "r.html"))
    head, *rows = table_of(page, "Scores")
    assert head[1:] == ["personalised", "prior", "base rate"]
    found = {row[0]: row[1:] for row in rows}
    assert found["AUROC, all samples pooled"] == ["0.830", "", "0.570"]
    assert found["AUROC, mean over clients of 5+ rows per class"] == ["0.800", "", "0.432"]
    assert found["average precision, mean over clients"] == ["0.510", "", ""] and found["class-wise calibration error"]
    assert "Base rate: a model that knows only" in page
    tiles = tiles_of(page)
    assert tiles["Pooled AUROC"][1].endswith("; base rate 0.570") and tiles["Accuracy"][1].endswith("; base rate 70.0%")
    assert tiles["Pooled AUROC"][0] == "0.830" and tiles["Pooled recall"][0] == "20.0%" and "AUROC" not in tiles
    two = page_of(write([run, make_run("b", algorithm="b", **measures)], tmp_path / "r.html"))[0]
    assert "base rate" in two and 'data-v="0.4321"' in two
    other = make_run("c", algorithm="c", **measures | dict.fromkeys(("base_auroc_large", "base_auroc_pooled"), 0.6))
    assert 'data-v="0.4321"' not in page_of(write([run, other], tmp_path / "r.html"))[0]  # other data
    assert ">0.900" not in two and "<h2>Scores</h2>" not in two  # neither does a table of several runs count them


def test_a_run_shows_its_confusion_matrix_and_recall_by_class(make_run: MakeRun, tmp_path: Path) -> None:
    page, _ = page_of(write([make_run("clinics", **OF_CLASSES)], tmp_path / "r.html"))
    assert table_of(page, "Classes") == [
        ["class", "rows", "predicted no", "predicted yes", "recall", "precision", "F1"],
        ["no", "75", "70", "5", "93.3%", "77.8%", "0.849"],
        ["yes", "25", "20", "5", "20.0%", "50.0%", "–"],
    ]
    many = {f"{key}_by_class": [0.5] * 21 for key in ("recall", "precision", "f1")}
    page, _ = page_of(write([make_run("many", confusion=[[1] * 21] * 21, **many)], tmp_path / "r.html"))
    assert table_of(page, "Classes")[1] == ["0", "21", "50.0%", "50.0%", "0.500"]  # too many for a matrix
    for i, damaged in enumerate(({"confusion": [[1, 2]]}, {"confusion": [["x", 1], [1, 1]]}, {"recall_by_class": "x"})):
        run = make_run(f"damaged{i}", **OF_CLASSES | damaged)
        assert "<h2>Classes</h2>" not in page_of(write([run], tmp_path / "r.html"))[0]


def test_a_client_with_few_rows_of_a_class_is_marked_at_its_ranks(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("clinics", clients=2, **OF_CLASSES)
    (run / "clients.csv").write_text(
        "client,name,n_test,accuracy,auroc,rows[no],rows[yes]\n0,north,20,0.9,1.0,16,4\n1,south,20,0.8,0.75,15,5\n"
    )
    page, _ = page_of(write([run], tmp_path / "r.html"))
    rows = table_of(page[page.index("Table of 2 clients") :].replace("<thead>", "<h2>Few</h2>"), "Few")
    assert rows[0] == ["Client", "Test", "Rows of no", "Rows of yes", "Accuracy", "AUROC"]
    assert rows[1] == ["north", "20", "16", "4", "90.0%", "1.000 °"] and rows[2][-1] == "0.750"
    assert "1 of 2 clients has fewer than 5 test rows of a class" in page


def test_a_small_client_s_measure_has_its_interval(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("small")
    head, first, *others = (run / "clients.csv").read_text().splitlines()
    more = "f1,f1_low,f1_high"
    lines = [f"{head},{more}", f"{first},0.5,0.25,0.75", *(f"{line},0.625,," for line in others)]
    (run / "clients.csv").write_text("\n".join(lines) + "\n")
    page = page_of(write([run], tmp_path / "r.html"))[0]
    assert page.count("0.500 (0.250–0.750)") == 1 and "0.625 (" not in page and "0.625" in page
    assert "Parentheses hold 95% intervals over rows" in page
    assert "Parentheses hold" not in page_of(write([make_run("plain")], tmp_path / "r.html"))[0]
