"""Drawing the pages of finished folders again: of runs, of a comparison, or of a reproduction."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import InputError
from ..files.paths import check_new
from ..report import save, write

PAGE = "report.html"
_RUN = ("config.json", "summary.json")


def _comparison(folder: Path, title: str | None) -> str:
    from .compare import page  # takes torch, which the page of a run does without

    return page(folder, title)


def _reproduction(folder: Path, title: str | None) -> str:
    from .paper import page

    return page(folder, title)


_PAGES: dict[str, Callable[[Path, str | None], str]] = {"comparison.json": _comparison, "reproduce.json": _reproduction}


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
    kinds = {folder: _kind(folder) for folder in folders}
    own = {folder: make for folder, make in kinds.items() if make is not None}
    at = Path(PAGE) if out is None and len(folders) > 1 and not own else out
    if at is not None and os.path.realpath(at) not in {os.path.realpath(folder / PAGE) for folder in folders}:
        check_new(at, force=force)
    if not own:
        return [write(folders, at or folders[0] / PAGE, title)]
    if len(own) < len(kinds):
        other = next(folder for folder in kinds if folder not in own)
        raise InputError(f"'{next(iter(own))}' has a page of its own, and '{other}' is a run: report them separately.")
    if len(own) > 1 and (out or title):
        raise InputError(f"These are {len(own)} pages, each in its own folder: leave --out and --title out.")
    return [save(make(folder, title), out or folder / PAGE) for folder, make in own.items()]


def _kind(folder: Path) -> Callable[[Path, str | None], str] | None:
    """Return the function that draws a folder's page; None for a run's folder."""
    if not folder.is_dir():
        raise InputError(f"There is no folder '{folder}'.")
    found = _known(folder)
    if found is None:
        inside = sorted(child.name for child in folder.iterdir() if child.is_dir() and _known(child))
        hint = f" Perhaps you mean a folder in it: {', '.join(inside[:3])}{', …' * (len(inside) > 3)}." * bool(inside)
        raise InputError(
            f"'{folder}' is not the folder of a run (which has config.json), of a comparison (comparison.json) or of "
            f"a reproduction (reproduce.json).{hint}"
        )
    return _PAGES.get(found)


def _known(folder: Path) -> str | None:
    """Return the file that identifies what a folder holds."""
    return next((name for name in (*_PAGES, *_RUN) if (folder / name).is_file()), None)
