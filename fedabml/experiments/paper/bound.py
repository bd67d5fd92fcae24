"""The bound: how fast a client's posterior comes to its truth as its data grow.

Ten clients with y = f_i(x) + N(0, σ²); θ is learned federatedly, λ = 1. The paper bounds the posterior's mean of
d²(P_w, P_i) = E_x[1 − exp(−(f_w − f_i)²/8σ²)] by a constant times ε_n² = r_n log^{2δ} n plus the approximation error ξ,
r_n = ((L+1)d/n) log M + (d/n) log(s₀√(n/d)), with d weights, L hidden layers of width M, and s₀ inputs. The constants
are unknown and ε_n² exceeds 1 at small n, so the *rate* is tested: d²/ε_n² (with δ = 1; a larger δ lets it fall faster)
must not grow with n. Shown are also d² against n on a log-log plot beside r_n, with its slope; a plateau where the
teacher is wider than the student (ξ > 0); and width and depth. A range of n can contradict the theorem, never prove it.
Beside it are the parts of Lemma 1's right side, E_q[ℓ_n]/n and KL/n, where ℓ_n = Σ log p_i/p_w over the client's data.

The sanity arm is mean-field Bayesian linear regression with d = 10: its posterior has variance σ²/n around a mean that
is off by as much, so d² ≈ 2d(σ²/n)/8σ² = d/4n, slope −1. This closed form is ours, not the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from ...data import Federation
from ...engine.client import personalize, predict
from ...engine.lanes import Lanes
from ...engine.rounds import Simulation
from ...gaussian import Gaussian, kl
from ...models import build
from ...report.charts import Axis, Series, line_chart
from ...runs.config import JsonDict, RunConfig
from ..cell import Cell
from ..statistics import student_quantile
from ..study import Study
from .experiment import Context, Done, Experiment, by_label
from .findings import NONE, Findings, Mean, Picture, Sheet, band, by, number, power

CLIENTS, TEST, NOISE = 10, 500, 0.5
INPUTS = 4  # s₀ of the networks
LINEAR = 10  # d of the linear arm
APART = 0.3  # deviation of the clients' weights around a common teacher, of the networks; 1 of the linear arm
SIZES, QUICK_SIZES = tuple(2**k for k in range(5, 14)), tuple(2**k for k in range(5, 10))
WIDTHS, DEPTHS, TEACHER = (2, 4, 8, 16, 32), (1, 2, 3), 64
MIDDLE, QUICK_MIDDLE = 2**10, 2**8  # n of the sweeps
ARMS, SWEEPS = ("linear", "network", "wider teacher"), ("width", "depth")
PARTS = {"d²": "d2", "E_q[ℓ_n]/n": "loss", "KL/n": "kl"}  # what is measured: d², and the parts of Lemma 1
Fit = tuple[float, float]  # a slope and half of its 95% interval
Lines = Mapping[str, Sequence[JsonDict]]  # by arm, a record for every setting


@dataclass(frozen=True)
class Teachers(Study):
    """Clients with n samples each of a teacher of their own, and a student of width M and depth L (0: linear)."""

    n: int
    width: int = 8
    depth: int = 1
    teacher: int = 8  # its width; its depth is the student's

    @property
    def inputs(self) -> int:
        """The number of inputs, s₀."""
        return INPUTS if self.depth else LINEAR

    def federation(self, config: RunConfig) -> Federation:
        return _world(self, config.seed)[0]

    def network(self, config: RunConfig, fed: Federation) -> nn.Module:
        return student(self, self.width, config.seed + 1)

    def observe(self, sim: Simulation) -> JsonDict:
        cohort, everyone = sim.cohort, list(range(CLIENTS))
        rows = [np.concatenate([cohort.fed.test[c], cohort.fed.train[c]]) for c in everyone]
        with torch.no_grad():
            lanes = Lanes.after_round(cohort, sim.theta, everyone, sim.round)
            q = personalize(lanes, {})
            f = predict(lanes, q, rows)[..., 0].double().cpu().numpy().reshape(-1, CLIENTS, TEST + self.n)
            prior = Gaussian(sim.theta["mean"], sim.theta["logstd"])
            apart = torch.stack([kl(Gaussian(*lane), prior) for lane in zip(*q, strict=True)]).double().cpu().numpy()
        truth = _world(self, cohort.seed)[1]
        y = np.stack([cohort.fed.y[index[TEST:], 0] for index in rows]).astype(float)
        away = (f - truth)[..., :TEST]
        ratio = ((y - f[..., TEST:]) ** 2 - (y - truth[:, TEST:]) ** 2) / (2 * NOISE**2)
        return {
            "d2": float((1 - np.exp(-(away**2) / (8 * NOISE**2))).mean()),
            "loss": float(ratio.mean()),
            "kl": float(apart.mean() / self.n),
            "weights": cohort.network.layout.size,
        }


def student(study: Teachers, width: int, seed: int) -> nn.Module:
    """Return a network of the study's depth, or a linear function."""
    if not study.depth:
        return nn.Linear(study.inputs, 1, bias=False)
    return build("mlp", (study.inputs,), 1, seed, hidden=(width,) * study.depth)


