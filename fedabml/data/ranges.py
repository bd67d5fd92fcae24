"""Ranges: what a table's columns usually hold, so that an unusual value of a row is found and its column named.

A network's own uncertainty is no alarm for a value in the wrong unit: far away from the data it may be *surer* than
ever. So every column is remembered by a few of its quantiles, the shares of its categories and the share of its gaps,
and each value of a new row gets its tail probability: how often training rows hold a value as extreme.

    ranges = Ranges.fit(columns)            # columns: {name: float64 [n] with NaN, or object [n] with None}
    p = ranges.tails(columns)               # {name: [n]}, small where a value is unusual
    novelty = ranges.novelties(columns)     # {name: [n]}, large where a value is unusual; see ranges.threshold()
    flags = ranges.sentences(columns, marks)  # for each row a sentence per column whose value is marked
    limits = ranges.limits(columns)         # for rows of one client: higher for what is common there

What is remembered here may be shared: a quantile has at least `LEAST` rows on either side and is rounded to about a
thousandth of the column's spread; a category or a gap that fewer rows have is not remembered at all. Of 100 rows or
more it is also remembered whether any is below zero. A column of few different numbers, such as 0 and 1 or a year, is
remembered by its values' shares, like one of words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError

LEAST_SHARE = 0.001  # of a category that is remembered; shares are rounded to it
LEAST = 5  # rows beyond a quantile, and rows of a category, that are remembered
FEW_VALUES, FEW_ROWS = 20, 100  # a column of fewer different numbers is discrete; fewer rows do not show what never is
PROBS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995)
LEAST_OWN, FOLDS = 25, 5  # rows of one client that set limits: four fifths of them show quartiles
FALSE_ALARMS = 0.05  # share of usual rows that may be flagged
LEAST_TAIL = 1e-300  # a probability of 0 counts as this one, so that its logarithm is a number
_SEEN = f"seen in fewer than {LEAST} rows"


@dataclass(frozen=True)
class NumberRange:
    """Quantiles of a column of numbers, and the share of rows without a value."""

    probs: tuple[float, ...]
    quantiles: tuple[float, ...]
    missing: float
    rows: int
    signed: bool = True  # whether a value is below zero; a negative age or count is impossible, not only rare

    @classmethod
    def fit(cls, values: np.ndarray) -> NumberRange:
        """Remember a column, float64 [n] with NaN in the gaps."""
        present = values[~np.isnan(values)]
        gaps = len(values) - len(present)
        missing = gaps / len(values) if gaps >= LEAST else 0.0
        signed = len(present) < FEW_ROWS or bool(present.min() < 0)
        probs = tuple(p for p in PROBS if min(p, 1 - p) * len(present) >= LEAST)
        if len(probs) < 3:  # too few rows to know both tails
            return cls((), (), missing, len(values), signed)
        quantiles = np.quantile(present, probs)
        step = 10.0 ** math.floor(math.log10(max((quantiles[-1] - quantiles[0]) / 1000, 1e-300)))
        return cls(probs, tuple(float(q) for q in np.round(quantiles / step) * step), missing, len(values), signed)

    def tails(self, values: np.ndarray) -> np.ndarray:
        """Return the two-sided tail probability of each value [n].

        Between quantiles its logarithm is interpolated; beyond the last one it falls on along the last slope. A gap
        has the share of gaps.
        """
        probabilities = np.full(len(values), self.missing or _never(self.rows))
        present = ~np.isnan(values)
        if not self.probs:
            probabilities[present] = 1.0
            return probabilities
        probs, q = np.array(self.probs), np.array(self.quantiles)
        lower = _log_tail(values[present], q, np.log(probs))
        upper = _log_tail(-values[present], -q[::-1], np.log1p(-probs[::-1]))
        probabilities[present] = np.exp(np.minimum(np.minimum(lower, upper) + math.log(2), 0))
        if not self.signed:
            probabilities[present & (values < 0)] = 0.0
        return probabilities

    def reason(self, value: float) -> str:
        """Say in words what is unusual about a value."""
        if math.isnan(value):
            return _reason_of_gap(self.missing)
        if value < 0 and not self.signed:
            return f"is {value:g}; no value is below zero"
        if not self.quantiles:
            return f"is {value:g}"
        side = "below" if value < self.quantiles[len(self.quantiles) // 2] else "above"
        edge, p = (self.quantiles[0], self.probs[0]) if side == "below" else (self.quantiles[-1], 1 - self.probs[-1])
        return f"is {value:g}; only {p:.1%} of the values are {side} {edge:g}"


def _reason_of_gap(missing: float) -> str:
    return "is missing" if missing else f"is missing, {_SEEN}"


def _log_tail(values: np.ndarray, quantiles: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return log P(X <= value) by interpolation of ascending quantiles, extrapolated below the first one."""
    inside = np.interp(values, quantiles, logs)
    # The scale on which the tail falls: between the first quantile and the next larger one.
    larger = int(np.argmax(quantiles > quantiles[0]))
    slope = (logs[larger] - logs[0]) / max(quantiles[larger] - quantiles[0], 1e-12)
    below = np.maximum(quantiles[0] - values, 0)
    return np.where(below > 0, logs[0] - np.minimum(slope * below, 600), inside)


