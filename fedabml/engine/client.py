"""What a client does, for many clients at once.

The functions: `initial_kept`, `client_round`, `weighted_round`, `personalize`, `predict`. All of them take lanes and
return new tensors; a lane's randomness is a function of (seed, round, client, step) alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import rng
from ..accel.machine import to_device
from ..accel.operators import triton_usable
from ..algorithms.base import Phase, Site, State, Step
from ..gaussian import Distribution
from .augment import PATH, augmented
from .compiling import steps_of_rounds
from .executor import StepName
from .lanes import Lanes, captured, split_state
from .loss import ClientLoss, draw, draws_of, output
from .minibatches import minibatches, padded, steps_of
from .programs import BatchedStep, Inputs, LaneInputs, RunInputs
from .samples import Samples
from .server import weighted_sum
from .setting import Cohort


class ClientResult(NamedTuple):
    """What clients have done in a round, a row each."""

    update: State  # what they send
    kept: State  # what they keep
    losses: Tensor  # the mean over their steps


# -- a round ----------------------------------------------------------------------------------------------------------
def initial_kept(lanes: Lanes) -> State:
    """Return the kept state of clients that have none yet, a row each."""
    params = lanes.per_lane([{"w": group.cohort.network.initial} for group in lanes.groups])["w"]
    keys = lanes.gather(lambda tensors, clients: tensors.keys(clients, rng.KEEP, 0))
    dims = (lanes.run_axis, lanes.run_axis, 0, 0)
    return lanes.for_each_lane(lanes.methods.keep, dims, params, lanes.shared, lanes.site, keys)


def client_round(lanes: Lanes, kept: State, epochs: int) -> ClientResult:
    """Return what clients do in a round: `begin`, all steps of `epochs` epochs, `end`.

    `kept` is what they keep, a row each. The clients, the shared state they are sent and the round are the lanes'.
    """
    carry = captured(lanes, begin_round, kept)
    carry, losses, steps = take_steps(lanes, carry, lanes.cohort.algorithm.phases(epochs), rng.NOISE)
    update, kept = captured(lanes, end_round, carry, kept, steps)
    return ClientResult(update, kept, losses)


def begin_round(lanes: Lanes, kept: State) -> State:
    """Return the carry that a round starts from."""
    dims = (lanes.run_axis, 0, 0, 0)
    return lanes.for_each_lane(lanes.methods.begin, dims, lanes.shared, kept, lanes.site, lanes.keys(rng.NOISE))


def begin_personal(lanes: Lanes, kept: State) -> State:
    """Return the carry that personalising starts from."""
    dims = (lanes.run_axis, 0, 0, 0)
    return lanes.for_each_lane(lanes.methods.personal, dims, lanes.shared, kept, lanes.site, lanes.keys(rng.PERSONAL))


def end_round(lanes: Lanes, carry: State, kept: State, steps: Tensor) -> tuple[State, State]:
    """Return the updates of a round, and what clients keep."""
    dims = (0, lanes.run_axis, 0, 0, 0)
    return lanes.for_each_lane(lanes.methods.end, dims, carry, lanes.shared, kept, lanes.site, steps)


def no_update(cohort: Cohort, shared: State) -> State:
    """Return an update of zeros, with the names and shapes of every client's."""
    lanes = Lanes.after_round(cohort, shared, [0], 1)
    return {name: torch.zeros_like(v[0]) for name, v in client_round(lanes, initial_kept(lanes), 0).update.items()}


def weighted_round(lanes: Lanes, kept: State, weights: list[Tensor], epochs: int) -> tuple[list[State], State, Tensor]:
    """Return the weighted sum of the updates of every group, what clients keep, and their mean losses.

    The loss of a client is NaN where anything of it is not finite. On a GPU the whole round is one program, where
    clients always take the same number of steps.
    """
    if lanes.executor.capture and _takes_equal_steps(lanes, epochs):
        steps = steps_of_rounds(lanes.cohort.algorithm, epochs)
        return captured(lanes, whole_round, kept, weights, static=(epochs,), steps=steps)
    return whole_round(lanes, kept, weights, epochs)


def _takes_equal_steps(lanes: Lanes, epochs: int) -> bool:
    """Return whether all clients take the same number of steps in a round, and not too many for one program."""
    phases, sizes = lanes.cohort.algorithm.phases(epochs), np.array([lanes.shortest, lanes.longest])
    steps = [steps_of(sizes, p.epochs, min(lanes.cohort.batch_size, lanes.longest), p.batches) for p in phases]
    limit = lanes.executor.policy.round_steps
    return (
        all(fewest == greatest for fewest, greatest in steps) and sum(int(greatest) for _, greatest in steps) <= limit
    )


def whole_round(lanes: Lanes, kept: State, weights: list[Tensor], epochs: int) -> tuple[list[State], State, Tensor]:
    """Run a round step by step; return the weighted sums of updates, what clients keep, and their mean losses."""
    update, kept, losses = client_round(lanes, kept, epochs)
    sums = [weighted_sum(*pair) for pair in zip(weights, split_state(update, lanes.counts), strict=True)]
    return sums, kept, _flagged(losses, [*update.values(), *kept.values()])


