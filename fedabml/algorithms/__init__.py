"""The algorithms by name. A new one is one file and one line of `REGISTRY`.

Importing this package imports no algorithm and no torch: a class is imported when it is first used, as
`fedabml.algorithms.Scaffold`, `REGISTRY["scaffold"].kind` or `make("scaffold")`. So the command line knows the names at
once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..accel import import_on_use, threads_sleep_while_waiting
from ..arguments import checks_arguments
from ..errors import InputError, nearest
from ..files.user_code import UserCode, code_of_class, is_user_code, read_user_code, refuse_other_code

if TYPE_CHECKING:
    from .apfl import APFL as APFL
    from .base import Algorithm as Algorithm
    from .ditto import Ditto as Ditto
    from .fedabml import FedABML as FedABML
    from .fedavg import FedAvg as FedAvg
    from .fedbabu import FedBABU as FedBABU
    from .fedpa import FedPA as FedPA
    from .fedpop import FedPop as FedPop
    from .fedprox import FedProx as FedProx
    from .fedrep import FedRep as FedRep
    from .fola import FOLA as FOLA
    from .local import Local as Local
    from .perfedavg import PerFedAvg as PerFedAvg
    from .pfedbayes import PFedBayes as PFedBayes
    from .pfedme import PFedMe as PFedMe
    from .scaffold import Scaffold as Scaffold


@dataclass(frozen=True)
class Entry:
    """A registered algorithm: its class, or where it is ("module:Class"), and the defaults that make the variant."""

    home: str | type[Algorithm]
    defaults: dict[str, Any]
    code: UserCode | None = None  # of a user's own class

    @property
    def kind(self) -> type[Algorithm]:
        """The class, imported on first use."""
        return _imported(self.home) if isinstance(self.home, str) else self.home


REGISTRY: dict[str, Entry] = {
    "fedabml": Entry("fedabml.algorithms.fedabml:FedABML", {}),
    "fedabml-plain": Entry("fedabml.algorithms.fedabml:FedABML", {"label_prior": "none"}),  # the paper's FedABML
    "fedavg": Entry("fedabml.algorithms.fedavg:FedAvg", {"personal_epochs": 0}),
    "fedavg-ft": Entry("fedabml.algorithms.fedavg:FedAvg", {}),
    "local": Entry("fedabml.algorithms.local:Local", {}),
    "fedprox": Entry("fedabml.algorithms.fedprox:FedProx", {"personal_epochs": 0}),
    "fedprox-ft": Entry("fedabml.algorithms.fedprox:FedProx", {}),
    "scaffold": Entry("fedabml.algorithms.scaffold:Scaffold", {"personal_epochs": 0}),
    "scaffold-ft": Entry("fedabml.algorithms.scaffold:Scaffold", {}),
    "fedrep": Entry("fedabml.algorithms.fedrep:FedRep", {}),
    "fedbabu": Entry("fedabml.algorithms.fedbabu:FedBABU", {}),
    "fedpop": Entry("fedabml.algorithms.fedpop:FedPop", {}),
    "perfedavg": Entry("fedabml.algorithms.perfedavg:PerFedAvg", {}),
    "pfedme": Entry("fedabml.algorithms.pfedme:PFedMe", {}),
    "ditto": Entry("fedabml.algorithms.ditto:Ditto", {}),
    "pfedbayes": Entry("fedabml.algorithms.pfedbayes:PFedBayes", {}),
    "apfl": Entry("fedabml.algorithms.apfl:APFL", {}),
    "fedpa": Entry("fedabml.algorithms.fedpa:FedPA", {}),
    "fola": Entry("fedabml.algorithms.fola:FOLA", {}),
}


@checks_arguments
def make(name: str, **hyper: Any) -> Algorithm:
    """Return the algorithm with this registered name; `hyper` replaces defaults.

    Raises InputError for an unknown name, an unknown hyperparameter, or a value outside its range.
    """
    if name not in REGISTRY:
        hint = f" If it is your own, name its file: FILE.py:{name}." if name.isidentifier() else ""
        raise InputError(f"There is no algorithm '{name}'.{nearest(name, REGISTRY)}{hint}")
    kind, defaults = REGISTRY[name].kind, REGISTRY[name].defaults
    names = {field.name for field in dataclasses.fields(kind)}
    for word in hyper:
        if word not in names:
            raise InputError(f"Algorithm '{name}' has no hyperparameter '{word}'.{nearest(word, names)}")
    return kind(**{**defaults, **hyper})


def remake(name: str, hyper: dict[str, Any]) -> Algorithm:
    """Return an algorithm from the name and hyperparameters that a file or message holds.

    Hyperparameters that the writer's version did not have get their neutral values, not the defaults.
    """
    return make(name, **(make(name, **hyper).neutral_values() | hyper))


def register_user_algorithm(name: str | type[Algorithm]) -> str:
    """Return the name in `REGISTRY` of an algorithm; `mine.py:FedDyn`, or a class, is registered under its own name.

    Only a name that a person gave may be passed, because the file is executed. Raises InputError if it has no such
    class or none that can be used, and if another file's is registered under its name.
    """
    if isinstance(name, str) and not is_user_code(name):
        return name
    code = read_user_code(name) if isinstance(name, str) else code_of_class(name)
    registered = next((key for key, entry in REGISTRY.items() if entry.kind is code.value), None)
    if registered is not None:
        return registered
    _check_class(code)
    REGISTRY[code.name] = Entry(code.value, {}, code)
    return code.name


def _check_class(code: UserCode) -> None:
    """Refuse what is no algorithm, and one whose hyperparameters are not declared."""
    from .base import Algorithm

    kind, subject = code.value, f"'{code.typed}'"
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        given = f"the class {kind.__name__}" if isinstance(kind, type) else f"an object of type {type(kind).__name__}"
        raise InputError(f"{subject} must be a subclass of fedabml.Algorithm; it is {given}.")
    if code.name in REGISTRY and REGISTRY[code.name].code is None:
        raise InputError(f"{subject} has the name of another algorithm, {code.name}. Rename the class.")
    refuse_other_code(code, REGISTRY[code.name].code if code.name in REGISTRY else None)
    try:
        kind().identity(), kind().discrete()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{subject} must be a frozen dataclass that can be made without arguments, and each of its hyperparameters "
            f"must be declared with fedabml.algorithms.hyper.hyper(default, meaning) ({type(error).__name__}: {error})."
        ) from error


def digest_of(algorithm: Algorithm) -> dict[str, str]:
    """Return the digest of the source of a user's own algorithm, by its name; empty for the others."""
    entry = REGISTRY.get(name_of(algorithm))
    return {entry.code.name: entry.code.digest} if entry and entry.code else {}


def name_of(algorithm: Algorithm) -> str:
    """Return the registered name that describes an algorithm best; of an unregistered class its name in lower case."""
    fits = [
        (len(entry.defaults), name)
        for name, entry in REGISTRY.items()
        if type(algorithm) is entry.kind and all(getattr(algorithm, k) == v for k, v in entry.defaults.items())
    ]
    return max(fits)[1] if fits else type(algorithm).__name__.lower()


def _imported(home: str) -> Any:
    module, _, name = home.partition(":")
    with threads_sleep_while_waiting():
        return getattr(import_module(module), name)


_CLASSES = (str(entry.home).removeprefix(f"{__name__}.").split(":") for entry in REGISTRY.values())
__getattr__ = import_on_use(__name__, {"base": ("Algorithm",), **{home: (name,) for home, name in _CLASSES}})
