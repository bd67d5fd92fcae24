"""torch's warnings of slow batching stay inside; a user's own warnings and filters are left alone."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedabml

pytestmark = pytest.mark.usefixtures("one_thread_here")
SLOW = "performance drop because we have not yet implemented the batching rule"


class Slow(nn.Linear):
    """A module with an operation that torch batches by a loop, and a warning of its own."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        warnings.warn("a warning of the user's", stacklevel=1)
        return super().forward(x.detach()).renorm(2, 0, 1.0)


@pytest.mark.parametrize("algorithm", [fedabml.FedABML(personal_epochs=1), fedabml.FedAvg(personal_epochs=1)])
def test_warnings_of_slow_batching_do_not_leak(algorithm):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 3)), np.arange(6) % 2) for _ in range(3)]
    fed = fedabml.Federation.from_arrays(clients, clients)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        run = fedabml.train(fed, Slow(), algorithm, rounds=1, participation=1.0, epochs=1, device="cpu", backend="vmap")
        run.prior.personalize(*clients[0]).predict(clients[0][0])
        assert warnings.filters == before
    texts = [str(each.message) for each in seen]
    assert not [text for text in texts if SLOW in text] and "a warning of the user's" in texts
    with pytest.warns(UserWarning, match=SLOW):  # a user's own call still warns
        torch.vmap(lambda x: x.renorm(2, 0, 1.0))(torch.ones(2, 3, 3))
