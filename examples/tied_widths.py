"""Prior widths σ_θ learned per layer, or per row of a layer's matrix, against one width for all weights.

    python examples/tied_widths.py TASK --out FILE.jsonl

A row holds the weights that enter one unit; a bias vector counts as one row. The server's estimate for a layer or row
is a mean over its weights and a round's clients. There are four forms:

    moments   σ_θ² ← mean((m_i − θ)² + σ_i²), with the clients' natural-gradient posteriors: empirical Bayes (EM)
    gap       the same, where σ_i stays at exp(start_gap)·σ_θ
    probe     σ_θ² ← σ_θ² · mean((m_i − θ)²)/mean(z(z − m_i' + m_i)), where m_i' is where the client's steps lead from
              θ + z, with z ~ N(0, σ_θ²) and a pull towards θ + z: it measures how much the steps forget their start
    ratio     σ_θ² ← exp(2ν₀) · mean((m_i − θ)²), divided by its mean over all weights

Half of the clients train. The others have 5, 10 or 15 random samples, and are scored on validation rows. The task
`known` has no steps: it prints where the estimates rest for linear regressions, whose posteriors have a closed form.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import spearmanr, t
from torch import Tensor, nn

import fedabml
from fedabml import FedABML, rng
from fedabml.algorithms.base import Batches, Loss, Site, State, Stepped
from fedabml.algorithms.hyper import hyper
from fedabml.engine.client import personalize, predict
from fedabml.engine.lanes import Lanes
from fedabml.engine.rounds import Simulation
from fedabml.evaluation.decisions import auroc
from fedabml.evaluation.predictions import Prediction
from fedabml.evaluation.scoring import TrainedRun, evaluate_after
from fedabml.experiments.paper.newcomers import few_random
from fedabml.vectors import Layout

SIZES = (5, 10, 15)
SEARCH, FIRST = 100, 110  # seeds of the search, and of the comparison from here on


@dataclass(frozen=True, repr=False)
class Tied(FedABML):
    """FedABML whose server learns one σ_θ for every layer, or for every row."""

    by: str = hyper("layer", "the weights that share one σ_θ", choices=("layer", "row"))
    form: str = hyper("moments", "the server's estimate", choices=("moments", "gap", "probe", "ratio"))
    aggregate: str = hyper("moments", "the server takes the θ-step", choices=("moments",))
    prior_std: str = hyper("learned", "σ_θ is learned", choices=("learned",))
    rho_std: float = hyper(0.3, "step of σ_θ²", 0, 1)
    groups: ClassVar[list[int]] = []  # how many weights share one σ_θ, in the order of the network that is trained

    def init(self, params: Tensor, layout: Layout) -> State:
        Tied.groups[:] = layout.sizes if self.by == "layer" else rows(layout)
        return super().init(params, layout)

    def begin(self, shared: State, kept: State, site: Site, key: Tensor) -> State:
        carry = super().begin(shared, kept, site, key)
        if self.form != "probe":
            return carry
        z = rng.normal(rng.fold(key, 77), (shared["mean"].shape[-1],), shared["mean"].dtype) * shared["logstd"].exp()
        return {**carry, "z": z, "probe": shared["mean"] + z}

    def step(self, carry: State, shared: State, batches: Batches, site: Site, key: Tensor, loss: Loss) -> Stepped:
        new, value = super().step(carry, shared, batches, site, key, loss)
        if self.form == "probe":
            phi = {"mean": carry["probe"], "logstd": carry["logstd"]}
            centre = {"mean": shared["mean"] + carry["z"], "logstd": shared["logstd"]}
            gradient, _ = self.gradient(phi, batches[0], rng.fold(key, 0), loss)
            fraction = self.step_fraction(batches[0], site.n)
            new["probe"] = self.move(phi, gradient, centre, site.n, self.lr, fraction)["mean"]
        return new, value

    def end(self, carry: State, shared: State, kept: State, site: Site, steps: Tensor) -> tuple[State, State]:
        sent, kept = super().end(carry, shared, kept, site, steps)
        if self.form in ("probe", "ratio"):
            sent["second"] = (carry["mean"] - shared["mean"]) ** 2
        if self.form == "probe":
            sent["gain"] = carry["z"] * (carry["z"] - carry["probe"] + carry["mean"])
        return sent, kept

    def merge(self, shared: State, update: State, sampled: int, clients: int) -> State:
        step, old = update["mean"] - shared["mean"], torch.exp(2 * shared["logstd"])
        new = self.tied(update["second"] - step**2)
        if self.form == "probe":
            ratio = new * sampled / max(1, sampled - 1) / self.tied(update["gain"]).clamp_min(1e-3 * old)
            new = old * ratio.clamp(0.25, 4)
        elif self.form == "ratio":
            new = np.exp(2 * self.nu0) * new / new.mean()
        logstd = 0.5 * torch.log(old + self.rho_std * (new - old))
        return {"mean": shared["mean"] + self.rho * step, "logstd": logstd}

    def tied(self, values: Tensor) -> Tensor:
        """Return the mean of every layer or row in the place of its values, [d]."""
        return torch.cat([part.mean().expand(part.numel()) for part in values.split(self.groups)])


def rows(layout: Layout) -> list[int]:
    """Return the sizes of all rows: those of a matrix, and a bias vector as a whole."""
    matrices = [
        (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape)) for shape in layout.shapes
    ]
    return [size for count, size in matrices for _ in range(count)]


class Blocks(nn.Module):
    """y = Σ_b x_b · w_b, a linear model in blocks that the layout calls layers."""

    TAUS = (0.1, 0.3, 1.0)  # how widely clients' weights differ in a block
    SIZE = 8

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(self.SIZE, 1, bias=False) for _ in self.TAUS)

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(part) for block, part in zip(self.blocks, x.split(self.SIZE, -1), strict=True))  # type: ignore


@dataclass(frozen=True)
class Task:
    """A task's partition, network and budget; `shift` is added to every ν₀ of the configurations."""

    clients: int
    rounds: int
    participation: float
    epochs: int
    lr: float
    personal: tuple[tuple[float, ...], tuple[int, ...]]  # step sizes and epochs that are tried
    hidden: tuple[int, ...] = ()
    classes: int = 0
    seeds: int = 4
    held_out: float = 0.4
    shift: float = 0.0


