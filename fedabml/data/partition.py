"""Dividing a dataset among clients: at most S classes each, by Dirichlet draws (two ways), at random, or by owners.

Every draw takes the labels of both splits, int64 [n], and returns (training rows, test rows), both numbered from 0.
Every sample has exactly one owner.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments import checks_arguments, whole
from ..errors import InputError, nearest
from ..files.sealed import write_json
from .arrays import Checked, as_array, large_enough
from .federation import Federation
from .rows import BY_CLASS, DIRICHLET, DIRICHLET_CLASSES, IID, Rows, generator, shuffled
from .sources import Dataset

KINDS = ("classes", "dirichlet", "dirichlet-classes", "dirichlet-clients", "iid", "natural")
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
    _check_clients(clients, len(y_train))
    classes = int(max(np.max(y_train), np.max(y_test, initial=0))) + 1
    slots = clients * whole(classes_per_client, "classes_per_client")
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
    deal = _deal_distinct if distinct else _deal
    hands = deal(shards, clients, classes_per_client, rng)
    return _cut(y_train, hands, rng, "training"), _cut(y_test, hands, rng, "test")


def dirichlet_classes(
    y_train: np.ndarray, y_test: np.ndarray, clients: int, alpha: float, seed: int, min_samples: int = 2
) -> tuple[Rows, Rows]:
    """Divide each class k by its own proportions p_k ~ Dirichlet(alpha, ..., alpha) over the clients.

    This is the usual draw (Yurochkin et al. 2019; Hsu et al. 2019; PFLlib and FedLab have it). A small alpha gives few
    classes and very unequal sizes, a large one equal shares. Both splits have the same proportions. All proportions are
    redrawn, at most `REDRAWS` times, until every client has `min_samples` training samples.
    """
    classes = _check_dirichlet(y_train, y_test, clients, alpha, min_samples)
    rng, held = generator(seed, DIRICHLET_CLASSES), np.bincount(y_train, minlength=classes)
    for _ in range(REDRAWS):
        share = rng.dirichlet(np.full(clients, alpha), classes).T
        if _dealt(share, held).sum(1).min() >= min_samples:
            train = Rows.by_owner(_proportional(y_train, share, rng), clients)
            return train, Rows.by_owner(_proportional(y_test, share, rng), clients)
    raise _no_draw(alpha, clients, min_samples)


def dirichlet_clients(
    y_train: np.ndarray, y_test: np.ndarray, clients: int, alpha: float, seed: int, min_samples: int = 2
) -> tuple[Rows, Rows]:
    """Divide the classes by proportions that each client draws: few classes each for small alpha, sizes near equal.

    Client i draws proportions q_i ~ Dirichlet(alpha) over the classes. Class k is divided among the clients in
    proportion to q_i(k), the same in both splits. Redraws are those of `dirichlet_classes`.
    """
    classes = _check_dirichlet(y_train, y_test, clients, alpha, min_samples)
    rng = generator(seed, DIRICHLET)
    for _ in range(REDRAWS):
        q = rng.dirichlet(np.full(classes, alpha), clients)
        if not (q.sum(0) > 0).all():  # tiny alpha: a class that nobody wants
            continue
        share = q / q.sum(0)
        train = Rows.by_owner(_proportional(y_train, share, rng), clients)
        if train.counts.min() >= min_samples:
            return train, Rows.by_owner(_proportional(y_test, share, rng), clients)
    raise _no_draw(alpha, clients, min_samples)


def _check_dirichlet(y_train: np.ndarray, y_test: np.ndarray, clients: int, alpha: float, min_samples: int) -> int:
    """Refuse what no draw can satisfy; return the number of classes."""
    _check_clients(clients, len(y_train), min_samples)
    if not (alpha > 0 and np.isfinite(alpha)):
        raise InputError(f"alpha is {alpha}; a Dirichlet distribution needs a finite number above 0.")
    return int(max(np.max(y_train), np.max(y_test, initial=0))) + 1


def _no_draw(alpha: float, clients: int, min_samples: int) -> InputError:
    return InputError(
        f"{REDRAWS} draws of Dirichlet({alpha}) for {clients} clients each left someone with fewer than {min_samples} "
        f"training samples. Raise alpha, take fewer clients, or lower min_samples."
    )


DRAWS = {"dirichlet-classes": dirichlet_classes, "dirichlet-clients": dirichlet_clients}


def iid(y_train: np.ndarray, y_test: np.ndarray, clients: int, seed: int) -> tuple[Rows, Rows]:
    """Give every client an equal share of both splits, drawn at random."""
    _check_clients(clients, len(y_train))
    rng = generator(seed, IID)

    def part(n: int) -> Rows:
        owner = np.empty(n, np.int64)
        owner[shuffled(n, rng)] = np.arange(n) % clients
        return Rows.by_owner(owner, clients)

    return part(len(y_train)), part(len(y_test))


def natural(groups_train: Groups, groups_test: Groups = ()) -> tuple[Rows, Rows, tuple[str, ...]]:
    """Give every sample to its owner: return (training rows, test rows, names of the clients in sorted order)."""
    owners, train = np.unique(np.asarray(groups_train), return_inverse=True)
    known = {owner: i for i, owner in enumerate(owners.tolist())}
    strangers = [group for group in np.asarray(groups_test).tolist() if group not in known]
    if strangers:
        raise InputError(
            f"Client '{strangers[0]}' has test samples but no training sample. Give it some, or leave it out."
        )
    test = np.array([known[group] for group in np.asarray(groups_test).tolist()], np.int64)
    rows = Rows.by_owner(train.reshape(-1), len(owners)), Rows.by_owner(test, len(owners))
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
    """Divide a dataset among clients. `partition` is one of `KINDS`.

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
    names: tuple[str, ...] | None = None
    partition = "dirichlet-classes" if partition == "dirichlet" else partition
    kind: dict[str, Any] = {"kind": partition}
    if partition == "classes":
        kind |= {"classes_per_client": int(classes_per_client), "distinct": bool(distinct)}
        train, test = by_class(y_train, y_test, clients, classes_per_client, seed, distinct)
    elif partition in DRAWS:
        kind |= {"alpha": float(alpha), "min_samples": int(min_samples)}
        train, test = DRAWS[partition](y_train, y_test, clients, float(alpha), seed, min_samples)
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
        raise InputError(f"There is no partition called '{partition}'.{nearest(partition, KINDS)}")
    names = names or tuple(f"client-{i}" for i in range(len(train)))
    kept = large_enough(train.counts.tolist(), names, drop_small)
    train, test = train.select(kept), Rows(test.index + len(y_train), test.offsets).select(kept)
    rows, names = (train, Rows.empty(len(train)), test), tuple(names[i] for i in kept)
    checked = Checked(*dataset.samples, rows, "classification", dataset.classes, names)
    manifest = {"partition": kind, "seed": int(seed), "counts": {}}
    return Federation.assemble(checked, dataset=dataset.name, manifest=manifest)


