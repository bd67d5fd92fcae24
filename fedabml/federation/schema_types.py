"""A schema describes the inputs that every site must have, and the fixed numbers that normalise them.

The operator drafts it from one site's data (`schema_draft`), edits it (`schema.toml`), and every site compares it with
its own data (`site_check`). It holds names and kinds of columns, words of categories, classes, shapes, and shifts and
scales; never a row. A schema comes from a file or from the network, so `Schema.of` checks everything.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import checked_integer, is_number
from ..data import Federation, TableRecipe
from ..data.arrays import TASKS
from ..data.dates import part_names
from ..data.images import ImageRecipe
from ..data.recipe import MAX_CATEGORIES, Numeric
from ..data.rows import Rows
from ..errors import InputError, nearest, quoted
from ..files.limits import MAX_TOML, parse_toml
from ..files.paths import Name, read_text, write

SCHEMA_KINDS = ("table", "arrays", "images")
COLUMN_KINDS = ("number", "words", "date")
MOST_COLUMNS, MOST_CLASSES, MOST_WORD = 16_384, 1000, 200
CIRCLE = math.sqrt(0.5)  # the deviation of sine and cosine over a whole circle
_KEYS = {
    "table": {"target", "id", "columns"},
    "arrays": {"shape", "type", "targets", "shift", "scale"},
    "images": {"mode", "height", "width", "resized", "shift", "scale"},
}
_COMMON = {"kind", "task", "classes", "target_shift", "target_scale", "class_weights"}
_COLUMN_KEYS = {
    "number": ("shift", "scale", "fill", "gaps"),
    "words": ("words",),
    "date": ("shift", "scale", "fill", "gaps", "times"),
}


@dataclass(frozen=True)
class Column:
    """A column of a table. For dates, `shift`, `scale` and `fill` belong to the year."""

    kind: str  # one of `COLUMN_KINDS`
    shift: float = 0.0  # a network gets (value - shift) / scale
    scale: float = 1.0
    fill: float = 0.0  # stands for a missing number
    gaps: bool = True  # whether a further input marks missing values
    words: tuple[str, ...] = ()  # the known words; all others count as one
    times: bool = False  # whether dates have a time of day


@dataclass(frozen=True)
class Schema:
    """A schema describes the data of every site. Fields that do not belong to its kind have their defaults."""

    kind: str  # one of `SCHEMA_KINDS`
    task: str
    classes: tuple[str, ...] = ()
    target: str = ""
    columns: Mapping[str, Column] = field(default_factory=dict)
    shape: tuple[int, ...] = ()  # of one sample
    type: str = "float32"  # of samples: float32 or uint8
    targets: int = 1  # targets, labels or steps of a sample
    shift: tuple[float, ...] = ()  # one number, one per feature, or one per channel
    scale: tuple[float, ...] = ()
    target_shift: tuple[float, ...] = ()  # of a regression, one per target
    target_scale: tuple[float, ...] = ()
    mode: str = ""
    resized: bool = False
    class_weights: tuple[float, ...] = ()
    id: str = ""  # a table's column of identifiers, which predictions carry; it is no feature, and may be absent

    # -- reading and writing ------------------------------------------------------------------------------------------
    @classmethod
    def of(cls, data: Any, subject: str = "The schema") -> Schema:
        """Return the schema that `to_json` or a TOML file describes. Raises InputError for anything else."""
        try:
            schema = _parsed(cls, data)
            schema.inputs("check")  # sizes and recipes fit each other
            return schema
        except InputError as error:
            raise InputError(f"{subject}: {error}") from error
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, MemoryError) as error:
            raise InputError(
                f"{subject} is damaged or incomplete ({type(error).__name__}: {quoted(error)})."
            ) from error

    @classmethod
    def load(cls, path: Name) -> Schema:
        """Read a TOML file of at most 256 KiB."""
        try:
            return cls.of(parse_toml(read_text(path, MAX_TOML), f"'{path}'"), f"'{path}'")
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"'{path}' is not valid TOML: {error}.") from error

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain data with the keys of its kind."""
        regression = self.task == "regression"
        data: dict[str, Any] = {"kind": self.kind, "task": self.task}
        if self.task in ("classification", "sequence"):
            data["classes"] = list(self.classes)
        if self.class_weights:
            data["class_weights"] = list(self.class_weights)
        if regression:
            data |= {"target_shift": list(self.target_shift), "target_scale": list(self.target_scale)}
        if self.kind == "table":
            data |= {"target": self.target} | ({"id": self.id} if self.id else {})
            data["columns"] = {name: _column_json(column) for name, column in self.columns.items()}
            return data
        if self.kind == "images":
            data |= {"mode": self.mode, "height": self.shape[1], "width": self.shape[2], "resized": self.resized}
        else:
            data |= {"shape": list(self.shape), "type": self.type, "targets": self.targets}
        return data | {"shift": list(self.shift), "scale": list(self.scale)}

    def to_toml(self, notes: Sequence[str] = ()) -> str:
        """Return the schema as TOML with comments for the person who edits it; `notes` come first."""
        import tomli_w

        data = self.to_json()
        columns = data.pop("columns", {})
        lines = [_comment(text) for text in (*_HEAD, *notes)] + [""]
        for name, value in data.items():
            lines += [_comment(_MEANING[name]), tomli_w.dumps({name: value}).rstrip(), ""]
        for name, column in columns.items():
            lines += [tomli_w.dumps({"columns": {name: column}}).rstrip().removeprefix("[columns]\n"), ""]
        return "\n".join(lines)

    def save(self, path: Name, notes: Sequence[str] = ()) -> Path:
        """Write the commented TOML file."""
        return write(path, self.to_toml(notes))

    # -- what it means ------------------------------------------------------------------------------------------------
    def recipe(self) -> TableRecipe:
        """Return the recipe that encodes a table."""
        names: list[str] = []
        numeric: dict[str, Numeric] = {}
        for name, column in self.columns.items():
            if column.kind == "date":
                year, *circles = part_names(name, column.times)
                numeric[year] = Numeric(column.fill, column.shift, column.scale, column.gaps)
                numeric |= {part: Numeric(0.0, 0.0, CIRCLE, False) for part in circles}
                names += [year, *circles]
            else:
                names.append(name)
                if column.kind == "number":
                    numeric[name] = Numeric(column.fill, column.shift, column.scale, column.gaps)
        words = {name: column.words for name, column in self.columns.items() if column.kind == "words"}
        dates = {name: column.times for name, column in self.columns.items() if column.kind == "date"}
        target = (self.target, self.task, self.classes)
        return TableRecipe(tuple(names), numeric, words, "", *target, dates=dates, id=self.id or None)

    def image_recipe(self) -> ImageRecipe:
        """Return the recipe that decodes images."""
        _, height, width = self.shape
        return ImageRecipe(self.classes, self.mode, height, width, self.resized)

    def inputs(self, dataset: str) -> Federation:
        """Return a federation of two empty samples with the shape, normalisation and recipe of the schema."""
        recipe = self.recipe() if self.kind == "table" else None
        shape = (len(recipe.feature_names),) if recipe else self.shape
        x = np.zeros((2, *shape), self.type)
        y = np.zeros(2 if self.task == "classification" else (2, self.targets), np.int64)
        y = y.astype(np.float32) if self.task == "regression" else y
        rows = Rows.of([[0, 1]]), Rows.empty(1), Rows.empty(1)
        fed = Federation.assemble(
            x, y, rows, ["site"], len(self.classes), dataset=dataset, manifest={}, normalize="none", recipe=recipe,
            task=self.task,
        )  # fmt: skip
        changes: dict[str, Any] = {"images": self.image_recipe() if self.kind == "images" else None}
        if self.kind != "table":
            changes |= {"shift": self._shaped(self.shift), "scale": self._shaped(self.scale)}
        if self.task == "regression":
            changes["y_shift"] = np.array(self.target_shift, np.float32)
            changes["y_scale"] = np.array(self.target_scale, np.float32)
        return dataclasses.replace(fed, **changes)

    def _shaped(self, numbers: tuple[float, ...]) -> np.ndarray:
        """Return shift or scale, float32 in the shape that fits a sample."""
        full = (self.shape[0], *(1,) * (len(self.shape) - 1)) if len(numbers) > 1 else ()
        return np.array(numbers, np.float32).reshape(full)


