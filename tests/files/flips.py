"""Random flipped bits in every kind of file that is written and read again; none may change what is used unseen.

    python -m tests.files.flips 2000            prints what became of them, and fails if one was accepted silently

A flip is *refused* if reading ends in an `InputError`, *reported* if a warning is logged (a fallback to the checkpoint
before, a history without its damaged lines), and *harmless* if what is read is what was written: a space in JSON that
became a line feed, an exponent's e that became E. Anything else is *silent*, or a *crash*.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedabml
from fedabml.data.catalogue import SOURCES
from fedabml.data.sources import _checked
from fedabml.engine import autotune
from fedabml.errors import InputError
from fedabml.experiments import paper, request
from fedabml.experiments.compare import ComparisonRequest, _recorded_refusals, page
from fedabml.experiments.ledger import Ledger
from fedabml.files import paths, sealed
from fedabml.report.read import read_layers, read_runs
from fedabml.runs.config import RunConfig, read_toml, saved_config, to_toml
from fedabml.runs.folder import Folder
from tests.cli.command import SMALL, run

OUTCOMES = ("refused", "reported", "harmless", "silent", "crash")


def plain(value: Any) -> Any:
    """Anything that a reader returns, as something that compares by content."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, plain(dict(vars(value)))
    if isinstance(value, torch.Tensor):
        return plain(value.detach().numpy())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.nn.Module):
        return plain(value.state_dict())
    if isinstance(value, dict) or hasattr(value, "keys"):
        return {str(k): plain(value[k]) for k in value.keys()}  # noqa: SIM118
    return [plain(each) for each in value] if isinstance(value, list | tuple) else repr(value)


def read_prior(path: Path) -> Any:
    prior = fedabml.load_prior(path)
    return prior.shared, prior.algorithm, prior.batch_size, prior.digest, sealed.read_tensors(path)


def read_posterior(path: Path) -> Any:
    posterior = fedabml.load_posterior(path)
    return posterior.q, posterior.offset, posterior.samples, posterior.prior, sealed.read_tensors(path)


def read_run(folder: Path) -> Any:
    (found,) = read_runs([folder])
    return found, read_layers(found.folder)


def remembered(path: Path) -> Any:
    """The remembered choices; a file that is not used counts as refused, because what it had is measured anew."""
    known = autotune._read_choices(path)
    if not known:
        raise InputError("measured anew")
    return known


def build(place: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Writes one of every kind of file; by name, the file and what reads it."""
    a_run, kept, table, search = (place / name for name in ("run", "kept", "table", "search"))
    run("train", *SMALL, "--out", a_run, "--eval-every", 1, "--quiet")
    run("train", *SMALL, "--algorithm", "ditto", "--out", kept, "--quiet")
    run("compare", *SMALL, "--algorithms", "local,fedavg-ft", "--seeds", 2, "--out", table, "--quiet")
    asked = {"algorithms": ["local"], "trials": 16, "seeds": [100], "run": RunConfig().to_dict(everything=True)}
    request.claim(search, "tune", asked, resume=False)
    request.claim(place / "toy", "reproduce", paper.Request("toy", quick=True).to_dict(), resume=False)
    data = fedabml.load("digits")
    posterior = fedabml.load_prior(a_run / "shared.safetensors").personalize(data.x_train[:30], data.y_train[:30])
    posterior.save(place / "posterior.safetensors")
    digits = Path(shutil.copy(Path(str(fedabml.data.sources.location("digits"))), place / "digits.npz"))
    sealed.write_json(place / "backends.json", {"a network": ["vmap", 2, False], "another": ["loop", 1, True]})
    tuned = paths.write(place / "tuned.toml", sealed.sealed_text(to_toml(RunConfig().to_dict(everything=True))))
    newest = {kind: sorted((kept / "checkpoints").glob(f"{kind}-*"))[-1] for kind in ("round", "kept")}
    found: dict[str, tuple[Path, Callable[[], Any]]] = {
        "prior": (a_run / "shared.safetensors", lambda: read_prior(a_run / "shared.safetensors")),
        "prior in a report": (a_run / "shared.safetensors", lambda: read_run(a_run)),
        "posterior": (place / "posterior.safetensors", lambda: read_posterior(place / "posterior.safetensors")),
        "checkpoint": (newest["round"], lambda: Folder(kept).load_latest()),
        "kept states": (newest["kept"], lambda: Folder(kept).load_latest()),
        "configuration": (a_run / "config.json", lambda: saved_config(a_run)),
        "history of a resumed run": (a_run / "metrics.jsonl", lambda: Folder(a_run)._history(3)),
        "cells": (table / "cells.jsonl", lambda: Ledger(table / "cells.jsonl").results),
        "comparison": (table / "comparison.json", lambda: ComparisonRequest.read(table)),
        "table": (table / "table.json", lambda: _recorded_refusals(table / "table.json")),
        "search": (search / "tune.json", lambda: request.read(search, "tune")),
        "reproduction": (place / "toy/reproduce.json", lambda: request.read(place / "toy", "reproduce")),
        "manifest of a comparison": (table / "manifest-0.json", lambda: page(table)),
        "tuned settings": (tuned, lambda: read_toml(tuned)),
        "backends": (place / "backends.json", lambda: remembered(place / "backends.json")),
        "dataset": (digits, lambda: _checked("digits", SOURCES["digits"], digits)),
    }
    for name in ("config.json", "summary.json", "metrics.jsonl", "clients.csv", "manifest.json"):
        found[f"{name} in a report"] = (a_run / name, lambda: read_run(a_run))
    return found


class Warnings(logging.Handler):
    """Counts the warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def flip(path: Path, read: Callable[[], Any], whole: bytes, before: Any, chance: random.Random) -> str:
    """What becomes of one flipped bit."""
    spoiled, heard = bytearray(whole), Warnings()
    spoiled[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
    path.write_bytes(spoiled)
    logging.getLogger("fedabml").addHandler(heard)
    try:
        same = plain(read()) == before
    except InputError:
        return "refused"
    except Exception as error:
        print(f"{path.name}: {type(error).__name__}: {error}")
        return "crash"
    finally:
        logging.getLogger("fedabml").removeHandler(heard)
        path.write_bytes(whole)
    return "reported" if heard.count else "harmless" if same else "silent"


def campaign(place: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """Flips so many bits, in turn in every kind of file: for each kind, how many ended how."""
    chance, kinds = random.Random(seed), build(place)
    known = {name: (path.read_bytes(), plain(read())) for name, (path, read) in kinds.items()}
    found: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    for _, name in zip(range(count), (name for _ in range(count) for name in kinds), strict=False):
        found[name][flip(*kinds[name], *known[name], chance)] += 1
    return found


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.getLogger("fedabml").propagate = False  # what is counted need not be printed
    with tempfile.TemporaryDirectory() as place:
        found = campaign(Path(place), count, seed)
    total = sum(found.values(), Counter())
    for name, outcomes in [*found.items(), ("all", total)]:
        print(f"{name:28}", *(f"{outcomes[word]:6} {word}" for word in OUTCOMES))
    sys.exit(bool(total["silent"] + total["crash"]))


if __name__ == "__main__":
    main()
