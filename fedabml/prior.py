"""What a federation hands over: the prior, and a client's posterior made from it.

    prior = fedabml.load_prior("runs/demo/shared.safetensors")
    posterior = prior.personalize(x, y, epochs=5)
    p = posterior.predict(x_new)        # p.probs, p.entropy, p.mutual_information; regression: p.mean, p.std

A prior trained on a table reads tables: `prior.personalize(frame)` and `posterior.predict("new.csv").decode()`.

Both are one safetensors file: tensors, and a card of JSON facts that says how to use them (the network, the
normalisation of inputs, the table's recipe, the algorithm with its hyperparameters).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from . import algorithms, likelihoods, models, rng
from .algorithms.base import Algorithm, State
from .data import Federation, TableRecipe
from .data.arrays import as_features, as_numpy, as_targets, check_finite
from .data.rows import whole
from .data.table import as_frame, targets
from .engine.backend import device_of
from .engine.cohort import Cohort, draw, draws_of, output
from .errors import InputError
from .evaluate import Prediction, Regression
from .files import group, prefixed, read_tensors, write_tensors
from .gaussian import Distribution, Gaussian, Point, Samples
from .likelihoods import Categorical, Likelihood
from .vectors import Network

FORMAT = 1
_KINDS: dict[str, type[Any]] = {"Gaussian": Gaussian, "Point": Point, "Samples": Samples}
TABLE_WANTED = (
    "The prior was trained on a table and knows how to read one: hand over the table itself, a DataFrame or a .csv or "
    ".parquet file (in Python, features that recipe.apply has encoded already are taken with encoded=True)."
)


@dataclass(frozen=True)
class TablePrediction(Prediction):
    """A prediction for the rows of a table: its classes have names."""

    classes: tuple[str, ...] = ()

    def decode(self) -> list[str]:
        """The name of each row's most probable class."""
        return [self.classes[i] for i in self.label]


