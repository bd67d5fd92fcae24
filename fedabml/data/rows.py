"""Which samples belong to which client: ragged lists in two flat arrays, and the draws that divide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..arguments import checked_integer, checks_arguments
from ..errors import InputError, quoted

# One number per use of randomness, so that the same seed never gives the same draws to two purposes.
BY_CLASS, DIRICHLET, IID, HOLD_OUT, TABLE, EMNIST, DIRICHLET_CLASSES = range(1, 8)


def generator(seed: int, purpose: int) -> np.random.Generator:
    """Return the random numbers of one purpose. Draw with `random` where possible: its stream is the steadiest."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([checked_integer(seed, "The seed", 0), purpose])))


def shuffled(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return the numbers 0..n-1 in random order."""
    return np.argsort(rng.random(n), kind="stable")


@dataclass(frozen=True, eq=False)
class Rows:
    """One list of sample numbers per client. Client i owns `index[offsets[i]:offsets[i + 1]]`.

    `index` has one integer per owned sample and `offsets` one more than there are clients. They are two flat arrays
    rather than a list of arrays: a million clients cost 8 bytes each.
    """

    index: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        offsets = self.offsets
        for name, array in (("index", self.index), ("offsets", offsets)):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
                raise InputError(f"Rows: {name} must be a numpy array of whole numbers; it is {quoted(array)}.")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(self.index) or (np.diff(offsets) < 0).any():
            raise InputError("Rows: the offsets must rise from 0 to the number of sample numbers.")

    @classmethod
    @checks_arguments
    def of(cls, lists: Sequence[Sequence[int]]) -> Rows:
        """Make rows from one sequence of sample numbers per client."""
        parts = [np.asarray(part, dtype=np.int64) for part in lists]
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return cls.by_owner(owner, len(parts), np.concatenate([np.empty(0, np.int64), *parts]))

    @classmethod
    def by_owner(cls, owner: np.ndarray, clients: int, samples: np.ndarray | None = None) -> Rows:
        """Make rows from the client number of each sample, int [n]; `samples` [n] are their numbers, else 0..n-1."""
        order = np.argsort(owner, kind="stable").astype(np.int64)
        return cls(order if samples is None else samples[order], _offsets(np.bincount(owner, minlength=clients)))

    @classmethod
    def empty(cls, clients: int) -> Rows:
        """Make rows in which no client owns a sample."""
        return cls(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))

    def __repr__(self) -> str:
        return f"Rows({len(self):,} clients, {len(self.index):,} samples)"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        number = range(len(self))[client]  # range knows negative numbers and raises IndexError
        return self.index[self.offsets[number] : self.offsets[number + 1]]

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of samples of every client, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> np.ndarray:
        """The client number of every entry of `index`."""
        return np.repeat(np.arange(len(self)), self.counts)

    def select(self, clients: Sequence[int] | np.ndarray) -> Rows:
        """Return the rows of these clients, in this order."""
        chosen = np.asarray(clients, dtype=np.int64)
        counts = self.counts[chosen]
        offsets = _offsets(counts)
        positions = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Rows(self.index[positions], offsets)

    def split(self, taken: np.ndarray) -> tuple[Rows, Rows]:
        """Return (what stays, what is taken); `taken` has one truth value for every entry of `index`."""
        ends = np.concatenate([[0], np.cumsum(taken)])[self.offsets].astype(np.int64)
        return Rows(self.index[~taken], self.offsets - ends), Rows(self.index[taken], ends)

    def merge(self, other: Rows) -> Rows:
        """Return each client's samples from both rows."""
        owner, index = (np.concatenate([getattr(self, key), getattr(other, key)]) for key in ("owner", "index"))
        return Rows.by_owner(owner, len(self), index)


def check_share(share: float, subject: str) -> None:
    """Refuse a share outside [0, 1); `subject` names it."""
    if not 0 <= share < 1:
        raise InputError(f"The {subject} share is {share}; it must be at least 0 and below 1.")


def take_share(rows: Rows, share: float, least: int, labels: np.ndarray, seed: int, purpose: int) -> tuple[Rows, Rows]:
    """Return (what stays, what is taken) of every client's samples; `draw` chooses the share that is taken.

    At least `least` samples stay. Where there are more, at least one is taken unless the share is 0.
    """
    return rows.split(draw(rows, _quota(rows, share, least), labels, seed, purpose))


def take_newest(rows: Rows, share: float, least: int, time: np.ndarray) -> tuple[Rows, Rows]:
    """Return (what stays, what is taken) as `take_share` does, but take the samples with the largest `time` [n].

    Of samples at the same time, the one with the larger number counts as newer.
    """
    owner = rows.owner
    order = np.lexsort((rows.index, time[rows.index], owner))
    taken = np.empty(len(owner), bool)
    taken[order] = np.arange(len(owner)) >= (rows.offsets[1:] - _quota(rows, share, least))[owner]
    return rows.split(taken)


def _quota(rows: Rows, share: float, least: int) -> np.ndarray:
    """Return how many samples of every client a share of them is, int64 [N]; at least `least` stay."""
    counts = rows.counts
    wanted = np.rint(share * counts).astype(np.int64)
    return np.clip(wanted, np.minimum(1, counts // (least + 1)), np.maximum(counts - least, 0)) * (share > 0)


def draw(rows: Rows, quota: np.ndarray, labels: np.ndarray, seed: int, purpose: int) -> np.ndarray:
    """Mark `quota[i]` of client i's samples, spread over its labels: a truth value for every entry of `rows.index`.

    `labels` [n] has one integer per sample. Systematic sampling: a client's samples are sorted by label (at random
    within one) and every (n/quota)-th is taken from a random start, so each label gives its share to within one sample.
    The draw depends on the seed and on the client's own sample numbers alone: not on the other clients or their order.
    """
    size = int(rows.index.max(initial=-1)) + 1
    noise, start = generator(seed, purpose).random((size, 2)).T
    owner = rows.owner
    order = np.lexsort((noise[rows.index], labels[rows.index], owner))
    begin, n, q = rows.offsets[:-1][owner], rows.counts[owner], np.asarray(quota)[owner]
    rank = np.arange(len(owner)) - begin
    shift = (start[rows.index[order[begin]]] * n).astype(np.int64)
    taken = np.empty(len(owner), bool)
    taken[order] = ((rank + 1) * q + shift) // n > (rank * q + shift) // n
    return taken


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