@checks_arguments
def save_manifest(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Write seed, parameters, rows, label counts and hash of a federation as JSON."""
    write_json(path, federation.manifest_rows(), indent=None)


def _deal(shards: np.ndarray, clients: int, hand: int, rng: np.random.Generator) -> np.ndarray:
    """Return the class of every shard of every client, int [N, S]: the deck of `shards` [K] shuffled and cut."""
    deck = np.repeat(np.arange(len(shards)), shards)
    return deck[shuffled(len(deck), rng)].reshape(clients, hand)


def _deal_distinct(shards: np.ndarray, clients: int, hand: int, rng: np.random.Generator) -> np.ndarray:
    """Deal as `_deal` does, but no class twice in a hand, in one pass that cannot fail.

    A class with as many shards left as there are hands must be in this one; the others are drawn by weight. So no class
    ever has more shards than hands left, and since S shards per hand remain, at least S classes always do.
    """
    left = shards.copy()
    hands = np.empty((clients, hand), np.int64)
    for i in range(clients):
        # log(u)/w ranks like a weighted draw without replacement (Efraimidis and Spirakis 2006)
        with np.errstate(divide="ignore"):
            rank = np.where(left > 0, np.log(1 - rng.random(len(left))) / left, -np.inf)
        rank[left == clients - i] = np.inf
        hands[i] = np.argsort(-rank, kind="stable")[:hand]
        left[hands[i]] -= 1
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


def _bounds(share: np.ndarray, held: int) -> np.ndarray:
    """Return where each client's part of a class with `held` samples ends, but for the last client's."""
    return np.rint(np.cumsum(share)[:-1] * held).astype(np.int64)


def _dealt(share: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Count the samples that `_proportional` would give each client of each class, int [N, K]."""
    return np.stack([np.diff(_bounds(own, n), prepend=0, append=n) for own, n in zip(share.T, held, strict=True)], 1)


def _proportional(y: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the owner of every sample, int64 [n], class k divided by the proportions `share[:, k]`."""
    owner = np.empty(len(y), np.int64)
    for c in range(share.shape[1]):
        samples = np.flatnonzero(y == c)
        bounds = _bounds(share[:, c], len(samples))
        owner[samples[shuffled(len(samples), rng)]] = np.searchsorted(bounds, np.arange(len(samples)), side="right")
    return owner


def _check_clients(clients: int, samples: int, least: int = 1) -> None:
    if whole(clients, "The number of clients") * whole(least, "min_samples", 0) > samples:
        raise InputError(
            f"{samples} training samples cannot give each of {clients} clients at least {least}. Take fewer clients."
        )
