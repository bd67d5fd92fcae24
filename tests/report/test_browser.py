"""The page in a real browser: the script runs to its end, answers clicks, and nothing sticks out on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedabml.report import write
from fedabml.report.charts import PAGE, Axis, Series, line_chart
from fedabml.report.page import Figure, Section, document
from tests.cli.command import MAX_WAIT

MakeRun = Callable[..., Path]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open the page"),
]

# What came of a reader's presses and moves is written into attributes of <html>.
HELPERS = """
const note = (name, value) => document.documentElement.setAttribute("data-saw-" + name, value);
const one = (query) => document.querySelector(query);
"""
ACTIONS = """
note("wide", document.documentElement.scrollWidth - innerWidth);
one("[data-legend='1']").click();
const gone = (part) => getComputedStyle(part).display === "none";
note("hidden", [...document.querySelectorAll("svg [data-run='1']")].every(gone));
const column = one(".hit").getBoundingClientRect();
const at = { bubbles: true, clientX: column.x + 1, clientY: column.y + 1 };
one(".hit").dispatchEvent(new PointerEvent("pointermove", at));
note("tip", one("#tip").innerText.replaceAll("\\n", "|"));
const dot = one("g[data-run='0'] > circle[data-tip]"), box = dot.getBoundingClientRect();
const near = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 + 2 };
dot.closest("svg").dispatchEvent(new PointerEvent("pointermove", near));
note("dot", one("#tip").innerText.replaceAll("\\n", "|"));
const head = [...document.querySelectorAll("thead th")].find((th) => th.innerText.startsWith("NLL"));
const order = () => [...document.querySelectorAll("table")[0].tBodies[0].rows].map((r) => r.cells[0].innerText).join();
head.click(); note("up", order());
head.click(); note("down", order());
one("#up").value = "2"; one("#up").dispatchEvent(new Event("change"));
note("score", one("#score").innerText);
const before = getComputedStyle(document.body).backgroundColor;
one("#theme").click();
note("theme", before !== getComputedStyle(document.body).backgroundColor);
"""


def visit(page: Path, profile: Path, width: int = 1200, fragment: str = "") -> tuple[dict[str, str], str]:
    """Open the page; returns the attributes of <html> and what the console complained about."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={profile}", f"--window-size={width},900", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [*command, page.as_uri() + fragment], capture_output=True, text=True, timeout=MAX_WAIT, check=True
    )
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root, done.stderr
    complaints = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return dict(re.findall(r'([\w-]+)="([^"]*)"', root[0])), complaints


def acting(page: Path, script: str) -> Path:
    """The page with a script that plays its reader."""
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return page


TOUR = """
const svgs = [...document.querySelectorAll("figure svg[data-plot]")], tip = one("#tip");
const client = one("#client"), chosen = (at) => [...at.querySelectorAll(".chosen")];
const middle = (mark) => {
  if (mark.getAttribute("fill") === "none") { // a curve: a place on it
    return mark.getPointAtLength(mark.getTotalLength() / 3).matrixTransform(mark.getScreenCTM());
  }
  const { x, y, width, height } = mark.getBoundingClientRect();
  return { x: x + width / 2, y: y + height / 2 };
};
const point = (mark, kind) => {
  const { x, y } = middle(mark), at = { bubbles: true, clientX: x, clientY: y };
  const over = mark.matches(".hit") ? mark : mark.closest("svg");
  over.dispatchEvent(kind === "click" ? new MouseEvent(kind, at) : new PointerEvent(kind, at));
};
const talks = (svg) => {
  tip.hidden = true;
  point(svg.querySelector("[data-tip]"), "pointermove");
  return !tip.hidden && tip.innerText.length > 3;
};
const shown = (svg) => svg.getBoundingClientRect().height > 100;
note("figures", [...document.querySelectorAll("figure svg")].filter(shown).length);
note("wide", document.documentElement.scrollWidth - innerWidth);
note("dumb", svgs.filter((svg) => svg.querySelector("[data-tip]") && !talks(svg)).length);
note("talking", svgs.filter((svg) => svg.querySelector("[data-tip]")).length);
if (client) {
  client.value = client.options[2].value;
  client.dispatchEvent(new Event("change"));
  const with_it = svgs.filter((svg) => svg.querySelector(`[data-client="${CSS.escape(client.value)}"]`));
  note("client", client.value);
  note("lit", with_it.filter((svg) => chosen(svg).length).length);
  note("unlit", with_it.filter((svg) => !chosen(svg).length).length);
  note("astray", chosen(document).filter((mark) => mark.dataset.client !== client.value).length);
  point(chosen(with_it[0])[0], "click");
  note("pressed", client.value !== client.options[2].value); // off, or another that lies at the same place
}
"""


