"""Reports: run folders as one self-contained HTML page, and charts as SVG (see `fedabml.report.charts`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..arguments import checks_arguments
from ..errors import InputError
from ..files.paths import write as write_file
from .heat_map import save_heat_map
from .read import read_runs
from .run_page import render

__all__ = ["save", "save_heat_map", "write"]


@checks_arguments
def write(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], title: str | None = None) -> Path:
    """Write the report on one run folder, or the comparison of several, as a single HTML page at `out`.

    The page needs no network and no other file. It is written whole or not at all. Returns `out`. Raises `InputError`
    for a folder that is not a finished run, and for a path that cannot be written.
    """
    if not len(runs):
        raise InputError("There is no run to report on. Give at least one run folder.")
    return save(render(read_runs([Path(run) for run in runs]), title), Path(out))


def save(page: str, out: Path) -> Path:
    """Write the HTML text of a page to `out`; raise `InputError` if that is a folder or cannot be written."""
    out = Path(out)
    if out.is_dir():
        raise InputError(f"{out} is a folder. Name the page to write, such as {out / 'report.html'}.")
    return write_file(out, page)
