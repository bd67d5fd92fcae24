"""The command `fedabml federation personalize` makes a site's posterior from the newest prior on its own disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .console import print_line
from .options import command
from .posterior_flags import check_comparison, posterior_flags, print_comparison


@command(also=posterior_flags)
def personalize(
    folder: Path,
    *,
    out: Path = Path("posterior.safetensors"),
    compare: bool | None = None,
    newcomer: bool = False,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    **flags: Any,
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
        compare: Show whether the prior, the posterior or training alone is best for the site on the rows held out.
            [default: with --validation, if at least 10 rows are held out and the comparison is quick]
        newcomer: Begin like a site that never trained, without the state that this site keeps.
        seed: Seed of shuffles and weight samples.
        device: auto, cpu or cuda.
    """
    from ..federation import personal
    from ..federation.folders import SiteFolder
    from .use import posterior_lines

    check_comparison(compare, flags)
    site = SiteFolder(folder).check()
    # A new round's prior may arrive at any time, so this one is used for all that follows.
    prior, round = personal.newest_prior(site), personal.prior_round(site)
    how: dict[str, Any] = {"seed": seed, "device": device}
    posterior = personal.personalize(site, out, prior=prior, force=force, use_kept=not newcomer, **how, **flags)
    for line in posterior_lines(posterior):
        print_line(line)
    if flags["validation"] and compare is not False:
        print_comparison(compare, prior, personal.training_rows(site, prior), posterior, flags, **how)
    print_line(f"prior       {f'of round {round}' if round is not None else 'of an unknown round'}")
    print_line(f"posterior   {out}")