# -- checks of what a file or a message holds -------------------------------------------------------------------------
def _parsed(cls: type[Schema], data: Any) -> Schema:
    if not isinstance(data, Mapping) or data.get("kind") not in SCHEMA_KINDS:
        raise InputError(f"Its kind must be one of {', '.join(SCHEMA_KINDS)}.")
    kind, task = data["kind"], data.get("task")
    for name in data:
        if name not in _KEYS[kind] | _COMMON:
            raise InputError(f"It has an unknown key {quoted(name)}.{nearest(str(name)[:60], _KEYS[kind] | _COMMON)}")
    if task not in TASKS or (kind != "arrays" and task not in ("classification", "regression")):
        raise InputError(f"Its task {quoted(task)} is not one of {', '.join(TASKS)}, or none of this kind of data.")
    values: dict[str, Any] = {"kind": kind, "task": task, "classes": _words(data.get("classes", []), "classes")}
    if (task in ("classification", "sequence")) != bool(values["classes"]) or len(values["classes"]) == 1:
        raise InputError(f"The task {task} does not fit {len(values['classes'])} classes.")
    if kind == "images" and task != "classification":
        raise InputError("Images are for classification.")
    if kind == "table":
        values |= _table(data)
    elif kind == "images":
        sizes = [checked_integer(data[name], name) for name in ("height", "width")]
        recipe = {**{n: data[n] for n in ("mode", "height", "width", "resized")}, "class_names": list(data["classes"])}
        shape = ImageRecipe.from_json(recipe).shape
        values |= {"mode": data["mode"], "resized": data["resized"], "type": "uint8", "shape": (shape[0], *sizes)}
    else:
        values["shape"] = tuple(checked_integer(size, "A size in shape") for size in data["shape"])
        values |= {"type": data["type"], "targets": checked_integer(data.get("targets", 1), "targets")}
    if kind != "table":
        values |= _normalization(data, values["shape"], values["type"])
    if task == "regression":
        values |= {name: _numbers(data[name], name) for name in ("target_shift", "target_scale")}
        if {len(values["target_shift"]), len(values["target_scale"])} != {values.get("targets", 1)}:
            raise InputError("target_shift and target_scale have one number per target.")
        _check_scale(values["target_scale"], "target_scale")
    elif data.keys() & {"target_shift", "target_scale"}:
        raise InputError("target_shift and target_scale are for a regression.")
    values["class_weights"] = _numbers(data.get("class_weights", []), "class_weights")
    if values["class_weights"]:
        if task != "classification" or len(values["class_weights"]) != len(values["classes"]):
            raise InputError("class_weights has one positive number per class.")
        _check_scale(values["class_weights"], "class_weights")
    return cls(**values)