@lru_cache(maxsize=4)
def _world(study: Teachers, seed: int) -> tuple[Federation, np.ndarray]:
    """Return the clients' data, and f_i of their test and training inputs [clients, test + n]."""
    dice = np.random.Generator(np.random.PCG64([seed, study.n]))
    common = student(study, study.teacher, seed)
    apart = APART if study.depth else 1.0
    train, test, truth = [], [], []
    for _ in range(CLIENTS):
        weights = {
            name: w + apart * torch.from_numpy(dice.normal(size=w.shape)).float() * _scale(w)
            for name, w in common.named_parameters()
        }
        x = dice.normal(size=(TEST + study.n, study.inputs)).astype(np.float32)
        with torch.no_grad():
            f = torch.func.functional_call(common, weights, torch.from_numpy(x))
        f = (f if not study.depth else 2 * f).double().numpy()
        y = f + NOISE * dice.normal(size=f.shape)
        train.append((x[TEST:], y[TEST:].astype(np.float32)))
        test.append((x[:TEST], f[:TEST].astype(np.float32)))
        truth.append(f[:, 0])
    fed = Federation.from_arrays(train, test, task="regression", normalize="none", dataset="teachers")
    return fed, np.stack(truth)


def _scale(w: torch.Tensor) -> float:
    """Return the usual size of weights of this shape."""
    return 1 / math.sqrt(w.shape[-1]) if w.ndim > 1 and w.shape[0] > 1 else 1.0


def rate(n: float, weights: int, width: int, depth: int, inputs: int) -> float:
    """Return r_n."""
    return (depth + 1) * weights / n * math.log(width) + weights / n * math.log(inputs * math.sqrt(n / weights))


def slope(n: Sequence[float], values: Sequence[float]) -> Fit:
    """Return the slope of a line through log values over log n, and half of its 95% interval."""
    x, y = np.log(n), np.log(values)
    x = x - x.mean()
    fitted = float(x @ y / (x @ x))
    rest = y - y.mean() - fitted * x
    error = math.sqrt(float(rest @ rest) / max(len(x) - 2, 1) / float(x @ x))
    return fitted, student_quantile(max(len(x) - 2, 1)) * error


