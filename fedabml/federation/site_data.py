"""Read a site's own data and encode them by the card, as a federation with one client.

The server never sees the data. Errors about them are Refusals: they contain no value of a row, so that a site may send
their text. The details are in the site's own log.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..data import Federation
from ..data.encode import checked_targets, time_order
from ..data.files import read_client
from ..data.frames import READERS, WORKBOOKS, read_frame
from ..data.images import client_entries, site_files
from ..data.recipe import as_text
from ..data.rows import TABLE, Rows, take_newest, take_share
from ..errors import InputError
from ..runs.tokens import check_tokens
from .card import Card
from .folders import SiteFolder
from .messages import Refusal
from .schema_types import Schema
from .settings import SiteSettings
from .site_check import reasons

log = logging.getLogger("fedabml")
_NORM = ("shift", "scale", "y_shift", "y_scale")


def open_data(path: str | Path, words: Sequence[str] = ()) -> Any:
    """Return a table as a DataFrame, an .npz file as a dictionary of arrays, or a folder as a list of image files.

    A folder that holds one .npz file, and beside it documents at most, stands for that file. `words` are columns of a
    table to read as text.
    """
    place = Path(path)
    if place.is_dir():
        entries = client_entries(place)
        archive = next((entry for entry in entries if entry.suffix == ".npz"), None)
        other = next((entry for entry in entries if entry != archive), None)
        if archive is not None and other is not None:
            raise InputError(
                f"'{path}' holds '{archive.name}' and '{other.name}'; a site's data are one of them. Name the .npz "
                "file itself, or keep other files elsewhere."
            )
        return site_files(place) if archive is None else read_client(archive)
    suffix = place.suffix.lower()
    if suffix in (*READERS, *WORKBOOKS):
        return read_frame(place, words)
    if suffix == ".npz":
        return read_client(place)
    raise InputError(f"'{path}' is no table (.csv, .parquet, .xlsx), no .npz file and no folder of images.")


@contextmanager
def without_values(action: str) -> Iterator[None]:
    """Turn errors about a site's data into a Refusal without values; the details go to the local log."""
    try:
        yield
    except Refusal:
        raise
    except (InputError, LookupError, TypeError, ValueError, ArithmeticError, OSError, MemoryError) as error:
        log.warning("The data of this site cannot be %s: %s", action, error)
        raise Refusal(f"The data of this site cannot be {action}. The reason is in the site's own log.") from None


def read(settings: SiteSettings, schema: Schema) -> Any:
    """Return the site's opened data; a table has the names of the schema's columns."""
    if not settings.data:
        raise Refusal("This site has no data yet: `data` in its site.toml is empty.")
    with without_values("read"):
        words = schema.recipe().text_columns if schema.kind == "table" else ()
        data = open_data(settings.data, (*words, *([settings.id_column] if settings.id_column else [])))
        if schema.kind == "table" and settings.target_column and settings.target_column != schema.target:
            if schema.target in data.columns or settings.target_column not in data.columns:
                raise Refusal("The target_column of site.toml is missing, or stands beside the schema's own target.")
            data = data.rename(columns={settings.target_column: schema.target})
        return data


def mismatches(site: SiteFolder, schema: Schema) -> list[str]:
    """Return why the site's data do not fit a schema, without values of rows; the list is empty if they do."""
    try:
        data = read(site.settings, schema)
        with without_values("compared with the schema"):
            return reasons(schema, data)
    except Refusal as error:
        return [str(error)]


def load(site: SiteFolder, card: Card) -> Federation:
    """Return the site's data, encoded by the card's specification and with the card's normalisation, as one client.

    The samples have the bits that the same client has in a simulated federation with this normalisation. The rows of a
    table that are kept for testing are those of a simulated table that holds this site alone, or holds it first.
    Raises Refusal, without values of rows, if the data do not fit.
    """
    schema = Schema.of(dict(card.schema), "The card's schema")
    check_schema(card, schema)
    data = read(site.settings, schema)
    with without_values("encoded"):
        if found := reasons(schema, data):
            raise Refusal(" ".join(found))
        return _encoded(site, card, schema, data)