def _table(data: Mapping[str, Any]) -> dict[str, Any]:
    target, columns = _word(data["target"], "target"), data["columns"]
    id = _word(data["id"], "id") if "id" in data else ""
    if not isinstance(columns, Mapping) or not 0 < len(columns) <= MOST_COLUMNS or target in columns:
        raise InputError(f"columns must have 1 to {MOST_COLUMNS:,} columns, and not the target.")
    if id in (target, *columns):
        raise InputError("id must be another column than the target and the inputs.")
    return {
        "target": target,
        "id": id,
        "columns": {_word(n, "A column's name"): _column(n, c) for n, c in columns.items()},
    }


def _column(name: str, data: Any) -> Column:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind not in COLUMN_KINDS or data.keys() - {"kind", *_COLUMN_KEYS[kind]}:
        known = ", ".join(COLUMN_KINDS)
        raise InputError(f"Column {quoted(name)} must have a kind ({known}) and the keys of that kind.")
    if kind == "words":
        words = _words(data["words"], f"Column {quoted(name)}: words")
        if not 0 < len(words) <= MAX_CATEGORIES:
            raise InputError(f"Column {quoted(name)} must have 1 to {MAX_CATEGORIES} words.")
        return Column(kind, words=words)
    shift, scale, fill = _numbers([data[key] for key in ("shift", "scale", "fill")], f"Column {quoted(name)}")
    _check_scale((scale,), f"Column {quoted(name)}: scale")
    gaps, times = data.get("gaps", True), data.get("times", False)
    if not isinstance(gaps, bool) or not isinstance(times, bool):
        raise InputError(f"Column {quoted(name)}: gaps and times are true or false.")
    return Column(kind, shift, scale, fill, gaps, (), times)


