"""A synthetic table of patients in twelve hospitals, and a thirteenth that joins later; its truth is known.

    python examples/hospitals.py FOLDER [--seed 0]

writes FOLDER/patients.csv (twelve hospitals) and FOLDER/new-hospital.csv (Hospital M, 60 patients). Of the patients 12
to 22% died, by the seed. Hospitals differ in their size (40 to 900 patients), in who comes to them, in their base rate,
and in how much some measurements mean there: a model per hospital is right, but the small ones have too few patients to
learn it alone. Values are missing where people did not measure, most of all in patients who looked well.

The probability of death that the table was drawn from is `risk`: no model can have a higher expected AUROC, and a
perfectly calibrated model predicts it. It is not a column of the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

NAMES = [f"Hospital {letter}" for letter in "ABCDEFGHIJKLM"]
SIZES = [900, 700, 600, 450, 300, 250, 200, 120, 90, 70, 50, 40, 60]  # the last is the hospital that joins
WARDS = ("surgery", "medicine", "cardiology", "neurology", "intensive care")
WARD_RISK = dict(zip(WARDS, (-0.3, 0.0, 0.1, 0.2, 0.9), strict=True))


def patients(seed: int = 0) -> pd.DataFrame:
    """Return the patients of all thirteen hospitals, with the true probability of death in the column `risk`."""
    random = np.random.default_rng(seed)
    return pd.concat(
        [_hospital(name, size, random) for name, size in zip(NAMES, SIZES, strict=True)], ignore_index=True
    )


def _hospital(name: str, size: int, random: np.random.Generator) -> pd.DataFrame:
    """Draw the patients of one hospital: first what it is like, then who comes, then who dies."""
    base, age_effect, lactate_effect = random.normal((-3.0, 0.5, 0.8), (0.5, 0.15, 0.3))
    older, wards = random.normal(0, 4), random.dirichlet(np.full(len(WARDS), 2.0))

    age = np.clip(random.normal(62 + older, 15, size), 18, 99).round()
    ward = random.choice(WARDS, size, p=wards)
    sick = random.normal(0, 1, size)  # what all measurements share
    emergency = random.random(size) < 1 / (1 + np.exp(-0.8 * sick))
    creatinine = np.exp(random.normal(4.4 + 0.25 * sick, 0.35)).round()  # µmol/l
    lactate = np.exp(random.normal(0.4 + 0.35 * sick, 0.35)).round(1)  # mmol/l
    heart_rate = random.normal(82 + 8 * sick, 12).round()
    sodium = random.normal(139 - 0.8 * sick, 3.5).round()
    temperature = random.normal(36.9 + 0.2 * sick, 0.5).round(1)

    logit = (
        base
        + age_effect * (age - 62) / 15
        + lactate_effect * (np.log(lactate) - 0.4) / 0.5
        + 0.5 * (np.log(creatinine) - 4.4) / 0.43
        + 0.35 * ((sodium - 139) / 3.6) ** 2 / 2  # too low is as bad as too high
        + 0.3 * (heart_rate - 82) / 14.4
        + 0.4 * emergency
        + np.array([WARD_RISK[each] for each in ward])
    )
    risk = 1 / (1 + np.exp(-logit))
    table = pd.DataFrame(
        {
            "patient": [f"{name[-1]}{i:04d}" for i in range(size)],
            "hospital": name,
            "age": age,
            "sex": random.choice(["female", "male"], size),
            "ward": ward,
            "admission": np.where(emergency, "emergency", "planned"),
            "creatinine": creatinine,
            "lactate": lactate,
            "heart_rate": heart_rate,
            "sodium": sodium,
            "temperature": temperature,
            "died": np.where(random.random(size) < risk, "yes", "no"),
            "risk": risk,
        }
    )
    for column, share in (("lactate", 0.25), ("creatinine", 0.08), ("temperature", 0.03)):
        missing = random.random(size) < share * 2 / (1 + np.exp(sick))  # those who look well are measured less often
        table.loc[missing, column] = np.nan
    return table


def main() -> None:
    """Read the arguments and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table, joins = patients(options.seed).drop(columns="risk"), NAMES[-1]
    table[table.hospital != joins].to_csv(options.folder / "patients.csv", index=False)
    table[table.hospital == joins].drop(columns="hospital").to_csv(options.folder / "new-hospital.csv", index=False)
    print(f"written: {options.folder / 'patients.csv'} and {options.folder / 'new-hospital.csv'}")


if __name__ == "__main__":
    main()
