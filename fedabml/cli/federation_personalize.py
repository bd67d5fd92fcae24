"""The command `fedabml federation personalize` makes a site's posterior from the newest prior on its own disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from .console import print_line
from .options import command


@command()
def personalize(
    folder: Path,
    *,
    out: Path = Path("posterior.safetensors"),
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    validation: float = 0.0,
    aim: str = "",
    coverage: float = 0.9,
    false_alarms: float = 0.05,
    calibration: str = "temperature",
    class_weights: str | None = None,
    compare: bool = False,
    newcomer: bool = False,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
) -> None:
    """Make this site's posterior from the newest prior on its own disk and its own data. Nothing leaves the machine.

    The data are those that site.toml names. The posterior reveals facts about them, so keep it at the site. Use it with
    `fedabml predict` and `fedabml serve`.

    With --validation, the command holds out a share of the site's rows. On these rows it calibrates the posterior,
    chooses the threshold for --aim, and sets the limits of prediction sets (or intervals) and of alarms.

    Example: `fedabml federation personalize north --out north.safetensors --validation 0.3`

    Flags:
        folder (DIR): The site's folder.
        out (FILE): File for the site's posterior.
        epochs: Epochs on the site's data. [default: the algorithm's]
        lr: Step size. [default: the algorithm's]
        batch_size: Samples in a minibatch. [default: as in training]
        validation: Share of the site's rows held out to calibrate and check the posterior.
        aim (AIM): Goal of the threshold between two classes: f1, recall>=0.8, precision>=0.8 or cost:MISS,ALARM.
        coverage: Probability with which a prediction set or interval contains the truth.
        false_alarms: Share of usual inputs that may be flagged as unusual.
        calibration (WORD): How probabilities are calibrated on the rows held out: temperature, isotonic (100 rows or
            more) or none. Its effect is shown by cross-validation on these rows.
        class_weights (WEIGHTS): How much rows of each class count: balanced (by the site's rows), none, or numbers
            such as 1,5. [default: as in training]
        compare: Show whether the prior, the posterior or training alone is best for the site on the rows held out.
        newcomer: Begin like a site that never trained, without the state that this site keeps.
        seed: Seed of shuffles and weight samples.
        device: auto, cpu or cuda.
    """
    from ..data.arrays import STRUCTURED
    from ..federation import personal
    from ..federation.folders import SiteFolder
    from ..runs.site import compare_at_site
    from .use import trust_lines

    if compare and not validation:
        raise InputError("--compare needs rows held out: give --validation 0.3, or another share.")
    site = SiteFolder(folder).check()
    learning: dict[str, Any] = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "class_weights": class_weights}
    trust: dict[str, Any] = {"validation": validation, "aim": aim, "coverage": coverage}
    trust |= {"false_alarms": false_alarms, "calibration": calibration}
    posterior = personal.personalize(
        site, out, force=force, use_kept=not newcomer, seed=seed, device=device, **learning, **trust
    )
    round = personal.prior_round(site)
    for line in trust_lines(posterior.trust, posterior.input_spec.task in STRUCTURED):
        print_line(line)
    if compare:
        prior = personal.newest_prior(site)
        x, y = personal.training_rows(site, prior)
        print_line(compare_at_site(prior, x, y, validation, seed, device, **learning).sentence)
    print_line(f"prior       {f'of round {round}' if round is not None else 'of an unknown round'}")
    print_line(f"posterior   {out}")
