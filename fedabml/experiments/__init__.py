"""Experiments: each declares its cells, one runner executes them, and what is finished is never run twice."""

from ..accel import threads_sleep_while_waiting

with threads_sleep_while_waiting():
    import torch  # noqa: F401  here, because any module of this package may be imported first
