"""The manifest of a federation with its clients listed."""

from __future__ import annotations

from typing import Any

from .arrays import SPLITS

MAX_COUNTS, MAX_ROWS = 1_000_000, 2_000_000  # counts by client and class, and samples, that a manifest lists at most
LISTED = 1000  # clients that a manifest lists where it cannot list all of them


def listed_manifest(fed: Any, rows: bool) -> dict[str, Any]:
    """Return a federation's manifest with the names, sizes, label counts and sample numbers of its clients."""
    too_many = fed.clients * max(1, fed.classes) > MAX_COUNTS
    shown = LISTED if too_many else fed.clients
    manifest = {
        **fed.manifest,
        "names": list(fed.names[:shown]),
        "sizes": {split: fed.rows(split).counts[:shown].tolist() for split in SPLITS},
        "counts": {split: fed.label_counts(split)[:shown].tolist() for split in SPLITS},
    }
    recipe = fed.recipe or fed.images
    if names := recipe.class_names if recipe else fed.named_classes:
        manifest["class_names"] = list(names)
    if not rows or too_many or len(fed.y) > MAX_ROWS:
        return {**manifest, "rows": None}
    lists = {split: [fed.rows(split)[i].tolist() for i in range(fed.clients)] for split in SPLITS}
    return {**manifest, "rows": lists}