def _normalization(data: Mapping[str, Any], shape: tuple[int, ...], type: Any) -> dict[str, Any]:
    """Return shift and scale of arrays or images, after a check of all sizes."""
    if not 0 < len(shape) <= 4 or math.prod(shape) > 1 << 24 or type not in ("float32", "uint8"):
        raise InputError("shape has 1 to 4 sizes, at most 16,777,216 numbers, and type is float32 or uint8.")
    if type == "uint8" and len(shape) != 3:
        raise InputError("Samples of type uint8 are images of shape [channels, height, width].")
    each = shape[0] if type == "uint8" or len(shape) == 1 else 1
    pair = {name: _numbers(data[name], name) for name in ("shift", "scale")}
    if len(pair["shift"]) != len(pair["scale"]) or len(pair["shift"]) not in (1, each):
        raise InputError(f"shift and scale have one number each, or {each}.")
    _check_scale(pair["scale"], "scale")
    return pair


def _numbers(values: Any, what: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) > 1 << 20:
        raise InputError(f"{what} must be a list of numbers.")
    if not all(is_number(value) and math.isfinite(value) and abs(value) < 1e30 for value in values):
        raise InputError(f"{what} must be finite numbers.")
    return tuple(float(value) for value in values)


def _check_scale(values: Sequence[float], what: str) -> None:
    if not all(value > 1e-30 for value in values):
        raise InputError(f"{what} must be above 0.")


def _word(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MOST_WORD:
        raise InputError(f"{what} must be a text of 1 to {MOST_WORD} characters.")
    return value


def _words(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) > MOST_CLASSES:
        raise InputError(f"{what} must be a list of at most {MOST_CLASSES} texts.")
    words = tuple(_word(value, what) for value in values)
    if len(set(words)) < len(words):
        raise InputError(f"{what} has an entry twice.")
    return words


def _column_json(column: Column) -> dict[str, Any]:
    values = {"kind": column.kind} | {key: getattr(column, key) for key in _COLUMN_KEYS[column.kind]}
    return values | ({"words": list(column.words)} if column.kind == "words" else {})


def _comment(text: str) -> str:
    return textwrap.fill(text, 110, initial_indent="# ", subsequent_indent="# ")


_HEAD = (
    "The inputs that every site of the federation must have. Edit this file before the federation starts: from then on "
    "it is frozen in the card, and a change has no effect.",
    "A network gets (value - shift) / scale. Round numbers of the right size suffice; they need not be exact means.",
    "Of a table: kind is number, words or date. A missing number becomes `fill`, and `gaps = true` adds an input that "
    "marks it. A word that is not listed counts as 'other'. Remove a column to leave it out.",
)
_MEANING = {
    "kind": "table, arrays (an .npz file per site) or images (a folder per class).",
    "task": "classification or regression; of arrays also multilabel or sequence.",
    "classes": "Every class that any site may have. Counts of classes never leave a site.",
    "class_weights": "How much an example of each class counts in training.",
    "target_shift": "The network learns (target - target_shift) / target_scale.",
    "target_scale": "See target_shift.",
    "target": "The column to predict.",
    "id": "The column of identifiers, which a site's own predictions carry. It is no input and never leaves a site.",
    "mode": "L (grey), RGB or RGBA.",
    "height": "Pixels.",
    "width": "Pixels.",
    "resized": "Whether images of other sizes are resized.",
    "shape": "The shape of one sample.",
    "type": "float32, or uint8 for images.",
    "targets": "Targets, labels or steps of one sample.",
    "shift": "One number, or one for each feature or channel.",
    "scale": "See shift.",
}
