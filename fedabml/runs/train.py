"""`train`: a whole run, from a federation to a prior and scores."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..accel.process import borrowed
from ..algorithms import Algorithm, name_of
from ..arguments import checked_integer, checks_arguments, is_number
from ..data import Federation, save_manifest
from ..engine.checkpoint import Checkpoint
from ..engine.processes import World, agree, with_folder_lock
from ..engine.processes import world as processes
from ..engine.rounds import Simulation
from ..errors import InputError, nearest, shortened
from ..evaluation.scoring import SCORED_CLIENTS, Evaluation, check_rows
from ..evaluation.scoring import evaluate as score_clients
from ..files.paths import write
from ..files.sealed import digests, write_json
from ..files.sheets import frame, html_card
from ..likelihoods import Likelihood
from .config import read_config
from .folder import Folder
from .log import RunLog
from .posterior import Posterior
from .prepare import Setup, prepare, resolve_split
from .prior import Prior
from .progress import shows_progress
from .summary import client_records, clients_csv, summarise

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedabml")

# What a notebook shows of a run's summary.
CARD = (
    *("algorithm", "dataset", "model", "clients", "rounds", "seed", "split", "accuracy", "base_accuracy"),
    *("auroc_pooled", "f1_pooled", "rmse", "base_rmse", "nll", "base_nll", "ece"),
    *("prior_accuracy", "prior_nll", "seconds"),
)
# Keys that may change when a run is resumed: its length, its scoring, and what is only recorded.
PERSONAL = ("personal_epochs", "personal_lr", "predict_samples")
MAY_CHANGE = {"rounds", "eval_every", "eval_clients", "eval_all", "split", "specificity"}
MAY_CHANGE |= {"run", "command", "versions", "fedabml", "processes", "launch"}
# What decides the bits of a machine's results, but not the results: a resumed run takes over what the folder records.
EXECUTION = ("workers", "threads", "channels_last")
MAY_CHANGE |= {*EXECUTION}
MAX_THREADS = 1024  # a number above it is no machine's, and torch may fail to start so many
MAY_CHANGE |= {f"algorithm.hyper.{name}" for name in PERSONAL}


@dataclass(repr=False)
class Run:
    """A finished run: the prior, a summary of scores and costs, and one line of history per round."""

    prior: Prior
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    config: dict[str, Any]
    evaluation: Evaluation | None = None
    folder: Path | None = None
    federation: Federation | None = None

    def posterior(self, client: str | int, **options: Any) -> Posterior:
        """Make the posterior of a client of the run, by its name or number, from its training rows.

        `options` are those of `Prior.personalize`, such as `validation=0.3`. If the run was trained with validation
        rows (`--validation 0.2`, `fed.hold_out(0.2)`), any `validation` holds out the client's own, all of them: the
        prior never saw them. Otherwise `validation` is the share of the training rows to hold out. The prior was
        trained on these rows, so calibration, coverage and comparison are too favourable; train with --validation 0.2
        to hold rows out.
        """
        if self.federation is None:
            raise InputError("This run holds no data. Personalise the prior: run.prior.personalize(x, y).")
        rows = client_rows(self.federation, self.prior, client, options.get("validation", 0.0))
        held = {"validation": rows.validation, "trained_on": rows.trained_on}
        return self.prior.personalize(rows.x, rows.y, encoded=rows.encoded, **options | held)

    def __repr__(self) -> str:
        keys = ("algorithm", "dataset", "model", "clients", "rounds", "accuracy", "nll")
        return shortened(f"Run({', '.join(f'{k}={v}' for k in keys if (v := self.summary.get(k)) is not None)})")

    def _repr_html_(self) -> str:
        """Show a notebook the setting and the scores of the run, and those of its clients."""
        records = self.records() if self.federation and self.evaluation else []
        return html_card("Run", {k: self.summary.get(k) for k in CARD}, records)

    def records(self) -> list[dict[str, Any]]:
        """Return a record per client: its number, name, sizes and scores. Raises InputError without them."""
        if self.federation is None or self.evaluation is None:
            raise InputError("This run has no scores of clients: it was trained with evaluate=False.")
        return client_records(self.federation, self.evaluation, self.config["split"])

    def frame(self) -> pd.DataFrame:
        """Return the records as a DataFrame, a row per client."""
        return frame(self.records())


class ClientRows(NamedTuple):
    """A client's rows and which of them to hold out, as `Prior.personalize` takes them."""

    x: Any
    y: Any
    encoded: bool
    validation: Any  # a share, or the numbers of the rows that the prior never saw
    trained_on: bool  # whether the prior was trained on the rows held out


