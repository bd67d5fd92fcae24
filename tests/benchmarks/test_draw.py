"""The published tables are what their cells give: drawn anew they say the same, and no cell is missing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks import draw

RESULTS = draw.ROOT / "results"
DATA = Path(os.environ.get("FEDABML_DATA") or "nowhere")
CHAINS = draw.lines()
DRAWN = ("table1/cifar10-2-equal", "table2/cifar10-5", "sensitivity/emnist", "fewdata/cifar10-5")


def said(table):
    """All but when and by which version it was drawn, and the line that tells where."""
    lines = (line for line in table.splitlines() if not re.match(r"\d{4}-\d\d-\d\d |fedabml reproduce ", line))
    return [re.sub(r"\(figures/.*/", "(figures/", line) for line in lines if "were chosen before" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_a_published_table_is_what_its_cells_give(name, tmp_path):
    if missing := [need for need in CHAINS[name].needs if not (DATA / f"{need}.npz").exists()]:
        pytest.skip(f"$FEDABML_DATA has no {missing[0]}.npz")
    table = draw.draw(CHAINS[name], tmp_path / "drawn")
    assert said(table) == said((RESULTS / f"{name}.md").read_text(encoding="utf-8"))


def test_every_line_draws_and_trains_nothing():
    for chain in CHAINS.values():
        (command,) = chain.commands
        assert command[0] == "reproduce" and command[-3:] == ("--so-far", "--out", "OUT")
        files = [word for word in command if word.startswith("results/")]
        assert files and all((draw.ROOT / file).exists() for file in files)
        assert (RESULTS / f"{chain.name}.md").exists()


def test_pictures_that_tables_show_are_there():
    for table in RESULTS.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+\.svg)\)", table.read_text(encoding="utf-8")):
            assert (table.parent / link).exists(), f"{table}: {link}"


@pytest.mark.slow
def test_cells_that_are_missing_are_an_error(tmp_path):
    chain = CHAINS["sensitivity/emnist"]
    if not (DATA / "emnist.npz").exists():
        pytest.skip("$FEDABML_DATA has no emnist.npz")
    lines = (RESULTS / "sensitivity/emnist.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[1:]), encoding="utf-8")
    words = tuple(str(tmp_path / "some.jsonl") if word.startswith("results/") else word for word in chain.commands[0])
    with pytest.raises(SystemExit, match="cells are missing"):
        draw.draw(chain._replace(commands=(words,)), tmp_path / "drawn")
