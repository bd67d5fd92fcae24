"""Do FedABML's posteriors deserve trust at every site? Measured on two tables, over several seeds.

    python examples/trust_study.py --seeds 10 --out results/hospitals

The tables are `hospitals.py` (synthetic, truth known) and `breast_cancer.py` (real). For every seed, half of each
site's rows are for testing. FedABML (an MLP of 32 units) trains on the other halves, and three things are measured:

1. *Ranking*: the AUROC at every site, beside that of training alone (the same network, and logistic regression) and of
   a logistic regression on the pooled rows of all sites, which no federation can have. The means over small sites (at
   most 100 training rows in hospitals, 20 in tumours) and over all sites are compared, paired by seed, with Student's
   95% intervals.
2. *Calibration and coverage*, for posteriors made with `validation=0.3`, at sites with 50 or more test rows: the number
   of positive rows against the interval of its predictive distribution, and the number of rows whose set of 90% holds
   the truth against a beta-binomial interval (the chance of the test rows, and of the validation rows that set the
   limit). With many sites some fall outside of a 95% interval by chance. So the intervals have a level of
   1 − 5%/(sites × seeds), at which all of them hold at once with 95%, and the number outside of plain 95% intervals is
   given beside its expectation. The intervals of coverage are one-sided, because two classes can often not have sets of
   exactly 90%: only too little counts. The sites are not new: the prior was trained on the rows that set temperature
   and limits, for 30 rounds. Larger networks and more rounds, which memorise rows, may cover less.
3. *Alarms*: how many clean rows have one (5% are allowed), and how many rows with a spoiled value have one, with the
   AUROC of the score behind the alarm.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import breast_cancer
import hospitals
import numpy as np
import pandas as pd
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import fedabml
from fedabml.experiments.statistics import interval

Record = dict[str, Any]
Change = Callable[[pd.DataFrame], pd.Series]
TEST_SHARE, VALIDATION, HIDDEN = 0.5, 0.3, 32
ENOUGH = 50  # test rows of a site that is judged, at least
LEVEL = 0.05
METHODS = {  # by their names in the records: those on the page
    "fedabml": "FedABML",
    "alone": "same network, trained alone",
    "alone_lr": "logistic regression alone",
    "pooled_lr": "pooled logistic regression",
}


@dataclass(frozen=True)
class Study:
    """A table of sites by seed, its columns, and what may go wrong in a value: the column, and the spoiled values."""

    name: str
    table: Callable[[int], pd.DataFrame]
    site: str
    target: str
    small: int  # training rows of a small site, at most
    spoiled: dict[str, tuple[str, Change]]


def _times(column: str, factor: float) -> tuple[str, Change]:
    return column, lambda t: t[column] * factor


def _always(column: str, value: Any) -> tuple[str, Change]:
    return column, lambda t: pd.Series([value] * len(t))


def _patients(seed: int) -> pd.DataFrame:
    table = hospitals.patients(seed)
    return table[table.hospital != hospitals.NAMES[-1]].drop(columns=["patient", "risk"]).reset_index(drop=True)


HOSPITALS = Study(
    "hospitals", _patients, "hospital", "died", 100,
    {
        "unit: creatinine in mg/dl": _times("creatinine", 1 / 88.4),
        "unit: temperature in °F": ("temperature", lambda t: 1.8 * t.temperature + 32),
        "unit: lactate in mg/dl": _times("lactate", 9.01),
        **{f"{name} ×10": _times(name, 10.0) for name in (
            "age", "creatinine", "lactate", "heart_rate", "sodium", "temperature")},
        "impossible: age -5": _always("age", -5.0),
        "impossible: heart rate 0": _always("heart_rate", 0.0),
        "unseen ward": _always("ward", "burns"),
        "case: SURGERY": ("ward", lambda t: t.ward.str.upper()),
        "case: Female": ("sex", lambda t: t.sex.str.capitalize()),
    },
)  # fmt: skip

TUMOURS = Study(
    "tumours", breast_cancer.tumours, "site", "diagnosis", 20,
    {
        "unit: mean radius in cm": _times("mean radius", 0.1),
        **{f"{name} ×10": _times(name, 10.0) for name in (
            "mean radius", "mean texture", "mean perimeter", "mean area", "mean smoothness", "worst radius")},
        "impossible: mean area -1": _always("mean area", -1.0),
        "impossible: mean smoothness 5": _always("mean smoothness", 5.0),
    },
)  # fmt: skip
STUDIES = {study.name: study for study in (HOSPITALS, TUMOURS)}


def measure(study: Study, seed: int, rounds: int = 30) -> tuple[list[Record], list[Record]]:
    """Return a record per site, and one per site and spoiled value."""
    table = study.table(seed)
    fed = fedabml.read_table(table, client=study.site, target=study.target, test_share=TEST_SHARE, seed=seed)
    ranking, prior = _ranking(fed, seed, rounds)
    sites, alarms = [], []
    for i, name in enumerate(fed.names):
        train, test = (table.iloc[rows].reset_index(drop=True) for rows in (fed.train[i], fed.test[i]))
        truth = fed.y[fed.test[i]]
        facts = {"table": study.name, "seed": seed, "site": name, "train": len(train), "test": len(test)}
        facts["small"] = len(train) <= study.small
        sites.append(facts | {method: ranking[method][i] for method in METHODS})
        posterior = prior.personalize(train, validation=VALIDATION, seed=seed)
        p = posterior.predict(test, seed=seed)
        sites[-1] |= _checked(p, truth, posterior.trust) | {"alarms": int(p.checks.alarm.sum())}
        if len(test) >= ENOUGH:
            for label, (column, change) in study.spoiled.items():
                known = test[test[column].notna()].reset_index(drop=True)
                spoiled = known.assign(**{column: change(known)})
                alarms.append(facts | {"spoiled": label} | _alarms(posterior, known, spoiled, seed))
    return sites, alarms


def _ranking(fed: fedabml.Federation, seed: int, rounds: int) -> tuple[dict[str, list[float | None]], fedabml.Prior]:
    """Return each method's AUROC by site, None for a site whose test rows are all of one class; and FedABML's prior."""
    options: dict[str, Any] = {"rounds": rounds, "participation": 1.0, "seed": seed, "device": "cpu"}
    options["model_options"] = {"hidden": [HIDDEN]}
    run, alone = (fedabml.train(fed, "mlp", how, **options) for how in (fedabml.FedABML(), fedabml.Local()))
    assert run.evaluation and alone.evaluation
    x = (fed.x - fed.shift) / fed.scale
    pooled = _regression(x[fed.train.index], fed.y[fed.train.index])
    own = [_regression(x[rows], fed.y[rows]) for rows in fed.train]
    aurocs = {
        "fedabml": run.evaluation.clients["auroc"],
        "alone": alone.evaluation.clients["auroc"],
        "alone_lr": [_auroc(fed.y[rows], model(x[rows])) for rows, model in zip(fed.test, own, strict=True)],
        "pooled_lr": [_auroc(fed.y[rows], pooled(x[rows])) for rows in fed.test],
    }
    return {
        name: [None if v != v else round(float(v), 4) for v in values] for name, values in aurocs.items()
    }, run.prior


def _regression(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fit scikit-learn's logistic regression with its defaults; return its probabilities of class 1."""
    if len(np.unique(y)) < 2:
        return lambda x: np.full(len(x), float(y[0]))
    model = LogisticRegression(max_iter=5000).fit(x, y)
    return lambda x: model.predict_proba(x)[:, 1]


