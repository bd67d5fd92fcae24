"""The columns of a table are parsed once, and every seed's recipe and features are those of a table read anew."""

from __future__ import annotations

import numpy as np
import pytest

from fedabml import read_table
from fedabml.data import columns as parsing
from fedabml.data.columns import Columns
from fedabml.data.table import as_columns
from fedabml.errors import InputError

pd = pytest.importorskip("pandas")
N = 240


@pytest.fixture
def frame():
    rng = np.random.default_rng(5)
    day = np.datetime64("2023-01-01T00:00") + rng.integers(0, 500_000, N).astype("timedelta64[m]")
    return pd.DataFrame(
        {
            "site": [f"site {i % 6} " for i in range(N)],
            "age": np.where(rng.random(N) < 0.1, np.nan, rng.normal(60, 9, N)),
            "count": rng.integers(0, 4, N),
            "ward": rng.choice(["a", "b", "c", None], N),
            "code": rng.choice(["01", "1", "x"], N),
            "smokes": rng.random(N) < 0.3,
            "day": day.astype(str),
            "number": np.arange(N),
            "died": rng.choice(["yes", "no"], N),
        }
    )


@pytest.fixture
def parsed(monkeypatch):
    """The calls that parse a column, as (function, column)."""
    calls = []

    def counted(function):
        honest = getattr(parsing, function)

        def parse(column, *args):
            calls.append((function, str(column.name)))
            return honest(column, *args)

        monkeypatch.setattr(parsing, function, parse)

    for function in ("as_text", "numbers", "is_numeric", "parse_dates"):
        counted(function)
    return calls


OPTIONS = [
    {"client": "site", "target": "died", "dates": ["day"]},
    {"client": "site", "target": "died", "drop": ["age"], "split_by": "day", "test_share": 0.3},
    {"client": "site", "target": "count", "drop": ["day"], "id": "number"},
    {"client": "site", "target": "age", "task": "regression", "drop": ["day", "number"]},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_several_seeds_of_one_table_are_what_each_is_alone(frame, options):
    frame = frame.fillna({"age": 50.0}) if options["target"] == "age" else frame
    shared = as_columns(frame)
    for seed in (0, 1, 2, 0):
        together, alone = read_table(shared, **options, seed=seed), read_table(frame, **options, seed=seed)
        assert together.hash == alone.hash and together.manifest == alone.manifest and together.names == alone.names
        assert together.recipe.to_json() == alone.recipe.to_json()
        new = frame.iloc[::-3].assign(ward="unseen")
        np.testing.assert_array_equal(together.recipe.apply(new), alone.recipe.apply(new))


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_a_second_seed_parses_nothing_again(frame, options, parsed):
    shared = as_columns(frame)
    first = read_table(shared, **options, seed=0)
    assert ("as_text", "ward") in parsed and parsed.count(("numbers", "age")) <= 1
    parsed.clear()
    second = read_table(shared, **options, seed=1)
    assert parsed == [] and (first.hash != second.hash or "split_by" in options)


def test_what_is_kept_of_a_table_takes_few_bytes_per_row_and_column(frame):
    shared = Columns(frame)
    for seed in range(5):
        read_table(shared, client="site", target="died", dates=["day"], seed=seed)
    arrays = [value for value in shared._parsed.values() if isinstance(value, np.ndarray)]
    arrays += [words.codes for (kind, _), words in shared._parsed.items() if kind == "words"]
    assert sum(array.nbytes for array in arrays) <= 16 * N * len(frame.columns)


def test_words_are_numbered_in_their_order_and_a_gap_is_the_empty_word(frame):
    words = Columns(frame).words("ward")
    assert words.values == ("", "a", "b", "c")
    assert [words.values[code] for code in words.codes] == frame["ward"].fillna("").tolist()
    assert Columns(frame).gaps("ward").tolist() == frame["ward"].isna().tolist()


def test_an_error_names_the_row_of_the_table_and_not_of_its_training_rows(frame):
    frame.loc[N - 1, "age"] = np.inf
    for seed in range(4):
        with pytest.raises(InputError, match=f"'age' has an infinite .* in row {N}"):
            read_table(frame, client="site", target="died", drop=["day"], seed=seed)
