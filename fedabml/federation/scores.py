"""Score the sites' own models while a federation trains: sites compute scores, the server checks and averages them.

A site personalises what the server sent, exactly as the simulator scores a client. It is scored on its test rows,
which never train. It sends scores only if its `site.toml` allows them and at least `LEAST_ROWS_TO_SCORE` rows are
scored, and it rounds them. Scoring never affects training: after an error there are no scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

from ..algorithms.base import State
from ..arguments import is_number, is_whole
from ..engine.setting import Cohort
from ..errors import InputError, TrainingError
from ..evaluation.measures import FEW_ROWS
from ..evaluation.scoring import evaluate

log = logging.getLogger("fedabml")

LEAST_ROWS_TO_SCORE = FEW_ROWS  # scores of fewer rows would show single labels
SCORE_NAMES = ("accuracy", "rmse", "nll")
MAX_SCORE = 1e30


def site_scores(cohort: Cohort, shared: State, kept: State, round: int) -> dict[str, Any]:
    """Return the scores of the only client of a cohort on its test rows: rows, nll, and accuracy or rmse.

    `kept` is the client's kept state, with one row. The result is empty if there are too few rows, or if scoring fails.
    """
    rows = int(cohort.fed.test.counts[0])
    if rows < LEAST_ROWS_TO_SCORE:
        return {}
    try:
        summary = evaluate(cohort, shared, lambda _: kept, "test", round, brief=True).summary
    except (TrainingError, InputError) as error:
        log.warning("This site could not be scored in round %s: %s", round, error)
        return {}
    found = {name: float(summary[name]) for name in SCORE_NAMES if is_number(summary.get(name))}
    scores = {name: float(f"{value:.4g}") for name, value in found.items() if math.isfinite(value)}
    return {"rows": rows, **scores} if scores else {}


def check_scores(facts: Any, most_rows: int) -> dict[str, float]:
    """Return a site's scores and its number of rows if all are plausible; otherwise an empty dictionary."""
    scores = facts.get("scores") if isinstance(facts, dict) else None
    if not isinstance(scores, dict) or not scores.keys() <= {"rows", *SCORE_NAMES} or len(scores) < 2:
        return {}
    if not is_whole(scores.get("rows")) or not LEAST_ROWS_TO_SCORE <= scores["rows"] <= most_rows:
        return {}
    lowest, highest = {"nll": -MAX_SCORE}, {"accuracy": 1.0}
    for name in scores.keys() - {"rows"}:
        if not is_number(scores[name]) or not lowest.get(name, 0.0) <= scores[name] <= highest.get(name, MAX_SCORE):
            return {}
    return {name: float(value) for name, value in scores.items()}


def mean_scores(sites: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the means of checked scores, weighted by rows, and the number of rows. Empty scores are left out."""
    known = [scores for scores in sites if scores]
    result: dict[str, float] = {}
    for name in SCORE_NAMES:
        having = [(scores["rows"], scores[name]) for scores in known if name in scores]
        if having:
            result[name] = math.fsum(rows * value for rows, value in having) / sum(rows for rows, _ in having)
    return {**result, "scored rows": sum(scores["rows"] for scores in known)} if result else {}