def _auroc(y: np.ndarray, score: np.ndarray) -> float:
    return roc_auc_score(y, score) if 0 < y.sum() < len(y) else float("nan")


def _checked(p: Any, truth: np.ndarray, trust: Any) -> Record:
    """Return counts and p-values of a site's calibration and coverage on its test rows."""
    positives, score = int(truth.sum()), p.probs[:, 1]
    covered, n = int(p.checks.sets[np.arange(len(truth)), truth].sum()), trust.rows
    k = int(np.ceil((n + 1) * trust.coverage - 1e-9))  # the rank of the limit: coverage is Beta(k, n + 1 - k)
    chance = stats.betabinom(len(truth), k, n + 1 - k) if k <= n else None
    return {
        "validation": n, "positives": positives, "expected": round(float(score.sum()), 2),
        "calibration_p": count_p(score, positives), "temperature": round(trust.temperature, 3),
        "covered": covered, "coverage_p": 1.0 if chance is None else float(chance.cdf(covered)),
        "set_size": round(float(p.checks.sets.sum(1).mean()), 3),
    }  # fmt: skip


def count_p(probs: np.ndarray, count: int) -> float:
    """Return the two-sided p-value of a number of positive rows, if row i is positive with a probability probs[i]."""
    density = np.ones(1)
    for p in probs:
        density = np.convolve(density, (1 - p, p))
    return float(min(1.0, 2 * min(density[: count + 1].sum(), density[count:].sum())))


def _alarms(posterior: Any, usual: pd.DataFrame, spoiled: pd.DataFrame, seed: int) -> Record:
    """Return the share of spoiled rows with an alarm, and the AUROC of the score behind it against the usual rows."""
    before, after = (posterior.predict(rows, seed=seed).checks for rows in (usual, spoiled))
    label = np.r_[np.zeros(len(usual)), np.ones(len(spoiled))]
    auroc = roc_auc_score(label, np.r_[before.score, after.score])
    return {"flagged": round(float(after.alarm.mean()), 4), "auroc": round(float(auroc), 4)}


