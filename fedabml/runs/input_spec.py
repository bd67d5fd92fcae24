"""The input specification of a prior or a posterior: how raw data become a network's inputs, and outputs predictions.

`InputSpec` travels in the file beside the tensors, so that whoever has the file can use it on raw data.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import likelihoods
from ..data import Federation, TableRecipe
from ..data.arrays import as_features, as_numpy, as_targets, check_finite
from ..data.client_datasets import check_steps, pad_labels, pad_tokens
from ..data.encode import clients_of, targets
from ..data.frames import as_frame
from ..data.images import ImageRecipe
from ..data.recipe import as_text
from ..data.target_transform import TargetTransform
from ..errors import InputError, nearest, shortened
from ..files.sealed import group, prefixed
from ..likelihoods import Bernoulli, Categorical, GaussianNoise, Likelihood, StepCategorical
from ..vectors import Network
from .modules import Model, Origin, layout_of, pack_network, unpack_network
from .tokens import check_tokens, padding_of

# 2: with what earlier versions would leave out: a target's transform, noise by input, an adapter, class weights
# 3: a posterior with costs of decisions, which earlier versions would ignore
FORMATS = (1, 2, 3)
MOST_NUMBERS = 64  # of an input that is checked number by number, as a table is column by column
_OUTPUTS = {"regression": "target(s)", "multilabel": "labels", "sequence": "outputs of steps"}
_NORM = ("shift", "scale", "y_shift", "y_scale")
TABLE_WANTED = (
    "The prior was trained on a table. Give the table itself: a DataFrame, or a .csv, .parquet or .xlsx file. In "
    "Python, give features that recipe.apply has encoded with encoded=True."
)


class Inputs(NamedTuple):
    """Checked inputs: what the network reads, before normalisation, and a table's own values, which are checked."""

    x: np.ndarray  # [n, *shape]
    columns: dict[str, np.ndarray] | None = None  # {name: [n]}, see `InputSpec.columns`


