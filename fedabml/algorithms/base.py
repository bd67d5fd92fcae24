"""The contract of an algorithm: vector mathematics for one client, and a merge on the server.

An algorithm is a frozen dataclass of hyperparameters with pure methods over dictionaries of flat vectors. No method
has a client axis; the engine adds it. The words:

    shared   what the server owns and sends          kept    what a client keeps between rounds
    carry    what a client's steps hand on           update  what a client sends back
    site     what a client knows of itself           theta   what the server is scored and personalised with

A round:   shared ──begin──▶ carry ──step…──▶ carry ──end──▶ update, kept;   mean of updates ──merge──▶ shared
A client:  shared ──personal──▶ carry ──personal_step…──▶ carry ──own_model──▶ a distribution over weights
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from ..accel import threads_sleep_while_waiting

with threads_sleep_while_waiting():  # whichever module of this package is imported first
    import torch
    from torch import Tensor

from ..errors import InputError, short
from ..gaussian import Distribution, Point
from ..vectors import Layout, derived, plus
from .hyper import AVERAGES, LR, PERSONAL_EPOCHS, PERSONAL_LRS, SERVER_MOMENTA, checked, hyper

SERVER_MOMENTUM = "β: how much of its last step the server takes again"  # the meaning, whatever its default

State = dict[str, Tensor]


class Site(NamedTuple):
    """Constants a client knows of itself and never sends."""

    n: Tensor  # training samples
    counts: Tensor  # training samples of each class


class Batch(NamedTuple):
    """A minibatch; rows with mask 0 are padding."""

    x: Tensor
    y: Tensor
    mask: Tensor


class Loss(Protocol):
    """The engine's: mean −log likelihood of a batch, averaged over `samples` draws of the weights."""

    def __call__(self, q: Distribution, batch: Batch, key: Tensor, samples: int = 1) -> Tensor: ...


class Step(Protocol):
    """carry, the batches of this step, ... → the new carry and the loss it met."""

    def __call__(
        self, carry: State, shared: State, batches: tuple[Batch, ...], site: Site, key: Tensor, loss: Loss
    ) -> tuple[State, Tensor]: ...


class Phase(NamedTuple):
    """So many epochs of a step that takes so many minibatches."""

    epochs: int
    step: Step
    batches: int = 1


