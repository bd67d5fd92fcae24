"""What a federation hands over: the prior, and a client's posterior made from it.

    prior = fedabml.load_prior("runs/demo/shared.safetensors")
    posterior = prior.personalize(x, y, epochs=5)
    p = posterior.predict(x_new)        # p.probs, p.entropy, p.mutual_information; regression: p.mean, p.std

Both are one safetensors file: tensors, and a card of JSON facts that says how to use them (the network, the
normalisation of inputs, the table's recipe, the algorithm with its hyperparameters).
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from . import algorithms, likelihoods, models, rng
from .algorithms.base import Algorithm, State
from .data import Federation, TableRecipe
from .data.arrays import as_numpy
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

    def federation(self, x: Any, y: Any) -> Federation:
        """One client's data as a federation of its own, normalised as the prior's was."""
        classes = self.likelihood.classes if isinstance(self.likelihood, Categorical) else None
        fed = Federation.from_arrays([(x, y)], task=self.task, classes=classes, normalize="none", names=["client"])
        self.check(fed.x)
        norm = {name: getattr(self, name) for name in ("shift", "scale", "y_shift", "y_scale")}
        return dataclasses.replace(fed, **norm, recipe=self.recipe)

    def check(self, x: np.ndarray) -> None:
        """Refuses inputs of another shape or kind than the prior was trained on."""
        if tuple(x.shape[1:]) != self.shape or (x.dtype == np.uint8) != (self.dtype == "uint8"):
            raise InputError(
                f"The inputs are {x.dtype} of shape {tuple(x.shape[1:])} each; the prior was trained on {self.dtype} "
                f"of shape {self.shape}."
            )

    def inputs(self, x: Any, device: torch.device) -> Tensor:
        """Raw inputs as the network takes them."""
        x, classes = as_numpy(x, "The input"), 1 if self.task == "classification" else None
        if x.ndim == 0:
            raise InputError("The input is a single number; give an array with a row per example.")
        y = np.zeros(len(x), int if classes else float)
        if len(x) == 1:  # a federation wants two samples; a prediction is content with one
            return self.inputs(np.concatenate([x, x]), device)[:1]
        raw = Federation.from_arrays([(x, y)], task=self.task, classes=classes, normalize="none").x
        self.check(raw)
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
        network.module.load_state_dict({**network.module.state_dict(), **group(tensors, "constant")})
        network.initial = tensors.get("initial", network.initial)
        norm = group(tensors, "norm")
        recipe = TableRecipe.from_json(facts["recipe"]) if facts["recipe"] else None
        return cls(
            network,
            likelihood,
            facts["model"],
            tuple(int(v) for v in facts["shape"]),
            **{n: norm[n].numpy() for n in _NORM},
            dtype=str(facts["dtype"]),
            dataset=str(facts["dataset"]),
            recipe=recipe,
        )


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
        y: Any,
        epochs: int | None = None,
        seed: int = 0,
        lr: float | None = None,
        batch_size: int | None = None,
        device: str = "auto",
    ) -> Posterior:
        """A client's posterior from its training data: φ = θ, then a few epochs of steps (the algorithm's default)."""
        changes: dict[str, Any] = {"personal_epochs": epochs, "personal_lr": lr}
        algorithm = dataclasses.replace(self.algorithm, **{k: v for k, v in changes.items() if v is not None})
        place = device_of(device)
        cohort = Cohort(
            algorithm, self.card.network, self.card.likelihood, self.card.federation(x, y), seed=seed, chunk=1,
            batch_size=batch_size or self.batch_size, device=place, dtype=torch.float32, backend="loop",
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
        try:
            spec = facts["algorithm"]
            algorithm = algorithms.make(spec["name"], **spec["hyper"])
            card = Card.unpack(tensors, facts, model, str(path))
            return cls(algorithm, group(tensors, "shared"), card, int(facts["batch_size"]))
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise _foreign(path, error) from error


@dataclass(frozen=True)
class Posterior:
    """A client's own model: a distribution over weights, and how to predict with it."""

    q: Distribution
    card: Card
    offset: Tensor | None  # log π_i, the client's label level; it never leaves the client
    samples: int = 10

    @torch.no_grad()
    def predict(
        self, x: Any, samples: int | None = None, seed: int = 0, device: str = "auto"
    ) -> Prediction | Regression:
        """Predictions averaged over weight samples (0: the posterior mean, one pass), with their uncertainty."""
        place, samples = device_of(device), self.samples if samples is None else samples
        network = self.card.network.to(place, torch.float32)
        inputs, key = self.card.inputs(x, place), rng.key(seed, rng.PREDICT, device=place)
        q = type(self.q)(*(leaf.to(place) for leaf in self.q))
        offset = None if self.offset is None else self.offset.to(place)
        parts = []
        for j in range(draws_of(q, samples)):
            weights = draw(q, key, j, samples)
            pieces = [output(network, self.card.likelihood, weights, part, offset) for part in inputs.split(1024)]
            parts.append(torch.cat(pieces))
        if self.card.task == "classification":
            return Prediction.of(torch.stack(parts))
        return Regression.of(torch.stack(parts), self.card.y_shift, self.card.y_scale)

    def to_module(self) -> nn.Module:
        """A plain module with the mean weights (its inputs normalised, its label level left out)."""
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
        try:
            card = Card.unpack(tensors, facts, model, str(path))
            q = _KINDS[facts["distribution"]](**group(tensors, "q"))
            return cls(q, card, tensors.get("offset"), int(facts["samples"]))
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise _foreign(path, error) from error


def _read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, facts = read_tensors(path)
    if facts.get("kind") != kind:
        raise InputError(f"'{path}' holds a {facts.get('kind', 'checkpoint')}, not a {kind}.")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"'{path}' holds values that are not finite, in '{name}'; it is damaged.")
    return tensors, facts


def _foreign(path: str | os.PathLike[str], error: Exception) -> InputError:
    return InputError(f"'{path}' lacks something a fedabml file has ({error}); it is damaged or of another version.")


def load_prior(path: str | os.PathLike[str], model: nn.Module | None = None) -> Prior:
    """Reads a prior; `model` is the module where it was the user's own."""
    return Prior.load(path, model)


def load_posterior(path: str | os.PathLike[str], model: nn.Module | None = None) -> Posterior:
    """Reads a posterior; `model` is the module where it was the user's own."""
    return Posterior.load(path, model)