def _never(rows: int) -> float:
    """Return the tail probability of what no row has: 0 if there were enough of them, else less than one row's."""
    return 0.0 if rows >= FEW_ROWS else 0.5 / (rows + 1)


@dataclass(frozen=True)
class WordRange:
    """The shares of a column's categories, of all that are too rare to be named, and of rows without a value."""

    shares: Mapping[str, float]
    rare: float
    missing: float
    rows: int

    @classmethod
    def fit(cls, values: np.ndarray) -> WordRange:
        """Remember a column of words, object [n] with None in the gaps, or of few numbers, float64 [n] with NaN."""
        texts = _as_texts(values)
        counts = Counter(text for text in texts if text is not None)
        named = sorted((text, count) for text, count in counts.items() if count >= LEAST)
        shares = {text: max(round(count / len(texts), 3), LEAST_SHARE) for text, count in named}
        rare = sum(count for count in counts.values() if count < LEAST) / len(texts)
        gaps = texts.count(None)
        return cls(shares, round(rare, 4), gaps / len(texts) if gaps >= LEAST else 0.0, len(texts))

    def tails(self, values: np.ndarray) -> np.ndarray:
        """Return how often each value [n] occurs together with those that are rarer."""
        total, by_text = self.rare, {}
        for text, share in sorted(self.shares.items(), key=lambda item: item[1]):
            total += share
            by_text[text] = total
        unknown, missing = (share or _never(self.rows) for share in (self.rare, self.missing))
        return np.array([missing if text is None else by_text.get(text, unknown) for text in _as_texts(values)], float)

    def held_by_few(self, values: np.ndarray) -> np.ndarray:
        """Return which values [n] are words that fewer than `LEAST` rows hold; those not named count together."""
        few = round(self.rare * self.rows) < LEAST
        return np.array([text is not None and few and text not in self.shares for text in _as_texts(values)], bool)

    def reason(self, value: Any) -> str:
        """Say in words what is unusual about a value."""
        text = _as_texts(np.array([value], float if isinstance(value, float) else object))[0]
        if text is None:
            return _reason_of_gap(self.missing)
        if text in self.shares:
            return f"is '{text}', which is rare ({self.shares[text]:.1%})"
        same_letters = [word for word in self.shares if word.casefold().strip() == text.casefold().strip()]
        return f"is '{text}', {_SEEN}" + (f"; '{same_letters[0]}' is known" if same_letters else "")


def gaps_of(values: np.ndarray) -> np.ndarray:
    """Return which values [n] are missing: None among words, NaN among numbers."""
    return np.array([value is None for value in values], bool) if values.dtype == object else np.isnan(values)


def _as_texts(values: np.ndarray) -> list[str | None]:
    """Return words as they are, numbers in their shortest form, and None for gaps."""
    if values.dtype == object:
        return [None if value is None else str(value) for value in values]
    return [None if value != value else f"{value:.15g}" for value in values.tolist()]


