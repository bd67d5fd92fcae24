"""The results of a federation: the prior, and a client's posterior made from it.

    prior = fedabml.load_prior("runs/demo/shared.safetensors")
    posterior = prior.personalize(x, y, epochs=5)
    p = posterior.predict(x_new)        # p.probs, p.entropy, p.mutual_information; regression: p.mean, p.std

A prior trained on a table reads tables: `prior.personalize(frame)` and `posterior.predict("new.csv").decode()`.

Both are one safetensors file: tensors, and an `InputSpec` of JSON facts that says how to use them (the network, the
normalisation of inputs, the table's recipe, the algorithm with its hyperparameters).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import algorithms, rng
from ..accel.process import borrowed
from ..algorithms.base import Algorithm, State
from ..arguments import check_fields, checks_arguments, whole
from ..engine.autotune import device_of
from ..engine.client import Lanes, initial_kept, personalise
from ..engine.loss import draw, draws_of, output
from ..engine.setting import Cohort, Place, Setting
from ..errors import InputError, short
from ..evaluation.predictions import Prediction, Regression
from ..files.limits import host_memory
from ..files.sealed import group, packed_tensors, prefixed, read_tensors, tensors_digest, write_tensors
from ..gaussian import Distribution, Gaussian, Point, Samples
from ..likelihoods import Categorical
from .input_spec import InputSpec, check_fit

FLOATS = (torch.float32, torch.float64)  # types of weights in a file
MOST_SAMPLES = 100_000  # largest number of weight samples of a prediction
_KINDS: dict[str, type[Any]] = {"Gaussian": Gaussian, "Point": Point, "Samples": Samples}


@dataclass(frozen=True, repr=False)
class TablePrediction(Prediction):
    """A prediction for the rows of a table, whose classes have names."""

    classes: tuple[str, ...] = ()

    def decode(self) -> list[str]:
        """Return the name of each row's most probable class."""
        return [self.classes[i] for i in self.label]


@dataclass(frozen=True)
class Prior:
    """The server's result of training, from which any client's posterior is made.

    Sites whose priors have the same `digest` have the same prior.
    """

    algorithm: Algorithm
    shared: State
    input_spec: InputSpec
    batch_size: int = 50

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return short(f"Prior({algorithms.name_of(self.algorithm)}; {self.input_spec.words}; digest {self.digest[:16]})")

    @checks_arguments
    @borrowed()
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
        """Make a client's posterior from its training data: φ = θ, then a few epochs of steps.

        `epochs`, `lr` and `batch_size` default to those of the algorithm. `x` and `y` are arrays of n rows. If the
        prior was trained on a table, `x` is a DataFrame or a path to a .csv or .parquet file, and `y` are raw values of
        the target, or None if the table has its column. With `encoded`, `x` and `y` are arrays that the prior's recipe
        has encoded.
        """
        changes: dict[str, Any] = {"personal_epochs": epochs, "personal_lr": lr}
        algorithm = dataclasses.replace(self.algorithm, **{k: v for k, v in changes.items() if v is not None})
        batch_size = self.batch_size if batch_size is None else whole(batch_size, "batch_size")
        seed = whole(seed, "seed", 0)
        place = device_of(device)
        spec = self.input_spec
        federation = spec.federation(x, y, encoded)
        cohort = Cohort(
            Setting(algorithm, spec.network, spec.likelihood, federation, batch_size, seed),
            Place(place, torch.float32, backend="loop"),
        )
        shared = {k: v.to(place, torch.float32) for k, v in self.shared.items()}
        with torch.no_grad():
            lanes = Lanes.of(cohort, shared, [0])
            lane, offsets = personalise(lanes, initial_kept(lanes)), lanes.offset
        q = type(lane)(*(leaf[0].cpu() for leaf in lane))
        if not all(torch.isfinite(leaf).all() for leaf in q):
            raise InputError(
                "The posterior is not finite, because personalisation diverged. Give a smaller lr or fewer epochs."
            )
        level = None if offsets is None else offsets[0].cpu()
        return Posterior(q, self.input_spec, level, algorithm.predict_samples, self.digest)

    @checks_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the prior to one safetensors file, and replace a file of that name."""
        return write_tensors(path, *self._packed())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 digest of the prior's file: 64 hexadecimal digits."""
        return packed_tensors(*self._packed())[1]

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and facts of the prior's file."""
        tensors, facts = self.input_spec.pack()
        algorithm = {"name": algorithms.name_of(self.algorithm), "hyper": self.algorithm.values()}
        facts |= {"kind": "prior", "algorithm": algorithm, "batch_size": self.batch_size}
        if self.algorithm.keeps:  # a new client's own state begins at the initial weights
            tensors["initial"] = self.input_spec.network.initial
        return tensors | prefixed("shared", self.shared), facts

    @classmethod
    @checks_arguments
    @borrowed()
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Self:
        """Read what `save` wrote; `model` is the module, if the prior was trained with the user's own."""
        tensors, facts = _read(path, "prior")
        with _sound(path):
            spec = facts["algorithm"]
            algorithm = algorithms.make(spec["name"], **spec["hyper"])
            input_spec = InputSpec.unpack(tensors, facts, model, str(path))
            if algorithm.keeps and "initial" not in tensors:
                raise KeyError("initial")
            shared = group(tensors, "shared")
            expected = algorithm.init(input_spec.network.initial, input_spec.network.layout)
            check_fit(str(path), "shared state", shared, {n: tuple(t.shape) for n, t in expected.items()})
            prior = cls(algorithm, shared, input_spec, whole(facts["batch_size"], "batch_size"))
        if digest := tensors_digest(path):  # that of the file, whichever version wrote it
            vars(prior)["digest"] = digest
        return prior


