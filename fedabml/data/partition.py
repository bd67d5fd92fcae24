"""Dividing a dataset among clients: at most S classes each, by Dirichlet draws (two ways), at random, or by owners.

Every draw takes the labels of both splits, int64 [n], and returns (training rows, test rows), both numbered from 0.
Every sample has exactly one owner.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments import checked_integer, checks_arguments
from ..errors import InputError, nearest
from ..files.sealed import write_json
from .arrays import as_array, large_enough
from .federation import Federation
from .rows import BY_CLASS, DIRICHLET, DIRICHLET_CLASSES, IID, Rows, generator, shuffled
from .sources import Dataset

PARTITION_KINDS = ("classes", "dirichlet", "dirichlet-classes", "dirichlet-clients", "iid", "natural")
REDRAWS = 1000

Groups = Sequence[Any] | np.ndarray
"""The owner of every sample, a number or a word."""


def by_class(
    y_train: np.ndarray, y_test: np.ndarray, clients: int, classes_per_client: int, seed: int, distinct: bool = False
) -> tuple[Rows, Rows]:
    """Give every client at most S = `classes_per_client` classes.

    With N clients and K classes, every class is cut into N·S/K shards. (Where that is not whole, each class gets the
    floor and the rest is spread at random.) The list of classes, each repeated that often, is shuffled and cut into N
    hands of S. A client gets one shard of each class in its hand, in both splits. A class may come twice in a hand
    unless `distinct`.
    """
    classes = _check_clients(y_train, y_test, clients)
    slots = clients * checked_integer(classes_per_client, "classes_per_client")
    if classes_per_client > classes:
        raise InputError(f"classes_per_client is {classes_per_client}, but there are only {classes} classes.")
    if slots < classes:
        raise InputError(
            f"{clients} clients with {classes_per_client} classes each have {slots} places, fewer than the {classes} "
            f"classes, so some classes would be left out. Take more clients or more classes per client."
        )
    rng = generator(seed, BY_CLASS)
    shards = np.full(classes, slots // classes)
    shards[shuffled(classes, rng)[: slots % classes]] += 1
    if distinct:
        hands = _deal_distinct(shards, clients, classes_per_client, rng)
    else:
        hands = np.repeat(np.arange(classes), shards)[shuffled(slots, rng)].reshape(clients, classes_per_client)
    return _cut(y_train, hands, rng, "training"), _cut(y_test, hands, rng, "test")


def dirichlet(
    y_train: np.ndarray,
    y_test: np.ndarray,
    clients: int,
    alpha: float,
    seed: int,
    min_samples: int = 2,
    by: str = "classes",
) -> tuple[Rows, Rows]:
    """Divide each class k by Dirichlet proportions over the clients, the same in both splits.

    `by` "classes" is the usual draw (Yurochkin et al. 2019; Hsu et al. 2019; PFLlib and FedLab have it): every class
    draws its proportions over the clients, p_k ~ Dirichlet(alpha, ..., alpha). A small alpha gives few classes and very
    unequal sizes, a large one equal shares. `by` "clients": client i draws q_i ~ Dirichlet(alpha) over the classes, and
    class k is divided in proportion to q_i(k): few classes each for small alpha, sizes near equal. All proportions are
    redrawn, at most `REDRAWS` times, until every client has `min_samples` training samples.
    """
    classes = _check_clients(y_train, y_test, clients, min_samples)
    if not (alpha > 0 and np.isfinite(alpha)):
        raise InputError(f"alpha is {alpha}; a Dirichlet distribution needs a finite number above 0.")
    rng = generator(seed, DIRICHLET_CLASSES if by == "classes" else DIRICHLET)
    for _ in range(REDRAWS):
        if by == "classes":
            proportions = rng.dirichlet(np.full(clients, alpha), classes).T
            if _sizes(y_train, proportions).min() < min_samples:  # known before the samples are shuffled
                continue
        else:
            proportions = rng.dirichlet(np.full(classes, alpha), clients)
            if not (proportions.sum(0) > 0).all():  # tiny alpha: a class that nobody wants
                continue
            proportions /= proportions.sum(0)
        train = _proportional(y_train, proportions, rng)
        if train.counts.min() >= min_samples:
            return train, _proportional(y_test, proportions, rng)
    raise InputError(
        f"{REDRAWS} draws of Dirichlet({alpha}) for {clients} clients each left someone with fewer than {min_samples} "
        f"training samples. Raise alpha, take fewer clients, or lower min_samples."
    )


def iid(y_train: np.ndarray, y_test: np.ndarray, clients: int, seed: int) -> tuple[Rows, Rows]:
    """Give every client an equal share of both splits, drawn at random."""
    _check_clients(y_train, y_test, clients)
    rng = generator(seed, IID)

    def part(n: int) -> Rows:
        owner = np.empty(n, np.int64)
        owner[shuffled(n, rng)] = np.arange(n) % clients
        return Rows.by_owner(owner, clients)

    return part(len(y_train)), part(len(y_test))


def natural(groups_train: Groups, groups_test: Groups = ()) -> tuple[Rows, Rows, tuple[str, ...]]:
    """Give every sample to its owner: return (training rows, test rows, names of the clients in sorted order)."""
    owners, train = np.unique(np.asarray(groups_train), return_inverse=True)
    number = {owner: i for i, owner in enumerate(owners.tolist())}
    test = np.asarray(groups_test).tolist()
    if strangers := [group for group in test if group not in number]:
        raise InputError(
            f"Client '{strangers[0]}' has test samples but no training sample. Give it some, or leave it out."
        )
    test_owner = np.array([number[group] for group in test], np.int64)
    rows = Rows.by_owner(train.reshape(-1), len(owners)), Rows.by_owner(test_owner, len(owners))
    return *rows, tuple(map(str, owners.tolist()))


@checks_arguments
def federate(
    dataset: Dataset,
    *,
    partition: str = "classes",
    clients: int = 100,
    classes_per_client: int = 2,
    alpha: float = 0.5,
    distinct: bool = False,
    min_samples: int = 2,
    groups: tuple[Groups, Groups] | None = None,
    drop_small: bool = False,
    seed: int = 0,
) -> Federation:
    """Divide a dataset among clients. `partition` is one of `PARTITION_KINDS`.

    - classes: at most `classes_per_client` classes each; with `distinct`, never the same class twice.
    - dirichlet, short for dirichlet-classes: the usual draw with `alpha`; every client has `min_samples` or more.
    - dirichlet-clients: the same with clients of nearly equal sizes.
    - iid: equal shares at random.
    - natural: `groups` is (owner of every training sample, owner of every test sample).

    The samples are numbered through: the dataset's training samples first, then its test samples. `drop_small` leaves
    out clients with fewer than two training samples, which are an InputError otherwise.
    """
    y_train, y_test = dataset.y_train.astype(np.int64), dataset.y_test.astype(np.int64)
    if not len(y_train):
        raise InputError(
            f"{dataset.name} has no training samples, only a test split: it cannot be divided among clients."
        )
    names: Sequence[str] = ()
    parameters: dict[str, Any] = {}
    if partition == "classes":
        parameters = {"classes_per_client": int(classes_per_client), "distinct": bool(distinct)}
        train, test = by_class(y_train, y_test, clients, classes_per_client, seed, distinct)
    elif partition in ("dirichlet", "dirichlet-classes", "dirichlet-clients"):
        by = partition.partition("-")[2] or "classes"
        partition, parameters = f"dirichlet-{by}", {"alpha": float(alpha), "min_samples": int(min_samples)}
        train, test = dirichlet(y_train, y_test, clients, float(alpha), seed, min_samples, by)
    elif partition == "iid":
        train, test = iid(y_train, y_test, clients, seed)
    elif partition == "natural":
        owners = [as_array(part, "groups") for part in groups] if isinstance(groups, tuple | list) else []
        if [part.shape for part in owners] != [y_train.shape, y_test.shape]:
            raise InputError(
                "A natural partition needs groups=(owner of every training sample, owner of every test one)."
            )
        train, test, names = natural(*owners)
    else:
        raise InputError(f"There is no partition called '{partition}'.{nearest(partition, PARTITION_KINDS)}")
    names = names or [f"client-{i}" for i in range(len(train))]
    kept = large_enough(train.counts.tolist(), names, drop_small)
    rows = [train, Rows.empty(len(train)), Rows(test.index + len(y_train), test.offsets)]
    return Federation.assemble(
        *dataset.samples,
        [part.select(kept) for part in rows],
        [names[i] for i in kept],
        dataset.classes,
        dataset=dataset.name,
        manifest={"partition": {"kind": partition, **parameters}, "seed": int(seed), "counts": {}},
    )


@checks_arguments
def save_manifest(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Write seed, parameters, rows, label counts and hash of a federation as JSON."""
    write_json(path, federation.manifest_rows(), indent=None)