def tour(page: Path, folder: Path, width: int = 1200) -> dict[str, str]:
    """What a reader sees of any page, who moves over its figures and chooses a client, if there are any."""
    folder.mkdir(exist_ok=True)
    copy = folder / page.name
    copy.write_text(page.read_text())
    saw, complaints = visit(acting(copy, f"{HELPERS}{{{TOUR}}}"), folder / "profile", width)
    assert complaints == "" and saw["data-ready"] == "true" and float(saw["data-saw-wide"]) <= 0
    assert saw["data-saw-dumb"] == "0" and int(saw["data-saw-talking"]) > 0
    assert (' data-client="' in page.read_text()) == ("data-saw-client" in saw)
    if "data-saw-client" in saw:
        assert saw["data-saw-astray"] == saw["data-saw-unlit"] == "0" and int(saw["data-saw-lit"]) > 0
        assert saw["data-saw-pressed"] == "true"
    return {key.removeprefix("data-saw-"): value for key, value in saw.items()}


def test_a_run_opens_without_complaint(make_run: MakeRun, tmp_path: Path) -> None:
    page = write([make_run(clients=1, rounds=1)], tmp_path / "r.html")
    root, complaints = visit(page, tmp_path / "profile", fragment="#dark")
    assert complaints == "" and root["data-ready"] == "true" and root["data-theme"] == "dark"


def test_runs_of_one_colour_differ_in_their_shapes(make_run: MakeRun, tmp_path: Path) -> None:
    theme = """
    one("#up").value = "6"; one("#up").dispatchEvent(new Event("change"));
    const dots = [...one("#up").closest("figure").querySelectorAll("[data-tip]")];
    const of = (shape) => dots.filter((dot) => dot.getAttribute("d").includes(shape));
    const fills = (shape) => of(shape).map((dot) => dot.getAttribute("fill"));
    note("round", [...new Set(fills("a1"))]); note("pointed", [...new Set(fills("L"))]);
    const dot = one("g[data-run='6'] > path[data-tip]"), box = dot.getBoundingClientRect();
    const near = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
    dot.closest("svg").dispatchEvent(new PointerEvent("pointermove", near));
    note("tip", one("#tip").innerText.replaceAll("\\n", "|")); note("key", one("#tip i path") !== null);
    """
    runs = [make_run(f"r{i}", algorithm=f"r{i}", clients=9, seed=i, skill=0.9) for i in range(7)]
    saw, complaints = visit(acting(write(runs, tmp_path / "r.html"), HELPERS + theme), tmp_path / "profile")
    assert complaints == "" and {saw["data-saw-round"], saw["data-saw-pointed"]} == {"var(--c0)"}
    assert re.match(r"clinic \d+\|r6: [\d.]+%", saw["data-saw-tip"]) and saw["data-saw-key"] == "true"


def test_a_picture_hides_the_series_whose_name_is_pressed(make_run: MakeRun, tmp_path: Path) -> None:
    theme = """
    const svg = one("svg[aria-label='Accuracy per round']"), entry = svg.querySelector("[aria-label='prior alone']");
    const seen = (g) => getComputedStyle(g).display !== "none";
    const shown = () => [...svg.querySelectorAll("[data-of]")].map(seen).join();
    const press = (key) => entry.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    const tip = () => {
      const hit = svg.querySelector(".hit"), box = hit.getBoundingClientRect();
      hit.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: box.x + 1, clientY: box.y + 1 }));
      return one("#tip").innerText.replaceAll("\\n", "|");
    };
    entry.focus();
    note("focus", document.activeElement === entry);
    note("before", shown()); note("tip-before", tip());
    note("taken", !press(" ")); note("space", shown() + " " + entry.getAttribute("aria-pressed")); note("tip", tip());
    press("a"); note("letter", shown());
    press("Enter"); note("enter", shown() + " " + entry.getAttribute("aria-pressed"));
    entry.querySelector("text").dispatchEvent(new MouseEvent("click", { bubbles: true })); note("click", shown());
    const others = [...document.querySelectorAll("[data-of]")].filter((g) => !svg.contains(g));
    note("others", others.length && others.every(seen));
    """
    page = acting(write([make_run()], tmp_path / "r.html"), HELPERS + theme)
    saw, complaints = visit(page, tmp_path / "profile", width=500)
    assert complaints == "" and saw["data-saw-focus"] == saw["data-saw-taken"] == saw["data-saw-others"] == "true"
    assert saw["data-saw-before"] == "true,true" and "|prior alone: " in saw["data-saw-tip-before"]
    assert saw["data-saw-space"] == "true,false false" and saw["data-saw-letter"] == "true,false"
    assert re.fullmatch(r"round 1\|personal models: [\d.]+%", saw["data-saw-tip"])
    assert saw["data-saw-enter"] == "true,true true" and saw["data-saw-click"] == "true,false"