@dataclass(frozen=True)
class Posterior:
    """A client's model: a distribution over weights, and how to predict with it."""

    q: Distribution
    input_spec: InputSpec
    offset: Tensor | None  # log π_i, the client's label level [classes]; it never leaves the client
    samples: int = 10
    prior: str = ""  # the digest of the prior that it was made from; empty if unknown

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return short(f"Posterior({type(self.q).__name__}, {self.samples} samples; {self.input_spec.words})")

    @checks_arguments
    @borrowed()
    @torch.no_grad()
    def predict(
        self, x: Any, samples: int | None = None, seed: int = 0, device: str = "auto", *, encoded: bool = False
    ) -> Prediction | Regression:
        """Predict by averaging over weight samples (0: the posterior mean, in one pass), with uncertainty.

        If the prior was trained on a table, `x` is one, as for `personalize`, and `decode()` names the classes.
        """
        place, samples = device_of(device), self.samples if samples is None else _samples(samples)
        network = self.input_spec.network.to(place, torch.float32)
        inputs = self.input_spec.normalised(self.input_spec.inputs(x, encoded=encoded), place)
        key = rng.key(whole(seed, "seed", 0), rng.PREDICT, device=place)
        self._check_memory(len(inputs), samples)
        q = type(self.q)(*(leaf.to(place) for leaf in self.q))
        offset = None if self.offset is None else self.offset.to(place)
        parts = []
        for j in range(draws_of(q, samples)):
            weights = draw(q, key, j, samples)
            pieces = [output(network, self.input_spec.likelihood, weights, part, offset) for part in inputs.split(1024)]
            parts.append(torch.cat(pieces))
        outputs = torch.stack(parts)
        if not torch.isfinite(outputs).all():
            raise InputError(
                "The predictions are not finite: the posterior or the inputs are out of range. Compare the inputs with "
                "the training data, or personalise again with a smaller lr."
            )
        if self.input_spec.task == "classification":
            p = Prediction.of(outputs, offset)
            names = self.input_spec.class_names
            return TablePrediction(p.probs, p.mutual_information, p.surprise, names) if names else p
        return Regression.of(outputs, self.input_spec.y_shift, self.input_spec.y_scale)

    def _check_memory(self, rows: int, samples: int) -> None:
        """Refuse predictions that would not fit into memory, which holds those of all weight samples at once."""
        likelihood = self.input_spec.likelihood
        outputs = likelihood.classes if isinstance(likelihood, Categorical) else 2 * likelihood.targets
        needed, free = 8 * max(1, samples) * rows * outputs, host_memory()[1]
        if 0 < free < needed:
            raise InputError(
                f"{samples} weight samples for {rows} rows need about {needed:,} bytes of memory, and {free:,} are "
                "free. Use fewer samples, or predict the rows in parts."
            )

    @borrowed()
    def to_module(self) -> nn.Module:
        """Return a plain module with the mean weights, for use outside of fedabml.

        The module expects normalised inputs, (x − input_spec.shift) / input_spec.scale; the inputs of a table are what
        `input_spec.recipe.apply` returns. It returns the network's bare outputs: without log π of the client's label
        level and, for regression, in units of the standardised target.
        """
        return self.input_spec.network.to_module(self.q.mean)

    @checks_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the posterior to one safetensors file that only its owner can read; replace a file of that name.

        The posterior reveals facts about the client's data, so keep it at the client.
        """
        tensors, facts = self.input_spec.pack()
        facts |= {"kind": "posterior", "distribution": type(self.q).__name__, "samples": self.samples}
        facts |= {"prior": self.prior} if self.prior else {}
        own = prefixed("q", self.q._asdict()) | ({} if self.offset is None else {"offset": self.offset})
        return write_tensors(path, tensors | own, facts, private=True)

    @classmethod
    @checks_arguments
    @borrowed()
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Self:
        """Read what `save` wrote; `model` is the module, if the prior was trained with the user's own."""
        tensors, facts = _read(path, "posterior")
        with _sound(path):
            input_spec = InputSpec.unpack(tensors, facts, model, str(path))
            kind, leaves, size = _KINDS[facts["distribution"]], group(tensors, "q"), input_spec.network.layout.size
            chain = len(leaves["weights"]) if kind is Samples else 0
            expected = {n: (max(1, chain), size) if kind is Samples else (size,) for n in kind._fields}
            check_fit(str(path), "distribution", leaves, expected)
            level = {"offset": tensors["offset"]} if "offset" in tensors else {}
            if level:
                classes = input_spec.likelihood.classes if isinstance(input_spec.likelihood, Categorical) else 0
                check_fit(str(path), "label level", level, {"offset": (classes,)})
            own = {name: leaf.to(torch.float32) for name, leaf in leaves.items()}
            if not all(torch.isfinite(leaf).all() for leaf in own.values()):
                raise InputError(f"'{path}' holds weights beyond the range of float32, so it is damaged.")
            samples = _samples(facts["samples"])
            return cls(kind(**own), input_spec, level.get("offset"), samples, facts.get("prior", ""))