def _deal_distinct(shards: np.ndarray, clients: int, hand: int, rng: np.random.Generator) -> np.ndarray:
    """Return the classes of every client's hand, int [N, S], none of them twice, in one pass that cannot fail.

    A class with as many `shards` [K] left as there are hands must be in this one; the others are drawn by weight. So no
    class ever has more shards than hands left, and since S shards per hand remain, at least S classes always do.
    """
    shards_left = shards.copy()
    hands = np.empty((clients, hand), np.int64)
    for i in range(clients):
        # log(u)/w ranks like a weighted draw without replacement (Efraimidis and Spirakis 2006)
        with np.errstate(divide="ignore"):
            rank = np.where(shards_left > 0, np.log(1 - rng.random(len(shards_left))) / shards_left, -np.inf)
        rank[shards_left == clients - i] = np.inf
        hands[i] = np.argsort(-rank, kind="stable")[:hand]
        shards_left[hands[i]] -= 1
    return hands[shuffled(clients, rng)]


def _cut(y: np.ndarray, hands: np.ndarray, rng: np.random.Generator, split: str) -> Rows:
    """Divide each class evenly among the shards dealt, in random order."""
    clients, hand = hands.shape
    owner = np.empty(len(y), np.int64)
    for c in range(hands.max() + 1 if len(y) else 0):
        holders = np.flatnonzero(hands.reshape(-1) == c) // hand
        samples = np.flatnonzero(y == c)
        if len(samples) < len(holders):
            raise InputError(
                f"Class {c} has {len(samples)} {split} samples, too few for the {len(holders)} shards it must be cut "
                f"into. Take fewer clients or fewer classes per client."
            )
        owner[samples[shuffled(len(samples), rng)]] = np.sort(holders[np.arange(len(samples)) % len(holders)])
    return Rows.by_owner(owner, clients)