@dataclass(frozen=True)
class InputSpec:
    """How raw data become a network's inputs, and its outputs become predictions."""

    network: Network
    likelihood: Likelihood
    model: dict[str, Any] | None  # how to build the network again; None for the user's own module
    shape: tuple[int, ...]  # shape of one input
    shift: np.ndarray
    scale: np.ndarray
    y_shift: np.ndarray
    y_scale: np.ndarray
    dtype: str = "float32"  # type of the samples: uint8 or float32
    dataset: str = ""
    recipe: TableRecipe | None = None
    images: ImageRecipe | None = None
    transform: TargetTransform | None = None  # of a target that is never below 0
    origin: Origin = dataclasses.field(default_factory=Origin)
    named_classes: tuple[str, ...] = ()  # as the datasets of a federation called them

    @classmethod
    def of(
        cls,
        fed: Federation,
        network: Network,
        likelihood: Likelihood,
        model: dict[str, Any] | None,
        origin: Origin | None = None,
    ) -> InputSpec:
        """Return the specification of a federation and a network."""
        shape, dtype = tuple(fed.x.shape[1:]), str(fed.x.dtype)
        network, made = network.to("cpu", torch.float32), origin or Origin()
        norm = (fed.shift, fed.scale, fed.y_shift, fed.y_scale, dtype, fed.dataset)
        return cls(
            network, likelihood, model, shape, *norm, fed.recipe, fed.images, fed.transform, made, fed.named_classes
        )

    @property
    def description(self) -> str:
        """Data, network, inputs and outputs in one line."""
        name = self.model["name"] if self.model else type(self.network.module).__name__
        outputs = f"{self.classes} classes" if self.classes else f"{self.outputs} {_OUTPUTS[self.task]}"
        outputs += f" ({self.transform.description})" if self.transform else ""
        return f"{self.dataset}: {name} with {self.network.layout.size:,} weights, inputs {self.shape}, {outputs}"

    @property
    def properties(self) -> dict[str, Any]:
        """Data, network, inputs and outputs, by name."""
        model = self.model["name"] if self.model else type(self.network.module).__name__
        sizes = {"weights": self.network.layout.size, "inputs": list(self.shape)}
        return {"dataset": self.dataset, "model": model, **sizes, "task": self.task, "outputs": self.outputs}

    def __repr__(self) -> str:
        return shortened(f"InputSpec({self.description})")

    @property
    def classes(self) -> int | None:
        """The number of classes; None for other tasks than classification."""
        return self.likelihood.classes if isinstance(self.likelihood, Categorical) else None

    @property
    def outputs(self) -> int:
        """The number of classes, targets, labels, or steps times classes."""
        return self.likelihood.targets if isinstance(self.likelihood, GaussianNoise) else self.likelihood.outputs

    @property
    def task(self) -> str:
        """The task that the likelihood belongs to."""
        return self.likelihood.task

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the table or datasets, or of the folders of images; empty if there was none."""
        recipe = self.recipe or self.images
        return recipe.class_names if recipe else self.named_classes

    def with_id(self, name: str | None) -> InputSpec:
        """Return the specification with another column of identifiers; None changes nothing."""
        if name is None:
            return self
        if self.recipe is None:
            raise InputError(f"The ID column '{name}' belongs to a table, but the prior was not trained on one.")
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, id=name))

    def ids(self, frame: Any, needed: bool = False) -> list[str] | None:
        """Return the identifiers of a table's rows; None if there are none, which is an error if they are `needed`."""
        name = self.recipe.id if self.recipe else None
        if frame is None or name not in frame.columns:
            if needed:
                hint = nearest(str(name), map(str, frame.columns)) if frame is not None else " Give the table itself."
                raise InputError(f"The table has no column '{name}'.{hint}")
            return None
        return as_text(frame[name])

    def table(self, x: Any, encoded: bool) -> Any:
        """Return the DataFrame of a table, if the prior reads one; None for arrays and folders of images."""
        named = isinstance(x, str | os.PathLike)
        if self.recipe is None and named and self.images is None:
            raise InputError(
                f"'{x}': the prior was not trained on a table or a folder of images. Give the inputs as an array."
            )
        if self.recipe is None or encoded:
            return None
        if not named and not (hasattr(x, "iloc") and hasattr(x, "columns")):
            raise InputError(TABLE_WANTED)
        return as_frame(x, self.recipe.text_columns)

    def inputs(self, x: Any, subject: str = "The array of inputs", encoded: bool = False) -> np.ndarray:
        """Return checked inputs [n, *shape] from an array or, if the prior reads one, a table or a folder of images."""
        frame = self.table(x, encoded)
        if self.images and isinstance(x, str | os.PathLike):
            x = self.images.inputs(x)[0]
        x = self._padded(x, subject) if frame is None else x
        raw = as_features(x, subject) if frame is None or self.recipe is None else self.recipe.apply(frame)
        if not len(raw):
            raise InputError(f"{subject} is empty: it has no rows.")
        if tuple(raw.shape[1:]) != self.shape or (raw.dtype == np.uint8) != (self.dtype == "uint8"):
            raise InputError(
                f"{subject}: its rows are {raw.dtype} of shape {tuple(raw.shape[1:])}; the prior was trained on "
                f"{self.dtype} of shape {self.shape}."
            )
        check_finite(raw, lambda row: f"{subject}: row {row}")
        if self.network.tokens:
            check_tokens(self.network, raw, subject)
        return raw

    def read(self, x: Any, encoded: bool = False) -> Inputs:
        """Return checked inputs, and the values of a table's columns."""
        frame = self.table(x, encoded)
        inputs = self.inputs(x if frame is None else frame, encoded=encoded)
        return Inputs(inputs, self.columns(frame, inputs))

    def columns(self, frame: Any, x: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return the values that ranges are about, by name: a table's raw columns, or the numbers x0, x1, … of vectors.

        None for encoded rows of a table, images, tokens, and vectors of more than `MOST_NUMBERS` numbers.
        """
        if self.recipe is not None:
            return None if frame is None else self.recipe.raw_columns(frame)
        if len(self.shape) != 1 or self.shape[0] > MOST_NUMBERS or self.network.tokens:
            return None
        return {f"x{number}": values.astype(np.float64) for number, values in enumerate(x.T)}

    def _padded(self, x: Any, subject: str) -> Any:
        """Return sequences of tokens of any length as one array, where the network knows a token of padding."""
        width = np.shape(x)[1:] if isinstance(x, np.ndarray) else None
        if padding_of(self.network) is None or width == self.shape or not isinstance(x, np.ndarray | list | tuple):
            return x
        return pad_tokens(x, padding_of(self.network), self.shape[0], subject)

    def targets(self, y: Any, subject: str = "y") -> np.ndarray:
        """Return checked targets from an array: int64 [n], or float32 [n, targets]."""
        if isinstance(self.likelihood, StepCategorical) and isinstance(y, list | tuple):
            y = pad_labels([as_numpy(labels, subject) for labels in y], self.likelihood.steps, subject)
        raw = as_numpy(y, subject)
        if raw.ndim == 0:
            raise InputError(f"{subject} is a single number. Give one value for each row of the inputs.")
        if isinstance(self.likelihood, Bernoulli | StepCategorical):
            raw = as_targets(raw, self.task, subject)
            steps = self.likelihood.labels if isinstance(self.likelihood, Bernoulli) else self.likelihood.steps
            if raw.shape[1] != steps:
                raise InputError(f"{subject} has {raw.shape[1]} columns; the prior has {steps} {_OUTPUTS[self.task]}.")
            return raw
        if self.classes is None:
            raw = as_targets(raw, "regression", subject)
            if raw.shape[1] != self.outputs:
                raise InputError(f"{subject} has {raw.shape[1]} columns; the prior has {self.outputs} target(s).")
            check_finite(raw, lambda row: f"{subject}: row {row}")
            return raw
        raw = raw[:, 0] if raw.ndim == 2 and raw.shape[1] == 1 else raw
        if raw.ndim != 1:
            raise InputError(f"{subject} has the shape {list(raw.shape)}. Give one class number for each row.")
        is_class = (raw >= 0) & (raw < self.classes) & (np.floor(raw) == raw)
        if not is_class.all():
            row, last = int(np.argmin(is_class)), self.classes - 1
            raise InputError(f"{subject} has the label {raw[row]} in row {row}; the prior's classes are 0 to {last}.")
        return raw.astype(np.int64)

    def samples(self, x: Any, y: Any, encoded: bool = False, end: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return checked inputs and targets; a table may contain `y`, and has rows of one client.

        `end` is added to the names x and y in errors.
        """
        frame = self.table(x, encoded)
        if frame is not None and self.recipe is not None:
            self._refuse_several_clients(frame)
            outputs = targets(frame, self.recipe, y)
            return self.inputs(frame), self._in_domain(outputs, f"The column '{self.recipe.target}'")
        if self.images and isinstance(x, str | os.PathLike):
            if y is not None:
                raise InputError(f"'{x}' names the class of each image by its folder, so leave y out.")
            x, y = self.images.site(x)["train"]
        if y is None:
            raise InputError("There is no y. Give the targets of the inputs.")
        lists = isinstance(x, list | tuple) and isinstance(y, list | tuple)
        if lists and self.task == "sequence" and padding_of(self.network) is not None:
            check_steps(x, y, f"x{end}")
        inputs, outputs = self.inputs(x, f"x{end}", encoded=True), self.targets(y, f"y{end}")
        if len(inputs) != len(outputs):
            raise InputError(f"x{end} has {len(inputs)} rows, y{end} has {len(outputs)}. Give one y for each row of x.")
        return inputs, self._in_domain(outputs, f"y{end}")

    def clients(self, frame: Any) -> tuple[str, int]:
        """Return the name of the column of clients, and how many a table has there; 1 if it has no such column."""
        name = self.recipe.client if self.recipe else ""
        return name, len(clients_of(frame[name].dropna())[0]) if frame is not None and name in frame else 1

    def _refuse_several_clients(self, frame: Any) -> None:
        """Refuse a table with rows of more than one client, which would be pooled in one posterior."""
        name, clients = self.clients(frame)
        if clients > 1:
            raise InputError(
                f"The table has rows of {clients} clients in its column '{name}', but a posterior belongs to one "
                f"client. Give each client its own table: in Python frame[frame['{name}'] == NAME]. For a client of "
                f"the run, use fedabml personalize RUN --client NAME. If all rows are of one site, leave '{name}' out."
            )

    def _in_domain(self, y: np.ndarray, subject: str) -> np.ndarray:
        """Return targets; refuse those that the prior's transform cannot have."""
        if self.transform is not None:
            self.transform.check(y, lambda row: f"{subject}: row {row}")
        return y

    def federation(self, x: Any, y: Any = None, encoded: bool = False) -> Federation:
        """Return one client's data as a federation with the prior's normalisation."""
        x, y = self.samples(x, y, encoded)
        if len(x) < 2:
            raise InputError("There is a single sample. Personalisation needs two or more.")
        classes = getattr(self.likelihood, "classes", None)
        fed = Federation.from_arrays([(x, y)], task=self.task, classes=classes, normalize="none", names=["client"])
        return dataclasses.replace(fed, **{name: getattr(self, name) for name in (*_NORM, "recipe", "transform")})

    def normalized(self, raw: np.ndarray, device: torch.device) -> Tensor:
        """Return checked inputs as float32, normalised for the network."""
        shift, scale = (torch.as_tensor(np.asarray(a, np.float32)) for a in (self.shift, self.scale))
        normalised = torch.empty(raw.shape, dtype=torch.float32, device=device)
        for first in range(0, len(raw), 1024):  # images have a quarter of the bytes: few of them are floats twice
            rows = slice(first, first + 1024)
            normalised[rows] = (torch.as_tensor(np.asarray(raw[rows], np.float32)) - shift) * (1 / scale)
        return normalised

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and JSON metadata for a file."""
        norm = {n: torch.as_tensor(np.asarray(getattr(self, n), np.float32)) for n in _NORM}
        noise_by_input = isinstance(self.likelihood, GaussianNoise) and self.likelihood.by_input
        weights = isinstance(self.likelihood, Categorical) and self.likelihood.weights
        constants, made = pack_network(self.network, self.origin)
        metadata = {
            "format": FORMATS[bool(self.transform or noise_by_input or weights or made.keys() - {"tokens"})],
            "model": self.model,
            "layout": layout_of(self.network),
            "likelihood": likelihoods.to_json(self.likelihood),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "dataset": self.dataset,
            "recipe": self.recipe.to_json() if self.recipe else None,
            **({"images": self.images.to_json()} if self.images else {}),
            **({"transform": self.transform.to_json()} if self.transform else {}),
            **({"class_names": list(self.named_classes)} if self.named_classes else {}),
        }
        return prefixed("norm", norm) | constants, metadata | made

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], metadata: dict[str, Any], module: Model | None) -> InputSpec:
        """Rebuild the specification from what `pack` returned; everything is checked before it is used.

        The caller adds the file's name to errors.
        """
        if metadata.get("format") not in FORMATS:
            raise InputError(
                f"The file has format {metadata.get('format')!r}; this version of fedabml reads formats "
                f"{FORMATS[0]} to {FORMATS[-1]}. Update fedabml."
            )
        likelihood, norm = likelihoods.from_json(metadata["likelihood"]), group(tensors, "norm")
        network, origin = unpack_network(tensors, metadata, module, likelihood)
        input_spec = cls(
            network, likelihood, metadata["model"],
            tuple(int(v) for v in metadata["shape"]), **{n: norm[n].numpy() for n in _NORM},
            dtype=str(metadata["dtype"]), dataset=str(metadata["dataset"]),
            recipe=TableRecipe.from_json(metadata["recipe"]) if metadata["recipe"] else None,
            images=ImageRecipe.from_json(metadata["images"]) if metadata.get("images") else None,
            transform=TargetTransform.from_json(metadata["transform"]) if "transform" in metadata else None,
            origin=origin, named_classes=tuple(map(str, metadata.get("class_names", ()))),
        )  # fmt: skip
        input_spec._check()
        return input_spec

    def _check(self) -> None:
        """Refuse a normalisation or a recipe that does not fit the inputs and outputs."""
        targets = (self.outputs,) if self.task == "regression" else ()
        for name, full in zip(_NORM, (self.shape, self.shape, targets, targets), strict=True):
            shape = getattr(self, name).shape
            if len(shape) > len(full) or any(a not in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
                raise InputError(f"Its {name} has the shape {shape}, the data have {full}; it is damaged.")
        if (self.scale <= 0).any() or (self.y_scale <= 0).any():
            raise InputError("Its normalisation has a scale that is not positive; it is damaged.")
        if self.transform and (self.task != "regression" or len(self.transform.powers) not in (0, self.outputs)):
            raise InputError("Its target transform does not fit its targets; it is damaged.")
        if self.recipe:
            expected = (len(self.recipe.feature_names),), self.recipe.task, len(self.recipe.class_names)
            if (self.shape, self.task, self.classes or 0) != expected:
                raise InputError("Its recipe for tables is not that of its network; it is damaged.")
        if self.named_classes and len(self.named_classes) != getattr(self.likelihood, "classes", None):
            raise InputError("Its names of classes are not as many as its classes; it is damaged.")
        images = self.images
        if images and (images.shape, len(images.class_names), "uint8") != (self.shape, self.classes, self.dtype):
            raise InputError("Its recipe for images is not that of its network; it is damaged.")
