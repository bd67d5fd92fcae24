"""Make samples in place of a site's, where only shapes matter: the server has no data."""

from __future__ import annotations

import numpy as np

from ..data import Federation
from ..likelihoods import Bernoulli, StepCategorical
from ..runs.input_spec import InputSpec


def stand_in(spec: InputSpec) -> Federation:
    """Return a federation of one client with two samples of the right shapes and types, all equal."""
    x = np.zeros((2, *spec.shape), np.uint8 if spec.dtype == "uint8" else np.float32)
    size: tuple[int, ...] = ()
    if isinstance(spec.likelihood, Bernoulli):
        size = (spec.likelihood.labels,)
    elif isinstance(spec.likelihood, StepCategorical):
        size = (spec.likelihood.steps,)
    elif spec.classes is None:
        size = (spec.outputs,)
    y = np.ones((2, *size), np.float32) if spec.task == "regression" else np.zeros((2, *size), np.int64)
    return spec.federation(x, y, encoded=True)