TASKS = {
    "blocks": Task(40, 40, 0.5, 5, 0.02, ((0.01, 0.03), (5, 20, 100)), shift=2.5, held_out=0.5),
    "digits": Task(30, 30, 0.5, 5, 0.1, ((0.03, 0.1), (2, 5, 20)), (50, 50), 5, seeds=5),
    "fashionmnist": Task(60, 30, 0.25, 2, 0.03, ((0.03, 0.1), (2, 5, 20)), (50,), 3),
}
NARROW, WIDE = {"nu0": -3.0, "start_gap": -1.0}, {"nu0": -2.0, "start_gap": -2.0}
NATURAL, FIXED = {"posterior_std": "natural", "lr_std": 0.1}, {"posterior_std": "fixed"}
ONE_WIDTH = [(-4, 0.01, 0), (-3, 0.01, 0), (-3, 0.01, -1), (-3, 0.1, -1), (-4, 1, 0), (-3, 1, -1), (-2, 0.1, -2)]
ONE_WIDTH += [(-2, 1, -2)]
CONFIGS: dict[str, dict[str, Any]] = {
    f"one width, nu0 {nu0}, lam {lam}, gap {gap}": {"nu0": float(nu0), "lam": lam, "start_gap": float(gap)}
    for nu0, lam, gap in ONE_WIDTH
}
CONFIGS |= {
    "tied moments, lam 1": {"form": "moments", "lam": 1.0, **NATURAL, **WIDE},
    "tied moments, lam 1, warm": {"form": "moments", "lam": 1.0, **NATURAL, **WIDE, "warm": True},
    "tied gap, lam 0.01": {"form": "gap", "lam": 0.01, **FIXED, **NARROW},
    "tied gap, lam 1, warm": {"form": "gap", "lam": 1.0, **FIXED, **WIDE, "warm": True},
    "tied probe, lam 1, warm": {"form": "probe", "lam": 1.0, **FIXED, **WIDE, "warm": True},
    "tied probe, lam 0.1, warm": {"form": "probe", "lam": 0.1, **FIXED, **NARROW, "warm": True},
    "tied ratio, lam 0.01": {"form": "ratio", "lam": 0.01, **NARROW},
    "tied ratio, lam 0.1": {"form": "ratio", "lam": 0.1, **NARROW},
}
CONFIGS |= {
    f"rows{label.removeprefix('tied')}": {**config, "by": "row"}
    for label, config in CONFIGS.items()
    if "form" in config
}
CONFIGS |= {
    "per weight": {"prior_std": "learned", "posterior_std": "natural", "lr_std": 0.05, "nu0": -4.0},
}
KINDS = ("one width", "tied", "rows")  # the first words of the labels of those that are compared
SEARCHED = {  # four configurations of each kind, where it is not all
    "fashionmnist": (
        *(
            "one width, nu0 -4, lam 0.01, gap 0",
            "one width, nu0 -3, lam 0.01, gap 0",
            "one width, nu0 -3, lam 0.01, gap -1",
        ),
        *("one width, nu0 -2, lam 0.1, gap -2", "tied moments, lam 1, warm", "tied gap, lam 0.01"),
        *("tied probe, lam 0.1, warm", "tied ratio, lam 0.01"),
        *("rows moments, lam 1, warm", "rows gap, lam 0.01", "rows probe, lam 0.1, warm", "rows ratio, lam 0.01"),
    ),
    "blocks": (
        *("one width, nu0 -4, lam 1, gap 0", "one width, nu0 -3, lam 1, gap -1", "one width, nu0 -2, lam 1, gap -2"),
        *("one width, nu0 -3, lam 0.01, gap -1", "tied moments, lam 1", "tied moments, lam 1, warm"),
        *("tied probe, lam 1, warm", "tied ratio, lam 0.1"),
    ),
}