def slope(w: Tensor, batch: Batch, key: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """∇f(w) and f(w) on a minibatch."""
    return derived(lambda w: loss(Point(w), batch, key), w)


@contextlib.contextmanager
def twice(instead: str) -> Iterator[None]:
    """Names the operation of a network that cannot be derived twice; `instead` needs no second derivative."""
    try:
        yield
    except RuntimeError as error:
        met = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", str(error))
        if met is None:
            raise
        raise InputError(
            f"This model cannot be derived twice: torch has no derivative of {met[1]}. Use {instead}, or other "
            "operations of torch in its place."
        ) from error


@dataclass(frozen=True, repr=False)
class Algorithm:
    """The base of every algorithm: hyperparameters all of them have, and the plain defaults of the contract."""

    lr: float = hyper(0.1, "η: step size of local training", 0, tune=LR)
    lr_decay: float = hyper(1.0, "what η is multiplied with after every round", 0.5, 1, neutral=1.0)
    momentum: float = hyper(0.0, "heavy-ball momentum of local steps", 0, 0.999, static=True)
    personal_epochs: int = hyper(5, "epochs on the client's training data before it is scored", 0, tune=PERSONAL_EPOCHS)
    personal_lr: float | None = hyper(0.03, "step size of those epochs (none: lr)", 0, tune=PERSONAL_LRS)
    weights: str = hyper("uniform", "how the server weighs clients", choices=("uniform", "samples"))
    average: float = hyper(
        0.0, "decay of the average of θ over rounds that is scored (0: the last θ)", 0, 0.999, tune=AVERAGES
    )
    server_momentum: float = hyper(0.0, SERVER_MOMENTUM, 0, 0.999, neutral=0.0, tune=SERVER_MOMENTA)
    label_prior: str = hyper("none", "label level: π_i from the client's own counts", choices=("none", "dirichlet"))
    label_alpha: float | None = hyper(
        0.1, "α of the label level's Dirichlet prior (none: 1/K, one sample's worth for all K classes)", 1e-6
    )
    augment: str = hyper(
        "none", "what is done to images in every step", choices=("none", "flip", "crop", "crop-flip"), neutral="none"
    )
    predict_samples: int = hyper(10, "weight samples of a prediction (0: the posterior mean, one pass)", 0)

    remedy: ClassVar[str] = "A smaller step size usually helps."  # said where training or personalising diverges
    batches_per_step: ClassVar[int] = 1
    samples_per_step: ClassVar[int] = 1  # weight samples alive at once, for the engine's memory estimate
    estimator: ClassVar[str] = "weight"  # where the noise of a Gaussian's weights enters the loss
    antithetic: ClassVar[bool] = False  # whether its samples come in pairs of opposite noise

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(type(self).__name__, field, getattr(self, field.name)))

    def __repr__(self) -> str:
        """Shows the hyperparameters that are not the class's defaults."""
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        given = (f"{k}={v!r}" for k, v in self.values().items() if type(v) is not type(usual[k]) or v != usual[k])
        return short(f"{type(self).__name__}({', '.join(given)})")

    @property
    def needs_full_precision(self) -> bool:
        """Whether it takes small differences of gradients, which the errors of coarse products would drown."""
        return False

    # -- the server -------------------------------------------------------------------------------------------------
    def init(self, params: Tensor, layout: Layout) -> State:
        """What the server owns and sends, from the initial weights."""
        return {"mean": params}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        """The new shared state from the weighted mean of the updates."""
        return update

    def apply_server_momentum(self, old: State, new: State, velocity: State) -> tuple[State, State]:
        """The server's heavy ball after `merge`: v ← βv + (new − old), m = old + v; the shared state and v.

        It is that of weights alone. An algorithm that means something else by this name sees to it itself; one with
        another default means the same.
        """
        mine, usual = (kind.__dataclass_fields__["server_momentum"].metadata for kind in (type(self), Algorithm))
        if mine.get("doc") != usual["doc"] or not self.server_momentum:
            return new, {}
        steps = {name: new[name] - old[name] for name in ("mean", "body") if name in new}
        velocity = {name: v + self.server_momentum * velocity[name] if velocity else v for name, v in steps.items()}
        return {**new, **{name: old[name] + v for name, v in velocity.items()}}, velocity

    def prior(self, shared: State) -> Distribution | None:
        """What the server itself would predict with; None where it owns no model."""
        return Point(shared["mean"])

    # -- a client in a round ----------------------------------------------------------------------------------------
    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        """What a client keeps between rounds, before its first."""
        return {}

    @property
    def keeps(self) -> bool:
        """Whether clients keep anything at all; where that hangs on a hyperparameter, an algorithm says so itself."""
        return type(self).keep is not Algorithm.keep

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        """The carry of the first step."""
        return {"mean": shared["mean"], **self.zero_momentum(shared["mean"])}

    def phases(self, epochs: int) -> list[Phase]:
        """The local work of a round."""
        return [Phase(epochs, self.step, self.batches_per_step)]

    def step(
        self, carry: State, shared: State, batches: tuple[Batch, ...], site: Site, key: Tensor, loss: Loss
    ) -> tuple[State, Tensor]:
        """One local step on a minibatch."""
        return self.descend(carry, shared, batches[0], site, key, loss, self.lr)

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        """The update to send and the state to keep."""
        return {"mean": carry["mean"]}, {}

    # -- a client's own model ---------------------------------------------------------------------------------------
    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        """The carry from which a client, seen or new, is personalised."""
        return self.begin(shared, kept, site, key)

    def personal_phases(self) -> list[Phase]:
        """The work of personalising."""
        return [Phase(self.personal_epochs, self.personal_step)]

    def personal_step(
        self, carry: State, shared: State, batches: tuple[Batch, ...], site: Site, key: Tensor, loss: Loss
    ) -> tuple[State, Tensor]:
        """The same at the personal step size."""
        return self.descend(carry, shared, batches[0], site, key, loss, self.own_lr)

    def own_model(self, carry: State) -> Distribution:
        """The client's distribution over weights."""
        return Point(carry["mean"])

    # -- parts that algorithms share --------------------------------------------------------------------------------
    def lr_factor(self, round: int) -> float:
        """What the step size of a round is multiplied with, 1e-4 at the least; personal steps keep theirs."""
        return max(self.lr_decay ** (round - 1), 1e-4)

    @property
    def own_lr(self) -> float:
        """The personal step size."""
        return self.lr if self.personal_lr is None else self.personal_lr

    def zero_momentum(self, like: Tensor) -> State:
        """A momentum buffer at rest, where there is momentum."""
        return {"velocity": torch.zeros_like(like)} if self.momentum else {}

    def momentum_step(self, carry: State, gradient: Tensor) -> tuple[Tensor, State]:
        """The direction of a heavy-ball step and the new buffer."""
        if not self.momentum:
            return gradient, {}
        velocity = self.momentum * carry["velocity"] + gradient
        return velocity, {"velocity": velocity}

    def descend(
        self, carry: State, shared: State, batch: Batch, site: Site, key: Tensor, loss: Loss, lr: float
    ) -> tuple[State, Tensor]:
        """One step of local training at a given step size: SGD, unless an algorithm says otherwise."""
        return self.sgd(carry, batch, key, loss, lr)

    def sgd(
        self, carry: State, batch: Batch, key: Tensor, loss: Loss, lr: float, more: Tensor | None = None
    ) -> tuple[State, Tensor]:
        """w ← w − η(∇f(w) + more), with momentum; `more` is a proximal pull or a control variate."""
        gradient, value = slope(carry["mean"], batch, key, loss)
        direction, buffer = self.momentum_step(carry, gradient if more is None else gradient + more)
        return {**carry, "mean": plus(carry["mean"], lr, direction, -1), **buffer}, value

    # -- hyperparameters --------------------------------------------------------------------------------------------
    def values(self) -> dict[str, Any]:
        """Every hyperparameter by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def identity(self) -> dict[str, Any]:
        """Those that make a difference: all but the ones that came later and are as if they had not."""
        neutral = self.neutral_values()
        return {name: v for name, v in self.values().items() if name not in neutral or v != neutral[name]}

    def neutral_values(self) -> dict[str, Any]:
        """The values of those that came later at which they are as if they had not."""
        values = {f.name: f.metadata["neutral"] for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def smoothing(self, classes: int) -> float | Tensor:
        """α of the label level for so many classes."""
        return 1 / classes if self.label_alpha is None else self.label_alpha

    def notes(self) -> list[str]:
        """What a person should know about this choice of hyperparameters."""
        if not self.personal_epochs or self.personal_lr is None or self.personal_lr <= self.lr:
            return []
        return [f"Personal steps of {self.personal_lr:g} are larger than those of training; personal_lr sets them."]

    def continuous(self) -> dict[str, float]:
        """Those that reach the steps as tensors."""
        fields = dataclasses.fields(self)
        return {f.name: v for f in fields if isinstance(v := getattr(self, f.name), float) and not f.metadata["static"]}

    def discrete(self) -> tuple[tuple[str, Any], ...]:
        """All others, by name: two algorithms that agree in them may share a program."""
        continuous = self.continuous()
        return tuple((name, v) for name, v in self.values().items() if name not in continuous)

    def bind(self, tensors: dict[str, Tensor]) -> Self:
        """A copy whose continuous hyperparameters are 0-d tensors."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__ | tensors)
        return other