@dataclass(frozen=True)
class Card:
    """How raw data become a network's inputs, and its outputs become predictions."""

    network: Network
    likelihood: Likelihood
    model: dict[str, Any] | None  # how to build the network again; None: a module of the user's own
    shape: tuple[int, ...]  # of one input
    shift: np.ndarray
    scale: np.ndarray
    y_shift: np.ndarray
    y_scale: np.ndarray
    dtype: str = "float32"  # of the samples: uint8 or float32
    dataset: str = ""
    recipe: TableRecipe | None = None

    @classmethod
    def of(cls, fed: Federation, network: Network, likelihood: Likelihood, model: dict[str, Any] | None) -> Card:
        """The card of a federation and a network."""
        norm = (fed.shift, fed.scale, fed.y_shift, fed.y_scale)
        shape, dtype = tuple(fed.x.shape[1:]), str(fed.x.dtype)
        return cls(network.to("cpu", torch.float32), likelihood, model, shape, *norm, dtype, fed.dataset, fed.recipe)

    @property
    def task(self) -> str:
        return "classification" if isinstance(self.likelihood, Categorical) else "regression"

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the table calls the classes; nothing where there was none."""
        return self.recipe.class_names if self.recipe else ()

    def table(self, x: Any, encoded: bool) -> Any:
        """The frame of a table, where the prior reads one; None for arrays."""
        named = isinstance(x, str | os.PathLike)
        if self.recipe is None:
            if named:
                raise InputError(f"'{x}': the prior was not trained on a table. Give the inputs as an array.")
            return None
        if encoded:
            return None
        if not named and not (hasattr(x, "iloc") and hasattr(x, "columns")):
            raise InputError(TABLE_WANTED)
        return as_frame(x)

    def inputs(self, x: Any, what: str = "The array of inputs", encoded: bool = False) -> np.ndarray:
        """Checked inputs from an array or, where the prior reads one, a table."""
        frame = self.table(x, encoded)
        raw = as_features(x, what) if frame is None or self.recipe is None else self.recipe.apply(frame)
        if not len(raw):
            raise InputError(f"{what} is empty: it has no rows.")
        if tuple(raw.shape[1:]) != self.shape or (raw.dtype == np.uint8) != (self.dtype == "uint8"):
            raise InputError(
                f"{what}: its rows are {raw.dtype} of shape {tuple(raw.shape[1:])}; the prior was trained on "
                f"{self.dtype} of shape {self.shape}."
            )
        check_finite(raw, lambda row: f"{what}: row {row}")
        return raw

    def targets(self, y: Any, what: str = "y") -> np.ndarray:
        """Checked targets from an array: int64 [n], or float32 [n, targets]."""
        raw = as_numpy(y, what)
        if raw.ndim == 0:
            raise InputError(f"{what} is a single number; one value for each row of the inputs is needed.")
        if isinstance(self.likelihood, Categorical):
            raw, last = raw[:, 0] if raw.ndim == 2 and raw.shape[1] == 1 else raw, self.likelihood.classes - 1
            if raw.ndim != 1:
                raise InputError(f"{what} has the shape {list(raw.shape)}; one class number for each row is needed.")
            known = (raw >= 0) & (raw <= last) & (np.floor(raw) == raw)
            if not known.all():
                row = int(np.argmin(known))
                raise InputError(f"{what} has the label {raw[row]} in row {row}; the prior's classes are 0 to {last}.")
            return raw.astype(np.int64)
        raw = as_targets(raw, "regression", what)
        if raw.shape[1] != self.likelihood.targets:
            raise InputError(f"{what} has {raw.shape[1]} columns; the prior has {self.likelihood.targets} target(s).")
        check_finite(raw, lambda row: f"{what}: row {row}")
        return raw

    def samples(self, x: Any, y: Any, encoded: bool = False, end: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Checked inputs and targets; of a table, `y` may be in it. `end` completes the names x and y in errors."""
        frame = self.table(x, encoded)
        if frame is not None and self.recipe is not None:
            return self.inputs(frame), targets(frame, self.recipe, y)
        if y is None:
            raise InputError("There is no y: give the targets of the inputs.")
        inputs, found = self.inputs(x, f"x{end}", encoded=True), self.targets(y, f"y{end}")
        if len(inputs) != len(found):
            raise InputError(f"x{end} has {len(inputs)} rows, y{end} has {len(found)}; each row needs its own y.")
        return inputs, found

    def federation(self, x: Any, y: Any = None, encoded: bool = False) -> Federation:
        """One client's data as a federation of its own, normalised as the prior's was."""
        x, y = self.samples(x, y, encoded)
        if len(x) < 2:
            raise InputError("There is a single sample; two are the least to personalise on.")
        classes = self.likelihood.classes if isinstance(self.likelihood, Categorical) else None
        fed = Federation.from_arrays([(x, y)], task=self.task, classes=classes, normalize="none", names=["client"])
        return dataclasses.replace(fed, **{name: getattr(self, name) for name in _NORM}, recipe=self.recipe)

    def normalised(self, raw: np.ndarray, device: torch.device) -> Tensor:
        """Checked inputs as the network takes them."""
        x32, shift, scale = (torch.as_tensor(np.asarray(a, np.float32)) for a in (raw, self.shift, self.scale))
        return ((x32 - shift) * (1 / scale)).to(device)

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON facts for a file."""
        norm = {n: torch.as_tensor(np.asarray(getattr(self, n), np.float32)) for n in _NORM}
        facts = {
            "format": FORMAT,
            "model": self.model,
            "layout": [
                [n, list(s)] for n, s in zip(self.network.layout.names, self.network.layout.shapes, strict=True)
            ],
            "likelihood": likelihoods.to_json(self.likelihood),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "dataset": self.dataset,
            "recipe": self.recipe.to_json() if self.recipe else None,
        }
        return prefixed("norm", norm) | prefixed("constant", self.network.constants), facts

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], facts: dict[str, Any], module: nn.Module | None, path: str) -> Card:
        """The inverse of `pack`; everything read is checked before it is used."""
        if facts.get("format") != FORMAT:
            raise InputError(f"'{path}' has format {facts.get('format')!r}; this version of fedabml reads {FORMAT}.")
        likelihood = likelihoods.from_json(facts["likelihood"])
        if module is None:
            if facts["model"] is None:
                raise InputError(
                    f"'{path}' was trained with a module of your own, which a file cannot hold: give the same module "
                    "as load_prior(path, model=module)."
                )
            spec = facts["model"]
            module = models.build(spec["name"], spec["shape"], spec["outputs"], **spec["options"])
        network = Network(module, likelihood.own)
        layout = [[n, list(s)] for n, s in zip(network.layout.names, network.layout.shapes, strict=True)]
        if layout != facts["layout"]:
            raise InputError(f"The model does not fit '{path}': its parameters have other names or shapes.")
        constants, norm = group(tensors, "constant"), group(tensors, "norm")
        _fit(path, "constants", constants, {n: tuple(t.shape) for n, t in network.constants.items()})
        network.module.load_state_dict({**network.module.state_dict(), **constants})
        if "initial" in tensors:
            _fit(path, "initial weights", {"initial": tensors["initial"]}, {"initial": (network.layout.size,)})
            network.initial = tensors["initial"]
        recipe = TableRecipe.from_json(facts["recipe"]) if facts["recipe"] else None
        card = cls(
            network,
            likelihood,
            facts["model"],
            tuple(int(v) for v in facts["shape"]),
            **{n: norm[n].numpy() for n in _NORM},
            dtype=str(facts["dtype"]),
            dataset=str(facts["dataset"]),
            recipe=recipe,
        )
        card._check(path)
        return card

    def _check(self, path: str) -> None:
        """Refuses a normalisation or a recipe that does not fit the inputs and outputs."""
        classes = self.likelihood.classes if isinstance(self.likelihood, Categorical) else 0
        targets = () if isinstance(self.likelihood, Categorical) else (self.likelihood.targets,)
        for name, full in zip(_NORM, (self.shape, self.shape, targets, targets), strict=True):
            shape = getattr(self, name).shape
            if len(shape) > len(full) or any(a not in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
                raise InputError(f"'{path}': its {name} has the shape {shape}, the data have {full}; it is damaged.")
        if (self.scale <= 0).any() or (self.y_scale <= 0).any():
            raise InputError(f"'{path}': its normalisation has a scale that is not positive; it is damaged.")
        if self.recipe and (
            self.shape != (len(self.recipe.feature_names),)
            or self.task != self.recipe.task
            or len(self.recipe.class_names) != classes
        ):
            raise InputError(f"'{path}': its recipe for tables is not that of its network; it is damaged.")


_NORM = ("shift", "scale", "y_shift", "y_scale")


@dataclass(frozen=True)
class Prior:
    """What the server owns after training, ready to become any client's posterior."""

    algorithm: Algorithm
    shared: State
    card: Card
    batch_size: int = 50

    def personalize(
        self,
        x: Any,
        y: Any = None,
        epochs: int | None = None,
        seed: int = 0,
        lr: float | None = None,
        batch_size: int | None = None,
        device: str = "auto",
        *,
        encoded: bool = False,
    ) -> Posterior:
        """A client's posterior from its training data: φ = θ, then a few epochs of steps (the algorithm's default).

        `x` and `y` are arrays. Where the prior was trained on a table, `x` is a table, too: a DataFrame or a path to
        a .csv or .parquet file; `y` are raw values of the target, or None where the table has its column. `encoded`
        says that `x` and `y` are arrays that the prior's recipe has encoded already.
        """
        changes: dict[str, Any] = {"personal_epochs": epochs, "personal_lr": lr}
        algorithm = dataclasses.replace(self.algorithm, **{k: v for k, v in changes.items() if v is not None})
        batch_size = self.batch_size if batch_size is None else whole(batch_size, "batch_size")
        seed = whole(seed, "seed", 0)
        place = device_of(device)
        cohort = Cohort(
            algorithm, self.card.network, self.card.likelihood, self.card.federation(x, y, encoded), seed=seed,
            chunk=1, batch_size=batch_size, device=place, dtype=torch.float32, backend="loop",
        )  # fmt: skip
        shared = {k: v.to(place, torch.float32) for k, v in self.shared.items()}
        with torch.no_grad():
            lane = cohort.personalise(shared, cohort.keep(shared, [0]), [0])
            offsets = cohort.offsets([0])
        q = type(lane)(*(leaf[0].cpu() for leaf in lane))
        if not all(torch.isfinite(leaf).all() for leaf in q):
            raise InputError("Personalising diverged: the posterior is not finite. Give a smaller lr or fewer epochs.")
        return Posterior(q, self.card, None if offsets is None else offsets[0].cpu(), algorithm.predict_samples)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the prior to one safetensors file."""
        tensors, facts = self.card.pack()
        algorithm = {"name": algorithms.name_of(self.algorithm), "hyper": self.algorithm.values()}
        facts |= {"kind": "prior", "algorithm": algorithm, "batch_size": self.batch_size}
        if type(self.algorithm).keep is not Algorithm.keep:  # a new client's own state begins at the initial weights
            tensors["initial"] = self.card.network.initial
        return write_tensors(path, tensors | prefixed("shared", self.shared), facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Self:
        """Reads what `save` wrote; `model` is the module, where it was the user's own."""
        tensors, facts = _read(path, "prior")
        with _sound(path):
            spec = facts["algorithm"]
            algorithm = algorithms.make(spec["name"], **spec["hyper"])
            card = Card.unpack(tensors, facts, model, str(path))
            if type(algorithm).keep is not Algorithm.keep and "initial" not in tensors:
                raise KeyError("initial")
            shared = group(tensors, "shared")
            expected = algorithm.init(card.network.initial, card.network.layout)
            _fit(str(path), "shared state", shared, {n: tuple(t.shape) for n, t in expected.items()})
            return cls(algorithm, shared, card, whole(facts["batch_size"], "batch_size"))


