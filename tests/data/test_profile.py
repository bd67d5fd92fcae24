"""What the columns of a table hold, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedabml.data.encode import TableOptions, clients_of
from fedabml.data.profile import profile_columns

pd = pytest.importorskip("pandas")


def profiles(frame, **options):
    _, owners = clients_of(frame["site"])
    found = profile_columns(frame, TableOptions("site", "y", **options), owners)
    return {column.name: column for column in found}


TABLE = pd.DataFrame(
    {
        "site": ["a"] * 21 + ["b"] * 21,
        "x": [float(i) for i in range(21)] + [None] * 20 + [0.5],
        "word": ["u"] * 14 + ["v"] * 7 + ["w"] * 21,
        "day": ["2024-01-31"] * 42,
        "code": [f"k{i}" for i in range(42)],
        "y": [0, 1] * 21,
    }
)


def test_kinds_uses_and_values():
    found = profiles(TABLE, id="code")
    assert {name: (c.use, c.kind) for name, c in found.items()} == {
        "site": ("client", "words"),
        "x": ("feature", "numbers"),
        "word": ("feature", "words"),
        "day": ("feature", "dates"),
        "code": ("ID", "words"),
        "y": ("target", "whole numbers"),
    }
    x, word = found["x"], found["word"]
    assert x.clients[0].quantiles == (1.0, 10.0, 19.0) and x.clients[0].text == "10 [1, 19]"
    assert x.total.gaps == pytest.approx(20 / 42) and x.clients[1].text == "0.5 [0.5, 0.5], 95% gaps"
    assert word.clients[0].text == "u 67% of 2" and word.total.different == 3
    assert found["day"].total.text == "2024-01-31 [2024-01-31, 2024-01-31]" and "--date-columns" in found["day"].problem
    assert found["code"].total.text == "42 different" and found["y"].total.text == "0 50% of 2"


@pytest.mark.parametrize("role", ["dates", "split_by"])
def test_a_date_with_a_use_is_no_problem(role):
    found = profiles(TABLE, **{role: "day"})["day"]
    assert (found.kind, found.problem) == ("dates", "")
    stamps = TABLE.assign(day=pd.to_datetime(TABLE.day))
    assert profiles(stamps, **{role: "day"})["day"].total == found.total
    assert "no ISO date" in profiles(TABLE.assign(day="soon"), **{role: "day"})["day"].problem


def test_a_column_without_values_and_one_of_mixed_values():
    found = profiles(TABLE.assign(x=np.nan, word=[f"{i}.5" for i in range(41)] + ["n/a?"]))
    assert found["x"].total.text == "no value"
    assert found["word"].kind == "unclear" and "41 of 42 values are numbers" in found["word"].problem
    assert profiles(TABLE.assign(word=[f"{i}.5" for i in range(41)] + ["?"]), drop="word")["word"].problem == ""
