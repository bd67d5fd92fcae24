"""The results of a federation: the prior, and a client's posterior made from it.

    prior = fedabml.load_prior("runs/demo/shared.safetensors")
    posterior = prior.personalize(x, y, epochs=5)
    p = posterior.predict(x_new)        # p.probs, p.entropy, p.mutual_information; regression: p.mean, p.std

A prior trained on a table reads tables: `prior.personalize(frame)` and `posterior.predict("new.csv").decode()`.

Both are one safetensors file: tensors, and an `InputSpec` of JSON metadata that says how to use them (the network, the
normalisation of inputs, the table's recipe, the algorithm with its hyperparameters).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import algorithms, models
from ..accel.process import borrowed
from ..algorithms.base import Algorithm, State
from ..arguments import check_fields, checked_integer, checks_arguments, is_number
from ..data import Federation
from ..data.ranges import LEAST_OWN, Ranges
from ..engine.autotune import device_of
from ..engine.client import initial_kept, personalize
from ..engine.lanes import Lanes
from ..engine.setting import Cohort, Place, Setting
from ..errors import InputError, shortened
from ..evaluation.decision_costs import DecisionCosts, short_aim
from ..evaluation.density import FeatureDensity, Maps
from ..files.sealed import group, packed_tensors, prefixed, read_tensors, tensors_digest, write_tensors
from ..files.sheets import html_card
from ..gaussian import Gaussian, Point, Samples
from ..likelihoods import weighted
from .input_spec import InputSpec
from .modules import Model, check_fit, warn_if_code_differs
from .posterior import Posterior, sample_count
from .prediction_columns import class_names
from .trust import CALIBRATION, COVERAGE, FALSE_ALARMS, Trust

FLOATS = (torch.float32, torch.float64)  # types of weights in a file
LEAST_DENSITY = 10  # rows whose features' density is fitted
_FAMILIES: dict[str, type[Any]] = {"Gaussian": Gaussian, "Point": Point, "Samples": Samples}


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
        return shortened(
            f"Prior({algorithms.name_of(self.algorithm)}; {self.input_spec.description}; digest {self.digest[:16]})"
        )

    def _repr_html_(self) -> str:
        """Show a notebook what the prior is, without weights."""
        properties = {
            "algorithm": algorithms.name_of(self.algorithm),
            **self.input_spec.properties,
            "digest": self.digest[:16],
        }
        return html_card("Prior", properties)

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
        id: str | None = None,
        validation: float | Sequence[int] = 0.0,
        trained_on: bool = False,
        aim: str = "",
        coverage: float = COVERAGE,
        false_alarms: float = FALSE_ALARMS,
        class_weights: str | Sequence[float] | None = None,
        calibration: str = CALIBRATION,
        kept: State | None = None,
    ) -> Posterior:
        """Make a client's posterior from its training data: φ = θ, then a few epochs of steps.

        `epochs`, `lr` and `batch_size` default to those of the algorithm. `x` and `y` are arrays of n rows. If the
        prior was trained on a table, `x` is a DataFrame or a path to a .csv, .parquet or .xlsx file, and `y` are raw
        values of the target, or None if the table has its column. With `encoded`, `x` and `y` are arrays that the
        prior's recipe has encoded. `id` is the table's column of identifiers, which predictions carry; unless given, it
        is the one named in training.

        With `validation`, this share of the rows is held out, or the rows of these numbers. On them the posterior is
        calibrated, a threshold is chosen for the `aim` (`f1`, `recall>=0.8`, `precision>=0.8`, `cost:MISS,ALARM`), sets
        or intervals get the `coverage`, and unusual inputs are flagged with a share of `false_alarms`: see
        `runs.trust`. `calibration` is `temperature`, `isotonic` (for at least 100 rows held out) or `none`. The aim
        `cost:costs.csv` names a matrix of costs for any number of classes: see `evaluation.decision_costs`. Without
        `validation` these options are refused, because they would have no effect. `trained_on` says that the prior was
        trained on the rows held out: calibration and coverage then look better than they are, which the posterior's
        `trust` records.

        `class_weights` default to those of the federation's training. `none` gives none; `balanced` goes by this
        client's rows, because a prior does not hold the counts of other clients.

        `kept` is what the client has kept between rounds, for an algorithm that keeps something; without it the client
        begins as one that never took part.
        """
        holds_out = validation != 0 if is_number(validation) else True
        costs = DecisionCosts.of_aim(aim, class_names(self.input_spec))
        shown_aim, aim = (short_aim(aim), "") if costs else (aim, aim)
        Trust.check_options(self.input_spec.classes, coverage, aim, false_alarms, calibration)
        options = {"An aim": (shown_aim, ""), "A coverage": (coverage, COVERAGE)}
        options |= {"A calibration": (calibration, CALIBRATION)}
        options |= {"A share of false alarms": (false_alarms, FALSE_ALARMS)}
        for option, (given, default) in options.items():
            if given != default and not holds_out:
                way = "give validation=0.2 (--validation 0.2), or another share."
                raise InputError(f"{option} needs validation rows: {way}")
        changes: dict[str, Any] = {"personal_epochs": epochs, "personal_lr": lr}
        algorithm = dataclasses.replace(self.algorithm, **{k: v for k, v in changes.items() if v is not None})
        batch_size = self.batch_size if batch_size is None else checked_integer(batch_size, "batch_size")
        place, spec = Place(device_of(device), torch.float32, backend="loop"), self.input_spec.with_id(id)
        frame, seed = spec.table(x, encoded), checked_integer(seed, "seed", 0)
        spec.ids(frame, needed=id is not None)
        fed = spec.federation(x if frame is None else frame, y, encoded)
        fed = _held_out(fed, validation, seed) if holds_out else fed
        likelihood = spec.likelihood
        if class_weights is not None:
            likelihood = weighted(likelihood, class_weights, fed.label_counts("train").sum(0).tolist())
        cohort = Cohort(Setting(algorithm, spec.network, likelihood, fed, batch_size, seed), place)
        shared = {k: v.to(place.device, place.dtype) for k, v in self.shared.items()}
        with torch.no_grad():
            lanes = Lanes.after_round(cohort, shared, [0])
            first = initial_kept(lanes)
            lane, offsets = personalize(lanes, first if kept is None else _kept_rows(kept, first)), lanes.offset
        q = type(lane)(*(leaf[0].cpu() for leaf in lane))
        if not all(torch.isfinite(leaf).all() for leaf in q):
            raise InputError(
                "The posterior is not finite, because personalisation diverged. Give a smaller lr or fewer epochs."
            )
        level = None if offsets is None else offsets[0].cpu()
        posterior = Posterior(q, spec, level, algorithm.predict_samples, self.digest)
        columns, federation = spec.columns(frame, fed.x), spec.recipe.ranges if spec.recipe else None
        if not holds_out:
            if columns is None or federation or len(fed.y) < LEAST_OWN:
                return posterior
            own_ranges = Ranges.fit(columns)
            return dataclasses.replace(posterior, ranges=own_ranges, range_limit=own_ranges.crossed_limit(columns))
        (train, y_train), (held, y_held) = ((fed.x[r], fed.y[r]) for r in (fed.train[0], fed.val[0]))
        checks: dict[str, Any] = {}
        if (features := posterior.features(train)) is not None and len(train) >= LEAST_DENSITY:
            labels = y_train if spec.classes else None
            checks = {"density": FeatureDensity.fit(features.hidden, labels), "features": posterior.features(held)}
            checks["maps"] = Maps.fit(features.maps, labels) if features.maps else None
        checks["federation"] = federation
        if columns is not None:
            own, new = ({n: v[r] for n, v in columns.items()} for r in (fed.train[0], fed.val[0]))
            checks["ranges"] = Ranges.fit(columns if federation else own)
            checks["columns"] = columns if federation else new
        p = posterior.predict(held, seed=seed, device=device, encoded=True)
        if self.input_spec.classes == 2:
            checks["positive"] = class_names(self.input_spec)[1]
        trust = Trust.fit(p, y_held, coverage=coverage, aim=aim, false_alarms=false_alarms, kind=calibration, **checks)
        trust = dataclasses.replace(
            trust, aim=shown_aim, costs=costs, held_out=rows_digest(held, y_held), trained_on=trained_on
        )
        return dataclasses.replace(posterior, trust=trust)

    def hold_out(
        self, x: Any, y: Any, validation: float | Sequence[int], seed: int = 0, encoded: bool = False
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Return a client's rows as encoded (x, y), those to train on and those that `personalize` would hold out."""
        fed = _held_out(self.input_spec.federation(x, y, encoded), validation, seed)
        rows = fed.train[0], fed.val[0]
        return (fed.x[rows[0]], fed.y[rows[0]]), (fed.x[rows[1]], fed.y[rows[1]])

    @checks_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the prior to one safetensors file, and replace a file of that name."""
        return write_tensors(path, *self._packed())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 digest of the prior's file: 64 hexadecimal digits."""
        return packed_tensors(*self._packed())[1]

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and metadata of the prior's file."""
        tensors, metadata = self.input_spec.pack()
        algorithm = {"name": algorithms.name_of(self.algorithm), "hyper": self.algorithm.values()}
        for digest in algorithms.digest_of(self.algorithm).values():
            algorithm["code"] = digest
        metadata |= {"kind": "prior", "algorithm": algorithm, "batch_size": self.batch_size}
        if self.algorithm.keeps:  # a new client's own state begins at the initial weights
            tensors["initial"] = self.input_spec.network.initial
        return tensors | prefixed("shared", self.shared), metadata