@dataclass(frozen=True)
class Posterior:
    """A client's own model: a distribution over weights, and how to predict with it."""

    q: Distribution
    card: Card
    offset: Tensor | None  # log π_i, the client's label level; it never leaves the client
    samples: int = 10

    @torch.no_grad()
    def predict(
        self, x: Any, samples: int | None = None, seed: int = 0, device: str = "auto", *, encoded: bool = False
    ) -> Prediction | Regression:
        """Predictions averaged over weight samples (0: the posterior mean, one pass), with their uncertainty.

        Where the prior was trained on a table, `x` is one, as for `personalize`, and `decode()` names the classes.
        """
        place, samples = device_of(device), self.samples if samples is None else whole(samples, "samples", 0)
        network = self.card.network.to(place, torch.float32)
        inputs = self.card.normalised(self.card.inputs(x, encoded=encoded), place)
        key = rng.key(whole(seed, "seed", 0), rng.PREDICT, device=place)
        q = type(self.q)(*(leaf.to(place) for leaf in self.q))
        offset = None if self.offset is None else self.offset.to(place)
        parts = []
        for j in range(draws_of(q, samples)):
            weights = draw(q, key, j, samples)
            pieces = [output(network, self.card.likelihood, weights, part, offset) for part in inputs.split(1024)]
            parts.append(torch.cat(pieces))
        if self.card.task == "classification":
            p = Prediction.of(torch.stack(parts))
            names = self.card.class_names
            return TablePrediction(p.probs, p.mutual_information, names) if names else p
        return Regression.of(torch.stack(parts), self.card.y_shift, self.card.y_scale)

    def to_module(self) -> nn.Module:
        """A plain module with the mean weights, for use outside of fedabml.

        It knows neither the normalisation nor the client's label level: it expects inputs that are normalised already,
        (x − card.shift) / card.scale (of a table, what `card.recipe.apply` gives), and returns the network's bare
        outputs, without log π of the label level and, for regression, in units of the standardised target.
        """
        return self.card.network.to_module(self.q.mean)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the posterior to one safetensors file. It tells of the client's data: keep it at the client."""
        tensors, facts = self.card.pack()
        facts |= {"kind": "posterior", "distribution": type(self.q).__name__, "samples": self.samples}
        own = prefixed("q", self.q._asdict()) | ({} if self.offset is None else {"offset": self.offset})
        return write_tensors(path, tensors | own, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Self:
        """Reads what `save` wrote."""
        tensors, facts = _read(path, "posterior")
        with _sound(path):
            card = Card.unpack(tensors, facts, model, str(path))
            kind, leaves, size = _KINDS[facts["distribution"]], group(tensors, "q"), card.network.layout.size
            chain = len(leaves["weights"]) if kind is Samples else 0
            expected = {n: (max(1, chain), size) if kind is Samples else (size,) for n in kind._fields}
            _fit(str(path), "distribution", leaves, expected)
            level = {"offset": tensors["offset"]} if "offset" in tensors else {}
            if level:
                classes = card.likelihood.classes if isinstance(card.likelihood, Categorical) else 0
                _fit(str(path), "label level", level, {"offset": (classes,)})
            return cls(kind(**leaves), card, level.get("offset"), whole(facts["samples"], "samples", 0))


def _read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, facts = read_tensors(path)
    if facts.get("kind") != kind:
        raise InputError(f"'{path}' holds a {facts.get('kind', 'checkpoint')}, not a {kind}.")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"'{path}' holds values that are not finite, in '{name}'; it is damaged.")
    return tensors, facts


@contextmanager
def _sound(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever is missing or strange in a file's facts becomes an InputError."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"'{path}': {error}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"'{path}' lacks something a fedabml file has ({reason}); it is damaged or of another version."
        ) from error


def _fit(path: str, what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses tensors of other names or shapes than the network needs."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise InputError(f"'{path}': its {what} lacks '{name}'; the file is damaged.")
        if name not in expected:
            raise InputError(f"'{path}': its {what} has '{name}', which does not belong there; the file is damaged.")
        if found[name] != expected[name]:
            raise InputError(
                f"'{path}': '{name}' of its {what} has the shape {found[name]}, but the network needs "
                f"{expected[name]}; the file is damaged, or of another network."
            )


def load_prior(path: str | os.PathLike[str], model: nn.Module | None = None) -> Prior:
    """Reads a prior; `model` is the module where it was the user's own."""
    return Prior.load(path, model)


def load_posterior(path: str | os.PathLike[str], model: nn.Module | None = None) -> Posterior:
    """Reads a posterior; `model` is the module where it was the user's own."""
    return Posterior.load(path, model)
