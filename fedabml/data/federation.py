"""A federation: every sample once, and the rows that every client owns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import checked_integer, checks_arguments
from ..errors import InputError, nearest, quoted, shortened
from ..files.sheets import frame, html_card
from . import arrays
from .arrays import SPLITS, large_enough
from .catalogue import class_names
from .client_datasets import read_datasets
from .columns import Columns
from .encode import TableOptions, encode
from .folders import read_folder
from .frames import as_frame
from .images import ImageRecipe
from .manifest import listed_manifest
from .recipe import TableRecipe
from .rows import HOLD_OUT, Rows, check_share, take_share
from .statistics import moments
from .target_transform import TargetTransform

if TYPE_CHECKING:
    import pandas as pd

CARD = ("dataset", "task", "clients", "classes", "sample_shape", "samples")  # facts that a notebook shows


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Samples, targets, and the rows of every client.

    `x` is uint8 [n, C, H, W] for images and float32 [n, ...] for anything else; a model gets (x - shift) / scale.
    `y` is int64 [n] for classification; for regression float32 [n, targets], and a model gets (y - y_shift) / y_scale,
    of the transformed y if there is a `transform`; for several labels int64 [n, labels] of 0 and 1, for labelled steps
    int64 [n, steps], with -1 for what is unknown. The four statistics come from training samples only. `val` and `test`
    may be empty. If `x` was encoded from a table, `table` is that table, with a row per sample.
    """

    x: np.ndarray
    y: np.ndarray
    train: Rows
    val: Rows
    test: Rows
    task: str
    classes: int
    shift: np.ndarray
    scale: np.ndarray
    y_shift: np.ndarray
    y_scale: np.ndarray
    names: tuple[str, ...]
    dataset: str
    manifest: dict[str, Any] = field(default_factory=dict)
    recipe: TableRecipe | None = None
    images: ImageRecipe | None = None  # of a folder of images
    padding: int | None = None  # the token number that fills short sequences; None: there is none
    transform: TargetTransform | None = None  # of a target that is never below 0
    named_classes: tuple[str, ...] = ()  # the names that datasets give the classes; tables and images have a recipe
    table: pd.DataFrame | None = None

    @classmethod
    def assemble(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        rows: Sequence[Rows],
        names: Sequence[str],
        classes: int,
        *,
        dataset: str,
        manifest: dict[str, Any],
        normalize: str = "auto",
        recipe: TableRecipe | None = None,
        task: str | None = None,
    ) -> Federation:
        """Make a federation of checked samples: take the statistics, and complete the manifest.

        `rows` are those of training, validation and test; 0 `classes` mean regression. `normalize` is "auto" to
        standardise features and regression targets, "targets" for the latter alone, or "none".
        """
        if normalize not in ("auto", "targets", "none"):
            raise InputError(f"normalize is {normalize!r}; it must be 'auto', 'targets' or 'none'.")
        train, val, test = rows
        fit = np.concatenate([train.index, val.index])
        shift, scale = moments(x, fit) if normalize == "auto" else (np.float32(0), np.float32(1))
        task = task or ("classification" if classes else "regression")
        targets = y.shape[1:] if task == "regression" else ()
        y_shift, y_scale = np.zeros(targets, np.float32), np.ones(targets, np.float32)
        if task == "regression" and normalize != "none":
            y_shift, y_scale = moments(y, fit)
        return cls(
            x, y, train, val, test, task, classes, np.asarray(shift), np.asarray(scale), y_shift, y_scale,
            tuple(names), dataset, manifest, recipe,
        )._with({})  # fmt: skip

    @classmethod
    @checks_arguments
    def from_arrays(
        cls,
        train: Sequence[arrays.Pair],
        test: Sequence[arrays.Pair | None] | None = None,
        val: Sequence[arrays.Pair | None] | None = None,
        *,
        names: Sequence[str | int] | None = None,
        task: str | None = None,
        classes: int | None = None,
        normalize: str = "auto",
        dataset: str = "arrays",
        drop_small: bool = False,
    ) -> Federation:
        """Make a federation from one (x, y) per client, numpy or torch; a client without test data has None there.

        uint8 arrays of three or four axes are images (`arrays.as_features` documents the order of their axes). Labels
        of a whole-number type mean classification, floats regression; `task` overrides, and must be given for a few
        whole numbers of a float type. `classes` is the highest training label plus one unless given. Features are
        standardised, integers too, unless the model looks them up in an embedding (tokens) or `normalize` is "none".
        `drop_small` leaves out clients with fewer than two training samples. Features are copied, except for a single
        client's that are mapped read-only (`np.load(file, mmap_mode="r")`).
        """
        clients = [f"client-{i}" for i in range(len(train))] if names is None else [str(name) for name in names]
        parts, task = arrays.check_parts({"train": train, "val": val, "test": test}, clients, task)
        sizes = {part.client: len(part.y) for part in parts if part.split == 0}
        kept = large_enough([sizes.get(i, 0) for i in range(len(clients))], clients, drop_small)
        number = {client: i for i, client in enumerate(kept)}
        parts = [part for part in parts if part.client in number]
        arrays.check_alike(parts)
        counts = [len(part.y) for part in parts]
        first = np.cumsum([0, *counts])

        def describe(sample: int) -> str:
            i = int(np.searchsorted(first, sample, side="right")) - 1
            return f"{parts[i].title}, sample {sample - first[i]},"

        mapped = len(parts) == 1 and arrays.is_mapped(parts[0].x)  # a map, as of the image cache, may exceed the memory
        x = parts[0].x if mapped else np.concatenate([part.x for part in parts])
        y = np.concatenate([part.y for part in parts])
        owner, split = np.repeat([[number[part.client], part.split] for part in parts], counts, axis=0).T
        rows = _rows(owner, split, len(kept))
        classes = arrays.check_values(x, y, rows[0].index, task, classes, describe)
        manifest: dict[str, Any] = {"partition": {"kind": "given"}}
        if any(part.whole for part in parts):
            manifest["whole_numbers"] = True
        clients = [clients[i] for i in kept]
        common: dict[str, Any] = {"dataset": dataset, "normalize": normalize, "task": task}
        return cls.assemble(x, y, rows, clients, classes, manifest=manifest, **common)

    @classmethod
    @checks_arguments
    def from_owners(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        owner: np.ndarray,
        test: np.ndarray | None = None,
        *,
        task: str | None = None,
        classes: int | None = None,
        normalize: str = "auto",
        dataset: str = "arrays",
        drop_small: bool = False,
    ) -> Federation:
        """Make a federation from samples x [n, ...] and the owner [n] of each; `test` [n] marks test samples.

        For very many clients: `x` is not copied, uint8 [n, C, H, W] or float32 [n, ...], and may be memory-mapped
        (`np.load(file, mmap_mode="c")`), so that a run reads only the samples of the clients it draws. Its values are
        read once, for the statistics and the hash.
        """
        labels, owner, marks = arrays.check_owned(x, y, owner, test)
        task = arrays.check_task(task, [labels])
        owners, number = np.unique(owner, return_inverse=True)
        targets, names = arrays.as_targets(labels, task, "y"), [str(name) for name in owners.tolist()]
        arrays.check_rounding([("y", labels, targets)], "target")
        rows = _rows(number, marks * SPLITS.index("test"), len(names))
        kept = large_enough(rows[0].counts.tolist(), names, drop_small)
        if len(kept) < len(names):
            rows, names = [part.select(kept) for part in rows], [names[i] for i in kept]

        def describe(sample: int) -> str:
            return f"sample {sample} (client '{owner[sample]}')"

        classes = arrays.check_values(x, targets, rows[0].index, task, classes, describe)
        manifest = {"partition": {"kind": "natural"}}
        common: dict[str, Any] = {"dataset": dataset, "normalize": normalize, "task": task}
        return cls.assemble(x, targets, rows, names, classes, manifest=manifest, **common)

    @classmethod
    @checks_arguments
    def from_frame(
        cls,
        frame: pd.DataFrame,
        *,
        client: str,
        target: str,
        task: str | None = None,
        test_share: float = 0.2,
        seed: int = 0,
        drop_small: bool = False,
        drop: Sequence[str] | str = (),
        id: str | None = None,
        dates: Sequence[str] | str = (),
        split_by: str | None = None,
        positive_class: str | None = None,
        dataset: str = "table",
    ) -> Federation:
        """Make a federation from a DataFrame: each value of `client` is a client, the column `target` is predicted.

        A share of each client's rows is kept for testing: spread over its labels, or its newest rows by the dates (or
        numbers) of the column `split_by`. At least two rows always train. Words and truth values become one column
        each, numbers are standardised, gaps are filled and marked; ISO dates of the columns `dates` become numbers
        (`data.dates`). All of it is learned from training rows (the names of the classes alone come from the whole
        table) and kept in `federation.recipe`. The columns `drop` are left out. So is the column `id`, which
        predictions for later tables carry, and `split_by`, unless it is one of `dates`.

        Of two classes, `positive_class` is the one that recall, precision and thresholds are about, and that comes
        second in `class_names`; by default it is the second by name.
        """
        options = TableOptions(
            client, target, task, test_share, seed, drop_small, drop, id, dates, split_by, positive_class
        )
        return cls.from_encoded(as_frame(frame), options, dataset=dataset)

    @classmethod
    def from_encoded(
        cls, table: pd.DataFrame | Columns, options: TableOptions, source: str = "The table", dataset: str = "table"
    ) -> Federation:
        """Encode a table and assemble its federation; `source` names the table in errors."""
        columns = Columns.of(table)
        x, y, rows, names, recipe, manifest = encode(columns, options, source)
        fed = cls.assemble(
            x, y, rows, names, len(recipe.class_names), dataset=dataset, normalize="targets", manifest=manifest,
            recipe=recipe,
        )  # fmt: skip
        return replace(fed, table=columns.frame)

    @classmethod
    @checks_arguments
    def from_folder(
        cls,
        path: str | os.PathLike[str],
        task: str | None = None,
        drop_small: bool = False,
        image_size: int | None = None,
    ) -> Federation:
        """Read a folder with one .npz per client, named after it, or with one folder of images per client.

        An .npz holds x_train, y_train and perhaps x_test, y_test (or just x, y). A client's folder of images holds a
        folder of .png or .jpg files per class, or such folders inside `train` and `test`. Images of different sizes
        are refused, unless `image_size` asks for all of them to be resized to so many pixels in width and height.
        They are decoded once, into a cache on disk (`data.image_cache`), which later calls map into memory.
        """
        fed: Federation = read_folder(cls, Path(path), task, drop_small, image_size)
        return fed

    @classmethod
    @checks_arguments
    def from_datasets(
        cls,
        train: Mapping[str, Any],
        test: Mapping[str, Any] | None = None,
        val: Mapping[str, Any] | None = None,
        *,
        x: str | None = None,
        y: str | None = None,
        padding: int | None = None,
        task: str | None = None,
        classes: int | None = None,
        normalize: str = "auto",
        dataset: str = "datasets",
        drop_small: bool = False,
    ) -> Federation:
        """Make a federation from one map-style dataset per client, by name: a torch Dataset, a Hugging Face dataset.

        An item is a pair (x, y), or a dictionary whose entries `x` and `y` name; x is a number, array, tensor or PIL
        image. A client's dictionary of datasets (a DatasetDict) has splits train, validation and test. Sequences of
        whole numbers (tokens) of different lengths are filled up with the number `padding`; such inputs are not
        standardised, and a model whose forward takes `attention_mask` gets 1 for tokens and 0 for padding. Labels of
        steps are filled up with -1. Names of classes (a ClassLabel, or the attribute `classes`) are kept, and must be
        the same in all datasets. The other arguments are those of `from_arrays`.
        """
        padding = None if padding is None else checked_integer(padding, "padding", 0)
        names, parts, named = read_datasets(train, test, val, x, y, padding, task)
        named = () if task == "multilabel" else named  # they name labels, each of which is 0 or 1
        if named and classes is not None and classes != len(named):
            raise InputError(
                f"The datasets name {len(named)} classes, {quoted(list(named))}, but classes is {quoted(classes)}. "
                "Leave classes out."
            )
        normalize = "targets" if padding is not None and normalize == "auto" else normalize
        fed = cls.from_arrays(
            [pair or ([], []) for pair in parts["train"]], parts["test"], parts["val"], names=names, task=task,
            classes=len(named) or classes, normalize=normalize, dataset=dataset, drop_small=drop_small,
        )  # fmt: skip
        return replace(
            fed, padding=padding, named_classes=named if fed.task != "multilabel" and fed.classes == len(named) else ()
        )

    def __repr__(self) -> str:
        """Show sizes only: a federation's data must not end up in a notebook or a log."""
        sizes = " / ".join(f"{self.rows(s).counts.sum()} {s}" for s in SPLITS)
        shape = tuple(self.x.shape[1:])
        return shortened(f"Federation({self.dataset}: {self.clients} clients, {sizes}, shape {shape}, {self.outcomes})")

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes: those of the data or the dataset, or their numbers; empty for a regression."""
        recipe = self.recipe or self.images
        return class_names(recipe.class_names if recipe else self.named_classes, self.dataset, self.classes)

    @property
    def outcomes(self) -> str:
        """What is predicted, in words: 3 classes, 1 target, 5 labels, or 3 classes at each of 8 steps."""
        if self.task == "classification":
            return f"{self.classes} classes"
        count = self.y.shape[1]
        if self.task == "sequence":
            return f"{self.classes} classes at each of {count} steps"
        word = "label" if self.task == "multilabel" else "target"
        return f"{count} {word}{'s' * (count != 1)}"

    def _repr_html_(self) -> str:
        """Show a notebook the facts and the clients' sizes; no sample is shown."""
        description = self.describe()
        description["samples"] = ", ".join(f"{count} {split}" for split, count in description["samples"].items())
        return html_card("Federation", {k: v for k, v in description.items() if k in CARD}, self.records())

    def records(self) -> list[dict[str, Any]]:
        """Return a record per client: its number, name, sizes and, for classification, its number of classes."""
        sizes = {f"n_{split}": self.rows(split).counts.tolist() for split in SPLITS}
        if self.classes:
            sizes["classes"] = (self.label_counts() > 0).sum(1).tolist()
        columns = {"client": range(self.clients), "name": self.names, **sizes}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def frame(self) -> pd.DataFrame:
        """Return the records as a DataFrame, a row per client."""
        return frame(self.records())

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train)

    @checks_arguments
    def rows(self, split: str) -> Rows:
        """Return the rows of "train", "val" or "test"."""
        if split not in SPLITS:
            raise InputError(f"There is no split called '{split}'.{nearest(split, SPLITS)}")
        return getattr(self, split)

    @checks_arguments
    def label_counts(self, split: str = "train") -> np.ndarray:
        """Count each client's samples of each class, int64 [N, classes]; [N, 0] for other tasks."""
        rows = self.rows(split)
        if self.task != "classification":
            return np.zeros((self.clients, 0), np.int64)
        cells = rows.owner * self.classes + self.y[rows.index]
        return np.bincount(cells, minlength=self.clients * self.classes).reshape(self.clients, self.classes)

    def describe(self) -> dict[str, Any]:
        """Return the facts that a report begins with, ready for JSON."""
        sizes = self.train.counts + self.val.counts
        description: dict[str, Any] = {
            "dataset": self.dataset,
            "task": self.task,
            "clients": self.clients,
            "classes": self.classes,
            "sample_shape": list(self.x.shape[1:]),
            "dtype": str(self.x.dtype),
            "samples": {split: len(self.rows(split).index) for split in SPLITS},
            "training_samples_per_client": [int(sizes.min()), float(np.median(sizes)), int(sizes.max())],
        }
        if self.task == "classification":
            description["classes_per_client"] = float((self.label_counts() > 0).sum(1).mean())
        return description

    @checks_arguments
    def hold_out(self, share: float, seed: int = 0) -> Federation:
        """Move a share of each client's training rows into `val`, spread over its labels.

        At least one sample stays and, where there are two, at least one moves. The draw depends on the seed and the
        client's own samples, so `hold_out` and `select` give the same in either order. The statistics stay.
        """
        check_share(share, "validation")
        if share == 0:
            return self
        labels = self.y if self.task == "classification" else np.zeros(len(self.y), np.int64)
        train, moved = take_share(self.train, share, 1, labels, seed, HOLD_OUT)
        note = {"hold_out": {"share": share, "seed": int(seed)}}
        return self._with(note, train=train, val=self.val.merge(moved))

    @checks_arguments
    def with_positive_target(self, transform: str | None = None) -> Federation:
        """Declare that a regression's targets are never below 0, so that no interval is; perhaps transform them.

        `transform` is "log" or "boxcox", whose λ is learned from training rows (`fedabml.data.target_transform`). The
        model then learns the transformed target, standardised. `y`, predictions and scores keep the original unit.
        """
        if self.task != "regression":
            raise InputError("The targets are classes; a positive target and a transform are for a regression.")
        used, owner = (
            np.concatenate([getattr(self.rows(split), name) for split in SPLITS]) for name in ("index", "owner")
        )
        domain = TargetTransform((1.0,), (1.0,)) if transform else TargetTransform()
        domain.check(self.y[used], lambda row: f"A row of client '{self.names[owner[row]]}'")
        fit = np.concatenate([self.train.index, self.val.index])
        changed = replace(self, transform=TargetTransform.fit(self.y[fit], transform))
        if not transform:
            return changed
        y_shift, y_scale = moments(changed.model_targets(), fit)
        return replace(changed, y_shift=y_shift, y_scale=y_scale)

    def model_targets(self) -> np.ndarray:
        """Return the targets on the scale that a model learns, before they are standardised."""
        if self.transform is None or not self.transform.powers:
            return self.y
        return self.transform.forward(np.where(self.y > 0, self.y, 1))  # samples of no client may be anything

    @checks_arguments
    def select(self, clients: Sequence[int]) -> Federation:
        """Return the federation of these clients alone, in this order; it shares the arrays."""
        wrong = next((c for c in clients if not 0 <= c < self.clients), None)
        if wrong is not None or not len(clients):
            raise InputError(
                f"There is no client {wrong}: the federation has 0..{self.clients - 1}; choose at least one."
            )
        chosen = [int(c) for c in clients]
        rows = {split: self.rows(split).select(chosen) for split in SPLITS}
        return self._with({"selected": chosen}, **rows, names=tuple(self.names[c] for c in chosen))

    @cached_property
    def hash(self) -> str:
        """The sha256 over samples, targets, normalisation and rows: two federations with one hash are the same."""
        digest = hashlib.sha256(self.rows_hash.encode())
        for array in (self.x, self.y, self.shift, self.scale, self.y_shift, self.y_scale):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        digest.update(repr(self.transform).encode() if self.transform else b"")
        return digest.hexdigest()

    @cached_property
    def rows_hash(self) -> str:
        """The sha256 over the rows of all three splits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            rows = self.rows(split)
            digest.update(rows.offsets.astype("<i8").tobytes() + rows.index.astype("<i8").tobytes())
        return digest.hexdigest()

    def manifest_rows(self, rows: bool = True) -> dict[str, Any]:
        """Return the manifest with every client's name, label counts, sizes and sample numbers, by split.

        Without `rows`, and for very many samples, the sample numbers are left out, and the hash stands for them. Of
        very many clients only the first thousand are listed.
        """
        return listed_manifest(self, rows)

    def _with(self, note: dict[str, Any], **changes: Any) -> Federation:
        """Return a copy with changes, its manifest brought up to date."""
        changed = replace(self, **changes)
        manifest = {
            "version": 1,
            "dataset": self.dataset,
            **self.manifest,
            **note,
            "clients": changed.clients,
            "samples": {split: len(changed.rows(split).index) for split in SPLITS},
            "hash": changed.rows_hash,
        }
        if "counts" in manifest:
            manifest["counts"] = {split: changed.label_counts(split).tolist() for split in SPLITS}
        return replace(changed, manifest=manifest)


def _rows(owner: np.ndarray, split: np.ndarray, clients: int) -> list[Rows]:
    """Return the rows of each split from the client number and the split's number of every sample, [n] each."""
    samples = [np.flatnonzero(split == number) for number in range(len(SPLITS))]
    return [Rows.by_owner(owner[chosen], clients, chosen) for chosen in samples]