def client_rows(fed: Federation, prior: Prior, client: str | int, validation: Any = 0.0) -> ClientRows:
    """Return a client's training rows by its name or number; with a `validation` also its validation rows, at the end.

    These are then the ones to hold out. A client without any has a share of its training rows to hold out. The rows of
    a table come back as they stand there, because only raw columns tell what usual values of a client are.
    """
    if prior.algorithm.keeps:
        raise InputError(
            f"The clients of {name_of(prior.algorithm)} keep a state of their own, which a prior does not "
            "hold, so a posterior made here would not be theirs. `fedabml evaluate RUN` scores their models."
        )
    number_of = dict(zip(fed.names, range(fed.clients), strict=True))
    number = number_of.get(client) if isinstance(client, str) else client
    if not isinstance(client, str) and number_of.get(str(client), client) != client:
        raise InputError(f"Clients have numbers as names; give '{client}'.")
    if number is None or not 0 <= number < fed.clients:
        raise InputError(f"There is no client {client!r} in the run.{nearest(str(client), fed.names)}")
    rows, unseen = fed.train[number], fed.val[number]
    asked = not is_number(validation) or validation > 0
    if asked and len(unseen):
        validation, rows = list(range(len(rows), len(rows) + len(unseen))), np.concatenate([rows, unseen])
    trained_on = asked and not len(unseen)
    if fed.table is not None:
        return ClientRows(fed.table.iloc[rows], None, False, validation, trained_on)
    return ClientRows(fed.x[rows], fed.y[rows], True, validation, trained_on)


