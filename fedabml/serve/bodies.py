"""The bodies of requests: JSON or CSV from a stranger becomes checked inputs, or an InputError with a sentence.

    {"rows": [{"age": 61, "sex": "f"}, ...]}        a table's columns by name; null is a missing value
    {"rows": [[0.1, 0.2], ...]}                     arrays: each row has the shape of the posterior's inputs

A CSV has the table's columns in its first line; for arrays of one axis it has a row of numbers per line. Nothing is
guessed: a number is not read from a word, and a row must have every column.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..data import TableRecipe
from ..data.client_datasets import pad_tokens
from ..data.columns import as_text
from ..data.frames import MAX_COLUMNS, pandas
from ..errors import InputError, nearest, quoted, shortened
from ..files.limits import parse_json
from ..runs.input_spec import Inputs, InputSpec
from ..runs.posterior import Posterior
from ..runs.tokens import padding_of

MOST_WHOLE = 2**53  # below it, a float stands for one whole number
MOST_NAMED = 20  # known values, or ignored columns, that a sentence or an answer lists


class TooManyRows(InputError):
    """A request has more rows than the service takes at once."""


class Rows(NamedTuple):
    """The rows of a request before they are read, and the columns among them that the posterior does not read."""

    size: int
    x: Any  # a table's columns by name, a list of cells each; else an array [n, *shape]
    ignored: list[str]
    ids: list[str] | None = None


def parse_json_body(spec: InputSpec, body: bytes, max_rows: int) -> Rows:
    """Return the rows of a JSON body."""
    text = _text(body)
    content = parse_json(text, "The body", loads=_strict)
    if not isinstance(content, dict) or "rows" not in content:
        raise InputError('The body must be a JSON object with a list of rows: {"rows": [...]}.')
    if others := sorted(set(content) - {"rows"}):
        raise InputError(f"The body has '{shortened(others[0], 60)}' beside 'rows', which is not known. Leave it out.")
    rows, recipe = content["rows"], spec.recipe
    if not isinstance(rows, list):
        raise InputError('"rows" must be a list, with an entry for each row.')
    _check_count(len(rows), max_rows)
    if recipe is None:
        if "true" in text or "false" in text:  # numpy would make numbers of them
            raise InputError("The rows hold true or false, where numbers are needed.")
        return Rows(len(rows), _array(rows, spec), [])
    cells = {name: _column(rows, name, recipe) for name in recipe.table_columns}
    others = sorted({name for row in rows for name in row} - set(cells))
    ids = _ids(_column(rows, recipe.id, recipe)) if recipe.id is not None and recipe.id in others else None
    return Rows(len(rows), cells, _ignored(others, recipe), ids)


def parse_csv_body(spec: InputSpec, body: bytes, max_rows: int) -> Rows:
    """Return the rows of a CSV body."""
    text, recipe = _text(body), spec.recipe
    if not text.strip():
        raise InputError("The body is empty. Send rows as CSV.")
    if recipe is None:
        if len(spec.shape) != 1:
            raise InputError(f"Inputs of shape {spec.shape} do not fit into a CSV. Send JSON.")
        array = _array(_numbers(text, max_rows), spec)
        return Rows(len(array), array, [])
    head = text.lstrip().partition("\n")[0]
    if head.count(",") >= MAX_COLUMNS:
        raise InputError(f"The first line has more than {MAX_COLUMNS:,} columns.")
    try:
        types = dict.fromkeys(recipe.text_columns, str)
        frame = pandas().read_csv(io.StringIO(text), nrows=max_rows + 1, dtype=types, low_memory=False)
    except Exception as error:  # pandas has errors of nearly every type for damaged text
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(f"The body is not a CSV table: {shortened(reason)}.") from error
    if twice := _twice(next(csv.reader([head]), [])):
        raise InputError(f"The first line has the column '{shortened(twice, 60)}' twice.")
    _check_count(len(frame), max_rows)
    if not isinstance(frame.index, pandas().RangeIndex):
        raise InputError("The rows have more cells than the first line has columns.")
    names = [str(name) for name in frame.columns]
    if missing := next((name for name in recipe.table_columns if name not in names), None):
        raise InputError(f"The table has no column '{missing}'.{nearest(missing, names)}")
    cells = {name: frame.iloc[:, names.index(name)].tolist() for name in recipe.table_columns}
    ids = _ids(frame[recipe.id].tolist()) if recipe.id in names else None
    return Rows(len(frame), cells, _ignored(sorted(set(names) - set(cells)), recipe), ids)


PARSERS: dict[str, Callable[[InputSpec, bytes, int], Rows]] = {
    "application/json": parse_json_body,
    "text/csv": parse_csv_body,
}


def read_rows(posterior: Posterior, parts: Sequence[Rows], refuse_unknown: bool) -> Inputs:
    """Return the inputs of several requests as one; words that fewer than five training rows had are refused if asked.

    A frame takes pandas milliseconds for one row and for fifty, so requests are joined before. Its cells stay what they
    are in each request: pandas would choose a type for the whole column.
    """
    recipe = posterior.input_spec.recipe
    if recipe is None:
        return posterior.read(np.concatenate([part.x for part in parts]) if len(parts) > 1 else parts[0].x)
    joined = {name: [cell for part in parts for cell in part.x[name]] for name in recipe.table_columns}
    frame = pandas().DataFrame(joined, dtype=object)
    for name, known_words in recipe.categories.items() if refuse_unknown else ():
        for row, text in enumerate(recipe.words(frame, name), 1):
            if text and text not in known_words:
                examples = ", ".join(known_words[:MOST_NAMED]) + (", …" if len(known_words) > MOST_NAMED else "")
                raise InputError(
                    f"Column '{name}' has '{shortened(text, 60)}' in row {row}, which is no known value: "
                    f"{shortened(examples, 300)}. Send a known value, or null if it is missing."
                )
    return posterior.read(frame)


def _ids(cells: list[Any]) -> list[str]:
    return as_text(pandas().Series(cells, dtype=object))


def _ignored(names: list[str], recipe: TableRecipe) -> list[str]:
    return [shortened(name, 60) for name in names if name != recipe.id][:MOST_NAMED]


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"The body is not UTF-8 text: its byte {error.start} does not fit.") from error


def _strict(text: str) -> Any:
    """Parse JSON without NaN and Infinity, which are no JSON, and without a name that stands twice in an object."""

    def refuse(word: str) -> Any:
        raise InputError(f"The body has {word}, which is not a number of JSON. Send null for a missing value.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise InputError(f"An object has '{shortened(_twice([name for name, _ in pairs]), 60)}' twice.")
        return entries

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


def _twice(names: list[str]) -> str:
    """Return the first name that stands there before; an empty text if all differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _check_count(rows: int, most: int) -> None:
    if rows == 0:
        raise InputError("There are no rows. Send at least one.")
    if rows > most:
        raise TooManyRows(f"There are more than {most:,} rows, the most for one request. Send them in parts.")


