"""How far an input lies from a client's training data, in the network's last hidden layer.

Softmax entropy falls far away from the data, so a certain prediction is no sign of a familiar input. The distance to
the features of the training data grows instead. With features h, class means μ_c and their common covariance Σ (Lee et
al. 2018, arXiv 1807.03888):

    d(x) = min_c (h − μ_c)ᵀ Σ⁻¹ (h − μ_c)

The *relative* distance (Ren et al. 2021, arXiv 2106.09022) also subtracts the distance to all features without regard
to classes. It can fall far away from the data, so alarms use the plain distance.

Images of another kind often give *small* features, so their distance is small, too. What changes is the direction:

    a(x) = 1 − max_c cos(h, μ_c)

A network with convolutions also has feature maps. The means u of their channels over the image, as directions
u / ‖u‖, keep what the later layers drop: colours, edges and textures. `Maps` has the distance d of each map.

`Strangeness` adds the angle a, the logarithm of the predictive entropy and the logarithms of the maps' distances, each
measured on a scale of rows held out. How well each part tells images from outside: results/outside/README.md.

Covariances are shrunk towards a multiple of the identity as Ledoit and Wolf (2004) do, so that a client with fewer
samples than features has a distance, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEAST_ENTROPY = 1e-6  # nats; below it a prediction counts as certain
LEAST_DISTANCE = 1e-6  # of a map; below it an input lies at a class mean


class Features(NamedTuple):
    """The features that a network computes for n inputs, a row each."""

    hidden: np.ndarray  # [n, h]: the last hidden layer
    maps: tuple[np.ndarray, ...] = ()  # [n, c] each: the channels' means of the convolutions


@dataclass(frozen=True)
class FeatureDensity:
    """Gaussians of the features of a client's training data: one per class, with a common covariance."""

    means: np.ndarray  # [classes that occur, h]
    whitening: np.ndarray  # W [h, h] with WᵀW = Σ⁻¹

    @classmethod
    def fit(cls, features: np.ndarray, labels: np.ndarray | None = None) -> FeatureDensity:
        """Fit features [n, h] of samples with labels [n]; without labels (a regression) there is one class."""
        features = np.asarray(features, np.float64)
        labels = np.zeros(len(features), int) if labels is None else labels
        classes, number = np.unique(labels, return_inverse=True)
        means = np.stack([features[number == c].mean(0) for c in range(len(classes))])
        return cls(means, _whitening(features - means[number]))

    def distance(self, features: np.ndarray) -> np.ndarray:
        """Return the distance d of features [n, h] to the nearest class, [n]."""
        white = np.asarray(features, np.float64) @ self.whitening.T
        nearest: np.ndarray = np.min([((white - m) ** 2).sum(1) for m in self.means @ self.whitening.T], axis=0)
        return nearest

    def angle(self, features: np.ndarray) -> np.ndarray:
        """Return 1 − cos of the angle between features [n, h] and the nearest class mean, [n]; from 0 to 2."""
        return 1 - (_directions(np.asarray(features, np.float64)) @ _directions(self.means).T).max(1)


@dataclass(frozen=True)
class Maps:
    """The densities of the feature maps' directions, a map after the other."""

    densities: tuple[FeatureDensity, ...] = ()

    @classmethod
    def fit(cls, maps: Sequence[np.ndarray], labels: np.ndarray | None = None) -> Maps:
        """Fit maps [n, c] of samples with labels [n]."""
        return cls(tuple(FeatureDensity.fit(_directions(rows), labels) for rows in maps))

    def distances(self, maps: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the distance [n] of each of the inputs' maps [n, c] to the nearest class."""
        return [d.distance(_directions(rows)) for d, rows in zip(self.densities, maps, strict=True)]


@dataclass(frozen=True)
class Strangeness:
    """How unlike a client's data an input is, by its features and the entropy of its prediction.

    Its parts are the angle of the last hidden layer, the logarithm of the entropy, and the logarithms of the distances
    of the feature maps. Each is measured from its median over rows held out, in units of its spread there (half of the
    distance between the quantiles 16% and 84%, a deviation if it is Gaussian). The score is exp of their mean: about 1
    for a usual input.
    """

    centre: tuple[float, ...]
    spread: tuple[float, ...]

    @classmethod
    def fit(cls, angle: np.ndarray, entropy: np.ndarray, distances: Sequence[np.ndarray] = ()) -> Strangeness:
        """Fit the scales on rows held out, with angles, entropies and each map's distances [n]."""
        low, middle, high = np.quantile(_parts(angle, entropy, distances), (0.16, 0.5, 0.84), axis=1)
        spread = np.maximum((high - low) / 2, 1e-6)
        return cls(tuple(middle.tolist()), tuple(spread.tolist()))

    def score(self, angle: np.ndarray, entropy: np.ndarray, distances: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Return the strangeness [n] of inputs."""
        parts = _parts(angle, entropy, distances)
        scaled = (parts - np.array(self.centre)[:, None]) / np.array(self.spread)[:, None]
        return np.exp(np.clip(scaled.mean(0), -100, 100))


def _parts(angle: np.ndarray, entropy: np.ndarray, distances: Sequence[np.ndarray]) -> np.ndarray:
    logs = [np.log(np.maximum(d, LEAST_DISTANCE)) for d in distances]
    return np.stack([angle, np.log(np.maximum(entropy, LEAST_ENTROPY)), *logs])


def _directions(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _whitening(centred: np.ndarray) -> np.ndarray:
    """Return W with WᵀW = Σ⁻¹ for the shrunk covariance Σ of centred features [n, h]."""
    values, vectors = np.linalg.eigh(shrunk_covariance(centred))
    values = np.maximum(values, 1e-10 * max(values[-1], 1e-12))
    return (vectors / np.sqrt(values)).T


def shrunk_covariance(centred: np.ndarray) -> np.ndarray:
    """Return (1 − δ) S + δ m I, S = XᵀX/n, m = tr S / h, with the δ of Ledoit and Wolf that has the least risk.

    δ = min(1, Σ_k ‖x_k x_kᵀ − S‖² / n² / ‖S − mI‖²), which needs no matrix per sample.
    """
    n, h = centred.shape
    sample = centred.T @ centred / n
    scale = np.trace(sample) / h
    spread = (sample**2).sum() - h * scale**2  # ‖S − mI‖²
    noise = ((centred**2).sum(1) ** 2).sum() / n**2 - (sample**2).sum() / n  # Σ ‖x xᵀ − S‖² / n²
    shrinkage = 1.0 if spread <= 0 else min(1.0, max(0.0, noise / spread))
    return (1 - shrinkage) * sample + shrinkage * scale * np.eye(h)