@checks_arguments
@shows_progress
@with_folder_lock()
@borrowed()
def train(
    fed: Federation,
    model: nn.Module | str = "mlp",
    algorithm: Algorithm | None = None,
    *,
    rounds: int = 50,
    participation: float = 0.1,
    epochs: int = 5,
    batch_size: int = 50,
    seed: int = 0,
    device: str = "auto",
    evaluate: bool = True,
    eval_every: int = 0,
    eval_clients: int | None = None,
    eval_all: bool = True,
    split: str = "auto",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    dtype: str = "float32",
    backend: str = "auto",
    chunk: int | None = None,
    compile: bool | None = None,
    likelihood: Likelihood | None = None,
    model_options: dict[str, Any] | None = None,
    pretrained: str | os.PathLike[str] | None = None,
    class_weights: str | Sequence[float] | None = None,
    train: str = "all",
    lora_rank: int = 8,
    specificity: float = 0.9,
    extra: dict[str, Any] | None = None,
    on_start: Callable[[Setup, Simulation], None] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = False,
) -> Run:
    """Train a federation, then personalise and score every client.

    `model` is a name from `fedabml.models` or any `nn.Module`, whose weights are where training starts; `pretrained`
    is a .safetensors file of initial weights. `algorithm` defaults to `FedABML()`. `class_weights` makes rows of a rare
    class count more: `balanced`, or a number per class. It shifts the predicted probabilities towards that class.

    A `model` may also be the path of a local folder of Hugging Face's (config.json and safetensors files). With
    `train="head"` only the last layer is trained, with `train="lora"` also low-rank changes of the other linear layers,
    of rank `lora_rank`: messages, prior and posteriors hold these weights only. `model_options` has the options of a
    network by name and, for every model, `output` (the name or number of the logits in what a module returns), `head`,
    `lora_alpha` and `padding`.

    With `evaluate` every client is personalised and scored at the end. With `eval_every` N, `eval_clients` clients (by
    default all, up to 10,000; the same ones every time) are scored every N rounds; without `eval_all` only these are
    scored at the end. `split` names the rows to score on: `val`, `test`, or `auto` for the validation rows if there are
    any (the test rows are then never read) and the test rows otherwise. Of two classes, `sensitivity` is scored at this
    `specificity`: the largest share of positive rows that is found while this share of negative rows, or more, causes
    no false alarm.

    With `out` the run writes a folder, with a checkpoint and a line of train.log every round. `resume=True` continues
    the run there; the result is bit-equal to that of an uninterrupted run. `compile` compiles the steps with
    torch.compile; None does so on a GPU once the first rounds show that it pays.

    `on_start(setup, simulation)` is called before the first round, `on_round(line)` after every round. `setup.notes`
    says what is worth knowing before a run; without `on_start` the notes are warnings of the logger "fedabml".
    `progress=True` shows a bar in terminals and notebooks, and plain lines elsewhere.

    Under torchrun the processes train one federation together (docs/distributed.md). All of them get the result; only
    process 0 writes the folder and calls `on_start` and `on_round`.
    """
    world = processes()
    folder = Folder(Path(out)) if out is not None else None
    device, execution = world.device_name(device), dict.fromkeys(EXECUTION)
    if folder and resume:
        backend, chunk, execution = world.decide(partial(_settings_at_start, folder.path, backend, chunk))
    if (threads := execution.pop("threads")) is not None:
        torch.set_num_threads(threads)  # products of matrices may differ in the last bit for another number
    setup = prepare(
        fed, model, algorithm, rounds=rounds, participation=participation, epochs=epochs, batch_size=batch_size,
        seed=seed, device=device, dtype=dtype, backend=backend, chunk=chunk, compile=compile, likelihood=likelihood,
        model_options=model_options, pretrained=pretrained, class_weights=class_weights, train=train,
        lora_rank=lora_rank, specificity=specificity, **execution,
    )  # fmt: skip
    setup = _agreed(world, setup, chunk)
    cohort = setup.cohort
    if evaluate:
        split = resolve_split(fed, split)
        check_rows(fed, split)  # fails now, not after hours of training
    eval_every = checked_integer(eval_every, "eval_every", 0)
    scored = SCORED_CLIENTS if eval_clients is None else checked_integer(eval_clients, "eval_clients", 1)
    scoring = {"eval_every": eval_every, "eval_clients": eval_clients, "eval_all": eval_all, "split": split}
    config = setup.config | scoring | (extra or {})
    state = world.on_rank_0(partial(_opened, folder, fed, config, cohort.algorithm, resume)) if folder else None
    path = folder.path if folder else None
    sim = Simulation(cohort, state=state, world=world, folder=path)
    if folder:
        folder.history = world.decide(folder.history.copy)
    if world.rank == 0 and on_start is not None:
        on_start(setup, sim)
    elif world.rank == 0:
        for note in setup.notes:
            log.warning(note)
    start, before = time.perf_counter(), sim.seconds

    def score(sim: Simulation, limit: int | None, brief: bool = False) -> Evaluation:
        return score_clients(cohort, sim.theta, sim.kept_for, split, sim.round, world, limit, brief)

    with closing(RunLog(path, setup, sim)) if path and world.rank == 0 else nullcontext() as journal:
        listeners = [*([journal.round] if journal else []), *([on_round] if on_round else [])]

        def report(line: dict[str, Any]) -> None:
            for listener in listeners:
                listener(line)

        history = sim.run(
            rounds, history=folder.history if folder else (), save=folder.write_round if folder else None,
            score=(lambda sim: score(sim, scored, brief=True).summary) if evaluate else None, eval_every=eval_every,
            on_round=report if listeners else None,
        )  # fmt: skip
    theta = {k: v.detach().cpu() for k, v in sim.theta.items()}
    prior = Prior(cohort.algorithm, theta, setup.input_spec, batch_size)
    if folder:  # before scoring: a client that diverges there must not cost the prior
        world.on_rank_0(partial(prior.save, folder.path / "shared.safetensors"))
    final = score(sim, None if eval_all else scored) if evaluate else None
    summary = summarise(setup, sim, history, final, split, before + time.perf_counter() - start)
    run = Run(prior, summary, history, config, final, path, fed)
    if path:
        world.on_rank_0(partial(_write_results, path, fed, run))
    return run


