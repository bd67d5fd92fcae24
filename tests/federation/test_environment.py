"""Tests that need Flower's packages are marked for the environment that has them."""

import ast
import re
from pathlib import Path

import pytest

PACKAGES = re.compile(r"importorskip\('(flwr|cryptography|fedabml\.federation\.flower)")
MARKED = re.compile(r"^pytestmark = .*mark\.flower|^@(pytest\.mark\.flower|needs_cryptography)", re.MULTILINE)


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.rglob("test_*.py")), ids=lambda path: path.name)
def test_what_other_environments_skip_is_marked(path):
    """`make test-flower` selects by the marker: a test without it would run nowhere before the night."""
    statements = [ast.unparse(statement) for statement in ast.parse(path.read_text(encoding="utf-8")).body]
    if not any(text.startswith("pytestmark") and MARKED.search(text) for text in statements):
        unmarked = [text for text in statements if PACKAGES.search(text) and not MARKED.search(text)]
        assert not unmarked, "mark these `flower`"
