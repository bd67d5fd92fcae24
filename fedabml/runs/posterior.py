"""A client's posterior: its own distribution over weights, and how to predict with it.

    p = posterior.predict(x_new)        # p.probs, p.entropy, p.mutual_information; regression: p.mean, p.std

It is made by `Prior.personalize`, and read from its file by `load_posterior`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import rng
from ..accel.process import borrowed
from ..arguments import check_fields, checked_integer, checks_arguments
from ..data.ranges import Ranges
from ..engine.autotune import device_of
from ..engine.loss import draw, draws_of, output
from ..errors import InputError, shortened
from ..evaluation.density import Features
from ..evaluation.predictions import Prediction, Regression
from ..evaluation.structured import MultiPrediction
from ..files.limits import host_memory
from ..files.sealed import prefixed, write_tensors
from ..files.sheets import html_card
from ..gaussian import Distribution
from ..models.adapters import merged
from ..vectors import Network
from .input_spec import FORMATS, Inputs, InputSpec
from .prediction_columns import output_columns
from .tokens import padding_of
from .trust import Trust, flagged

log = logging.getLogger("fedabml")

MOST_KEPT = 256 << 20  # bytes of weight samples that all posteriors of the process together keep between predictions
MOST_KEEPERS = 8  # posteriors that keep weight samples, and with them a network on their device
MOST_SAMPLES = 100_000  # largest number of weight samples of a prediction
MOST_FEATURES = 2048  # of a last hidden layer or a feature map that is looked at


@dataclass(frozen=True, repr=False)
class TablePrediction(Prediction):
    """A prediction for the rows of a table, whose classes have names."""

    classes: tuple[str, ...] = ()

    def decode(self) -> list[str]:
        """Return the name of each row's label."""
        return [self.classes[i] for i in self.label]


