"""What a client finds out about its own posterior on rows that the posterior was not trained on.

`Prior.personalize(..., validation=0.2)` holds out a fifth of the client's rows, trains the posterior on the rest, and
fits a `Trust` on the rows held out. It stays with the posterior, at the client, and every prediction uses it:

- probabilities are calibrated, by a temperature or an isotonic regression;
- with an aim (`f1`, `recall>=0.8`, `cost:10,1`) the label of two classes follows a threshold chosen for it; with costs
  of decisions (`cost:costs.csv`) the label of any number of classes is the one of least expected cost;
- prediction sets, or intervals of a regression, contain the truth with a stated coverage;
- unusual inputs are flagged: values that a table's columns (or the numbers of a short vector) rarely hold, and inputs
  far from the client's training data in the network's last hidden layer; images and other inputs without columns also
  by their strangeness, which looks at feature maps, too. Of usual rows, at most a stated share has an alarm.

A posterior that was made without validation rows has no `Trust`. Its predictions still get the flags and alarms of what
the columns hold over all sites, or at the client if the prior does not know that: see `flagged`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.ranges import FALSE_ALARMS, LEAST_TAIL, RangeLimits, Ranges, gaps_of
from ..errors import InputError, nearest
from ..evaluation import calibration
from ..evaluation.decision_costs import DecisionCosts
from ..evaluation.decisions import classwise_ece
from ..evaluation.density import FeatureDensity, Features, Maps, Strangeness
from ..evaluation.predictions import DISTANCE, STRANGENESS, Checks, Prediction, Regression
from ..evaluation.structured import MultiPrediction
from ..files.sealed import group

COVERAGE, CALIBRATION = 0.9, "temperature"
TRAINED_ON = (
    "The prior was trained on these rows, so calibration, coverage and comparison are too favourable. Rows that took "
    "no part in training judge fairly."
)
NO_LIMITS = RangeLimits(math.inf)  # where no ranges are known
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trust:
    """What was fitted on `rows` validation rows of one client."""

    rows: int
    coverage: float  # of prediction sets and intervals
    quantile: float  # of their scores; infinite where the rows do not suffice for the coverage
    temperature: float = 1.0
    aim: str = ""
    threshold: float | None = None  # of class 1; None: the most probable class is predicted
    nll_before: float | None = None  # on the validation rows, before the calibration
    nll_after: float | None = None  # after it; each row calibrated by what was fitted on other validation rows
    false_alarms: float = FALSE_ALARMS
    density: FeatureDensity | None = None
    density_limit: float = math.inf  # the distance beyond which an input is flagged
    strangeness: Strangeness | None = None  # of inputs that are no table, if classes are predicted
    strangeness_limit: float = math.inf  # beyond which an input is flagged
    maps: Maps | None = None  # of the convolutions, which strangeness looks at; files of earlier versions have none
    ranges: Ranges | None = None  # of the client's own columns
    range_limits: RangeLimits = NO_LIMITS  # the novelty beyond which a value raises an alarm, by column
    positives: int | None = None  # validation rows of class 1, where a threshold was chosen on them
    ece_before: float | None = None  # the class-wise calibration error, as the NLL
    ece_after: float | None = None
    kind: str = "temperature"  # of the calibration
    curves: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()  # of an isotonic one
    costs: DecisionCosts | None = None  # of decisions: they need no threshold, and nothing is fitted for them
    held_out: str | None = None  # the digest of the validation rows; files of earlier versions have none
    trained_on: bool = False  # whether the prior is known to have been trained on the validation rows

    def __repr__(self) -> str:
        threshold = "" if self.threshold is None else f", threshold {self.threshold:.3g} for {self.aim}"
        return f"Trust({self.rows} rows held out, calibration {self.kind}, coverage {self.coverage:g}{threshold})"

    @classmethod
    def fit(
        cls,
        p: Prediction | Regression | MultiPrediction,
        y: np.ndarray,
        *,
        coverage: float = COVERAGE,
        aim: str = "",
        false_alarms: float = FALSE_ALARMS,
        kind: str = "temperature",
        density: FeatureDensity | None = None,
        maps: Maps | None = None,
        features: Features | None = None,
        ranges: Ranges | None = None,
        federation: Ranges | None = None,
        columns: Columns | None = None,
        positive: str = "1",
    ) -> Trust:
        """Fit everything on the predictions for validation rows with targets `y`.

        `density` and `maps` are those of the client's training rows, `features` the validation rows' own. `federation`
        are the ranges of all sites, and `ranges` those of the client: of all its rows with `federation`, else of its
        training rows. `columns` are all of the client's rows with `federation`, else the validation rows. A table's
        rows are checked by values and distances, other inputs by distances and, for classes, strangeness; each check
        may raise half of the false alarms. The limits of distances and strangeness are quantiles of the validation
        rows. Those of values are the ones that the ranges imply, and higher for what is common among `columns`. `kind`
        is that of the calibration, and `positive` the name of class 1 in errors.
        """
        usual = federation or ranges
        by_value, by_distance = usual is not None, density is not None and features is not None
        by_strangeness = by_distance and not by_value and isinstance(p, Prediction)
        alarm_rate = false_alarms / max(1, by_value + by_distance + by_strangeness)
        density_limit = strangeness_limit = math.inf
        strangeness, range_limits = None, NO_LIMITS
        if density is not None and features is not None:
            density_limit = calibration.conformal_quantile(density.distance(features.hidden), 1 - alarm_rate)
            if by_strangeness and isinstance(p, Prediction):
                parts = density.angle(features.hidden), p.entropy, maps.distances(features.maps) if maps else ()
                strangeness = Strangeness.fit(*parts)
                strangeness_limit = calibration.conformal_quantile(strangeness.score(*parts), 1 - alarm_rate)
        if usual is not None:
            range_limits = (
                RangeLimits(usual.threshold(alarm_rate)) if columns is None else usual.limits(columns, alarm_rate)
            )
        common: dict[str, Any] = {"false_alarms": false_alarms, "density": density, "density_limit": density_limit}
        common |= {"rows": len(y), "coverage": coverage, "ranges": ranges, "range_limits": range_limits}
        common |= {"strangeness": strangeness, "strangeness_limit": strangeness_limit}
        common["maps"] = maps if strangeness is not None else None
        if isinstance(p, Regression):
            scores = calibration.interval_scores(*p.gaussian(), p.latent(y)).max(1)
            return cls(quantile=calibration.conformal_quantile(scores, coverage), **common)
        if isinstance(p, MultiPrediction):  # one temperature for every known answer; sets are of a single answer
            if kind == "isotonic":
                raise InputError("An isotonic calibration is for one label per row. Choose 'temperature' or 'none'.")
            flat, answers, row = p.flat(y, np.arange(len(y)))
            temperature = calibration.Calibration.fit(kind, flat.probs, answers).temperature
            crossed = calibration.cross_calibrated(kind, flat.probs, answers, row)
            nll = [
                -float(np.log(np.clip(1 - calibration.label_scores(probs, answers), 1e-30, None)).mean())
                for probs in (flat.probs, crossed)
            ]
            return cls(
                quantile=math.inf, temperature=temperature, nll_before=nll[0], nll_after=nll[1], kind=kind, **common
            )
        if kind == "isotonic" and len(y) < calibration.ISOTONIC_ROWS:
            raise InputError(
                f"An isotonic calibration needs {calibration.ISOTONIC_ROWS} validation rows; here are {len(y)}. "
                "Give more rows, a larger validation share, or choose the calibration 'temperature'."
            )
        fitted = calibration.Calibration.fit(kind, p.probs, y)
        probs, crossed = fitted.apply(p.probs), calibration.cross_calibrated(kind, p.probs, y)
        threshold = calibration.choose_threshold(probs[:, 1], y, calibration.Aim.parse(aim)) if aim else None
        if aim and threshold is None:
            why = "no threshold reaches it" if (y == 1).any() else f"they have no sample of the class '{positive}'"
            raise InputError(
                f"The {len(y)} validation rows cannot tell a threshold for '{aim}': {why}. Give more rows, a larger "
                "validation share, or another aim."
            )
        nll = [float(-np.log(np.clip(q[np.arange(len(y)), y], 1e-30, None)).mean()) for q in (p.probs, crossed)]
        # Curves follow the validation rows closely, so these would no longer resemble new rows: sets do without curves.
        scores = calibration.label_scores(p.probs if fitted.curves else probs, y)
        return cls(
            quantile=calibration.conformal_quantile(scores, coverage), temperature=fitted.temperature, aim=aim,
            threshold=threshold, nll_before=nll[0], nll_after=nll[1], positives=int((y == 1).sum()) if aim else None,
            ece_before=classwise_ece(p.probs, y), ece_after=classwise_ece(crossed, y), kind=kind, curves=fitted.curves,
            **common,
        )  # fmt: skip

    @property
    def rows_for_distances(self) -> int:
        """How many validation rows suffice to judge distances at this share of false alarms."""
        checks = 1 + math.isfinite(self.range_limits.usual) + (self.strangeness is not None)
        return math.ceil(checks / self.false_alarms - 1e-9) - 1

    @property
    def calibration(self) -> calibration.Calibration:
        """How probabilities are calibrated."""
        return calibration.Calibration(self.kind, self.temperature, self.curves)

    @staticmethod
    def check_options(classes: int | None, coverage: float, aim: str, false_alarms: float, kind: str) -> None:
        """Refuse options that no validation data could serve, before anything is trained."""
        if kind not in calibration.CALIBRATION_KINDS:
            raise InputError(f"The calibration is {kind!r}.{nearest(kind, calibration.CALIBRATION_KINDS)}")
        if kind == "isotonic" and not classes:
            raise InputError("An isotonic calibration belongs to classes; this posterior is a regression.")
        for name, value, example in (("coverage", coverage, 0.9), ("share of false alarms", false_alarms, 0.05)):
            if not 0 < value < 1:
                raise InputError(f"The {name} is {value}; it must lie between 0 and 1, such as {example}.")
        if aim:
            calibration.Aim.parse(aim)
            if classes != 2:
                here = f"here are {classes}" if classes else "this posterior predicts numbers, or several labels"
                way = "Give the costs of all decisions instead, cost:costs.csv, with a row per true class"
                way = f"{way} and a column per decision." if classes else "Leave the aim out."
                raise InputError(f"An aim for the threshold belongs to two classes; {here}. {way}")

    def apply(
        self,
        p: Prediction | Regression | MultiPrediction,
        features: Features | None,
        columns: Columns | None,
        federation: Ranges | None,
    ) -> Prediction | Regression | MultiPrediction:
        """Return a prediction that is calibrated and checked.

        `features` are the inputs' last hidden layer and feature maps, `columns` their raw values by name, `federation`
        what all sites' columns usually hold.
        """
        rows = len(p.mean) if isinstance(p, Regression) else len(p.probs)
        checks = Checks(self.coverage, np.zeros(rows, bool), score=np.zeros(rows), causes=[[] for _ in range(rows)])
        usual, own = (federation, self.ranges) if federation else (self.ranges, None)
        if columns is not None and usual is not None:
            checks = _checked_values(columns, usual, self.range_limits, own, self.false_alarms / 2)
            checks = replace(checks, coverage=self.coverage)
        if self.density is not None and features is not None:
            distance = self.density.distance(features.hidden)
            checks = replace(_with_cause(checks, DISTANCE, distance / self.density_limit), distance=distance)
            if self.strangeness is not None and isinstance(p, Prediction):
                distances = self.maps.distances(features.maps) if self.maps else ()
                strangeness = self.strangeness.score(self.density.angle(features.hidden), p.entropy, distances)
                checks = _with_cause(checks, STRANGENESS, strangeness / self.strangeness_limit)
                checks = replace(checks, strangeness=strangeness)
        if isinstance(p, Regression):
            low, high = calibration.intervals(*p.gaussian(), self.quantile)
            return replace(p, checks=replace(checks, low=p.original(low), high=p.original(high)))
        probs = self.calibration.apply(p.probs)
        if isinstance(p, MultiPrediction):
            return replace(p, probs=probs, checks=checks)
        sets = calibration.label_sets(p.probs if self.curves else probs, self.quantile)
        return replace(p, probs=probs, threshold=self.threshold, costs=self.costs, checks=replace(checks, sets=sets))

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and JSON metadata for a posterior's file."""
        metadata: dict[str, Any] = {
            name: None if isinstance(value := getattr(self, name), float) and math.isinf(value) else value
            for name in (*_NUMBERS, *_LATER, "aim")
            if name != "range_limit"
        }
        metadata["strangeness"] = [*self.strangeness.centre, *self.strangeness.spread] if self.strangeness else None
        metadata["no_positive"] = self.threshold == math.inf
        metadata["ranges"] = self.ranges.to_json() if self.ranges else None
        usual = self.range_limits.usual
        metadata |= {"range_limit": usual if math.isfinite(usual) else None, "raised": self.range_limits.to_json()}
        metadata |= {"calibration": self.kind, "curves": [[list(part) for part in curve] for curve in self.curves]}
        metadata["held_out"] = self.held_out
        metadata |= {"trained_on": True} if self.trained_on else {}
        metadata |= {"costs": self.costs.to_json()} if self.costs else {}
        arrays: dict[str, np.ndarray] = {} if self.density is None else dict(vars(self.density))
        for number, density in enumerate(self.maps.densities if self.maps else ()):
            arrays |= {f"map{number}.{name}": value for name, value in vars(density).items()}
        return {name: torch.from_numpy(value).contiguous() for name, value in arrays.items()}, metadata

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], metadata: Any) -> Trust:
        """Rebuild what `pack` returned; anything else is an error that the caller reports with the file's name."""
        values = {name: metadata[name] for name in _NUMBERS} | {name: metadata.get(name) for name in _LATER}
        for name, value in values.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise TypeError(f"{name} is {value!r}")
        for name in ("quantile", "density_limit", "range_limit", "strangeness_limit"):
            values[name] = math.inf if values[name] is None else float(values[name])
        values["range_limits"] = _range_limits(values.pop("range_limit"), metadata.get("raised"))
        if metadata["no_positive"]:
            values["threshold"] = math.inf
        if not values["temperature"] > 0 or not 0 < values["coverage"] < 1 or not 0 < values["false_alarms"] < 1:
            raise ValueError("a temperature, coverage or share of false alarms out of range")
        density = maps = None
        if tensors:
            density = _density({name: tensor for name, tensor in tensors.items() if not name.startswith("map")})
            count = len({name.partition(".")[0] for name in tensors if name.startswith("map")})
            maps = Maps(tuple(_density(group(tensors, f"map{number}")) for number in range(count))) if count else None
        strangeness = None
        if (scale := metadata.get("strangeness")) is not None:
            scale = [float(value) for value in scale]
            parts = 2 + (len(maps.densities) if maps else 0)
            if len(scale) != 2 * parts or not all(map(math.isfinite, scale)) or min(scale[parts:]) <= 0:
                raise ValueError("a strangeness with a scale out of range")
            strangeness = Strangeness(tuple(scale[:parts]), tuple(scale[parts:]))
        ranges = Ranges.from_json(metadata["ranges"]) if metadata["ranges"] is not None else None
        kind, curves = metadata.get("calibration", "temperature"), _curves(metadata.get("curves", []))
        if kind not in calibration.CALIBRATION_KINDS or (kind == "isotonic") != bool(curves):
            raise ValueError("an unknown calibration, or one without its curves")
        if not isinstance(held_out := metadata.get("held_out"), str | None):
            raise TypeError(f"held_out is {held_out!r}")
        if not isinstance(trained_on := metadata.get("trained_on", False), bool):
            raise TypeError(f"trained_on is {trained_on!r}")
        return cls(
            **values, aim=str(metadata["aim"]), density=density, strangeness=strangeness, maps=maps, ranges=ranges,
            kind=kind, curves=curves, costs=DecisionCosts.from_json(metadata.get("costs")), held_out=held_out,
            trained_on=trained_on,
        )  # fmt: skip


