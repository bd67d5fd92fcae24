"""Drawing the pages of finished folders again: of runs, of a comparison, or of a reproduction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..errors import InputError
from ..files.paths import check_new
from ..report import save, write

PAGE = "report.html"
# By the file that tells what a folder holds, the module whose `page` draws it: with torch, which a run's does without.
_MODULES = {"comparison.json": ".compare", "reproduce.json": ".paper"}
_RUN = ("config.json", "summary.json")


def rewrite(
    folders: Sequence[Path], out: Path | None = None, title: str | None = None, force: bool = False
) -> list[Path]:
    """Write the pages of folders anew without training, and return their paths.

    Runs share one page, by default report.html in the folder of a single one, else in the present folder. A comparison
    or a reproduction has its own, report.html in its folder; `out` and `title` are for a single page. A file that is
    not the page of one of the folders is replaced only with `force`.
    """
    for folder in folders:
        if (folder / PAGE).is_symlink() and not force:
            raise InputError(f"'{folder / PAGE}' is a link. Remove it, or write to what it points to with --force.")
    modules = {folder: _MODULES.get(_identifying_file(folder)) for folder in folders}
    special = {folder: module for folder, module in modules.items() if module}
    at = Path(PAGE) if out is None and len(folders) > 1 and not special else out
    if at is not None and os.path.realpath(at) not in {os.path.realpath(folder / PAGE) for folder in folders}:
        check_new(at, force=force)
    if not special:
        return [write(folders, at or folders[0] / PAGE, title)]
    if len(special) < len(modules):
        run = next(folder for folder in modules if folder not in special)
        raise InputError(
            f"'{next(iter(special))}' has a page of its own, and '{run}' is a run: report them separately."
        )
    if len(special) > 1 and (out or title):
        raise InputError(f"These are {len(special)} pages, each in its own folder: leave --out and --title out.")
    drawn = {folder: import_module(module, __package__).page(folder, title) for folder, module in special.items()}
    return [save(page, out or folder / PAGE) for folder, page in drawn.items()]


def _identifying_file(folder: Path) -> str:
    """Return the name of the file that tells what a folder holds; refuse a folder that has none."""

    def names(folder: Path) -> list[str]:
        return [name for name in (*_MODULES, *_RUN) if (folder / name).is_file()]

    if not folder.is_dir():
        raise InputError(f"There is no folder '{folder}'.")
    if not names(folder):
        inside = sorted(child.name for child in folder.iterdir() if child.is_dir() and names(child))
        hint = f" Perhaps you mean a folder in it: {', '.join(inside[:3])}{', …' * (len(inside) > 3)}." * bool(inside)
        raise InputError(
            f"'{folder}' is not the folder of a run (which has config.json), of a comparison (comparison.json) or of "
            f"a reproduction (reproduce.json).{hint}"
        )
    return names(folder)[0]
