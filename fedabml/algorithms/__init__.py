"""The algorithms by name. A new one is one file and one line here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .. import asleep_while_waiting

with asleep_while_waiting():
    import torch  # noqa: F401  whoever imports a module of this package first

from ..arguments import checks_arguments
from ..errors import InputError, nearest
from .apfl import APFL
from .base import Algorithm
from .ditto import Ditto
from .fedabml import FedABML
from .fedavg import FedAvg
from .fedbabu import FedBABU
from .fedpa import FedPA
from .fedpop import FedPop
from .fedprox import FedProx
from .fedrep import FedRep
from .fola import FOLA
from .local import Local
from .perfedavg import PerFedAvg
from .pfedbayes import PFedBayes
from .pfedme import PFedMe
from .scaffold import Scaffold


class Entry(NamedTuple):
    """A registered algorithm: its class, and the defaults that make it this variant of it."""

    kind: type[Algorithm]
    defaults: dict[str, Any]


REGISTRY: dict[str, Entry] = {
    "fedabml": Entry(FedABML, {}),
    "fedabml-plain": Entry(FedABML, {"label_prior": "none"}),  # the paper's, without the label level
    "fedavg": Entry(FedAvg, {"personal_epochs": 0}),
    "fedavg-ft": Entry(FedAvg, {}),
    "local": Entry(Local, {}),
    "fedprox": Entry(FedProx, {"personal_epochs": 0}),
    "fedprox-ft": Entry(FedProx, {}),
    "scaffold": Entry(Scaffold, {"personal_epochs": 0}),
    "scaffold-ft": Entry(Scaffold, {}),
    "fedrep": Entry(FedRep, {}),
    "fedbabu": Entry(FedBABU, {}),
    "fedpop": Entry(FedPop, {}),
    "perfedavg": Entry(PerFedAvg, {}),
    "pfedme": Entry(PFedMe, {}),
    "ditto": Entry(Ditto, {}),
    "pfedbayes": Entry(PFedBayes, {}),
    "apfl": Entry(APFL, {}),
    "fedpa": Entry(FedPA, {}),
    "fola": Entry(FOLA, {}),
}


@checks_arguments
def make(name: str, **hyper: Any) -> Algorithm:
    """An algorithm by its registered name, with hyperparameters in place of the defaults."""
    if name not in REGISTRY:
        raise InputError(f"There is no algorithm '{name}'.{nearest(name, REGISTRY)}")
    kind, defaults = REGISTRY[name]
    known = {field.name for field in dataclasses.fields(kind)}
    for word in hyper:
        if word not in known:
            raise InputError(f"Algorithm '{name}' has no hyperparameter '{word}'.{nearest(word, known)}")
    return kind(**{**defaults, **hyper})


def name_of(algorithm: Algorithm) -> str:
    """The registered name that describes an algorithm best; its class's name if it is not registered."""
    fits = [
        (len(entry.defaults), name)
        for name, entry in REGISTRY.items()
        if type(algorithm) is entry.kind and all(getattr(algorithm, k) == v for k, v in entry.defaults.items())
    ]
    return max(fits)[1] if fits else type(algorithm).__name__.lower()


__all__ = [
    "APFL",
    "FOLA",
    "REGISTRY",
    "Algorithm",
    "Ditto",
    "Entry",
    "FedABML",
    "FedAvg",
    "FedBABU",
    "FedPA",
    "FedPop",
    "FedProx",
    "FedRep",
    "Local",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "make",
    "name_of",
]