def flagged(
    p: Prediction | Regression | MultiPrediction, columns: Columns, usual: Ranges, limit: float | None = None
) -> Prediction | Regression | MultiPrediction:
    """Return a prediction with the flags and alarms of values by column, where no validation rows have set limits.

    `usual` tells what the columns hold over all sites, or at the client. Of rows like those, at most about a share
    `FALSE_ALARMS` has an alarm; `limit`, by default `usual.threshold()`, is the novelty beyond which a value raises it.
    """
    range_limits = RangeLimits(usual.threshold() if limit is None else limit)
    return replace(p, checks=_checked_values(columns, usual, range_limits))


def _checked_values(
    columns: Columns, usual: Ranges, limits: RangeLimits, own: Ranges | None = None, own_alarms: float = FALSE_ALARMS
) -> Checks:
    """Return the checks of a table's values: alarms with their causes, sentences, and how unusual the rows are.

    A value is `unusual_anywhere` beyond the usual limit among all sites, and `unusual_at_client` beyond that of the
    client's `own` ranges. The four cases are:

    - unusual in both: an alarm;
    - unusual anywhere, but not at the client: an alarm only beyond the limit that was raised for the column, else a
      sentence that ends in "such values are common at this client";
    - unusual at the client alone: a sentence that ends in "at this client";
    - unusual in neither: nothing.

    A raised limit never holds for words that fewer than `LEAST` of the client's rows have.
    """
    novelties = usual.novelties(columns)
    unusual_anywhere = {name: novelty > limits.usual for name, novelty in novelties.items()}
    unusual_at_client = {name: np.zeros_like(unusual) for name, unusual in unusual_anywhere.items()}
    if own:
        threshold = own.threshold(own_alarms)
        unusual_at_client = {name: novelty > threshold for name, novelty in own.novelties(columns).items()}
    held_by_few = (own or usual).held_by_few(columns)
    column_limits = {
        name: np.where(
            unusual_at_client[name] | held_by_few[name], limits.usual, limits.of(name, gaps_of(columns[name]))
        )
        for name in novelties
    }
    alarming = {name: novelty > column_limits[name] for name, novelty in novelties.items()}
    by_row = usual.sentences(columns, alarming)
    causes = [list(texts) for texts in by_row]
    common = {name: unusual & ~alarming[name] for name, unusual in unusual_anywhere.items()}
    at_client = {name: unusual & ~unusual_anywhere[name] for name, unusual in unusual_at_client.items()}
    for ranges, marks, end in (
        (usual, common, "such values are common at this client"),
        (own or usual, at_client, "at this client"),
    ):
        for texts, more in zip(by_row, ranges.sentences(columns, marks), strict=True):
            texts.update({name: f"{text} ({end})" for name, text in more.items()})
    score = np.max([novelty / column_limits[name] for name, novelty in novelties.items()], axis=0)
    alarm, flags = np.any(list(alarming.values()), axis=0), [list(texts.values()) for texts in by_row]
    return Checks(None, alarm, flags=flags, score=score, causes=causes)


