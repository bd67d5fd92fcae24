"""A site that trains as every site does, and then multiplies the change of the state it was sent."""

from __future__ import annotations

import dataclasses

import torch

from fedabml.federation.folders import SiteFolder
from fedabml.federation.messages import Order, Reply
from fedabml.federation.site import Site


def falsified(order: Order, reply: Reply, factor: float) -> Reply:
    """Return a reply whose change is multiplied; a tensor that is not part of the sent state is multiplied itself."""
    sent = {name: order.tensors.get(name, torch.zeros_like(value)) for name, value in reply.tensors.items()}
    false = {name: sent[name] + factor * (value - sent[name]) for name, value in reply.tensors.items()}
    return dataclasses.replace(reply, tensors=false)


class FalseSite(Site):
    """A site that multiplies the change of what it was sent by `factor`."""

    def __init__(self, folder: SiteFolder, factor: float) -> None:
        super().__init__(folder)
        self._factor = factor

    def _train(self, order: Order) -> Reply:
        return falsified(order, super()._train(order), self._factor)
