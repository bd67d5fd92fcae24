"""The contract of an algorithm: vector mathematics for one client, and a merge on the server.

An algorithm is a frozen dataclass of hyperparameters with pure methods over `dict[str, Tensor]` of flat vectors [d].
No method has a client axis: the engine adds it with `torch.vmap`. Messages are exactly `shared` and `update`. Label
counts are never sent.

    shared   state of the server, sent to clients    kept    state of a client between rounds, never sent
    carry    state from step to step of a client     update  state that a client sends back
    site     constants of a client: n, label counts  theta   shared state that is scored and personalised

A round:   shared ──begin──▶ carry ──step…──▶ carry ──end──▶ update, kept;   mean of updates ──merge──▶ shared
A client:  shared ──personal──▶ carry ──personal_step…──▶ carry ──own_model──▶ a distribution over weights
A client without kept state begins from `keep`, which may depend on the initial weights and on what the server sends.
Optimiser: `zero_momentum` and `momentum_step`, for SGD and Adam; `steps` has the form with a pull, `Variational.move`
the step of σ.
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

from ..errors import InputError, shortened
from ..gaussian import Distribution, Point
from ..vectors import Layout, derived, plus
from .hyper import AVERAGES, LR, PERSONAL_EPOCHS, PERSONAL_LRS, SERVER_MOMENTA, checked, hyper

LABEL_PRIORS = ("none", "dirichlet", "sparse")
ADAM = (0.9, 0.999, 1e-8)  # β₁, β₂ and ε of Kingma and Ba 2015
SERVER_MOMENTUM = "β: share of its last step that the server adds to the next"

State = dict[str, Tensor]


class Site(NamedTuple):
    """Constants of a client. Label counts are never sent.

    A site of a real federation reports `n` beside its update. With `weights=samples`, SCAFFOLD and `drift=control` send
    1/n in the update.
    """

    n: Tensor  # number of training samples, []
    counts: Tensor  # number of training samples of each class, [classes]


class Batch(NamedTuple):
    """A minibatch of b rows, of which those with mask 0 are padding."""

    x: Tensor  # [b, ...]
    y: Tensor  # [b] or [b, targets]
    mask: Tensor  # [b]


Batches = tuple[Batch, ...]
"""The minibatches of one step."""
Stepped = tuple[State, Tensor]
"""The new carry, and the loss [] before the step."""


class Loss(Protocol):
    """The engine's loss: mean −log likelihood of a batch, averaged over `samples` draws of the weights, []."""

    def __call__(self, q: Distribution, batch: Batch, key: Tensor, samples: int = 1) -> Tensor: ...


class Step(Protocol):
    """A step of a client: from a carry and minibatches to the new carry and the loss."""

    def __call__(
        self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss
    ) -> Stepped: ...


class Phase(NamedTuple):
    """A part of a client's work: `epochs` passes over its data with steps of `batches` minibatches each.

    `step` is a method of the algorithm: the engine calls it for a copy with bound hyperparameters.
    """

    epochs: int
    step: Step
    batches: int = 1