@dataclass(frozen=True)
class RangeLimits:
    """The novelty beyond which a value of a column, or a gap in it, raises an alarm."""

    usual: float  # of every column that `values` or `gaps` do not name; beyond it a value is unusual
    values: Mapping[str, float] = field(default_factory=dict)
    gaps: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str, gaps: np.ndarray) -> np.ndarray:
        """Return the limit of every row's value [n] of a column; `gaps` marks the rows that have none."""
        return np.where(gaps, self.gaps.get(name, self.usual), self.values.get(name, self.usual))

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the limits of columns as plain dictionaries; the usual limit is kept beside them."""
        return {"values": dict(self.values), "gaps": dict(self.gaps)}

    @classmethod
    def from_json(cls, usual: float, content: Any) -> RangeLimits:
        """Return what `to_json` wrote. Raises ValueError for limits that are no finite numbers."""
        parts = [{str(name): float(limit) for name, limit in content[key].items()} for key in ("values", "gaps")]
        if not all(math.isfinite(limit) for part in parts for limit in part.values()):
            raise ValueError("a limit of a column that is not finite")
        return cls(usual, *parts)


@dataclass(frozen=True)
class Ranges:
    """What every column of a table usually holds."""

    columns: Mapping[str, NumberRange | WordRange]

    @classmethod
    def fit(cls, columns: Mapping[str, np.ndarray]) -> Ranges:
        """Remember the columns of training rows: float64 [n] with NaN, or words, object [n] with None."""
        ranges: dict[str, NumberRange | WordRange] = {}
        for name, values in columns.items():
            discrete = values.dtype == object or len(np.unique(values[~np.isnan(values)])) < FEW_VALUES
            ranges[name] = WordRange.fit(values) if discrete else NumberRange.fit(values)
        return cls(ranges)

    def tails(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the tail probability of every value, by column."""
        return {name: column_range.tails(columns[name]) for name, column_range in self.columns.items()}

    def novelties(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return how unusual every value is, by column: −log of its tail probability [n]."""
        return {name: -np.log(np.maximum(p, LEAST_TAIL)) for name, p in self.tails(columns).items()}

    def novelty(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return how unusual the most unusual value of each row is [n]."""
        return np.max(list(self.novelties(columns).values()), axis=0)

    def threshold(self, false_alarms: float = FALSE_ALARMS) -> float:
        """Return the novelty that at most a share `false_alarms` of usual rows exceeds (Bonferroni over columns)."""
        return -math.log(false_alarms / max(1, len(self.columns)))

    def crossed_limit(self, columns: Mapping[str, np.ndarray]) -> float:
        """Return the novelty that about a share `FALSE_ALARMS` of new rows exceeds, from the rows these ranges know.

        Quantiles of few rows are closer to these rows than to new ones, so `threshold()` alone would be too low. Ranges
        of the other folds judge each fold of the rows. There must be `LEAST_OWN` rows or more.
        """
        rows = len(next(iter(columns.values())))
        fold, novelty = np.arange(rows) % FOLDS, np.empty(rows)
        for number in range(FOLDS):
            others, own = ({n: v[r] for n, v in columns.items()} for r in (fold != number, fold == number))
            novelty[fold == number] = Ranges.fit(others).novelty(own)
        return max(self.threshold(), float(np.quantile(novelty, 1 - FALSE_ALARMS, method="higher")))

    def limits(self, columns: Mapping[str, np.ndarray], false_alarms: float = FALSE_ALARMS) -> RangeLimits:
        """Return the limits that at most a share `false_alarms` of rows like these exceeds, in any column.

        Every limit is `threshold()` at first. While too many rows exceed one, the limit that the most rows exceed rises
        to the lowest novelty of these rows. So what is common in one column, such as gaps, leaves alarms of the others
        as they are. Gaps and values have limits of their own for the same reason. Of n rows ⌊(n + 1)·share⌋ − 1 may
        exceed a limit, as for a conformal quantile, but always one. The limit of gaps stays where they are fewer than
        `LEAST` and fewer than 5% of the rows.
        """
        usual = self.threshold(false_alarms)
        rows = len(next(iter(columns.values())))
        allowed = max(1, rows - math.ceil((rows + 1) * (1 - false_alarms) - 1e-9))
        limits: list[tuple[str, bool]] = []  # those that rows exceed: the column, and whether it is that of gaps
        exceeded: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # for each the rows, novelties, rows left beyond
        for name, novelty in self.novelties(columns).items():
            missing = gaps_of(columns[name])
            for is_gap in (True, False):
                found = np.flatnonzero((novelty > usual) & (missing == is_gap))
                enough = min(LEAST, FALSE_ALARMS * rows) if is_gap else 1
                if len(found) >= enough:
                    ordered = np.sort(novelty[found])
                    limits.append((name, is_gap))
                    exceeded.append((found, novelty[found], len(found) - np.searchsorted(ordered, novelty[found])))
        if not limits:
            return RangeLimits(usual)
        row, novelty, left = (np.concatenate(parts) for parts in zip(*exceeded, strict=True))
        limit = np.repeat(np.arange(len(limits)), [len(found) for found, _, _ in exceeded])
        # The rows left beyond a limit only fall, so sorting by them gives the order in which limits rise.
        order = np.lexsort((limit, novelty, -left))
        last_rise = np.full(rows, -1)  # the place in this order from which a row exceeds no limit
        np.maximum.at(last_rise, row[order], np.arange(len(order)))
        rises = order[: np.sort(last_rise)[::-1][allowed] + 1] if rows > allowed else order[:0]
        raised: tuple[dict[str, float], dict[str, float]] = {}, {}
        for number, (name, is_gap) in enumerate(limits):
            if len(risen := novelty[rises[limit[rises] == number]]):
                raised[is_gap][name] = float(risen.max())
        return RangeLimits(usual, *raised)

    def held_by_few(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return by column which values [n] are words that fewer than `LEAST` rows hold."""
        return {
            name: column_range.held_by_few(columns[name])
            if isinstance(column_range, WordRange)
            else np.zeros(len(columns[name]), bool)
            for name, column_range in self.columns.items()
        }

    def sentences(self, columns: Mapping[str, np.ndarray], marks: Mapping[str, np.ndarray]) -> list[dict[str, str]]:
        """Return for each row a sentence by column whose value is marked; `marks` has truth values [n] by column."""
        by_row: list[dict[str, str]] = [{} for _ in range(len(next(iter(columns.values()))))]
        for name, marked in marks.items():
            for row in np.flatnonzero(marked):
                by_row[row][name] = f"{name} {self.columns[name].reason(columns[name][row])}"
        return by_row

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and words."""
        return {name: asdict(column_range) for name, column_range in self.columns.items()}

    @classmethod
    def from_json(cls, content: Any) -> Ranges:
        """Return what `to_json` wrote; anything else is an InputError."""
        try:
            return cls({str(name): _from_json(fields) for name, fields in content.items()})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"The ranges of the columns are damaged ({error!r}).") from error


def _from_json(content: Any) -> NumberRange | WordRange:
    missing, rows = float(content["missing"]), int(content["rows"])
    if not 0 <= missing <= 1 or rows < 0:
        raise ValueError("a share or a number of rows out of range")
    if "shares" in content:
        shares = {str(text): float(share) for text, share in content["shares"].items()}
        if not all(0 <= share <= 1 for share in shares.values()):
            raise ValueError("a share out of range")
        shares = {text: share or LEAST_SHARE for text, share in shares.items()}  # earlier versions rounded some to 0
        rare = float(content["rare"])
        if not 0 <= rare <= 1:
            raise ValueError("a share out of range")
        return WordRange(shares, rare, missing, rows)
    probs, quantiles = (tuple(float(v) for v in content[key]) for key in ("probs", "quantiles"))
    if len(probs) != len(quantiles) or not all(0 < p < 1 for p in probs) or list(probs) != sorted(probs):
        raise ValueError("probabilities without quantiles, or out of order")
    if not all(map(math.isfinite, quantiles)) or list(quantiles) != sorted(quantiles):
        raise ValueError("quantiles out of order")
    signed = content.get("signed", True)  # files of earlier versions do not say it
    if not isinstance(signed, bool):
        raise ValueError("whether values are below zero is neither true nor false")
    return NumberRange(probs, quantiles, missing, rows, signed)