def _kept_rows(kept: State, like: State) -> State:
    """Return one client's kept state as a row, of the types and on the device of `like`."""
    if not all(isinstance(value, Tensor) for value in kept.values()):
        raise InputError("kept must be a dictionary of tensors, as a client of this algorithm keeps them.")
    check_fit("kept state", kept, {name: tuple(value.shape[1:]) for name, value in like.items()})
    return {name: kept[name].to(value.device, value.dtype).unsqueeze(0) for name, value in like.items()}


def rows_digest(x: np.ndarray, y: np.ndarray) -> str:
    """Return a short digest of encoded rows, by which `compare_at_site` tells whether a posterior learned from them."""
    return hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()[:16]


def _held_out(fed: Federation, validation: Any, seed: int) -> Federation:
    """Move a share of the only client's rows, or the rows of these numbers, to its validation rows.

    The normalisation stays that of the prior.
    """
    if is_number(validation):
        held_out = fed.hold_out(validation, seed)
        train, val, part = held_out.train, held_out.val, f"a share of {validation}"
    else:
        chosen = np.asarray(validation, np.int64)
        if ((chosen < 0) | (chosen >= len(fed.y))).any():
            raise InputError(f"The rows to hold out must be numbers from 0 to {len(fed.y) - 1}.")
        train, val = fed.train.split(np.isin(fed.train.index, chosen))
        part = f"{len(val.index)} rows"
    if not val.counts[0] or train.counts[0] < 2:
        raise InputError(f"{len(fed.y)} rows are too few to hold out {part} for validation.")
    return dataclasses.replace(fed, train=train, val=val)


