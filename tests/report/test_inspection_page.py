"""The page of an inspected table."""

from __future__ import annotations

import pytest

import fedabml
from fedabml.report.inspection_page import render_inspection

pd = pytest.importorskip("pandas")


def test_the_page_shows_warnings_columns_and_clients():
    table = pd.DataFrame(
        {"site": ["<b>a</b>", "c"] * 20, "x": [i / 3 for i in range(40)], "y": ["no", "no", "yes", "no"] * 10}
    )
    page = render_inspection(fedabml.inspect_table(table.assign(z=table.y), client="site", target="y"))
    assert "equals the target" in page and "<b>a</b>" not in page and "&lt;b&gt;a&lt;/b&gt;" in page
    assert "no 100% of 1" in page and "40 rows, 2 clients, 4 columns" in page
    assert "Nothing in this table looks wrong." in render_inspection(
        fedabml.inspect_table(table, client="site", target="y")
    )