def _flagged(losses: Tensor, values: list[Tensor]) -> Tensor:
    """Return the losses, NaN where any of the values is not finite."""
    values = [value for value in values if value.is_floating_point()]
    if losses.is_cuda and triton_usable():
        from ..accel import triton_kernels

        return triton_kernels.flag(losses, values)
    for value in values:  # what is not finite, less itself, is NaN, and all else is 0
        losses = losses + (value - value).reshape(len(losses), -1).sum(-1).to(losses.dtype)
    return losses


# -- steps ------------------------------------------------------------------------------------------------------------
class Schedule(NamedTuple):
    """The inputs of every phase's steps, but for the carry, and how many steps every lane takes in all."""

    phases: list[tuple[Inputs, Tensor] | None]  # with the plan of sample numbers; None for a phase of no epochs
    losses: Tensor  # zeros
    steps: Tensor


def take_steps(
    lanes: Lanes, carry: State, phases: list[Phase], purpose: int, epochs_done: int = 0
) -> tuple[State, Tensor, Tensor]:
    """Take all steps of all phases; return the last carry, the mean loss and the number of steps of every lane.

    The steps of `epochs_done` epochs of the only phase were taken before; all lanes take equally many.
    """
    if not lanes.cohort.batched and not lanes.cohort.executor.capture and len(lanes) > 1:
        # All steps of one client before the next: its weights stay in the cache.
        single_lanes = [Lanes([group._replace(clients=[client])]) for group in lanes.groups for client in group.clients]
        carries = split_state(carry, [1] * len(single_lanes))
        results = [take_steps(*pair, phases, purpose, epochs_done) for pair in zip(single_lanes, carries, strict=True)]
        return tree_map(lambda *t: torch.cat(t), *results)
    carry = {name: value.contiguous() for name, value in carry.items()}  # a recorded step is made for such
    sizes = tuple((phase.epochs, phase.batches) for phase in phases)
    schedule: Schedule = captured(lanes, schedule_steps, static=(purpose, sizes))
    # How many epochs there are does not change a step.
    options = tuple(option for option in lanes.cohort.algorithm.discrete() if option[0] != "personal_epochs")
    losses = schedule.losses
    for phase, phase_inputs in zip(phases, schedule.phases, strict=True):
        if phase_inputs is None:
            continue
        inputs, plan = phase_inputs
        steps = steps_of(lanes.sizes, phase.epochs, plan.shape[-1], phase.batches)
        name = StepName(phase.step.__name__, lanes.several_runs, lanes.unpadded, options)  # type: ignore[attr-defined]
        steps_done = int(steps_of(lanes.sizes, epochs_done, plan.shape[-1], phase.batches).max()) if epochs_done else 0
        first_step = inputs.first_step + steps_done if steps_done else inputs.first_step
        inputs = inputs._replace(carry=carry, losses=losses, samples=lanes.samples, first_step=first_step)
        plan, steps = plan[steps_done : steps.max()], steps - steps_done
        carry, losses = lanes.executor.run(name, batched_step(lanes, phase.step), inputs, plan, steps)
    return carry, losses / schedule.steps.clamp_min(1), schedule.steps


def schedule_steps(lanes: Lanes, purpose: int, phases: tuple[tuple[int, int], ...]) -> Schedule:
    """Return the inputs of phases that have so many epochs, and minibatches in a step, each."""
    keys, batch_size = lanes.keys(purpose), lanes.cohort.batch_size
    zeros = total_steps = torch.zeros_like(lanes.site.n)  # losses and steps, which nothing writes to
    inputs_by_phase: list[tuple[Inputs, Tensor] | None] = []
    sizes = lanes.gather(lambda tensors, clients: tensors.sizes(clients))
    for number, (epochs, per_step) in enumerate(phases):
        if epochs == 0:
            inputs_by_phase.append(None)
            continue
        shuffle = lanes.keys(purpose, number, rng.SHUFFLE)
        plan = minibatches(lanes.source[1], sizes, shuffle, epochs, batch_size, per_step, lanes.shortest)
        width = plan.shape[-1]
        fewest, greatest = steps_of(np.array([lanes.shortest, lanes.longest]), epochs, width, per_step)
        steps = steps_of(sizes, epochs, width, per_step) if fewest < greatest else torch.full_like(keys, greatest)
        by_lane = LaneInputs(lanes.site, lanes.offset, rng.fold(keys, number), steps)
        runs = RunInputs(lanes.hyper, lanes.shared)
        inputs_by_phase.append((Inputs({}, zeros, by_lane, runs, (), torch.zeros_like(steps[0])), plan))
        total_steps = total_steps + steps
    return Schedule(inputs_by_phase, zeros, total_steps)


