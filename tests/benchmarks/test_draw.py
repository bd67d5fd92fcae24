"""The published pages hold what their cells give: drawn again they are equal, and no cell is missing."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import draw

DATA = Path(os.environ.get("FEDABML_DATA") or "nowhere")
DRAWN = (
    *("table1/cifar10-2", "table1/emnist", "table1/fashionmnist"),
    *("table2/cifar10-5", "sensitivity/emnist", "fewdata/cifar10-5"),
)
PAGES = sorted(draw.RESULTS.rglob("*.md"))


def numbers_of(page):
    """Return the rows of a page's tables; prose and headings may be worded anew without drawing every page again."""
    return [line for line in page.splitlines() if re.match(r"\|.*\d", line) and not line.startswith("| algorithm |")]


def needed(words):
    """Return the datasets that a command reads."""
    columns = words[words.index("--columns") + 1].split(",")
    return {re.sub(r"-\d+$", "", column) for column in columns}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.nightly
def test_a_published_page_is_what_its_cells_give(name, tmp_path):
    words = draw.command(draw.RESULTS / name)
    if lacking := [need for need in needed(words) if not (DATA / f"{need}.npz").exists()]:
        pytest.skip(f"$FEDABML_DATA has no {lacking[0]}.npz")
    published = (draw.RESULTS / name / "README.md").read_text(encoding="utf-8").partition(draw.NOTES)[0]
    drawn = numbers_of(draw.draw(words, tmp_path / "drawn"))
    assert drawn and drawn == numbers_of(published)


def test_every_page_is_drawn_from_files_that_exist_and_trains_nothing():
    found = draw.folders()
    assert {str(folder.relative_to(draw.RESULTS)) for folder in found} > {*DRAWN}
    for folder in found:
        words = draw.command(folder)
        assert words[0] == "reproduce" and "--so-far" in words and words[words.index("--out") + 1] == "OUT"
        files = [word for word in words if word.startswith("results/")]
        assert files and all((draw.ROOT / file).exists() for file in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(draw.RESULTS)))
def test_links_and_pictures_of_a_page_exist(page):
    text = re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)#:\s]+)\)", text):
        assert (page.parent / link).exists(), link


def test_every_picture_stands_on_a_page():
    for picture in draw.RESULTS.rglob("*.svg"):
        assert f"(figures/{picture.name})" in (picture.parents[1] / "README.md").read_text(encoding="utf-8"), picture


def test_no_name_holds_a_commit():
    for file in draw.RESULTS.rglob("*"):
        assert not re.search(r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])\b[0-9a-f]{7}\b", file.name), file


def test_every_fenced_command_is_one_line_that_a_shell_can_split():
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)  # refuses an open quote, and a line that goes on in the next
                assert re.fullmatch(r"fedabml|python|apt-get|for|done;?|\w+=.*", words[0]), f"{page}: {line}"


@pytest.mark.slow
@pytest.mark.nightly
def test_cells_that_are_missing_are_an_error(tmp_path):
    folder = draw.RESULTS / "sensitivity/emnist"
    if not (DATA / "emnist.npz").exists():
        pytest.skip("$FEDABML_DATA has no emnist.npz")
    lines = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[1:]), encoding="utf-8")
    words = [str(tmp_path / "some.jsonl") if word.startswith("results/") else word for word in draw.command(folder)]
    with pytest.raises(SystemExit, match="Cells are missing"):
        draw.draw(words, tmp_path / "drawn")