def _agreed(world: World, setup: Setup, chunk: int | None) -> Setup:
    """Check that all processes have the same run; return it with what each has decided for itself settled."""
    cohort = setup.cohort
    config = setup.config | {"processes": world.size}
    if world.size == 1:
        return dataclasses.replace(setup, config=config)
    world.use_device(cohort.device)
    config["device"] = cohort.device.type
    sharing = -(-world.local_size // torch.cuda.device_count()) if config["device"] == "cuda" else 1
    fitting = cohort.chunk if chunk else max(1, cohort.chunk // sharing)  # the processes on one GPU share its memory
    config["backend"] = world.broadcast_text(cohort.backend)  # every process has measured and chosen for itself
    same = {name: v for name, v in config.items() if name not in ("chunk", "versions", *EXECUTION)}
    config["chunk"] = agree(world, same, fitting)
    cohort = cohort.at(backend=config["backend"], chunk=config["chunk"])
    return dataclasses.replace(setup, config=config, cohort=cohort)


def _opened(
    folder: Folder, fed: Federation, config: dict[str, Any], algorithm: Algorithm, resume: bool
) -> Checkpoint | None:
    """Make a run's folder, or return the checkpoint to resume from."""
    neutral = {f"algorithm.hyper.{name}": value for name, value in algorithm.neutral_values().items()}
    state = None
    if resume:
        state = folder.reopen(config, MAY_CHANGE, neutral | {"compile": "auto"})
    else:
        folder.create(config)
    if not (folder.path / "partition.svg").exists():
        from ..report import save_heat_map

        save_manifest(fed, folder.path / "manifest.json")
        save_heat_map(fed, folder.path / "partition.svg")
    return state


def _write_results(path: Path, fed: Federation, run: Run) -> None:
    """Write the results of a run: clients.csv, summary.json and report.html."""
    from ..report import write as write_report

    if run.evaluation is not None:
        write(path / "clients.csv", clients_csv(fed, run.evaluation, run.config["split"]))
    files = digests(path, ("clients.csv",))  # the page reads it, and it is not sealed
    write_json(path / "summary.json", run.summary | {"prior_digest": run.prior.digest, "files": files})
    write_report([path], path / "report.html")


def _settings_at_start(
    path: Path, backend: str, chunk: int | None
) -> tuple[str, int | None, dict[str, int | bool | None]]:
    """Return the backend, the chunk and the `EXECUTION` that a run began with, so that resuming it has the same bits.

    A folder of an earlier version may lack threads and channels_last: None leaves them to this machine.
    """
    if not (path / "config.json").exists():
        return backend, chunk, dict.fromkeys(EXECUTION)
    old = read_config(path)
    backend = old.get("backend", backend) if backend == "auto" else backend
    if (threads := old.get("threads")) is not None and checked_integer(threads, "threads in config.json") > MAX_THREADS:
        raise InputError(f"'{path / 'config.json'}' records {threads} threads; {MAX_THREADS} are the most.")
    return (
        backend,
        chunk or old.get("chunk"),
        {name: old.get(name) for name in EXECUTION} | {"workers": old.get("workers", 1)},
    )
