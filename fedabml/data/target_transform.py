"""Positive targets: the scale on which a Gaussian describes them, and the way back.

The Box-Cox transform of a target y, in units of its geometric mean g, has one parameter λ (Box and Cox 1964):

    z = ((y/g)^λ − 1)/λ   for λ > 0,     z = log(y/g)   for λ = 0;        y = g·(1 + λz)^(1/λ) or g·exp z

A model learns z, standardised; predictions and scores are those of y. λ is the maximum-likelihood estimate on training
rows. It is at least 0, because below 0 a Gaussian z would have infinite targets y. For λ > 0 a z below −1/λ is y = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError, nearest
from .statistics import lowest

TRANSFORMS = ("log", "boxcox")
MOST_POWER = 5.0  # the largest λ
NODES = 64  # of the quadrature for the moments of y, exact for powers 1/λ up to 63


@dataclass(frozen=True)
class TargetTransform:
    """A target that is never below 0, and how each of its columns is transformed; without `powers` it is not."""

    powers: tuple[float, ...] = ()  # λ of each column
    units: tuple[float, ...] = ()  # g of each column

    @classmethod
    def fit(cls, y: np.ndarray, kind: str | None) -> TargetTransform:
        """Learn from the targets of training rows [n, targets], which `check` accepts; `kind` None: no transform."""
        if kind is None:
            return cls()
        if kind not in TRANSFORMS:
            raise InputError(f"There is no target transform '{kind}'.{nearest(kind, TRANSFORMS)}")
        logs = np.log(y.astype(np.float64))
        powers = [box_cox_power(column) if kind == "boxcox" else 0.0 for column in logs.T]
        return cls(tuple(powers), tuple(np.exp(logs.mean(0)).tolist()))

    @property
    def description(self) -> str:
        """The transform in words, such as `log` or `Box-Cox with λ 0.31`."""
        powers = ", ".join(f"{power:.3g}" for power in self.powers)
        return f"Box-Cox with λ {powers}" if any(self.powers) else "log" if self.powers else "not below 0"

    def check(self, y: np.ndarray, describe: Callable[[int], str]) -> None:
        """Refuse targets [n, targets] out of the transform's domain; `describe(row)` begins the error."""
        wrong = ((y <= 0) if self.powers else (y < 0)).any(1)
        if wrong.any():
            row = int(np.argmax(wrong))
            need = (
                "a log or Box-Cox transform needs targets above 0" if self.powers else "a positive target is 0 or more"
            )
            raise InputError(
                f"{describe(row)} has the target {y[row].min():g}, but {need}. Correct the value. In train, compare "
                "and tune you may also leave the transform (--target-transform, --positive-target) out."
            )

    def forward(self, y: np.ndarray) -> np.ndarray:
        """Return z, float64 [..., targets], of targets y."""

        def column(values: np.ndarray, power: float, unit: float) -> np.ndarray:
            logs = np.log(values.astype(np.float64) / unit)
            return np.expm1(power * logs) / power if power else logs

        return self._by_column(column, y)

    def inverse(self, z: np.ndarray) -> np.ndarray:
        """Return the targets y [..., targets] of z; none is below 0."""

        def column(values: np.ndarray, power: float, unit: float) -> np.ndarray:
            with np.errstate(divide="ignore", over="ignore"):
                logs = np.log1p(np.maximum(power * values, -1)) / power if power else values
                return unit * np.exp(logs)

        return self._by_column(column, z) if self.powers else np.maximum(z, 0)

    def log_slope(self, y: np.ndarray) -> np.ndarray:
        """Return Σ log dz/dy over the columns [...]: what turns a density of z into one of y."""
        columns = zip(np.moveaxis(y.astype(np.float64), -1, 0), self.powers, self.units, strict=bool(self.powers))
        parts = [(power - 1) * np.log(values / unit) - np.log(unit) for values, power, unit in columns]
        return sum(parts, np.zeros(y.shape[:-1]))

    def moments(self, mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and deviation of y for Gaussians z ~ N(mean, std²), [..., targets] each.

        For the log they are those of the log-normal distribution; for other powers they come from Gauss-Hermite
        quadrature. Without a transform y = max(0, z), so that with r = mean/std

            E y = mean·Φ(r) + std·φ(r),     Var y = std²·(Φ(r) + r²·Φ(r)·Φ(−r) + r·φ(r)·(1 − 2Φ(r)) − φ(r)²).
        """
        if not self.powers:
            return _rectified_moments(mean, std)
        with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged has no finite moments
            if not any(self.powers):
                centre = np.exp(mean + std**2 / 2) * np.array(self.units)
                return centre, centre * np.sqrt(np.expm1(std**2))
            nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
            rule = [*zip(nodes, weights / weights.sum(), strict=True)]
            centre = sum((w * self.inverse(mean + node * std) for node, w in rule), 0 * mean)
            spread = sum((w * (self.inverse(mean + node * std) - centre) ** 2 for node, w in rule), 0 * mean)
            return centre, np.sqrt(spread)

    def _by_column(self, function: Callable[[np.ndarray, float, float], np.ndarray], values: np.ndarray) -> np.ndarray:
        if not self.powers:
            return values
        columns = zip(np.moveaxis(values, -1, 0), self.powers, self.units, strict=True)
        return np.stack([function(*column) for column in columns], -1)

    def to_json(self) -> dict[str, Any]:
        """Return the transform as plain data, for files."""
        return {"powers": list(self.powers), "units": list(self.units)}

    @classmethod
    def from_json(cls, content: Any) -> TargetTransform:
        """Return the transform that `to_json` wrote; anything else is an InputError."""
        try:
            powers, units = (tuple(map(float, content[name])) for name in ("powers", "units"))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"Its target transform is damaged ({error!r}).") from error
        sound = all(0 <= power <= MOST_POWER for power in powers) and all(0 < unit < np.inf for unit in units)
        if not sound or len(powers) != len(units):
            raise InputError("Its target transform has a λ or a unit out of range; it is damaged.")
        return cls(powers, units)


def _rectified_moments(mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and deviation of max(0, z) for z ~ N(mean, std²); see `TargetTransform.moments`."""
    import torch

    with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged has no finite moments
        ratio = np.clip(mean / np.maximum(std, np.finfo(np.float64).tiny), -40, 40)  # Φ(−40) is 0 in float64
        above, below = (torch.special.ndtr(torch.as_tensor(r, dtype=torch.float64)).numpy() for r in (ratio, -ratio))
        density = np.exp(-(ratio**2) / 2) / np.sqrt(2 * np.pi)
        share = above + ratio**2 * above * below + ratio * density * (1 - 2 * above) - density**2
        return np.maximum(mean * above + std * density, 0), std * np.sqrt(np.maximum(share, 0))


def box_cox_power(logs: np.ndarray, least: float = 0.0) -> float:
    """Return the λ of the highest likelihood for targets with the logarithms `logs` [n], between `least` and 5.

    In units of the geometric mean the likelihood is a falling function of the variance of z alone, with one maximum.
    """
    logs = logs - logs.mean()
    if not logs.any():
        return 1.0  # equal targets: any λ will do

    def log_variance(power: float) -> float:
        top = logs.max() if power > 0 else logs.min()  # taken out, so that nothing overflows
        z = np.expm1(power * (logs - top)) / power if power else logs
        return float(np.log(z.var())) + 2 * power * float(top)

    power = lowest(log_variance, least, MOST_POWER)
    return 0.0 if abs(power) < 1e-6 else power
