"""Noise by input against one noise per target, on validation rows: python examples/noise_by_input.py --out FILE.jsonl

Three federations: a synthetic table whose noise varies with an input, the same with equal noise, and the diabetes table
of scikit-learn divided by age. A line per federation, seed and likelihood; the summary has paired differences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t
from sklearn.datasets import load_diabetes

import fedabml

MEASURES = ("nll", "rmse", "coverage", "pinball")


def synthetic(seed: int, varies: bool = True, clients: int = 10, rows: int = 60) -> fedabml.Federation:
    """Return clients with y = x₀ + sin(2x₁)/2 + b_i + σ(x)·ε, where σ = exp(0.7·x₂)/2 or 1/2, and b_i ~ N(0, 0.3²)."""
    g, parts = np.random.default_rng([seed, 7]), []
    for _ in range(clients):
        x, b = g.normal(size=(rows, 5)), 0.3 * g.normal()
        std = 0.5 * np.exp(0.7 * x[:, 2]) if varies else 0.5
        parts.append((x, x[:, 0] + 0.5 * np.sin(2 * x[:, 1]) + b + std * g.normal(size=rows)))
    return fedabml.Federation.from_arrays(parts)


def diabetes(seed: int) -> fedabml.Federation:
    """Return the diabetes table in five groups of age."""
    x, y = load_diabetes(return_X_y=True)
    owner = np.digitize(x[:, 0], np.quantile(x[:, 0], [0.2, 0.4, 0.6, 0.8]))
    return fedabml.Federation.from_arrays([(x[owner == c], y[owner == c]) for c in range(5)], task="regression")


DATA: dict[str, Callable[[int], fedabml.Federation]] = {
    "noise varies": synthetic,
    "equal noise": lambda seed: synthetic(seed, varies=False),
    "diabetes": diabetes,
}


def measure(name: str, seed: int, by_input: bool, rounds: int) -> dict[str, object]:
    """Train on seven tenths of every client's rows, and return the scores on the others."""
    run = fedabml.train(
        DATA[name](seed).hold_out(0.3, seed), "mlp", fedabml.FedABML(), rounds=rounds, participation=1.0, epochs=2,
        seed=seed, device="cpu", model_options={"hidden": [32]},
        likelihood=fedabml.GaussianNoise(1, by_input=by_input),
    )  # fmt: skip
    facts = {"data": name, "seed": seed, "rounds": rounds, "by_input": by_input, "fedabml": fedabml.__version__}
    return facts | {key: round(run.summary[key], 5) for key in MEASURES}


def paired(lines: Sequence[dict[str, object]], name: str, rounds: int, key: str) -> str:
    """Return the mean difference that noise by input makes, with half of its 95% interval over seeds."""
    own = [line for line in lines if (line["data"], line["rounds"]) == (name, rounds)]
    values = [np.array([line[key] for line in own if line["by_input"] == by]) for by in (True, False)]
    gap = values[0] - values[1]
    half = t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / np.sqrt(len(gap))
    return f"{key} {values[1].mean():.3f} → {values[0].mean():.3f}, {gap.mean():+.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, nargs="+", default=[15, 40])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    for name in DATA:
        for rounds in options.rounds:
            cases = [(seed, by) for seed in range(options.seeds) for by in (False, True)]
            lines += [measure(name, seed, by, rounds) for seed, by in cases]
            print(name, rounds, "rounds:", "; ".join(paired(lines, name, rounds, key) for key in MEASURES), flush=True)
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
