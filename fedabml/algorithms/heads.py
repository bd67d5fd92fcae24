"""The parts of algorithms that split a network into a shared body and a head, each client's own last layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..gaussian import Branches, Distribution, Point
from ..vectors import LIKELIHOOD, Layout
from .base import Algorithm, Batch, Loss, Site, State, Stepped
from .hyper import hyper


def head_start(layout: Layout, head: str) -> int:
    """Return where the head begins in the flat vector.

    `head` is "auto" for the last layer, "" for no head, else a prefix of parameter names. Raises InputError where there
    is no such head, where it is not at the end of the vector, or where no body is left before it.
    """
    names = [name for name in layout.names if name != LIKELIHOOD]
    prefix = names[-1].rpartition(".")[0] if head == "auto" else head
    parts = [name for name in names if prefix and (name == prefix or name.startswith(prefix + "."))]
    start = names.index(parts[0]) if parts else len(names)
    hint = f"Name the head by hand with --set ALGORITHM.head=PREFIX; the parameters are {', '.join(names[:12])}."
    if head == "auto" and not prefix:
        raise InputError(f"The model's last parameter '{names[-1]}' stands in no layer, so no head is found. {hint}")
    if prefix and not parts:
        raise InputError(f"The model has no parameter under the name '{prefix}', so there is no head. {hint}")
    if parts != names[start:]:
        raise InputError(f"The head '{prefix}' does not stand at the end of the model. {hint}")
    if start == 0:
        raise InputError(f"The model has no layer before its head '{prefix}', so there is no body to share. {hint}")
    return sum(layout.sizes[:start])


@dataclass(frozen=True, repr=False)
class Headed(Algorithm):
    """A shared body [d_b] and a head [d_h] of the client's own, both in the carry; the flat vector joins them."""

    head: str = hyper("auto", "the head: auto (the last layer), or the name its parameters begin with", static=True)

    def init(self, params: Tensor, layout: Layout) -> State:
        return {"body": params[: head_start(layout, self.head)]}

    def prior(self, shared: State) -> Distribution | None:
        return None  # a body without a head predicts nothing

    def keep(self, params: Tensor, shared: State, site: Site, key: Tensor) -> State:
        return {"head": params[len(shared["body"]) :]}

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        parts = {"body": shared["body"], "head": kept["head"]}
        return parts | {f"{k}.{name}": v for name, part in parts.items() for k, v in self.zero_momentum(part).items()}

    def flat_weights(self, carry: State) -> Tensor:
        """Return the network's flat vector, [d]."""
        return torch.cat([carry["body"], carry["head"]])

    def part_step(self, part: str, carry: State, batch: Batch, key: Tensor, loss: Loss, lr: float) -> Stepped:
        """Take a step of one part, "body" or "head", the other frozen; each has its own optimiser's state."""

        def of_part(q: Point, batch: Batch, key: Tensor, samples: int = 1) -> Tensor:
            parts = {**carry, part: q.mean}
            return loss(Branches(parts["body"], parts["head"].unsqueeze(0)), batch, key, samples)

        end = f".{part}"
        state = {name.removesuffix(end): value for name, value in carry.items() if name.endswith(end)}
        state["mean"] = carry[part]
        state, value = self.sgd(state, batch, key, of_part, lr)  # type: ignore[arg-type]
        return {**carry, part: state.pop("mean"), **{f"{k}.{part}": v for k, v in state.items()}}, value

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        return {"body": carry["body"]}, {"head": carry["head"]}

    def own_model(self, carry: State) -> Distribution:
        return Point(self.flat_weights(carry))
