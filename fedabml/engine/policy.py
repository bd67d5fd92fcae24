"""The thresholds by which the engine decides how to run, in one frozen object.

`DEFAULT` is what a `Place` has unless it is given another; tests replace it to reach what takes large inputs otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Thresholds of the engine; none of them changes a result beyond the rounding of sums."""

    record_after: int = 30  # steps of the same shapes after which a CPU records one
    programs: int = 64  # captured programs that are kept, and recorded steps
    graph_steps: int = 128  # steps in the plan of a captured step; longer phases are cut
    round_steps: int = 256  # steps of a round that is captured as one program, at most
    small_batch: int = 16  # lanes of a graph below which fewer are not faster
    shrink: float = 0.7  # from one size of a batch in graphs to the next
    heavy_outputs: int = 1 << 20  # numbers that a lane's layers put out in a step, from which every lane counts
    decide_round: int = 4  # the round after which compiling is decided: the first ones capture graphs
    rows_per_lane: int = 128  # test rows of a lane that are predicted at once, at least
    rows_on_gpu: int = 8192  # rows of all lanes that a GPU predicts at once, at least
    activations_on_cpu: int = 1 << 20  # activations of the rows of all lanes that a CPU predicts at once
    normalized_bytes: int = 1 << 28  # of samples that a batch of lanes may hold normalised on a CPU


DEFAULT = Policy()