@checks_arguments
@borrowed()
def load_prior(
    path: str | os.PathLike[str],
    model: nn.Module | str | os.PathLike[str] | None = None,
    algorithm: str | None = None,
) -> Prior:
    """Read a prior, from its file or from the folder of the run that made it.

    If it was trained with the user's own network, `model` is the module, or names the file again: `mine.py:Net`, or is
    the Hugging Face folder. In the same way `algorithm` names the file of the user's own algorithm. A prior never says
    by itself which code is run.
    """
    path = Path(path) / "shared.safetensors" if Path(path).is_dir() else path
    if algorithm is not None:
        algorithms.register_user_algorithm(algorithm)
    with _opened(path, "prior", model) as (tensors, metadata, input_spec):
        name = metadata["algorithm"]["name"]
        made = algorithms.remake(name, metadata["algorithm"]["hyper"])
        warn_if_code_differs(name, metadata["algorithm"].get("code"), algorithms.REGISTRY[name].code)
        if made.keeps and "initial" not in tensors:
            raise KeyError("initial")
        shared = group(tensors, "shared")
        expected = made.init(input_spec.network.initial, input_spec.network.layout)
        check_fit("shared state", shared, {n: tuple(t.shape) for n, t in expected.items()})
        prior = Prior(made, shared, input_spec, checked_integer(metadata["batch_size"], "batch_size"))
    if digest := tensors_digest(path):  # that of the file, whichever version wrote it
        vars(prior)["digest"] = digest
    return prior