def blocks(seed: int, clients: int, rows: int = 100) -> fedabml.Federation:
    """Return linear regressions with noise of 0.5 whose weights are N(θ, τ²), τ one of `Blocks.TAUS` in each block."""
    g, tau = np.random.default_rng([seed, 3]), np.repeat(Blocks.TAUS, Blocks.SIZE)
    theta, parts = g.normal(size=len(tau)), []
    for _ in range(clients):
        x, w = g.normal(size=(rows, len(tau))), theta + tau * g.normal(size=len(tau))
        parts.append((x.astype(np.float32), (x @ w + 0.5 * g.normal(size=rows)).astype(np.float32)))
    return fedabml.Federation.from_arrays(parts, task="regression", normalize="none")


def federations(name: str, seed: int) -> tuple[fedabml.Federation, fedabml.Federation]:
    """Return the clients that train, and the new ones. FashionMNIST's test rows are replaced by MNIST's."""
    task = TASKS[name]
    if name == "blocks":
        everyone = blocks(seed, task.clients)
    else:
        data = fedabml.load(name)
        if name == "fashionmnist":
            kept, other = np.random.default_rng([seed, 5]).permutation(len(data.y_train))[:7500], fedabml.load("mnist")
            data = replace(data, x_train=data.x_train[kept], y_train=data.y_train[kept])
            data = replace(data, x_test=other.x_train[:2000], y_test=other.y_train[:2000])
        everyone = fedabml.federate(data, clients=task.clients, classes_per_client=task.classes, seed=seed)
    everyone = everyone.hold_out(task.held_out, seed)
    order = np.random.default_rng([seed, 9]).permutation(task.clients).tolist()
    return everyone.select(order[: task.clients // 2]), everyone.select(order[task.clients // 2 :])


def train(name: str, config: dict[str, Any], seed: int) -> tuple[Simulation, fedabml.Federation]:
    """Train a configuration and return it with the new clients.

    A `warm` one takes two thirds of its rounds with one narrow width, so that λ = 1 does not hold θ where it starts.
    """
    task, config = TASKS[name], dict(config)
    fed, new = federations(name, seed)
    warm, rounds = config.pop("warm", False), task.rounds
    module: nn.Module | str = Blocks() if name == "blocks" else "mlp"
    if warm:
        rounds = task.rounds // 3
        first = run(name, module, FedABML(lr=task.lr, label_prior="none"), fed, task.rounds - rounds, seed)
        module = first.cohort.network.to_module(first.shared["mean"])
    words = {"lr": task.lr, "personal_lr": task.personal[0][0], "label_prior": "none", **config}
    words["nu0"] += task.shift
    return run(name, module, (Tied if "form" in config else FedABML)(**words), fed, rounds, seed + 1000 * warm), new


def run(
    name: str, module: nn.Module | str, algorithm: FedABML, fed: fedabml.Federation, rounds: int, seed: int
) -> Simulation:
    """Train an algorithm from the module's weights on."""
    task = TASKS[name]
    setup = fedabml.prepare(
        fed, module, algorithm, rounds=rounds, participation=task.participation, epochs=task.epochs, seed=seed,
        device="cpu", model_options={"hidden": list(task.hidden)} if module == "mlp" else {},
        likelihood=fedabml.GaussianNoise(1, 0.5, learn=False) if name == "blocks" else None,
    )  # fmt: skip
    sim = Simulation(setup.cohort)
    sim.run(rounds)
    return sim


def scores(name: str, sim: Simulation, new: fedabml.Federation, seed: int) -> list[dict[str, Any]]:
    """Return validation scores of the new clients for every number of samples and every personal training."""
    rates, epochs = TASKS[name].personal
    keys = ("rmse", "nll", "coverage") if name == "blocks" else ("accuracy", "nll", "ece")
    lines = []
    for n in SIZES:
        cohort = sim.cohort.among(few_random(new, n, seed))
        for lr in rates:
            trained_run = TrainedRun(
                cohort.using(replace(cohort.algorithm, personal_lr=lr)), sim.theta, sim.kept_for, sim.round, brief=True
            )
            for count, (result,) in zip(epochs, evaluate_after(epochs, [trained_run], "val"), strict=True):
                found = getattr(result, "summary", None)
                values = {key: round(found[key], 5) for key in keys} if found else {"nll": None}
                lines.append({"n": n, "lr": lr, "epochs": count, **values})
    return lines


def outside(sim: Simulation, new: fedabml.Federation, seed: int, lr: float, epochs: int) -> float:
    """Return the AUROC of entropy, new clients with 15 samples: their test rows (MNIST) against validation rows."""
    cohort = sim.cohort.among(few_random(new, SIZES[-1], seed))
    cohort = cohort.using(replace(cohort.algorithm, personal_lr=lr, personal_epochs=epochs))
    clients = list(range(new.clients))
    rows = [np.concatenate([new.val[c], new.test[c]]) for c in clients]
    is_outside = np.concatenate([np.arange(len(r)) >= len(new.val[c]) for c, r in zip(clients, rows, strict=True)])
    with torch.no_grad():
        lanes = Lanes.after_round(cohort, sim.theta, clients, sim.round)
        draws = predict(lanes, personalize(lanes, sim.kept_for(clients)), rows)
    return auroc(Prediction.of(draws).entropy, is_outside)


def fixed_point(
    n: int, covariance: str, lam: float = 1.0, tied: bool = True, clients: int = 60, rounds: int = 300
) -> list[tuple[float, float]]:
    """Return the least and the greatest σ_θ/τ of every block's weights where the EM of σ_θ² rests.

    All clients take part and have n rows. `covariance` is that of their posteriors: `full`, `diagonal` (mean field), or
    `none`, which leaves σ_i² out.
    """
    g, tau = np.random.default_rng(0), np.repeat(Blocks.TAUS, Blocks.SIZE)
    d, truth = len(tau), g.normal(size=len(tau))
    w, x = truth + tau * g.normal(size=(clients, d)), g.normal(size=(clients, n, d))
    y = np.einsum("ind,id->in", x, w) + 0.5 * g.normal(size=(clients, n))
    curvature, slope = np.einsum("ind,ine->ide", x, x) / 0.25 / lam, np.einsum("ind,in->id", x, y) / 0.25 / lam
    theta, variance = truth, np.full(d, 0.3**2)
    for _ in range(rounds):
        precision = curvature + np.diag(1 / variance)
        means = np.linalg.solve(precision, (slope + theta / variance)[..., None])[..., 0]
        own = {
            "full": lambda p: np.einsum("idd->id", np.linalg.inv(p)),
            "diagonal": lambda p: 1 / np.einsum("idd->id", p),
            "none": lambda p: np.zeros((1, d)),
        }[covariance](precision)
        theta = means.mean(0)
        new = ((means - theta) ** 2).sum(0) / (clients - 1) + own.mean(0)
        if tied:
            new = np.repeat(new.reshape(-1, Blocks.SIZE).mean(1), Blocks.SIZE)
        variance = variance + 0.3 * (new - variance)
    ratio = (np.sqrt(variance) / tau).reshape(-1, Blocks.SIZE)
    return [(float(row.min()), float(row.max())) for row in ratio]


def known() -> None:
    """Print the fixed points of the estimates, tied and per weight, for more rows than weights and for fewer."""
    print(f"σ_θ/τ in blocks of τ {Blocks.TAUS}; {3 * Blocks.SIZE} weights")
    for n in (100, 24, 6):
        for covariance in ("full", "diagonal", "none"):
            for lam, tied in ((1.0, True), (0.01, True), (1.0, False)):
                found = fixed_point(n, covariance, lam, tied)
                text = ", ".join(f"{low:.2f}" if tied else f"{low:.2f} to {high:.2f}" for low, high in found)
                print(
                    f"n {n}, covariance {covariance}, λ {lam:g}, {'tied' if tied else 'per weight'}: {text}", flush=True
                )


def by_layer(sim: Simulation, values: Tensor) -> dict[str, float]:
    """Return the mean of the values of every layer's weights."""
    return {key: float(part.mean()) for key, part in sim.cohort.network.layout.split(values).items()}


def by_row(sim: Simulation, values: Tensor) -> list[float]:
    """Return the mean of the values of every row's weights."""
    return [float(part.mean()) for part in values.split(rows(sim.cohort.network.layout))]


def changes(sim: Simulation) -> Tensor:
    """Return, for every weight, the variance between training clients that train alone from θ on."""
    words = {"posterior": "point", "label_prior": "none", "personal_epochs": 50}
    cohort = sim.cohort.using(FedABML(personal_lr=sim.cohort.algorithm.lr, **words))
    clients = list(range(cohort.fed.clients))
    with torch.no_grad():
        return personalize(Lanes.after_round(cohort, {"mean": sim.theta["mean"]}, clients), {}).mean.var(0)


def best(lines: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float, int]]:
    """Return every configuration's lowest validation NLL, a mean over sizes and seeds, with its personal training."""
    found = {}
    for label in dict.fromkeys(line["label"] for line in lines):
        own_lines = [line for line in lines if line["label"] == label]
        own = [row for line in own_lines for row in line.get("scores", [])]
        if not own or any("error" in line for line in own_lines):
            found[label] = (np.inf, 0.0, 0)
            continue
        options = {(row["lr"], row["epochs"]) for row in own}
        values = {o: [row.get("nll") for row in own if (row["lr"], row["epochs"]) == o] for o in options}
        means = [(float(np.mean([v if v is not None else np.inf for v in vs])), *o) for o, vs in values.items()]
        found[label] = min(means)
    return found


def chosen(lines: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float, int]]:
    """Return the best configuration of every kind that a search has, each as `best` does."""
    found = best([line for line in lines if line["seed"] == SEARCH])
    kinds = [[(value, label) for label, value in found.items() if label.startswith(kind)] for kind in KINDS]
    return {label: value for value, label in (min(kind) for kind in kinds if kind)}


