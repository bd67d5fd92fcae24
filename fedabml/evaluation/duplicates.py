"""Samples that occur more than once in a federation, as warnings: at several clients, in training and test, by label.

    print("\\n".join(duplicate_warnings(fed)))

Each sample is hashed once, to 16 bytes. Identical images are never chance. Rows of numbers are, where columns have few
values; they are a warning only if more of them agree than chance explains.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ..data import Federation
from ..data.arrays import SPLIT_WORDS, SPLITS

NAMED = 5  # pairs of clients that are named
HOLDERS = 100  # clients with one row whose pairs are counted
MOST_CELLS = 50_000_000  # of rows of numbers, up to which the values of every column are counted


def duplicate_warnings(fed: Federation) -> list[str]:
    """Return a sentence for clients that share samples, for training samples in the test data, and for other labels."""
    index, owner = (np.concatenate([getattr(fed.rows(split), name) for split in SPLITS]) for name in ("index", "owner"))
    split = np.repeat(range(len(SPLITS)), [len(fed.rows(split).index) for split in SPLITS])
    used, place = np.unique(index, return_inverse=True)
    images, place = fed.x.dtype == np.uint8, place.reshape(-1)
    code, noun = _codes(fed.x, used)[place], "image" if images else "row"
    frequency = None if images else _frequencies(fed.x, used)[place]
    trained = agreement(code[split == 0], owner[split == 0])
    chance = None if frequency is None else Chance(trained, np.bincount(owner, frequency, fed.clients))
    warnings = shared_rows(code, owner, fed.names, chance, noun)
    for number in (1, 2):
        warnings += _leaks(code, owner, split == 0, split == number, frequency, fed.names, noun, SPLITS[number])
    if fed.task == "classification":
        warnings += _other_labels(code, owner, fed.y[index], frequency, fed.names, noun)
    return warnings


class Chance(NamedTuple):
    """Two estimates of how many rows are equal by chance; the larger one counts."""

    agreement: float  # the share of pairs of rows of one client that are equal
    alike: np.ndarray  # [clients]: how many rows of a client one other row would equal if columns were independent


def agreement(code: np.ndarray, owner: np.ndarray) -> float:
    """Return the share of pairs of rows of one client that are equal; `code` [n] is equal for equal rows."""
    times, size = (np.unique(a, return_counts=True)[1].astype(float) for a in (_at_owner(code, owner), owner))
    return float((times * (times - 1)).sum() / max(1.0, (size * (size - 1)).sum()))


def _at_owner(code: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return numbers that are equal for equal rows of one client."""
    return owner * (code.max(initial=0) + 1) + code


def shared_rows(
    code: np.ndarray, owner: np.ndarray, names: Sequence[str], chance: Chance | None, noun: str = "row"
) -> list[str]:
    """Return a warning if clients have more identical rows in common than chance explains.

    `code` [n] is equal for equal rows, `owner` [n] their client. If `chance` is None, every identical row counts.
    """
    order = np.lexsort((owner, code))
    sorted_owner, edges = owner[order], np.flatnonzero(np.diff(code[order], prepend=-1, append=-1))
    repeated = np.flatnonzero(np.diff(edges) > 1)
    shared: Counter[tuple[int, int]] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for start, end in zip(edges[repeated].tolist(), edges[repeated + 1].tolist(), strict=True):
        counts = sorted(Counter(sorted_owner[start:end].tolist()).items())
        for (a, n), (b, m) in combinations(counts[:HOLDERS], 2):
            shared[a, b] += min(n, m)
            pairs[a, b] += n * m
    size = np.bincount(owner, minlength=len(names)).astype(float)
    named_pairs = []
    for (a, b), count in shared.most_common():
        usual = 0.0
        if chance is not None:
            alike = chance.alike
            usual = max(chance.agreement * size[a] * size[b], alike[a] * size[b], alike[b] * size[a])
        if pairs[a, b] > usual + 4 * np.sqrt(usual):
            named_pairs.append(f"'{names[a]}' and '{names[b]}' ({count})")
    if not named_pairs:
        return []
    more = f" and {len(named_pairs) - NAMED} more pairs" if len(named_pairs) > NAMED else ""
    return [
        f"Clients share identical {noun}s: {', '.join(named_pairs[:NAMED])}{more}. If {_article(noun)} is in the data "
        f"twice, keep it at one client; otherwise a client may be tested on {noun}s that another has learned from."
    ]