@checks_arguments
@borrowed()
def load_posterior(path: str | os.PathLike[str], model: nn.Module | str | os.PathLike[str] | None = None) -> Posterior:
    """Read a posterior; `model` is the user's own module, its file or its folder, as for `load_prior`."""
    with _opened(path, "posterior", model) as (tensors, metadata, input_spec):
        family, leaves, size = _FAMILIES[metadata["distribution"]], group(tensors, "q"), input_spec.network.layout.size
        shape = (max(1, len(leaves["weights"])), size) if family is Samples else (size,)
        check_fit("distribution", leaves, dict.fromkeys(family._fields, shape))
        offset = tensors.get("offset")
        if offset is not None:
            check_fit("label level", {"offset": offset}, {"offset": (input_spec.classes or 0,)})
        leaves = {name: leaf.to(torch.float32) for name, leaf in leaves.items()}
        if not all(torch.isfinite(leaf).all() for leaf in leaves.values()):
            raise InputError(f"'{path}' holds weights beyond the range of float32, so it is damaged.")
        trust = Trust.unpack(group(tensors, "density"), metadata["trust"]) if "trust" in metadata else None
        if trust is not None and trust.costs and len(trust.costs.names) != input_spec.classes:
            raise InputError("Its costs of decisions are not those of its classes.")
        samples = sample_count(metadata["samples"])
        ranges = Ranges.from_json(metadata["ranges"]) if "ranges" in metadata else None
        if (limit := metadata.get("range_limit")) is not None and not math.isfinite(limit):
            raise ValueError("a limit of values that is not finite")
        return Posterior(family(**leaves), input_spec, offset, samples, metadata.get("prior", ""), trust, ranges, limit)


@contextmanager
def _opened(
    path: str | os.PathLike[str], content: str, model: Model | None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Any], InputSpec]]:
    """Read a file's tensors, metadata and input specification; every error in them is an InputError that names it.

    Raises InputError for a file with another content than `content`, or with weights that are not finite floats.
    """
    own = models.register_user_network(model) if isinstance(model, str) and not models.is_folder(model) else None
    tensors, metadata = read_tensors(path)
    if metadata.get("kind") != content:
        raise InputError(f"'{path}' holds a {metadata.get('kind', 'checkpoint')}, not a {content}.")
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and not torch.isfinite(tensor).all():
            raise InputError(f"'{path}' holds values in '{name}' that are not finite, so it is damaged.")
        if tensor.dtype not in FLOATS and not name.startswith("constant."):
            raise InputError(f"'{path}' holds {tensor.dtype} in '{name}', but weights must be float32 or float64.")
    try:
        trained = (metadata.get("model") or {}).get("name")
        if own is not None and own != trained:
            raise InputError(f"Its network is {trained or 'a module of its own'}, and the model given is {own}.")
        yield tensors, metadata, InputSpec.unpack(tensors, metadata, model if own is None else None)
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"'{path}': {error}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"'{path}' lacks something that a fedabml file has ({reason}). It is damaged or of another version."
        ) from error
