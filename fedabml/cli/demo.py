"""`fedabml demo`: train and compare three algorithms on embedded data, in about a minute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..evaluation.measures import COMPARED, MEASURES
from ..files.formats import size
from ..runs.config import RunConfig
from .console import number, print_line, table
from .options import command
from .train import execute

if TYPE_CHECKING:
    import numpy as np

    from ..data import Federation
    from ..runs.posterior import Posterior
    from ..runs.train import Run

# The setting of the demo; docs/guide.md explains how the federation was chosen.
COMMON: dict[str, Any] = {
    "dataset": "digits-few", "clients": 40, "classes_per_client": 5, "model": "mlp",
    "rounds": 40, "participation": 0.25, "eval_every": 5, "seed": 0,
}  # fmt: skip
# The step sizes are the best of a grid on held-out training data: lr .01 to .3, personal_lr .003 to .1 or lr.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedabml": {"lr": 0.3, "personal_lr": 0.1},
    "fedavg-ft": {"lr": 0.3, "personal_lr": 0.3},
    "local": {"lr": 0.1, "personal_lr": 0.1},
}
BINS = 12  # of the entropies
MARK = "demo.txt"  # marks a folder that the demo made and may replace


@command()
def demo(*, out: Path = Path("runs/demo"), quiet: bool = False) -> None:
    """Train FedABML, FedAvg with fine-tuning, and every client alone on embedded data, and compare them.

    The data are handwritten digits of 40 clients, each with at most five digits and 18 samples. Each algorithm trains
    for 40 rounds of 10 clients. Then every client gets its own model, scored on the client's own test digits and on
    digits that it never saw. The demo needs no network.

    Flags:
        out: Folder to write. A folder of an earlier demo is replaced.
    """
    from ..files.paths import folder_lock
    from ..files.sealed import write_json
    from ..report import write

    with folder_lock(out):
        prepare_folder(out)
        runs = {}
        for name, hyper in ALGORITHMS.items():
            runs[name] = execute(RunConfig(**COMMON, algorithm=name, hyper=hyper), out / name, quiet=quiet, label=name)
        fed = RunConfig(**COMMON).federation()
        unseen = {name: on_unseen(run, fed) for name, run in runs.items() if name != "local"}  # alone: no prior
        for name, scores in unseen.items():
            write_json(out / name / "unseen.json", scores)
        title = "Few digits: FedABML, FedAvg and training alone"
        page = write([out / name for name in runs], out / "report.html", title)
    if quiet:
        return
    summaries = [run.summary for run in runs.values()]
    rows = [(MEASURES[key].name, *(number(s[key]) for s in summaries)) for key in COMPARED["classification"]]
    rows.append(("traffic per client and round", *(size(s["bytes_up"] + s["bytes_down"]) for s in summaries)))
    rows.append(("seconds", *(f"{s['seconds']:.1f}" for s in summaries)))
    for i, label in enumerate(("entropy, own test digits", "entropy, digits never seen")):
        rows.append((label, *(number(unseen[name]["entropy"][i]) if name in unseen else "–" for name in runs)))
    table(("", *runs), rows, title="Every client's own model, on its own test digits", numbers=True)
    print_line(f"report   {page}")
    print_line(f"next     fedabml personalize {out / 'fedabml'} --data CLIENT.npz; fedabml train --help")


def prepare_folder(out: Path) -> None:
    """Remove the files of an earlier demo from the demo's folder, and refuse a folder with other files."""
    from ..files.paths import write

    if any(not file.name.startswith(".") for file in out.iterdir()) and not (out / MARK).is_file():
        raise InputError(f"'{out}' holds files that the demo did not make. Give another folder with --out.")
    write(out / MARK, "Made by `fedabml demo`, which replaces this folder's runs when it is called again.\n")
    for name in ALGORITHMS:
        if (out / name / "config.json").is_file():
            shutil.rmtree(out / name)
    (out / "report.html").unlink(missing_ok=True)


def on_unseen(run: Run, fed: Federation) -> dict[str, Any]:
    """Compare the predictions of every client's model for its own test digits and for digits that it never saw.

    Returns what `fedabml.report.unseen` draws: entropies of all clients, and the first client's predictions for the
    first test digit of every class.
    """
    import numpy as np

    from ..evaluation.predictions import Prediction
    from ..experiments.paper.outside import auroc

    def predict(posterior: Posterior, rows: np.ndarray) -> Prediction:
        prediction = posterior.predict(fed.x[rows])
        assert isinstance(prediction, Prediction)
        return prediction

    test, entropies = fed.test.index, []
    training = [fed.train[client] for client in range(fed.clients)]
    posteriors = [run.prior.personalize(fed.x[rows], fed.y[rows]) for rows in training]
    for client, posterior in enumerate(posteriors):
        unseen = test[~np.isin(fed.y[test], fed.y[training[client]])]
        entropies.append([predict(posterior, rows).entropy for rows in (fed.test[client], unseen)])
    own, other = (np.concatenate(parts) for parts in zip(*entropies, strict=True))
    edges = np.linspace(0, np.log(fed.classes), BINS + 1)
    classes = np.unique(fed.y[training[0]])
    examples = np.array([test[fed.y[test] == c][0] for c in range(fed.classes)])
    prediction = predict(posteriors[0], examples)
    samples = [
        {
            "pixels": (fed.x[row, 0] / fed.x.max()).round(2).tolist(), "label": str(fed.y[row]),
            "own": bool(fed.y[row] in classes), "answer": str(answer), "entropy": float(entropy),
        }
        for row, answer, entropy in zip(examples, prediction.label, prediction.entropy, strict=True)
    ]  # fmt: skip
    return {
        "own": np.histogram(own, edges)[0].tolist(), "unseen": np.histogram(other, edges)[0].tolist(),
        "edges": edges.tolist(), "entropy": [float(own.mean()), float(other.mean())], "auroc": auroc(own, other),
        "client": fed.names[0], "classes": ", ".join(map(str, classes)), "samples": samples,
    }  # fmt: skip
