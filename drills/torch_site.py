"""A site whose local work is the plain torch loop of `drills.torch_client`, in place of fedabml's engine.

The algorithm must be FedAvg, whose shared state and update are the weights, and the data one .npz file without
normalisation.
"""

from __future__ import annotations

import time

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedabml.federation.messages import Order, Reply
from fedabml.federation.site import Site

from .torch_client import load, network, train


class TorchSite(Site):
    """A site that trains as the torch client of Flower's arm does."""

    def _train(self, order: Order) -> Reply:
        started = time.perf_counter()
        x, y = load(self.folder.settings.data)
        model = network()
        with torch.no_grad():
            vector_to_parameters(order.tensors["mean"], model.parameters())
        with torch.enable_grad():
            loss = train(model, x, y)
        update = {"mean": parameters_to_vector(model.parameters()).detach().clone()}
        return order.reply(samples=len(x), loss=loss, tensors=update, seconds={"work": time.perf_counter() - started})
