"""A study: what a cell trains and scores, where that is more than its configuration's own federation.

A study chooses the data and the network that are trained, the clients that are scored, what is recorded after the
rounds of the cell's `curve`, and what else is measured when training is done. `Study` itself is the plain case.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch import Tensor, nn

from ..data import Dataset, Federation, load
from ..engine.client import initial_kept
from ..engine.lanes import Lanes
from ..engine.rounds import Simulation
from ..engine.setting import Cohort
from ..errors import TrainingError
from ..evaluation.measures import key_of_all
from ..evaluation.scoring import TrainedRun, evaluate_after
from ..files.sealed import tensor_bytes
from ..runs.config import JsonDict, RunConfig

WATCHED = ("accuracy", "rmse", "nll")  # recorded after a round of the curve


@dataclass(frozen=True)
class Study:
    """The plain case: a configuration's own federation, all clients scored. Fields are part of a cell's identity."""

    given: ClassVar[bool] = False  # whether the data are a caller's, and not the configuration's

    @property
    def identity(self) -> list[Any]:
        """The name and the fields of the study, as they are read back from JSON."""
        return [type(self).__name__, json.loads(json.dumps(asdict(self)))]

    def federation(self, config: RunConfig) -> Federation:
        """Return the federation that is trained."""
        return federation(config)

    def network(self, config: RunConfig, fed: Federation) -> nn.Module | str:
        """Return the network that is trained, or its name."""
        return config.model

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        """Return the federations whose clients are personalised and scored in the end, by name."""
        return {"": fed}

    @property
    def scored(self) -> float:
        """The estimated number of scored clients per client that trains, for the remaining time."""
        return 1.0

    def watch(self, sims: Sequence[Simulation], split: str) -> list[JsonDict]:
        """Return what is recorded of runs side by side after a round of the curve, scored on the rows of `split`.

        Measures are over all clients, those of few rows, too, as the comparison's table has them.
        """
        epochs = sims[0].cohort.algorithm.personal_epochs
        return [
            {"error": str(outcome)}
            if isinstance(outcome, TrainingError)
            else {
                name: outcome.summary[key_of_all(name, outcome.summary)] for name in WATCHED if name in outcome.summary
            }
            for outcome in evaluate_after((epochs,), [trained_run(sim, sim.cohort) for sim in sims], split)[0]
        ]

    def observe(self, sim: Simulation) -> JsonDict:
        """Return what else is measured on a trained federation, ready for JSON."""
        return {}


@dataclass(frozen=True, eq=False, repr=False)
class Given(Study):
    """Data, and perhaps a network, that a caller has in Python: `make` returns the federation of a configuration.

    `data` identifies the data, as a hash does. The federation is made once for every configuration that differs.
    """

    make: Callable[[RunConfig], Federation]
    data: str
    module: nn.Module | None = None
    same_clients: bool | None = True  # whether they are the same with every seed; None: as the configuration says
    given: ClassVar[bool] = True

    @cached_property
    def identity(self) -> list[Any]:
        return ["Given", {"data": self.data, "module": self.module and module_hash(self.module)}]

    def __repr__(self) -> str:
        return f"Given(data {self.data[:12]})"

    def federation(self, config: RunConfig) -> Federation:
        """Return the federation, its validation rows held out by the configuration's seed."""
        return self.make(config).hold_out(config.validation, config.seed)

    def network(self, config: RunConfig, fed: Federation) -> nn.Module | str:
        return self.module or config.model


def module_hash(module: nn.Module) -> str:
    """Return a hash of a module: its structure as it is printed, its weights, and the code of the user's own classes.

    The code is what Python runs, not a source file: a notebook has none, and a file may have been edited since. Plain
    attributes count, too. A module of torch's and fedabml's classes alone has the hash that earlier versions gave it.
    """
    digest = hashlib.sha256(repr(module).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    for name, part in module.named_modules():
        own = [kind for kind in type(part).__mro__ if kind.__module__.partition(".")[0] not in _KNOWN]
        if own:
            values = {key: v for key, v in vars(part).items() if key[0] != "_" and key != "training"}
            digest.update(f"{name}{_plain(values)}{[_class_code(kind) for kind in own]}".encode())
    return digest.hexdigest()


_KNOWN = ("torch", "fedabml", "builtins")  # packages whose classes are no part of a module's hash


def _class_code(kind: type) -> list[Any]:
    """Return the code of the functions in a class, and its plain attributes."""
    entries: list[Any] = [kind.__qualname__]
    for name, value in sorted(vars(kind).items()):
        parts: list[Any] = (
            [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
        )
        codes = [f.__code__ for part in parts if isinstance(f := inspect.unwrap(part), FunctionType)]
        if codes:
            entries.append((name, [_code(code) for code in codes]))
        elif isinstance(value, bool | int | float | str | tuple | list | dict) and not name.startswith("__"):
            entries.append((name, _plain(value)))
    return entries


def _code(code: CodeType) -> list[Any]:
    """Return what a function does, without its file and lines, which change with code around it."""
    constants: list[Any] = []
    for value in code.co_consts:
        ordered = sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)  # a set's order is random
        constants.append(_code(value) if isinstance(value, CodeType) else ordered)
    return [code.co_code.hex(), code.co_exceptiontable.hex(), code.co_names, constants]


def _plain(value: Any) -> str:
    """Return a value as JSON; of what has no such form, a function's code, or a name."""

    def described(other: Any) -> Any:
        return _code(other.__code__) if isinstance(other, FunctionType) else _name(other)

    try:
        return json.dumps(value, default=described, skipkeys=True)
    except ValueError:  # it contains itself
        return _name(value)


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


PLAIN = Study()


def trained_run(sim: Simulation, cohort: Cohort) -> TrainedRun:
    """Return a trained run to be scored: with its own clients, or with new ones, who have kept nothing yet."""
    if cohort.fed is sim.cohort.fed:
        return TrainedRun(cohort, sim.theta, sim.kept_for, sim.round)
    keeps = cohort.algorithm.keeps

    def kept(clients: list[int]) -> dict[str, Tensor]:
        return initial_kept(Lanes.after_round(cohort, sim.theta, clients)) if keeps else {}

    return TrainedRun(cohort, sim.theta, kept, sim.round)


@cache
def dataset(name: str, data_dir: str | None) -> Dataset:
    """Load a dataset once."""
    return load(name, data_dir)


def federation(config: RunConfig) -> Federation:
    """Return the federation of a configuration; partitions of one dataset share its samples."""
    return config.federation(dataset=None if config.data else dataset(config.dataset or "digits", config.data_dir))