def _samples(count: Any) -> int:
    """Return the number of weight samples. Raises InputError if it is out of range."""
    if whole(count, "samples", 0) > MOST_SAMPLES:
        raise InputError(f"samples is {count}; a prediction has at most {MOST_SAMPLES:,} weight samples.")
    return int(count)


def _read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, facts = read_tensors(path)
    if facts.get("kind") != kind:
        raise InputError(f"'{path}' holds a {facts.get('kind', 'checkpoint')}, not a {kind}.")
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and not torch.isfinite(tensor).all():
            raise InputError(f"'{path}' holds values in '{name}' that are not finite, so it is damaged.")
        if tensor.dtype not in FLOATS and not name.startswith("constant."):
            raise InputError(f"'{path}' holds {tensor.dtype} in '{name}', but weights must be float32 or float64.")
    return tensors, facts


@contextmanager
def _sound(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every error about a file's facts into an InputError that names the file."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"'{path}': {error}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"'{path}' lacks something that a fedabml file has ({reason}). It is damaged or of another version."
        ) from error


@checks_arguments
def load_prior(path: str | os.PathLike[str], model: nn.Module | None = None) -> Prior:
    """Read a prior; `model` is the module, if the prior was trained with the user's own."""
    return Prior.load(path, model)


@checks_arguments
def load_posterior(path: str | os.PathLike[str], model: nn.Module | None = None) -> Posterior:
    """Read a posterior; `model` is the module, if the prior was trained with the user's own."""
    return Posterior.load(path, model)