def batched_step(lanes: Lanes, step: Step) -> BatchedStep:
    """Return one step of an algorithm as a function of all lanes."""
    cohort, run_axis, unpadded = lanes.cohort, lanes.run_axis, lanes.unpadded
    # The method itself, to be called with an algorithm whose hyperparameters are bound as tensors.
    function = getattr(step, "__func__", None)
    if function is None:
        raise TypeError(f"A phase of {lanes.methods.__name__} has a step that is not a method of the algorithm.")
    source = cohort.data if cohort.executor.capture else lanes.source[0]
    augment = cohort.algorithm.augment

    def one(
        hyper: State, carry: State, shared: State, batches: Any, site: Site, key: Tensor, offset: Tensor | None
    ) -> tuple[State, Tensor]:
        batched, weights = cohort.batched, cohort.class_weights
        loss = ClientLoss(cohort.network, cohort.likelihood, offset, batched, cohort.noise, weights)
        return function(cohort.algorithm.bind(hyper), carry, shared, batches, site, key, loss)

    def all_lanes(inputs: Inputs, rows: Tensor, keys: Tensor) -> tuple[State, Tensor]:
        samples = Samples(*inputs.samples) if inputs.samples else source
        batches = tuple(samples.batch(part, unpadded) for part in rows)
        if augment != "none":
            batches = tuple(
                batch._replace(x=augmented(batch.x, rng.fold(keys, PATH + number), augment, cohort.data.black))
                for number, batch in enumerate(batches)
            )
        site, offset = inputs.lanes.site, inputs.lanes.offset
        dims = (run_axis, 0, run_axis, 0, 0, 0, None if offset is None else 0)
        return lanes.apply(one, dims, inputs.runs.hyper, inputs.carry, inputs.runs.shared, batches, site, keys, offset)

    return all_lanes


# -- a client's own model ---------------------------------------------------------------------------------------------
def personalize(lanes: Lanes, kept: State) -> Distribution:
    """Return every client's own distribution over weights, a row each, exactly as a new client would get it."""
    return next(personalize_after(lanes, kept, [lanes.cohort.algorithm.personal_epochs]))


def personalize_after(lanes: Lanes, kept: State, epochs: Sequence[int]) -> Iterator[Distribution]:
    """Yield every client's own distribution over weights after each of these numbers of epochs, which ascend.

    Where all lanes take equal steps, training goes on from one number to the next; elsewhere it begins anew.
    """
    start, epochs_done = captured(lanes, begin_personal, kept), 0
    one_by_one = not lanes.cohort.batched and not lanes.cohort.executor.capture
    steps_per_epoch = steps_of(lanes.sizes, 1, min(lanes.cohort.batch_size, lanes.longest), 1)
    can_continue = one_by_one or steps_per_epoch.min() == steps_per_epoch.max()
    carry = start
    for target in epochs:
        phases = dataclasses.replace(lanes.cohort.algorithm, personal_epochs=target).personal_phases()
        if not (can_continue and [(p.epochs, p.batches) for p in phases] == [(target, 1)]):
            carry, epochs_done = start, 0
        carry, _, _ = take_steps(lanes, carry, phases, rng.PERSONAL, epochs_done)
        epochs_done = target
        yield lanes.for_each_lane(lanes.methods.own_model, (0,), carry)


def predict(lanes: Lanes, models: Distribution, rows: Sequence[np.ndarray]) -> Tensor:
    """Return what every lane's model gives for its own rows under each weight draw: [draws, all rows, outputs]."""
    return outputs(lanes, models, rows, lanes.offset, lanes.keys(rng.PREDICT))


def outputs(
    lanes: Lanes, models: Distribution, rows: Sequence[np.ndarray], offsets: Tensor | None, keys: Tensor
) -> Tensor:
    """Return the outputs of any models, such as the prior itself, for each lane's rows: [draws, all rows, outputs].

    `offsets` are the label levels, if any, and `keys` the keys of the weight draws, a row per lane.
    """
    cohort, samples, policy = lanes.cohort, lanes.cohort.algorithm.predict_samples, lanes.cohort.place.policy
    first_samples = [group.cohort.first_sample for group in lanes.groups for _ in group.clients]
    numbers = padded([row_numbers + first for row_numbers, first in zip(rows, first_samples, strict=True)])
    index = to_device(torch.as_tensor(numbers), cohort.device)
    real = to_device(torch.as_tensor(np.flatnonzero(numbers >= 0)), cohort.device)  # a mask would make the host wait
    on_cpu = policy.activations_on_cpu // cohort.network.activations
    piece = max(policy.rows_per_lane, (policy.rows_on_gpu if cohort.device.type == "cuda" else on_cpu) // len(rows))
    dims = (0, 0, None if offsets is None else 0)

    def predict(weights: Tensor, x: Tensor, offset: Tensor | None) -> Tensor:
        return output(cohort.network, cohort.likelihood, weights, x, offset)

    draws = []
    for j in range(draws_of(models, samples)):
        weights = lanes.apply(lambda q, key: draw(q, key, j, samples), (0, 0), models, keys)  # noqa: B023
        pieces = [
            lanes.apply(predict, dims, weights, cohort.data.inputs(part.clamp_min(0)), offsets)
            for part in index.split(piece, 1)
        ]
        draws.append(torch.cat(pieces, 1).flatten(0, 1)[real])
    return torch.stack(draws)