class Bound(Experiment):
    """The bound."""

    title = "The bound: how fast posteriors come to the truth"
    partial = False
    claim = "A client's posterior is within ε_n² = r_n log^{2δ} n of its truth, plus the approximation error ξ."
    seeds = (3, 1)

    def cells(self, context: Context) -> list[Cell]:
        quick = context.request.quick
        sizes, middle = (QUICK_SIZES, QUICK_MIDDLE) if quick else (SIZES, MIDDLE)
        studies = {f"linear {n}": Teachers(n, 1, 0, 1) for n in sizes}
        studies |= {f"network {n}": Teachers(n) for n in sizes}
        studies |= {f"wider teacher {n}": Teachers(n, teacher=TEACHER) for n in sizes}
        studies |= {f"width {m}": Teachers(middle, m, 1, TEACHER) for m in (WIDTHS[:3] if quick else WIDTHS)}
        studies |= {f"depth {k}": Teachers(middle, 8, k, TEACHER) for k in (DEPTHS[:2] if quick else DEPTHS)}
        hyper: JsonDict = {"lr": 0.03, "momentum": 0.9, "lam": 1.0, "nu0": -1.0, "s": 2, "antithetic": True}
        hyper |= {"personal_lr": 0.03, "personal_epochs": 100 if quick else 2000, "predict_samples": 20}
        hyper |= {"prior_std": "learned", "rho_std": 0.3, "posterior_std": "natural", "lr_std": 0.1}
        hyper |= {"average": 0.0, "server_momentum": 0.0, "label_prior": "none"}
        config = context.config(
            algorithm="fedabml", clients=CLIENTS, noise=NOISE, learn_noise=False, participation=1.0,
            rounds=10 if quick else 50, epochs=20, batch_size=max(sizes),
        ).with_changes(hyper=hyper)  # fmt: skip
        return [cell for label, study in studies.items() for cell in context.seeded(label, config, study=study)]

    def findings(self, context: Context, finished: Sequence[Done]) -> Findings:
        unsorted = by([_record(label.rpartition(" ")[0], cells) for label, cells in by_label(finished).items()], "arm")
        records = {arm: unsorted[arm] for arm in (*ARMS, *SWEEPS)}
        lines = {arm: records[arm] for arm in ARMS}
        points = {arm: [(r["n"], v) for r in line for v in r["d2"].by_seed.values()] for arm, line in lines.items()}
        fits = {arm: slope(*zip(*pairs, strict=True)) for arm, pairs in points.items()}
        rates = {arm: slope([r["n"] for r in lines[arm]], [r["rate"] for r in lines[arm]])[0] for arm in ARMS[1:]}
        sheets = [_rates(fits, rates, lines), _by_samples(lines), _swept({k: records[k] for k in SWEEPS})]
        table = [record for line in records.values() for record in line]
        return Findings(_conclusions(fits, rates, lines), sheets, _pictures(lines), table)


def _record(arm: str, cells: Sequence[Done]) -> JsonDict:
    """Return the means over the seeds of a setting, with r_n."""
    study, weights = cells[0].cell.study, cells[0].result.found["weights"]
    assert isinstance(study, Teachers)
    means = {key: Mean({d.result.seed: d.result.found[key] for d in cells}) for key in PARTS.values()}
    bound = rate(study.n, weights, max(study.width, 2), study.depth, study.inputs)
    sizes = {"weights": weights, "width": study.width, "depth": study.depth}
    return {"arm": arm, "n": study.n, **means, "rate": bound, **sizes}


def _fit(fit: Fit) -> str:
    return f"{fit[0]:.2f} ± {fit[1]:.2f}"


def _rates(fits: Mapping[str, Fit], rates: Mapping[str, float], lines: Lines) -> Sheet:
    """Return the table of slopes."""
    table = []
    for arm, line in lines.items():
        ratios = [NONE] * 2 if arm == "linear" else [f"{_ratio(line[i]):.5f}" for i in (0, -1)]
        ends = [f"{line[i]['d2']:.5f}" for i in (0, -1)]
        table.append([arm, _fit(fits[arm]), number(rates.get(arm)), *ratios, *ends])
    head = ["", "slope of d²", "of r_n", "d²/ε_n² at the least n", "at the most", "d² at the least n", "at the most"]
    notes = ["± is half of the 95% interval of the slope of a line through log d². ε_n² = r_n log² n (δ = 1)."]
    return Sheet("Rates", head, table, notes)