def judge(sites: list[Record], alarms: list[Record]) -> Record:
    """Return the verdicts on one table's records: paired differences, sites outside of their intervals, alarms."""
    seeds = sorted({r["seed"] for r in sites})

    def means(method: str, small: bool) -> list[float]:
        chosen = [r for r in sites if r["small"] or not small]
        values = {s: [r[method] for r in chosen if r["seed"] == s and r[method] is not None] for s in seeds}
        return [float(np.mean(values[s])) for s in seeds]

    result: Record = {"seeds": len(seeds)}
    for group, small in (("small", True), ("all", False)):
        ours = means("fedabml", small)
        for method in METHODS:
            theirs = means(method, small)
            result[f"{group}_{method}"] = float(np.mean(theirs))
            if method != "fedabml":
                result[f"{group}_gain_over_{method}"] = interval(list(np.subtract(ours, theirs)))
    judged = [r for r in sites if r["test"] >= ENOUGH]
    result |= {"judged": len(judged), "expected_outside": LEVEL * len(judged)}
    for name in ("calibration_p", "coverage_p"):
        p = np.array([r[name] for r in judged])
        outside = int((p < LEVEL).sum())
        result[name.replace("_p", "")] = {
            "outside": outside, "outside_at_once": int((p < LEVEL / len(judged)).sum()),
            "p_of_so_many": float(stats.binom.sf(outside - 1, len(judged), LEVEL)),
        }  # fmt: skip
    missed = {r["seed"] for r in judged if min(r["calibration_p"], r["coverage_p"]) < LEVEL}
    result["whole"] = len({r["seed"] for r in judged} - missed)
    tested = sum(r["test"] for r in judged)
    result["mean_coverage"] = sum(r["covered"] for r in judged) / tested
    result["false_alarms"] = sum(r["alarms"] for r in judged) / tested
    for label in dict.fromkeys(r["spoiled"] for r in alarms):
        own = [r for r in alarms if r["spoiled"] == label]
        result.setdefault("spoiled", {})[label] = {
            "flagged": float(np.mean([r["flagged"] for r in own])), "auroc": float(np.mean([r["auroc"] for r in own])),
            "lowest_auroc": float(min(r["auroc"] for r in own)),
        }  # fmt: skip
    return result


def shown(name: str, verdict: Record) -> str:
    """Return a verdict as Markdown tables."""
    seeds = f"{verdict['seeds']} seed{'s' * (verdict['seeds'] > 1)}"
    lines = [f"### {name}, {seeds}", "", "| AUROC, mean over sites | small sites | all sites |"]
    lines.append("|---|---|---|")
    for method, label in METHODS.items():
        cells = []
        for group in ("small", "all"):
            mean, half = verdict.get(f"{group}_gain_over_{method}", (None, None))
            band = "" if half is None else f" ± {half:.3f}"
            gain = "" if mean is None else f" (FedABML {mean:+.3f}{band})"
            cells.append(f"{verdict[f'{group}_{method}']:.3f}{gain}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    count, expected = verdict["judged"], verdict["expected_outside"]
    lines += [
        "",
        f"Of {count} sites with {ENOUGH} or more test rows, {expected:.1f} are expected outside of 95% intervals:",
    ]
    for part in ("calibration", "coverage"):
        lines.append(f"{part} {verdict[part]['outside']}, outside of the joint 95% {verdict[part]['outside_at_once']};")
    lines.append(f"in {verdict['whole']} of {verdict['seeds']} tables every site is inside of both;")
    lines.append(
        f"sets of 90% hold the truth in {verdict['mean_coverage']:.1%} of all rows; of clean rows, "
        f"{verdict['false_alarms']:.1%} have an alarm."
    )
    lines += ["", "| spoiled value | rows with an alarm | AUROC, mean | AUROC, lowest site |", "|---|---|---|---|"]
    found = [label for label, own in verdict["spoiled"].items() if min(own["flagged"], own["lowest_auroc"]) > 0.9995]
    for label, own in verdict["spoiled"].items():
        if label not in found:
            lines.append(f"| {label} | {own['flagged']:.1%} | {own['auroc']:.3f} | {own['lowest_auroc']:.3f} |")
    lines.append(f"| the {len(found)} others | 100.0% | 1.000 | 1.000 |")
    return "\n".join(lines)


def main(words: Iterable[str] | None = None) -> None:
    """Read the arguments, measure, print the tables, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=[*STUDIES, "all"], default="all")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="folder for records.jsonl and alarms.jsonl")
    options = parser.parse_args(None if words is None else list(words))
    logging.getLogger("fedabml").setLevel(logging.ERROR)
    everything: tuple[list[Record], list[Record]] = [], []
    for name in STUDIES if options.table == "all" else [options.table]:
        records: tuple[list[Record], list[Record]] = [], []
        for seed in range(options.first, options.first + options.seeds):
            for kept, new in zip(records, measure(STUDIES[name], seed, options.rounds), strict=True):
                kept += new
        print(shown(name, judge(*records)), end="\n\n", flush=True)
        for kept, new in zip(everything, records, strict=True):
            kept += new
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for file, lines in zip(("records.jsonl", "alarms.jsonl"), everything, strict=True):
            (options.out / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