def repeated_rows(code: np.ndarray, owner: np.ndarray, frequency: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return a warning if more rows of a table occur again at the same client than chance explains.

    Chance is the larger one of `frequency` [n], how frequent each row would be if columns were independent, and the
    share of pairs of rows of different clients that are equal.
    """
    size, times = np.bincount(owner, minlength=len(names)).astype(float), np.bincount(code).astype(float)
    _, place, count = np.unique(_at_owner(code, owner), return_inverse=True, return_counts=True)
    apart = (times**2).sum() - (count.astype(float) ** 2).sum()
    elsewhere = apart / max(1.0, len(code) ** 2 - (size**2).sum())
    found = count[place.reshape(-1)] > 1
    expected = np.minimum(1, (size[owner] - 1) * np.maximum(frequency, elsewhere)).sum()
    if found.sum() <= expected + 4 * np.sqrt(expected):
        return []
    return [
        f"{_counted(int(found.sum()), 'row')} identical to another one of the same client: "
        f"{_holders(owner[found], names)}. One may train and the other test, so keep each row once."
    ]


def _leaks(
    code: np.ndarray,
    owner: np.ndarray,
    trained: np.ndarray,
    held: np.ndarray,
    frequency: np.ndarray | None,
    names: Sequence[str],
    noun: str,
    split: str,
) -> list[str]:
    """Return a warning if rows that a client holds out are among those that it learns from, more often than by chance.

    `trained` and `held` mark rows. Chance is estimated as in `shared_rows`, at every client from its training rows.
    """
    here = _at_owner(code, owner)
    found = np.isin(here[held], here[trained])
    expected = 0.0
    if frequency is not None and found.any():
        size = np.bincount(owner[trained], minlength=len(names)).astype(float)
        equal = np.maximum(frequency[held], agreement(code[trained], owner[trained]))
        expected = np.minimum(1, size[owner[held]] * equal).sum()
    if found.sum() <= expected + 4 * np.sqrt(expected):
        return []
    word = SPLIT_WORDS[split]
    return [
        f"{_counted(int(found.sum()), f'{word} {noun}')} also among the training {noun}s of the same client: "
        f"{_holders(owner[held][found], names)}. Keep each in one of the two, or the scores are too good to be true."
    ]


def _other_labels(
    code: np.ndarray,
    owner: np.ndarray,
    y: np.ndarray,
    frequency: np.ndarray | None,
    names: Sequence[str],
    noun: str,
) -> list[str]:
    """Return a warning if the same row has several labels, unless independent columns explain that rows are equal."""
    if frequency is not None:
        times, usual = np.bincount(code), len(code) * frequency.sum() / 2
        if (times * (times - 1.0)).sum() / 2 <= usual + 4 * np.sqrt(usual):
            return []
    labels = y.max() + 1
    ambiguous = np.bincount(np.unique(code * labels + y) // labels) > 1
    if not ambiguous.any():
        return []
    held = ambiguous[code]
    one_each = np.unique(_at_owner(code[held], owner[held])) // (code[held].max() + 1)
    return [
        f"{_counted(int(ambiguous.sum()), f'different {noun}')} in the data with more than one label: "
        f"{_holders(one_each, names)}. Check the labels."
    ]


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun} is" if count == 1 else f"{count} {noun}s are"


def _holders(owner: np.ndarray, names: Sequence[str]) -> str:
    """Return the clients that own most of some rows, with the number of rows of each."""
    most = Counter(owner.tolist()).most_common()
    more = f" and {len(most) - NAMED} more clients" if len(most) > NAMED else ""
    return ", ".join(f"'{names[client]}' ({count})" for client, count in most[:NAMED]) + more


def _codes(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a number for each of some rows of x [n, ...], equal for rows of the same bytes."""
    digests = np.empty((len(rows), 2), np.uint64)
    for digest, row in zip(digests, rows.tolist(), strict=True):
        values = x[row] if x.dtype == np.uint8 else x[row] + 0  # −0 becomes 0
        digest[...] = np.frombuffer(hashlib.blake2b(values.tobytes(), digest_size=16).digest(), np.uint64)
    order = np.lexsort(digests.T)
    first = np.r_[True, (np.diff(digests[order], axis=0) != 0).any(1)]
    code = np.empty(len(rows), np.int64)
    code[order] = np.cumsum(first[: len(rows)]) - 1
    return code


def _frequencies(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return how frequent each row would be if columns were independent; 0 for rows that are no table or too many."""
    if x.ndim != 2 or len(rows) * x.shape[1] > MOST_CELLS:
        return np.zeros(len(rows))
    frequency = np.ones(len(rows))
    for column in range(x.shape[1]):
        _, value, times = np.unique(x[rows, column], return_inverse=True, return_counts=True)
        frequency *= times[value.reshape(-1)] / len(rows)
    return frequency