def _ratio(record: JsonDict) -> float:
    """Return d²/ε_n² of a setting, with δ = 1."""
    return float(record["d2"] / (record["rate"] * math.log(record["n"]) ** 2))


def _by_samples(lines: Lines) -> Sheet:
    """Return the table of d² and the parts of Lemma 1 for every n."""
    head = ["n", *(f"{arm}: {part}" for arm in lines for part in PARTS), "d/4n", "r_n"]
    table = []
    for same_n in zip(*lines.values(), strict=True):
        n, cells = same_n[0]["n"], [f"{record[key]:.4g}" for record in same_n for key in PARTS.values()]
        table.append([f"{n:.0f}", *cells, f"{LINEAR / 4 / n:.4g}", f"{same_n[1]['rate']:.3g}"])
    note = "Means over clients and seeds. d/4n is what the linear arm should have; r_n is the network's, M = 8, L = 1."
    return Sheet("By the number of samples", head, table, [note])


def _swept(sweeps: Lines) -> Sheet:
    """Return the table of students of several widths and depths."""
    formats = {"weights": ".0f", "d2": ".5f", "loss": ".4f", "kl": ".4f"}
    table = [
        [f"{parameter} {record[parameter]:.0f}", *(f"{record[key]:{form}}" for key, form in formats.items())]
        for parameter, swept in sweeps.items()
        for record in swept
    ]
    note = f"n = {sweeps['width'][0]['n']:.0f}; the teacher has width {TEACHER} and the student's depth. "
    note += "Width sweeps have L = 1, depth M = 8."
    return Sheet("Width and depth", ["student", "weights", *PARTS], table, [note])


def _conclusions(fits: Mapping[str, Fit], rates: Mapping[str, float], lines: Lines) -> list[str]:
    """Say whether each arm has the slope that it should have."""
    linear, network, wide = (_fit(fits[arm]) for arm in ARMS)
    agrees = "is" if abs(fits["linear"][0] + 1) <= 0.1 else "is not"
    first, last = (_ratio(lines["network"][i]) for i in (0, -1))
    verdict = "not contradicted" if last <= first else "contradicted in this range"
    plateau = lines["wider teacher"][-1]["d2"] / lines["network"][-1]["d2"]
    return [
        f"The theorem is {verdict}: the network's d²/ε_n² goes from {first:.5f} at the least n to {last:.5f} at the "
        "most (δ = 1).",
        f"Linear: slope {linear}; it {agrees} within 0.1 of our closed form's −1.",
        f"Network: slope {network} beside {rates['network']:.2f} of r_n, without the factor log² n.",
        f"Wider teacher: slope {wide}; at the most n its d² is {plateau:.1f} times the network's (the plateau of ξ).",
    ]


def _pictures(lines: Lines) -> list[Picture]:
    """Draw d² beside r_n, and the parts of Lemma 1, against n."""
    network = lines["network"]
    n = [record["n"] for record in network]
    across = [power(v) for v in n]

    def curve(name: str, values: Sequence[float]) -> Series:
        return Series(name, [power(v) for v in values], across)

    rates = [band(f"d², {arm}", across, [r["d2"] for r in line], log=True) for arm, line in lines.items()]
    rates += [curve("d/4n", [LINEAR / 4 / v for v in n]), curve("r_n of the network", [r["rate"] for r in network])]
    lemma = [curve(part, [r[key] for r in network]) for part, key in PARTS.items()]
    lemma.append(curve("their sum", [r["loss"] + r["kl"] for r in network]))
    x = Axis("samples of a client", "power")
    arbitrary = "Both axes are logarithmic: a rate is a slope. The level of r_n is arbitrary."
    below = "The network arm; d² stays below the sum up to a constant."
    axes = {"x": x, "y": Axis("", "power"), "title": "Lemma 1"}
    return [
        Picture("rates", "d² against n", arbitrary, line_chart, rates, {"x": x, "y": Axis("d²", "power")}),
        Picture("lemma", "Lemma 1's right side", below, line_chart, lemma, axes),
    ]
