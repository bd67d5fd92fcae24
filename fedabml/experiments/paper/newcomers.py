"""Clients who come later: a federation is trained without them, then they personalise what it has learned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...data import Federation
from ...data.rows import draw
from ...runs.config import RunConfig
from ..study import Study, federation

NEW, FEW = 101, 102  # purposes of draws


@dataclass(frozen=True)
class Newcomers(Study):
    """A share of the clients trains; the others are scored, with all of their samples or with few."""

    share: float
    sizes: tuple[int, ...] = ()  # training samples of a new client; empty: all of its own

    def federation(self, config: RunConfig) -> Federation:
        everyone = federation(config)
        return everyone.select(self._order(everyone, config)[: self._trained(everyone)])

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        everyone = federation(config)
        new = everyone.select(self._order(everyone, config)[self._trained(everyone) :])
        return {str(n): few(new, n, config.seed) for n in self.sizes} if self.sizes else {"new": new}

    @property
    def scored(self) -> float:
        return max(1, len(self.sizes)) * (1 - self.share) / self.share

    def _trained(self, everyone: Federation) -> int:
        return max(1, round(self.share * everyone.clients))

    def _order(self, everyone: Federation, config: RunConfig) -> list[int]:
        return np.random.Generator(np.random.PCG64([config.seed, NEW])).permutation(everyone.clients).tolist()


def few(fed: Federation, n: int, seed: int) -> Federation:
    """Return a federation of the same clients with at most n training samples each, spread over their labels."""
    chosen = draw(fed.train, np.minimum(n, fed.train.counts), fed.y, seed, FEW)
    return replace(fed, train=fed.train.split(chosen)[1])