def table(lines: Sequence[dict[str, Any]], kind: str = "tied") -> list[str]:
    """Return a row per number of samples: measures of one width, and what a kind changes, ± half a 95% interval."""
    found, labels = [], {k: v for k, v in chosen(lines).items() if k.startswith((KINDS[0], kind))}
    for n in SIZES:
        cells = [str(n)]
        for key in ("nll", "accuracy", "ece", "rmse", "coverage"):
            values: list[dict[int, float]] = [
                {
                    line["seed"]: row[key]
                    for line in lines
                    if line["label"] == label and line["seed"] != SEARCH
                    for row in line["scores"]
                    if (row["n"], row["lr"], row["epochs"]) == (n, lr, epochs) and key in row
                }
                for label, (_, lr, epochs) in labels.items()
            ]
            seeds = sorted(values[0].keys() & values[1])
            if seeds:
                one, gap = (np.array([v[s] for s in seeds]) for v in values)
                gap = gap - one
                half = t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / np.sqrt(len(gap))
                cells.append(f"{one.mean():.3f}, {gap.mean():+.3f} ± {half:.3f}")
        found.append(" | ".join(cells).replace("-", "−"))
    return found


def rank(widths: list[float], changes: list[float]) -> float | None:
    """Return the rank correlation of widths with clients' changes, None if there is one width alone."""
    return None if len(set(widths)) == 1 else round(float(spearmanr(widths, changes).statistic), 3)