def _with_cause(checks: Checks, cause: str, score: np.ndarray) -> Checks:
    """Return checks with the alarms of a further score [n], which are those above 1."""
    causes = [[*names, cause] if value > 1 else names for names, value in zip(checks.causes or (), score, strict=True)]
    total = score if checks.score is None else np.maximum(checks.score, score)
    return replace(checks, alarm=checks.alarm | (score > 1), score=total, causes=causes)


def _range_limits(usual: float, raised: Any) -> RangeLimits:
    """Return the limits of a file. Raises an error where they are damaged."""
    if raised is not None:
        return RangeLimits.from_json(usual, raised)
    # Earlier versions had one limit for all columns, and what never was exceeded even the highest.
    return RangeLimits(min(usual, 0.999 * -math.log(LEAST_TAIL)) if math.isfinite(usual) else usual)


def _density(tensors: Mapping[str, Tensor]) -> FeatureDensity:
    """Return a density of features from a file. Raises an error where its arrays do not fit together.

    Files of earlier versions also hold the Gaussian of all features together, which no check uses.
    """
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items() if name not in ("mean", "background")}
    density = FeatureDensity(**arrays)
    h = len(density.whitening)
    if density.means.shape[1:] != (h,) or density.whitening.shape != (h, h):
        raise ValueError("a density of features of another shape")
    return density


def _curves(content: Any) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
    """Return the curves of a calibration from a file. Raises ValueError where they are no curves of probabilities."""
    curves = tuple((tuple(float(v) for v in x), tuple(float(v) for v in value)) for x, value in content)
    for x, value in curves:
        if not x or len(x) != len(value) or any(list(part) != sorted(part) for part in (x, value)):
            raise ValueError("curves out of order")
        if not all(0 <= v <= 1 for v in (*x, *value)):
            raise ValueError("curves beyond 0 and 1")
    return curves


_NUMBERS = (
    *("rows", "coverage", "quantile", "temperature", "threshold", "nll_before", "nll_after"),
    *("false_alarms", "density_limit", "range_limit", "positives"),
)
_LATER = ("ece_before", "ece_after", "strangeness_limit")  # numbers that files of earlier versions do not have