def test_a_comparison_answers_its_reader_on_a_phone(make_run: MakeRun, tmp_path: Path) -> None:
    long = "a-rather-long-algorithm-name-" * 3
    runs = [make_run(n, algorithm=n, nll=v) for n, v in (("a", 0.5), ("b", None), ("c", 0.3), (long, 0.4))]
    page = acting(write(runs, tmp_path / "r.html"), HELPERS + ACTIONS)
    saw, complaints = visit(page, tmp_path / "profile", width=500)
    assert complaints == "" and saw["data-ready"] == "true"
    assert float(saw["data-saw-wide"]) <= 0
    assert saw["data-saw-hidden"] == saw["data-saw-theme"] == "true"
    assert re.fullmatch(rf"round 1\|a: [\d.]+\|c: [\d.]+\|{long}: [\d.]+", saw["data-saw-tip"])
    assert re.match(r"clinic \d+\|a: [\d.]+%\|\d+ training samples", saw["data-saw-dot"])
    assert saw["data-saw-up"] == f"c,{long},a,b" and saw["data-saw-down"] == f"a,{long},c,b"
    counts = [int(n) for n in re.findall(r"\d+", saw["data-saw-score"])]
    assert saw["data-saw-score"].startswith("c is better for") and sum(counts) == 20


@pytest.mark.parametrize("width", [1100, 500])
def test_a_legend_of_many_wraps_where_there_is_room(make_run: MakeRun, tmp_path: Path, width: int) -> None:
    theme = """
    const nav = one(".legend"), buttons = [...nav.querySelectorAll("button")];
    const rows = new Set(buttons.map((button) => Math.round(button.getBoundingClientRect().top)));
    note("rows", rows.size);
    note("seen", buttons.filter((button) => button.getBoundingClientRect().right <= innerWidth).length);
    note("over", nav.scrollWidth - nav.clientWidth); note("wide", document.documentElement.scrollWidth - innerWidth);
    """
    runs = [make_run(f"r{i}", algorithm=f"algorithm-{i}", clients=3, rounds=2) for i in range(16)]
    saw, complaints = visit(acting(write(runs, tmp_path / "r.html"), HELPERS + theme), tmp_path / "profile", width)
    assert complaints == "" and float(saw["data-saw-wide"]) <= 0
    wraps = width == 1100
    assert (saw["data-saw-seen"] == "16") == wraps == (saw["data-saw-over"] == "0") == (int(saw["data-saw-rows"]) > 1)


@pytest.mark.parametrize(("theme", "paper"), [("dark", "rgb(23, 27, 33)"), ("light", "rgb(255, 255, 255)")])
def test_a_partition_is_no_white_sheet_in_the_dark(make_run: MakeRun, tmp_path: Path, theme: str, paper: str) -> None:
    script = """
    const svg = one("svg[aria-label^='digits: who has']"), fill = (part) => getComputedStyle(part).fill;
    note("paper", getComputedStyle(svg.closest("figure")).backgroundColor);
    note("words", fill(svg.querySelector("text")));
    const shades = [...svg.querySelectorAll("[data-cells]")].map((part) => Number(part.getAttribute("fill-opacity")));
    note("rising", shades.length > 3 && shades.every((shade, i) => !i || shade > shades[i - 1]));
    """
    page = acting(write([make_run()], tmp_path / "r.html"), HELPERS + script)
    saw, complaints = visit(page, tmp_path / "profile", fragment=f"#{theme}")
    assert complaints == "" and saw["data-saw-paper"] == paper and saw["data-saw-rising"] == "true"
    light = sum(map(int, re.findall(r"\d+", saw["data-saw-words"]))) / 3
    assert light > 128 if theme == "dark" else light < 128