def _ends(proportions: np.ndarray, samples: int) -> np.ndarray:
    """Return where each client's part of a class's `samples` ends, for its shares [N] of the class."""
    return np.append(np.rint(np.cumsum(proportions)[:-1] * samples).astype(np.int64), samples)


def _sizes(y: np.ndarray, proportions: np.ndarray) -> np.ndarray:
    """Count the samples that `_proportional` would give to each client, int [N]."""
    counts = np.bincount(y, minlength=proportions.shape[1])
    ends = [_ends(part, n) for part, n in zip(proportions.T, counts, strict=True)]
    return np.diff(ends, prepend=0).sum(0)


def _proportional(y: np.ndarray, proportions: np.ndarray, rng: np.random.Generator) -> Rows:
    """Divide every class k at random by the proportions `proportions[:, k]`."""
    owner = np.empty(len(y), np.int64)
    for c, part in enumerate(proportions.T):
        samples = np.flatnonzero(y == c)
        ends = _ends(part, len(samples))
        owner[samples[shuffled(len(samples), rng)]] = np.searchsorted(ends, np.arange(len(samples)), side="right")
    return Rows.by_owner(owner, len(proportions))


def _check_clients(y_train: np.ndarray, y_test: np.ndarray, clients: int, least: int = 1) -> int:
    """Refuse more clients than can have `least` training samples each; return the number of classes."""
    if checked_integer(clients, "The number of clients") * checked_integer(least, "min_samples", 0) > len(y_train):
        raise InputError(
            f"{len(y_train)} training samples cannot give each of {clients} clients at least {least}. Take fewer "
            "clients."
        )
    return int(max(np.max(y_train), np.max(y_test, initial=0))) + 1
