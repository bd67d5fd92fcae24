"""`fedabml demo`: the main job on embedded data, in about a minute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import RunConfig
from ..errors import InputError
from .console import number, say, size, table
from .train import execute

if TYPE_CHECKING:
    from ..data import Federation
    from ..run import Run

# What the demo trains; docs/guide.md has how the federation was chosen.
COMMON: dict[str, Any] = {
    "dataset": "digits-few", "clients": 40, "classes_per_client": 5, "model": "mlp",
    "rounds": 40, "participation": 0.25, "eval_every": 5, "seed": 0,
}  # fmt: skip
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedabml": {"lr": 0.4, "nu0": -3.0, "label_alpha": 0.01, "personal_lr": 0.1},
    "fedavg-ft": {"lr": 0.2},
}
MARK = "demo.txt"  # says that a folder was made by the demo, and may be made again
ROWS = (
    ("accuracy", "accuracy"),
    ("accuracy_worst_decile", "accuracy, worst tenth"),
    ("nll", "negative log likelihood"),
    ("ece", "calibration error"),
    ("brier", "Brier score"),
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write; one made by the demo before is replaced.")] = Path(
        "runs/demo"
    ),
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar=" ", help="No progress and no table; errors only.")
    ] = False,
) -> None:
    """Train FedABML and FedAvg with fine-tuning on embedded data, and compare them.

    Handwritten digits lie with 20 clients that have two digits each. Both algorithms train for 40 rounds of 5 clients,
    then every client gets its own model and is scored on its own test digits. It needs no network.
    """
    from ..files import folder_lock
    from ..report import write

    with folder_lock(out):
        make_room(out)
        runs = {}
        for name, hyper in ALGORITHMS.items():
            runs[name] = execute(RunConfig(**COMMON, algorithm=name, hyper=hyper), out / name, quiet=quiet, label=name)
        pages = [out / name for name in runs]
        page = write(pages, out / "report.html", "FedABML and FedAvg with fine-tuning on digits")
    if not quiet:
        compare(runs)
        stranger(runs["fedabml"], RunConfig(**COMMON).federation())
        say(f"report   {page}")
        say(f"next     fedabml personalize {out / 'fedabml'} --data CLIENT.npz; fedabml train --help")


def make_room(out: Path) -> None:
    """An empty folder with the demo's mark: a former demo's own files are removed, anything else is never touched."""
    from ..files import write

    if any(not file.name.startswith(".") for file in out.iterdir()) and not (out / MARK).is_file():
        raise InputError(f"'{out}' holds files that the demo did not make. Give another folder with --out.")
    write(out / MARK, "Made by `fedabml demo`, which replaces this folder's runs when it is called again.\n")
    for name in ALGORITHMS:
        if (out / name / "config.json").is_file():
            shutil.rmtree(out / name)
    (out / "report.html").unlink(missing_ok=True)


def compare(runs: dict[str, Run]) -> None:
    """The runs side by side."""
    summaries = [run.summary for run in runs.values()]
    rows = [(words, *(number(s[name]) for s in summaries)) for name, words in ROWS]
    rows.append(("traffic per client and round", *(size(s["bytes_up"] + s["bytes_down"]) for s in summaries)))
    rows.append(("seconds", *(f"{s['seconds']:.1f}" for s in summaries)))
    table(("", *runs), rows, title="Every client's own model, on its own test digits", numbers=True)


def stranger(run: Run, fed: Federation) -> None:
    """Whether a client's model knows what it has never seen: its uncertainty on its own digits and on others'."""
    import numpy as np

    from ..evaluate import Prediction

    own, test = fed.train[0], fed.test.index
    seen = np.unique(fed.y[own])
    posterior = run.prior.personalize(fed.x[own], fed.y[own])
    strange = test[~np.isin(fed.y[test], seen)]
    usual, unusual = (posterior.predict(fed.x[rows]) for rows in (fed.test[0], strange))
    assert isinstance(usual, Prediction) and isinstance(unusual, Prediction)
    say(f"{fed.names[0]} has only the digits {' and '.join(map(str, seen))}. Entropy of its model's predictions:")
    say(f"{usual.entropy.mean():.3f} on its own test digits, {unusual.entropy.mean():.3f} on digits it never saw.\n")