def measured(task: str, label: str, seed: int) -> dict[str, Any]:
    """Train and score one configuration, and return its line."""
    line: dict[str, Any] = {"task": task, "label": label, "seed": seed, "fedabml": fedabml.__version__}
    try:
        sim, new = train(task, CONFIGS[label], seed)
        line |= {"widths": {key: round(width, 5) for key, width in by_layer(sim, sim.theta["logstd"].exp()).items()}}
        line |= {"scores": scores(task, sim, new, seed)}
    except fedabml.TrainingError as error:
        return line | {"error": str(error)}
    variances = changes(sim)
    line["changes"] = {key: math.sqrt(variance) for key, variance in by_layer(sim, variances).items()}
    line["rank"] = rank(list(line["widths"].values()), list(line["changes"].values()))
    line["rank_of_rows"] = rank(by_row(sim, sim.theta["logstd"]), by_row(sim, variances))
    if task == "fashionmnist":
        options = [(lr, epochs) for lr in TASKS[task].personal[0] for epochs in TASKS[task].personal[1][-1:]]
        line["auroc"] = {f"{lr:g}, {e}": round(outside(sim, new, seed, lr, e), 4) for lr, e in options}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*TASKS, "known"])
    parser.add_argument("--out", type=Path, help="file of the results; what it has is not run again")
    options = parser.parse_args()
    if options.task == "known":
        known()
        return
    if options.out is None:
        parser.error("--out names the file of the results")
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(line["task"], line["label"], line["seed"]) for line in lines}

    def measure(label: str, seed: int) -> None:
        if (options.task, label, seed) not in done:
            lines.append(measured(options.task, label, seed))
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(seed, label, best(lines[-1:])[label], lines[-1].get("widths"), flush=True)

    for label in SEARCHED.get(options.task, CONFIGS):
        measure(label, SEARCH)
    own = [line for line in lines if line["task"] == options.task]
    for seed, label in product(range(FIRST, FIRST + TASKS[options.task].seeds), chosen(own)):
        measure(label, seed)
    own = [line for line in lines if line["task"] == options.task]
    print(*chosen(own).items(), sep="\n")
    for kind in KINDS[1:]:
        if any(label.startswith(kind) for label in chosen(own)):
            print(kind, *table(own, kind), sep="\n")


if __name__ == "__main__":
    main()
