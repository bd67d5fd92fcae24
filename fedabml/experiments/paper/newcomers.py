"""Clients who come later: a federation is trained without them, then they personalise what it has learned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...data import Federation
from ...data.rows import draw, generator
from ...runs.config import RunConfig
from ..study import Study, federation

NEW, FEW, FEW_RANDOM = 101, 102, 103  # purposes of draws
RANDOM = " random"  # ends the name of an audience whose samples are drawn at random


@dataclass(frozen=True)
class Newcomers(Study):
    """A share of the clients trains; the others are scored, with all of their samples or with few.

    Few samples are drawn in two ways: stratified by label (the audience `5`) and at random (`5 random`). Results that
    were stored before random draws existed have the same identity and the stratified audiences alone.
    """

    share: float
    sizes: tuple[int, ...] = ()  # training samples of a new client; empty: all of its own

    def federation(self, config: RunConfig) -> Federation:
        everyone = federation(config)
        return everyone.select(self._order(everyone, config)[: self._trained(everyone)])

    def audiences(self, config: RunConfig, fed: Federation) -> dict[str, Federation]:
        everyone = federation(config)
        new = everyone.select(self._order(everyone, config)[self._trained(everyone) :])
        if not self.sizes:
            return {"new": new}
        stratified = {str(n): few(new, n, config.seed) for n in self.sizes}
        return stratified | {f"{n}{RANDOM}": few_random(new, n, config.seed) for n in self.sizes}

    @property
    def scored(self) -> float:
        return max(1, 2 * len(self.sizes)) * (1 - self.share) / self.share

    def _trained(self, everyone: Federation) -> int:
        return max(1, round(self.share * everyone.clients))

    def _order(self, everyone: Federation, config: RunConfig) -> list[int]:
        return np.random.Generator(np.random.PCG64([config.seed, NEW])).permutation(everyone.clients).tolist()


def few(fed: Federation, n: int, seed: int) -> Federation:
    """Return a federation of the same clients with at most n training samples each, spread over their labels."""
    chosen = draw(fed.train, np.minimum(n, fed.train.counts), fed.y, seed, FEW)
    return replace(fed, train=fed.train.split(chosen)[1])


def few_random(fed: Federation, n: int, seed: int) -> Federation:
    """Return a federation of the same clients with at most n training samples each, drawn uniformly at random.

    The draw depends on the seed and on the client's own sample numbers alone, and the samples for a smaller n are among
    those for a larger one.
    """
    rows = fed.train
    noise = generator(seed, FEW_RANDOM).random(int(rows.index.max(initial=-1)) + 1)
    owner = rows.owner
    order = np.lexsort((noise[rows.index], owner))
    chosen = np.empty(len(owner), bool)
    chosen[order] = np.arange(len(owner)) - rows.offsets[:-1][owner] < n
    return replace(fed, train=rows.split(chosen)[1])