def gradient_at(w: Tensor, batch: Batch, key: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return ∇f(w), [d], and f(w), [], on a minibatch."""
    return derived(lambda w: loss(Point(w), batch, key), w)


@contextlib.contextmanager
def needs_second_derivative(instead: str) -> Iterator[None]:
    """Turn torch's error for a missing second derivative into an InputError that proposes `instead`."""
    try:
        yield
    except RuntimeError as error:
        missing = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", str(error))
        if missing is None:
            raise
        raise InputError(
            f"This model has no second derivative: torch cannot differentiate {missing[1]} twice. Use {instead}, or "
            "other operations of torch in its place."
        ) from error


@dataclass(frozen=True, repr=False)
class Algorithm:
    """The base of every algorithm: the hyperparameters that all have, and the contract's defaults (FedAvg)."""

    lr: float = hyper(0.1, "η: step size of local training", 0, tune=LR)
    lr_decay: float = hyper(1.0, "factor on η after every round", 0.5, 1, neutral=1.0)
    momentum: float = hyper(0.0, "heavy-ball momentum of local steps", 0, 0.999, static=True)
    optimiser: str = hyper(
        "sgd", "the client's steps; Adam's state begins anew every round", choices=("sgd", "adam"), neutral="sgd"
    )
    personal_epochs: int = hyper(5, "epochs on the client's training data before it is scored", 0, tune=PERSONAL_EPOCHS)
    personal_lr: float | None = hyper(0.03, "step size of the personal epochs (none: lr)", 0, tune=PERSONAL_LRS)
    weights: str = hyper("uniform", "how the server weighs clients", choices=("uniform", "samples"))
    average: float = hyper(
        0.0, "decay of the average of θ over rounds, which is scored (0: the last θ)", 0, 0.999, tune=AVERAGES
    )
    server_momentum: float = hyper(0.0, SERVER_MOMENTUM, 0, 0.999, neutral=0.0, tune=SERVER_MOMENTA)
    label_prior: str = hyper("none", "label level: π_i from the client's own counts", choices=LABEL_PRIORS)
    label_alpha: float | None = hyper(
        0.1, "α of the label level's Dirichlet prior (none: 1/K, one sample's worth for all K classes)", 1e-6
    )
    label_share: float = hyper(
        0.0,
        "ρ: share of the classes that a client has, for label_prior sparse (0: chosen)",
        0,
        1,
        neutral=0.0,
    )
    label_spread: float = hyper(1.0, "τ: spread of a client's number of classes around Kρ", 0.01, neutral=1.0)
    augment: str = hyper(
        "none", "random changes of training images", choices=("none", "flip", "crop", "crop-flip"), neutral="none"
    )
    predict_samples: int = hyper(10, "weight samples of a prediction (0: the posterior mean, one pass)", 0)

    remedy: ClassVar[str] = "A smaller step size usually helps."  # ends the error of a run that diverges
    batches_per_step: ClassVar[int] = 1
    samples_per_step: ClassVar[int] = 1  # weight samples alive at once, for the engine's memory estimate
    estimator: ClassVar[str] = "weight"  # where the noise of a Gaussian's weights enters the loss
    antithetic: ClassVar[bool] = False  # whether weight samples come in pairs of opposite noise
    needs_full_precision: ClassVar[bool] = False  # whether steps take small differences of gradients
    needs_sgd: ClassVar[bool] = False  # whether its formulas hold only for steps along the gradient
    server_momentum_of: ClassVar[tuple[str, ...]] = ("mean", "body")  # what `server_momentum` moves of `shared`

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(type(self).__name__, field, getattr(self, field.name)))
        if self.optimiser == "adam" and self.momentum:
            raise InputError(f"{type(self).__name__}: optimiser adam has its own momentum. Set momentum 0.")
        if self.optimiser == "adam" and self.needs_sgd:
            raise InputError(
                f"{type(self).__name__}: optimiser adam is not possible, because its formulas hold for steps along the "
                "gradient. Set optimiser sgd."
            )

    def __repr__(self) -> str:
        """Show the hyperparameters that are not the class's defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = (
            f"{k}={v!r}" for k, v in self.values().items() if type(v) is not type(defaults[k]) or v != defaults[k]
        )
        return shortened(f"{type(self).__name__}({', '.join(changed)})")

    # -- the server -------------------------------------------------------------------------------------------------
    def init(self, params: Tensor, layout: Layout) -> State:
        """Return the shared state before the first round, from the initial weights `params` [d]."""
        return {"mean": params}

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        """Return the new shared state from the weighted mean of the updates of `sampled` among all `clients`."""
        return update

    def apply_server_momentum(self, old: State, new: State, velocity: State) -> tuple[State, State]:
        """Return the shared state and v after the server's momentum: v ← βv + (new − old), shared = old + v.

        `old` and `new` are the shared states before and after `merge`. Only weights have momentum. An algorithm whose
        field `server_momentum` means something else sets `server_momentum_of` to ().
        """
        if not self.server_momentum:
            return new, {}
        steps = {name: new[name] - old[name] for name in self.server_momentum_of if name in new}
        velocity = {name: v + self.server_momentum * velocity[name] if velocity else v for name, v in steps.items()}
        return {**new, **{name: old[name] + v for name, v in velocity.items()}}, velocity

    def prior(self, shared: State) -> Distribution | None:
        """Return the server's own predictive distribution over weights; None where it has no whole model."""
        return Point(shared["mean"])

    # -- a client in a round ----------------------------------------------------------------------------------------
    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        """Return the kept state of a client before its first round: `params` are the initial weights."""
        return {}

    @property
    def keeps(self) -> bool:
        """Whether clients keep anything between rounds; overridden where a hyperparameter decides it."""
        return type(self).keep is not Algorithm.keep

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        """Return the carry of a round's first step."""
        return {"mean": shared["mean"], **self.zero_momentum(shared["mean"])}

    def phases(self, epochs: int) -> list[Phase]:
        """Return the local work of a round of `epochs` epochs."""
        return [Phase(epochs, self.step, self.batches_per_step)]

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        """Take one local step of a round."""
        return self.descend(carry, shared, batches[0], site, key, loss, self.lr)

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        """Return the update to send and the state to keep; `steps` [] counts the client's steps in the round."""
        return {"mean": carry["mean"]}, {}

    # -- a client's own model ---------------------------------------------------------------------------------------
    def personal(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        """Return the carry from which a client, seen or new, is personalised."""
        return self.begin(shared, kept, site, key)

    def personal_phases(self) -> list[Phase]:
        """Return the work of personalising."""
        return [Phase(self.personal_epochs, self.personal_step)]

    def personal_step(
        self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss
    ) -> Stepped:
        """Take one step of personalising, at the personal step size."""
        return self.descend(carry, shared, batches[0], site, key, loss, self.effective_personal_lr)

    def own_model(self, carry: State) -> Distribution:
        """Return the client's distribution over weights."""
        return Point(carry["mean"])

    # -- parts that algorithms share --------------------------------------------------------------------------------
    def lr_factor(self, round: int) -> float:
        """Return the factor on the step size in a round, at least 1e-4; personal steps are not decayed."""
        return max(self.lr_decay ** (round - 1), 1e-4)

    @property
    def effective_personal_lr(self) -> float:
        """The personal step size."""
        return self.lr if self.personal_lr is None else self.personal_lr

    def zero_momentum(self, like: Tensor) -> State:
        """Return the optimiser's state before the first step.

        Plain SGD has none, momentum has v [d], Adam has v, the squares [d] and the number of steps taken [].
        """
        if self.optimiser == "adam":
            zeros = {name: torch.zeros_like(like) for name in ("velocity", "squares")}
            return {**zeros, "taken": like.new_zeros(())}
        return {"velocity": torch.zeros_like(like)} if self.momentum else {}

    def momentum_step(self, carry: State, gradient: Tensor) -> tuple[Tensor, State]:
        """Return the direction of a step along the gradient g, and the optimiser's new state.

        SGD: v ← mv + g. Adam: v̂/(√ŝ + ε), the means v of g and s of g² divided by 1 − β^t.
        """
        if self.optimiser == "adam":
            beta1, beta2, eps = ADAM
            taken = carry["taken"] + 1
            velocity = torch.lerp(gradient, carry["velocity"], beta1)
            squares = torch.lerp(gradient**2, carry["squares"], beta2)
            scale = torch.sqrt(squares / (1 - beta2**taken)) + eps
            state = {"velocity": velocity, "squares": squares, "taken": taken}
            return velocity / (1 - beta1**taken) / scale, state
        if not self.momentum:
            return gradient, {}
        velocity = self.momentum * carry["velocity"] + gradient
        return velocity, {"velocity": velocity}

    def descend(
        self, carry: State, shared: State, batch: Batch, site: Site, key: Tensor, loss: Loss, lr: float
    ) -> Stepped:
        """Take one step of local training at a given step size: that of `sgd`, unless an algorithm overrides it."""
        return self.sgd(carry, batch, key, loss, lr)

    def sgd(
        self, carry: State, batch: Batch, key: Tensor, loss: Loss, lr: float, extra_gradient: Tensor | None = None
    ) -> Stepped:
        """Take a step w ← w − η(∇f(w) + e), with momentum, or Adam's step along that gradient.

        e [d] is `extra_gradient`, such as a proximal pull or a control variate.
        """
        gradient, value = gradient_at(carry["mean"], batch, key, loss)
        direction, buffer = self.momentum_step(carry, gradient if extra_gradient is None else gradient + extra_gradient)
        return {**carry, "mean": plus(carry["mean"], lr, direction, -1), **buffer}, value

    # -- hyperparameters --------------------------------------------------------------------------------------------
    def values(self) -> dict[str, Any]:
        """Return every hyperparameter by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def identity(self) -> dict[str, Any]:
        """Return the hyperparameters that identify a result: all but those at their neutral values."""
        neutral = self.neutral_values()
        return {name: v for name, v in self.values().items() if name not in neutral or v != neutral[name]}

    def neutral_values(self) -> dict[str, Any]:
        """Return the neutral values: results of versions without such a hyperparameter are results at its value."""
        values = {f.name: f.metadata["neutral"] for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def smoothing(self, classes: int) -> float | Tensor:
        """Return α of the label level for this number of classes."""
        return 1 / classes if self.label_alpha is None else self.label_alpha

    def notes(self) -> list[str]:
        """Return sentences that a user should read about this choice of hyperparameters."""
        if not self.personal_epochs or self.personal_lr is None or self.personal_lr <= self.lr:
            return []
        return [f"Personal steps of {self.personal_lr:g} are larger than those of training; personal_lr sets them."]

    def continuous(self) -> dict[str, float]:
        """Return the hyperparameters that reach the steps as 0-d tensors."""
        fields = dataclasses.fields(self)
        return {f.name: v for f in fields if isinstance(v := getattr(self, f.name), float) and not f.metadata["static"]}

    def discrete(self) -> tuple[tuple[str, Any], ...]:
        """Return all other hyperparameters: two algorithms that agree in them may share a compiled program."""
        continuous = self.continuous()
        return tuple((name, v) for name, v in self.values().items() if name not in continuous)

    def bind(self, tensors: dict[str, Tensor]) -> Self:
        """Return a copy whose continuous hyperparameters are 0-d tensors."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__ | tensors)
        return other