@dataclass(frozen=True)
class Posterior:
    """A client's model: a distribution over weights, and how to predict with it."""

    q: Distribution
    input_spec: InputSpec
    offset: Tensor | None  # log π_i, the client's label level [classes]; it never leaves the client
    samples: int = 10
    prior: str = ""  # the digest of the prior that it was made from; empty if unknown
    trust: Trust | None = None  # what was fitted on validation rows; None without any, when only values are flagged
    ranges: Ranges | None = None  # the client's own, if there are neither validation rows nor ranges in the prior
    range_limit: float | None = None  # of `ranges`; files of earlier versions lack it, and mean `threshold()`

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return shortened(f"Posterior({type(self.q).__name__}, {self.samples} samples; {self.input_spec.description})")

    def _repr_html_(self) -> str:
        """Show a notebook what the posterior is, without weights."""
        checked = f"on {self.trust.rows} validation rows" if self.trust else "no validation rows"
        properties = {"distribution": type(self.q).__name__, "samples": self.samples, **self.input_spec.properties}
        return html_card("Posterior", properties | {"prior": self.prior[:16] or None, "checked": checked})

    @checks_arguments
    @borrowed()
    @torch.no_grad()
    def predict(
        self,
        x: Any,
        samples: int | None = None,
        seed: int = 0,
        device: str = "auto",
        *,
        encoded: bool = False,
        id: str | None = None,
    ) -> Prediction | Regression | MultiPrediction:
        """Predict by averaging over weight samples (0: the posterior mean, in one pass), with uncertainty.

        If the prior was trained on a table, `x` is one, as for `personalize`, and `decode()` names the classes. The
        prediction's `ids` are those of the column `id`, by default the one that training or `personalize` named. Its
        `frame()` is a DataFrame with the columns of `fedabml predict`. Rows of several clients are a warning of the
        logger "fedabml", because all are predicted with this client's posterior.
        """
        samples = self.samples if samples is None else sample_count(samples)
        spec = self.input_spec.with_id(id)
        frame = spec.table(x, encoded)
        ids = spec.ids(frame, needed=id is not None)
        column, clients = spec.clients(frame)
        if clients > 1:
            log.warning("Rows of %s clients in '%s': all are predicted with one client's posterior.", clients, column)
        read = self.read(x if frame is None else frame, encoded)
        p = self.predict_inputs(read, samples, seed, device)
        return dataclasses.replace(p, ids=ids, named=partial(output_columns, input_spec=spec))

    def read(self, x: Any, encoded: bool = False) -> Inputs:
        """Check and encode inputs, as the first half of `predict`; the inputs of several callers can be joined."""
        return self.input_spec.read(x, encoded)

    @borrowed()
    @torch.no_grad()
    def predict_inputs(
        self, read: Inputs, samples: int | None = None, seed: int = 0, device: str = "auto"
    ) -> Prediction | Regression | MultiPrediction:
        """Predict for what `read` returned, as the second half of `predict`.

        The weight samples are kept for the next call with the same seed, unless they need more than `MOST_KEPT` bytes.
        Posteriors that were used longest ago give theirs up, so that those of many clients do not fill the memory.
        """
        target, spec, samples = device_of(device), self.input_spec, self.samples if samples is None else samples
        inputs = spec.normalized(read.x, target)
        self._check_memory(len(inputs), samples)
        network, weights = self._weights(target, samples, checked_integer(seed, "seed", 0))
        offset = None if self.offset is None else self.offset.to(target)
        draws = []
        for vector in weights:
            batches = [output(network, spec.likelihood, vector, batch, offset) for batch in inputs.split(1024)]
            draws.append(torch.cat(batches))
        outputs = torch.stack(draws)
        if not torch.isfinite(outputs).all():
            raise InputError(
                "The predictions are not finite: the posterior or the inputs are out of range. Compare the inputs with "
                "the training data, or personalise again with a smaller lr."
            )
        p: Prediction | Regression | MultiPrediction
        if spec.classes:
            p, names = Prediction.of(outputs, offset), spec.class_names
            p = TablePrediction(p.probs, p.mutual_information, p.surprise, classes=names) if names else p
        elif spec.task == "regression":
            p = Regression.of(outputs, spec.y_shift, spec.y_scale, spec.transform)
        else:
            p = MultiPrediction.of(outputs)
            if spec.task == "sequence" and (padding := padding_of(spec.network)) is not None:
                tokens = np.asarray(read.x) != padding
                p = dataclasses.replace(p, steps=tokens if tokens.shape == p.probs.shape[:2] else None)
        federation = spec.recipe.ranges if spec.recipe else None
        if self.trust is None:
            usual, limit = (federation, None) if federation else (self.ranges, self.range_limit)
            return flagged(p, read.columns, usual, limit) if usual and read.columns is not None else p
        features = self._features(inputs, network) if self.trust.density else None
        return self.trust.apply(p, features, read.columns, federation)

    def _weights(self, target: torch.device, samples: int, seed: int) -> tuple[Network, Iterable[Tensor]]:
        """Return the network and the weight vectors of a prediction on a device.

        Drawing them takes as long as predicting a few rows, so those of the last seed are kept: the numbers are the
        same. Threads may call this at once; at worst, each draws its own.
        """
        kept = vars(self).get("_kept")  # no field: it is not compared, copied by `replace` or saved
        if kept is None or kept[0] != (target, samples, seed):
            q = type(self.q)(*(leaf.to(target) for leaf in self.q))
            key, count = rng.key(seed, rng.PREDICT, device=target), draws_of(q, samples)
            weights: Iterable[Tensor] = (draw(q, key, j, samples) for j in range(count))
            network = self.input_spec.network.to(target, torch.float32)
            if 4 * count * network.layout.size > MOST_KEPT:
                return network, weights
            kept = (target, samples, seed), network, list(weights)
        _keep(self, kept, 4 * len(kept[2]) * kept[1].layout.size)
        return kept[1], kept[2]

    @torch.no_grad()
    def features(self, x: np.ndarray) -> Features | None:
        """Return the last hidden layer and the feature maps of checked inputs under the mean weights.

        None if the network has no linear layer, or a last one of more than `MOST_FEATURES` inputs.
        """
        spec = self.input_spec
        return self._features(spec.normalized(x, torch.device("cpu")), spec.network)

    @property
    def has_features(self) -> bool:
        """Whether `features` finds any in the network, so that distances can be judged."""
        return self.features(np.zeros((1, *self.input_spec.shape), self.input_spec.dtype)) is not None

    def _features(self, inputs: Tensor, network: Network) -> Features | None:
        mean = self.q.mean.to(inputs.device)
        batches = [network.features(mean, batch) for batch in inputs.split(1024)]
        hidden = [batch.hidden for batch in batches if batch.hidden is not None]
        if not hidden or hidden[0].shape[1] > MOST_FEATURES:
            return None
        maps = [torch.cat(parts) for parts in zip(*(batch.maps for batch in batches), strict=True)]
        arrays = [rows.cpu().double().numpy() for rows in (torch.cat(hidden), *maps) if rows.shape[1] <= MOST_FEATURES]
        return Features(arrays[0], tuple(arrays[1:]))

    def _check_memory(self, rows: int, samples: int) -> None:
        """Refuse predictions that would not fit into memory, which holds those of all weight samples at once."""
        outputs = self.input_spec.classes or 2 * self.input_spec.outputs
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
        level and, for regression, in units of the standardised target (with `input_spec.transform`, the transformed).
        """
        return merged(self.input_spec.network.to_module(self.q.mean))

    @checks_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the posterior to one safetensors file that only its owner can read; replace a file of that name.

        The posterior reveals facts about the client's data, so keep it at the client.
        """
        tensors, metadata = self.input_spec.pack()
        metadata |= {"kind": "posterior", "distribution": type(self.q).__name__, "samples": self.samples}
        metadata |= {"prior": self.prior} if self.prior else {}
        tensors |= prefixed("q", self.q._asdict()) | ({} if self.offset is None else {"offset": self.offset})
        metadata |= {"ranges": self.ranges.to_json()} if self.ranges else {}
        metadata |= {"range_limit": self.range_limit} if self.range_limit is not None else {}
        if self.trust is not None:
            density, metadata["trust"] = self.trust.pack()
            metadata |= {"format": FORMATS[2]} if self.trust.costs else {}
            tensors |= prefixed("density", density)
        return write_tensors(path, tensors, metadata, private=True)


_keepers: list[tuple[weakref.ref[Posterior], int]] = []  # with the bytes that each keeps; the last was used last
_keepers_lock = threading.Lock()


def _keep(posterior: Posterior, kept: Any, size: int) -> None:
    """Let a posterior keep weight samples of `size` bytes; those used longest ago lose theirs where limits ask for it.

    Posteriors are told apart by identity: comparing them would compare their tensors.
    """
    with _keepers_lock:
        others = [(ref, n) for ref, n in _keepers if ref() is not None and ref() is not posterior]
        while others and (len(others) >= MOST_KEEPERS or size + sum(n for _, n in others) > MOST_KEPT):
            oldest = others.pop(0)[0]()
            if oldest is not None:
                vars(oldest).pop("_kept", None)
        vars(posterior)["_kept"] = kept
        _keepers[:] = [*others, (weakref.ref(posterior), size)]


def sample_count(count: Any) -> int:
    """Return the number of weight samples. Raises InputError if it is out of range."""
    if checked_integer(count, "samples", 0) > MOST_SAMPLES:
        raise InputError(f"samples is {count}; a prediction has at most {MOST_SAMPLES:,} weight samples.")
    return int(count)
