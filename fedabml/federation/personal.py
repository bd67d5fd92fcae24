"""Make a site's own posterior, at the site, from the newest prior on its disk and its own training rows.

    posterior = personalize(SiteFolder("site-a"), "posterior.safetensors", validation=0.2)

Nothing leaves the site. A site that never trained needs only a prior and data that fit it. For algorithms that keep a
state at the client, the newest version on disk that the prior can have counted is used; without one the site begins as
a newcomer does. (Only the server knows whether it counted the site's last reply.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..algorithms.base import State
from ..errors import InputError
from ..files.paths import Name, check_new
from ..files.sealed import read_json, read_tensors
from ..runs.posterior import Posterior
from ..runs.prior import Prior, load_prior
from .card import Card
from .folders import SiteFolder
from .kept import KeptVersions
from .site_data import divide, open_data

log = logging.getLogger("fedabml")


def personalize(
    site: SiteFolder | Name,
    out: Name | None = None,
    *,
    prior: Prior | None = None,
    force: bool = False,
    use_kept: bool = True,
    **options: Any,
) -> Posterior:
    """Make the site's posterior from the newest prior on its disk, or from `prior`, and save it in `out` if given.

    `options` are those of `Prior.personalize`: epochs, lr, batch_size, seed, validation, aim, coverage, false_alarms,
    class_weights, calibration, device. The rows are the site's training rows; the test rows of a table take no
    part. With `use_kept=False` the site begins as a newcomer. Raises InputError if there is no prior yet.
    """
    folder = (site if isinstance(site, SiteFolder) else SiteFolder(site)).check()
    if wrong := options.keys() & {"x", "y", "encoded", "kept"}:
        raise InputError(f"personalize at a site takes its data from site.toml, not from {', '.join(sorted(wrong))}.")
    if out is not None:
        check_new(out, force=force)
    prior = newest_prior(folder) if prior is None else prior
    x, y = training_rows(folder, prior)
    if prior.input_spec.recipe is not None and folder.settings.id_column:
        options = {"id": folder.settings.id_column, **options}
    kept = kept_state(folder, prior) if use_kept and prior.algorithm.keeps else None
    # Without a card, or where the server has counted no reply of this site (0), the prior never saw its rows.
    trained_on = folder.card_file.is_file() and _prior_number(folder, "counted") != 0
    posterior = prior.personalize(x, y, kept=kept, trained_on=trained_on, **options)
    if out is not None:
        posterior.save(out)
    return posterior


def newest_prior(site: SiteFolder) -> Prior:
    """Return the newest prior that the server has sent to this site."""
    if not site.prior_file.is_file():
        raise InputError(
            f"'{site.path}' has no prior yet. The server sends one after every `prior_every` rounds (by default 10), "
            "and at the end of training."
        )
    return load_prior(site.prior_file)


def prior_round(site: SiteFolder) -> int | None:
    """Return the round of the newest prior, or None if it is not recorded for exactly this prior."""
    return _prior_number(site, "round")


def _prior_number(site: SiteFolder, name: str) -> int | None:
    """Return a count that was recorded with the newest prior, or None if there is none."""
    if not site.prior_facts_file.is_file():
        return None
    facts = read_json(site.prior_facts_file)
    number = facts.get(name) if isinstance(facts, Mapping) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def training_rows(site: SiteFolder, prior: Prior) -> tuple[Any, Any]:
    """Return x and y of the site's training rows, as `Prior.personalize` takes them."""
    spec, settings = prior.input_spec, site.settings
    if not settings.data:
        raise InputError(f"'{site.settings_file}' names no data. Set `data` to this site's table, file or folder.")
    if spec.recipe is None:
        if spec.images is not None:
            return spec.images.site(settings.data, site.images)["train"]
        data = open_data(settings.data)
        if not isinstance(data, dict):
            raise InputError(f"'{settings.data}' holds no arrays, which the prior was trained on. Give an .npz file.")
        return data["x_train"], data["y_train"]
    words = (*spec.recipe.text_columns, *([settings.id_column] if settings.id_column else []))
    frame = open_data(settings.data, words)
    if not hasattr(frame, "iloc"):
        raise InputError(f"'{settings.data}' is no table, which the prior was trained on.")
    target = spec.recipe.target
    if settings.target_column and settings.target_column != target:
        frame = frame.rename(columns={settings.target_column: target})
    if target not in frame.columns:
        raise InputError(f"'{settings.data}' has no column '{target}', so there is nothing to learn from.")
    seed = Card.load(site.card_file).seed if site.card_file.is_file() else 0
    train, _ = divide(settings, target, bool(spec.recipe.class_names), frame, seed)
    return frame.iloc[np.sort(train.index)], None


def kept_state(site: SiteFolder, prior: Prior) -> State | None:
    """Return the newest kept state that is not newer than the prior, or None if none fits.

    A state that is newer than the site's last reply which the server counted is of a reply that was lost, or of rounds
    from which the operator went back.
    """
    if not site.card_file.is_file():
        return None
    card = Card.load(site.card_file)
    bounds = [bound for bound in (prior_round(site), _prior_number(site, "counted")) if bound is not None]
    versions = KeptVersions(site.state, card.federation, card.digest, 0)
    for round in reversed(versions.rounds()):
        if bounds and round > min(bounds):
            continue
        try:
            tensors, facts = read_tensors(versions.path(round))
        except InputError as error:
            log.warning("What this site kept after round %s is left out: %s", round, error)
            continue
        if all(facts.get(key) == versions.owner[key] for key in ("kind", "federation", "card")):
            return tensors
    return None
