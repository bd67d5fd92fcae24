"""Intervals and paired tests over seeds and clients, with numpy alone.

Which test? Clients of one seed share a partition and a trained model, so they are not independent observations: a test
over clients alone finds equal methods different in most tables where training itself is noisy. The independent units
are seeds. A paired t-test over the seeds' mean differences is right whatever happens within a seed, but with three
seeds its variance may be small by luck. So a difference counts when *both* hold: it repeats over seeds, and it does not
come from a few clients (a paired t-test over clients). Both rejecting is a test of the same level. Student's rather
than Wilcoxon's, because the table ranks by means, and so must the test.

Holm's correction is for the number of rivals. It does not correct for the choice of the best method by the same data.
Simulated tables of equal methods show its size, where 5 % are meant: some rival was found different in 5 to 7 % of
tables with 3 methods, 8 % with 5, 13 % with 15. They had five seeds, 40 clients, and training noise of a third to one
of the clients' deviation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SEEDS_TO_TEST = 3  # with fewer seeds a t-test over them says nothing
MANY = 1000  # degrees of freedom, beyond which Student's quantiles hardly change


def student_within(t: float, df: int) -> float:
    """Return P(|T| < t) of Student's distribution with a whole number of degrees of freedom, as a finite sum.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    if df < 1:
        raise ValueError(f"Student's distribution needs at least one degree of freedom; it has {df}.")
    angle = math.atan2(t, math.sqrt(df))
    cos2, odd = math.cos(angle) ** 2, df % 2
    term = total = (math.cos(angle) if odd else 1.0) * (df > 1)
    for k in range(2 + odd, df - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return (angle + inside) * 2 / math.pi if odd else inside


@cache
def student_quantile(df: int, level: float = 0.95) -> float:
    """Return the t for which P(|T| < t) is the level."""
    low, high = 0.0, 1.0
    while student_within(high, df) < level:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, df) < level else (low, middle)
    return (low + high) / 2


def mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over seeds with half of its interval, which fewer than three seeds do not have."""
    middle, half = interval(values)
    return middle, half if len(values) >= SEEDS_TO_TEST else None


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half of its 95% confidence interval (Student); a single value has no interval."""
    v = np.asarray(values, float)
    if len(v) < 2:
        return float(v.mean()), None
    half = student_quantile(len(v) - 1) * float(v.std(ddof=1)) / math.sqrt(len(v))
    return float(v.mean()), half


def t_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a mean of zero (Student); 1 for a single difference."""
    d = np.asarray(differences, float)
    if len(d) < 2:
        return 1.0
    mean, error = float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d))
    if error <= 1e-12 * abs(mean):  # all the same
        return 1.0 if mean == 0 else 0.0
    return max(0.0, 1 - student_within(abs(mean) / error, len(d) - 1))  # rounding may pass 1


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected for the chance of any false alarm (Holm)."""
    order = np.argsort(ps, kind="stable")
    stepped = np.asarray(ps, float)[order] * (len(ps) - np.arange(len(ps)))
    corrected = np.empty(len(ps))
    corrected[order] = np.minimum(np.maximum.accumulate(stepped), 1)
    return corrected.tolist()


@dataclass(frozen=True)
class Paired:
    """The mean difference of two methods, half of its interval over seeds, and p-values."""

    mean: float
    half: float | None
    p_seeds: float | None  # none with fewer than three seeds
    p_clients: float
    errors: tuple[tuple[float, int], ...] = ()  # of each test, the standard error of the mean and degrees of freedom

    @property
    def p(self) -> float:
        """The p-value of both tests, as both must reject; with fewer than three seeds, of the clients alone."""
        return self.p_clients if self.p_seeds is None else max(self.p_seeds, self.p_clients)

    def least(self, level: float) -> float | None:
        """Return the smallest mean difference that the tests would detect at a level; None without a test.

        A true difference of this size is detected about every second time.
        """
        seen = [student_quantile(min(df, MANY), 1 - level) * error for error, df in self.errors]
        return max(seen, default=None)


def paired(differences: Sequence[np.ndarray], units: Sequence[Sequence[Hashable]] | None = None) -> Paired:
    """Test a mean difference of zero; `differences` are those of the clients, for every seed.

    `units` names the clients where they are the same in several seeds: each is then one observation, not several.
    """
    means = [float(d.mean()) for d in differences]
    clients = np.concatenate(differences).tolist()
    if units is not None:
        of_client: dict[Hashable, list[float]] = {}
        for value, name in zip(clients, itertools.chain(*units), strict=True):
            of_client.setdefault(name, []).append(value)
        clients = [sum(values) / len(values) for values in of_client.values()]
    mean, half = interval(means)
    tests = [means, clients] if len(means) >= SEEDS_TO_TEST else [clients]
    errors = tuple((float(np.std(d, ddof=1)) / math.sqrt(len(d)), len(d) - 1) for d in tests if len(d) > 1)
    return Paired(mean, half, t_test(means) if len(tests) > 1 else None, t_test(clients), errors)
