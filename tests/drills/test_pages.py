"""The pages of drills are those of their records, and their paragraphs have lines of bounded length."""

from pathlib import Path

import pytest

from drills import round_time
from drills.pages import WIDTH, wrapped

RELIABILITY = Path(__file__).resolve().parents[2] / "results/reliability"


@pytest.mark.parametrize("page", sorted(RELIABILITY.glob("*.md")), ids=lambda path: path.name)
def test_no_paragraph_has_a_long_line(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []


def test_lists_are_indented_and_tables_and_code_stay():
    text = f"# title\n\n- {'word ' * 60}end\n{'x' * 200}\n| {'cell ' * 60}|\n```\n{'code ' * 60}\n```\n"
    lines = wrapped(text).split("\n")
    assert lines[2].startswith("- word") and lines[3].startswith("  word") and max(map(len, lines[2:5])) <= WIDTH
    assert lines[-6:] == text.split("\n")[-6:]
    assert " ".join(wrapped(text).split()) == " ".join(text.split())


def test_the_stored_page_is_that_of_the_record():
    assert wrapped(round_time.page()) == round_time.PAGE.read_text(encoding="utf-8")