def check_schema(card: Card, schema: Schema) -> None:
    """Refuse a card whose inputs are not those of its own schema."""
    spec, inputs = card.input_spec, schema.inputs(card.input_spec.dataset)
    fits = (spec.recipe, spec.images, spec.task, spec.shape, spec.dtype, spec.transform) == (
        *(inputs.recipe, inputs.images, inputs.task, tuple(inputs.x.shape[1:]), str(inputs.x.dtype), None),
    )
    outputs = len(schema.classes) if schema.task == "classification" else schema.targets
    counted = getattr(spec.likelihood, "classes", 0) if schema.task == "classification" else spec_targets(spec)
    same = all(np.array_equal(getattr(spec, name), getattr(inputs, name)) for name in _NORM)
    if not fits or outputs != counted or not (same or spec.network.tokens):
        raise Refusal("The card is refused: its inputs are not those of its schema.")


def spec_targets(spec: Any) -> int:
    """Return how many targets, labels or steps a specification has."""
    likelihood = spec.likelihood
    return int(next(getattr(likelihood, n) for n in ("targets", "labels", "steps") if hasattr(likelihood, n)))


def _encoded(site: SiteFolder, card: Card, schema: Schema, data: Any) -> Federation:
    spec, settings = card.input_spec, site.settings
    classes = len(schema.classes) or None
    if schema.kind == "table":
        fed = _from_table(settings, card, data)
    else:
        splits = spec.images.site(settings.data, site.images) if spec.images else _splits(data)
        fed = Federation.from_arrays(
            [splits["train"]], [splits.get("test")], names=[settings.name], task=schema.task, classes=classes,
            normalize="none", dataset=spec.dataset,
        )  # fmt: skip
        if spec.network.tokens:
            check_tokens(spec.network, fed.x, "The site's inputs")
    if tuple(fed.x.shape[1:]) != spec.shape or str(fed.x.dtype) != spec.dtype:
        raise Refusal(f"The site's samples are {fed.x.dtype} of shape {fed.x.shape[1:]}, which the card does not have.")
    norm = {name: getattr(spec, name) for name in _NORM}
    return dataclasses.replace(fed, **norm, images=spec.images)


def _splits(data: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {split: (data[f"x_{split}"], data[f"y_{split}"]) for split in ("train", "test") if f"x_{split}" in data}


def _from_table(settings: SiteSettings, card: Card, frame: Any) -> Federation:
    """Encode a table, and divide its rows as `read_table` divides those of a client."""
    recipe = card.input_spec.recipe
    assert recipe is not None
    train, test = divide(settings, recipe.target, bool(recipe.class_names), frame, card.seed)
    x, y = recipe.apply(frame), checked_targets(recipe, frame[recipe.target], "The site's table")
    return Federation.assemble(
        x, y, (train, Rows.empty(1), test), [settings.name], len(recipe.class_names), dataset=card.input_spec.dataset,
        manifest={}, normalize="none", recipe=recipe,
    )  # fmt: skip


def divide(settings: SiteSettings, target: str, classes: bool, frame: Any, seed: int) -> tuple[Rows, Rows]:
    """Return the training rows and the test rows of a site's table."""
    owners = Rows.by_owner(np.zeros(len(frame), np.int64), 1)
    if settings.split_by:
        if settings.split_by not in frame.columns:
            raise Refusal(f"The column '{settings.split_by}' (split_by of site.toml) is missing.")
        times = time_order(frame[settings.split_by], settings.split_by)
        return take_newest(owners, settings.test_share, 2, times)
    labels = np.zeros(len(frame), np.int64)
    if classes:
        labels = np.unique(as_text(frame[target]), return_inverse=True)[1]
    return take_share(owners, settings.test_share, 2, labels, seed, TABLE)