def test_the_legend_hides_a_band_with_its_line(make_run: MakeRun, tmp_path: Path) -> None:
    theme = """
    const bands = [...document.querySelectorAll("svg[aria-label='Accuracy per round'] path[fill-opacity='.18']")];
    const shown = () => bands.map((band) => band.getClientRects().length > 0).join();
    note("before", shown()); one("[data-legend='0']").click(); note("after", shown());
    """
    runs = [make_run(name, algorithm=name) for name in "ab"]
    for run in runs:
        lines = [{"round": t, "accuracy": 0.5, "accuracy_half": 0.1} for t in (1, 2)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    saw, complaints = visit(acting(write(runs, tmp_path / "r.html"), HELPERS + theme), tmp_path / "profile")
    assert complaints == "" and saw["data-saw-before"] == "true,true" and saw["data-saw-after"] == "false,true"


def test_a_client_is_lit_in_all_figures(make_run: MakeRun, tmp_path: Path) -> None:
    theme = """
    const lit = () => [...document.querySelectorAll(".chosen")].map((mark) => mark.dataset.tip.split("\\n")[0]);
    const where = () => new Set([...document.querySelectorAll(".chosen")].map((mark) => mark.closest("svg"))).size;
    const say = (name) => note(name, [lit().length, where(), ...new Set(lit())].join());
    const pick = one("#client");
    pick.focus(); note("focus", document.activeElement === pick); note("label", pick.closest("label").innerText);
    note("order", [...pick.options].slice(1).map((option) => option.value).join());
    pick.value = "clinic 7"; pick.dispatchEvent(new Event("change")); say("chosen");
    note("top", [...document.querySelectorAll(".chosen")].every((mark) => !mark.nextElementSibling?.dataset.tip
      || mark.nextElementSibling.matches(".chosen")));
    one("#up").value = "2"; one("#up").dispatchEvent(new Event("change")); say("redrawn");
    one("[data-legend='1']").click(); say("legend");
    const press = (mark) => {
      const { x, y, width, height } = mark.getBoundingClientRect();
      const at = { bubbles: true, clientX: x + width / 2, clientY: y + height / 2 };
      mark.dispatchEvent(new MouseEvent("click", at));
    };
    press(one("figure [data-client='clinic 3']")); say("pressed"); note("value", pick.value);
    press(one("figure [data-client='clinic 3']")); say("again"); note("none", pick.value);
    note("wide", document.documentElement.scrollWidth - innerWidth);
    """
    runs = [make_run(n, algorithm=n, clients=12) for n in ("a", "bb", "ccc")]
    page = acting(write(runs, tmp_path / "r.html"), f"{HELPERS}{{{theme}}}")
    saw, complaints = visit(page, tmp_path / "profile", width=500)
    saw = {key.removeprefix("data-saw-"): value for key, value in saw.items()}
    assert complaints == "" and saw["focus"] == saw["top"] == "true" and saw["label"].startswith("Client")
    assert saw["order"] == ",".join(f"clinic {i}" for i in range(12))
    assert saw["chosen"] == saw["redrawn"] == saw["legend"] == "7,3,clinic 7"  # three runs in two figures, and the pair
    assert saw["pressed"] == "7,3,clinic 3" and saw["value"] == "clinic 3"
    assert saw["again"] == "0,0" and saw["none"] == "" and float(saw["wide"]) <= 0


def test_a_press_on_a_legend_chooses_nobody_and_curves_say_whose_they_are(tmp_path: Path) -> None:
    names = [f"client {i}" for i in range(40)]
    rows = [Series(w, [0, s, 0], [0, 1, 2], members=[[0, s * i / 20, 0] for i in range(40)], who=names)
            for w, s in (("in", 1), ("out", -1))]  # fmt: skip
    svg = line_chart(rows, title="t", y=Axis("", "mirror"), theme=PAGE)
    page = tmp_path / "r.html"
    page.write_text(document("t", "", [Section("s", figures=[Figure("f", svg, "r"), Figure("g", svg, "r")])]))
    theme = """
    const svg = one("figure svg"), curve = svg.querySelectorAll("[data-client='client 30']")[1];
    const at = curve.getPointAtLength(curve.getTotalLength() / 3).matrixTransform(curve.getScreenCTM());
    const under = { bubbles: true, clientX: at.x, clientY: at.y };
    svg.dispatchEvent(new PointerEvent("pointermove", under));
    note("tip", one("#tip").innerText.replaceAll("\\n", "|"));
    one(".entry text").dispatchEvent(new MouseEvent("click", under)); // as if the legend lay beside a curve
    note("nobody", one("#client").value === "");
    svg.dispatchEvent(new MouseEvent("click", under));
    note("value", one("#client").value); note("lit", document.querySelectorAll(".chosen").length);
    """
    saw, complaints = visit(acting(page, f"{HELPERS}{{{theme}}}"), tmp_path / "profile")
    assert complaints == "" and saw["data-saw-tip"] == "client 30|out" and saw["data-saw-nobody"] == "true"
    assert saw["data-saw-value"] == "client 30" and saw["data-saw-lit"] == "4"