def _column(rows: list[Any], name: str, recipe: TableRecipe) -> list[Any]:
    """Return one column of rows, each an object; its cells must be of the column's kind."""
    cells = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"Row {number} is {quoted(row)}; it must be an object with the table's columns.")
        if name not in row:
            others = [str(other) for other in row if other not in recipe.table_columns]
            hint = nearest(name, others) if others else ""
            hint = hint if "Did you mean" in hint else " Send null for a missing value."
            raise InputError(f"Row {number} has no column '{name}'.{hint}")
        cell = row[name]
        if (
            cell is not None
            and name in recipe.numeric
            and (isinstance(cell, bool) or not isinstance(cell, int | float))
        ):
            raise InputError(f"Column '{name}' has {quoted(cell)} in row {number}, where a number is needed.")
        if isinstance(cell, dict | list):
            raise InputError(f"Column '{name}' has {quoted(cell)} in row {number}, where one value is needed.")
        cells.append(cell)
    return cells


def _numbers(text: str, max_rows: int) -> list[list[float]]:
    """Return the rows of a CSV without a header, numbers in each."""
    rows: list[list[float]] = []
    try:
        for line in csv.reader(io.StringIO(text)):
            rows += [[float(cell) for cell in line]] if line else []
            _check_count(len(rows) or 1, max_rows)
    except (ValueError, csv.Error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"Row {len(rows) + 1} of the CSV is not one of numbers alone: {shortened(str(error))}."
        ) from error
    return rows


def _array(rows: list[Any], spec: InputSpec) -> np.ndarray:
    """Return rows as an array of the posterior's type, whole numbers from 0 to 255 for images.

    Short sequences of tokens are filled up with the token of padding, if the network knows one, as `predict` does.
    """
    try:
        if (padding := padding_of(spec.network)) is not None and all(isinstance(row, list) for row in rows):
            return pad_tokens([_whole(np.asarray(row)) for row in rows], padding, spec.shape[0], "The rows")
        array = np.array(rows)
    except InputError:
        raise
    except (ValueError, OverflowError) as error:
        raise InputError(f"The rows are not all of the shape {spec.shape}.") from error
    if array.dtype.kind not in "iuf":
        raise InputError(f"The rows hold something else than numbers; each must be numbers of shape {spec.shape}.")
    if tuple(array.shape[1:]) != spec.shape:
        raise InputError(f"The rows have the shape {tuple(array.shape[1:])}; the posterior takes {spec.shape}.")
    if spec.dtype != "uint8":
        return array
    if not ((array >= 0) & (array <= 255) & (np.floor(array) == array)).all():
        raise InputError("The rows hold other values than the whole numbers from 0 to 255, which images have.")
    return array.astype(np.uint8)


def _whole(values: np.ndarray) -> np.ndarray:
    """Return floats as integers if they all are whole numbers, since a CSV has no other; anything else unchanged."""
    if values.dtype.kind != "f" or not ((np.floor(values) == values) & (np.abs(values) < MOST_WHOLE)).all():
        return values
    return values.astype(np.int64)
