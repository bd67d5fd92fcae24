"""A real table at eight sites: the breast cancer data that ship with scikit-learn, divided unevenly and by a seed.

    python examples/breast_cancer.py FOLDER [--seed 0]

writes FOLDER/tumours.csv: 569 tumours, 30 measurements of each, and whether it is malignant (37%) or benign. The data
are those of W. H. Wolberg, O. L. Mangasarian and W. N. Street (1995), UCI repository, CC BY 4.0. They come from one
hospital. The sites are made up here so that they differ as sites do:

- Their sizes go from 150 tumours to 17.
- Each site sees more or fewer malignant tumours, and smoother or rougher textures, than the others. Sites choose in
  turn, the smallest first. A site takes a tumour with a probability proportional to exp(a · malignant + b · texture),
  with a ~ N(0, 1) and b ~ N(0, 0.5²) drawn for the site, and the texture standardised.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

SIZES = (150, 130, 110, 70, 40, 30, 22, 17)
SITES = [f"Site {letter}" for letter in "ABCDEFGH"]


def tumours(seed: int = 0) -> pd.DataFrame:
    """Return all tumours in the order of the sites, with the columns `site` and `diagnosis`."""
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer(as_frame=True)
    table = source.data.copy()
    table["diagnosis"] = np.where(source.target == 0, "malignant", "benign")
    random = np.random.default_rng(seed)
    texture = table["mean texture"]
    texture = ((texture - texture.mean()) / texture.std()).to_numpy()
    malignant, free = (table.diagnosis == "malignant").to_numpy(), np.ones(len(table), bool)
    site = np.empty(len(table), object)
    for name, size in sorted(zip(SITES, SIZES, strict=True), key=lambda each: each[1]):
        a, b = random.normal(0, (1.0, 0.5))
        weight = np.exp(a * malignant + b * texture) * free
        chosen = random.choice(len(table), size, replace=False, p=weight / weight.sum())
        site[chosen], free[chosen] = name, False
    table.insert(0, "site", site)
    return table.sort_values("site", kind="stable").reset_index(drop=True)


def main() -> None:
    """Read the arguments and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tumours(options.seed).to_csv(options.folder / "tumours.csv", index=False)
    print(f"written: {options.folder / 'tumours.csv'}")


if __name__ == "__main__":
    main()
