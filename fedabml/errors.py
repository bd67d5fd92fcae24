"""The errors a person can cause, each one paragraph: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something handed to fedabml cannot be used. The command line prints it and exits with code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on (a loss that is no longer finite). What was saved before stays as it was."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence: ` Did you mean 'x'?`, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else f" There is: {', '.join(known)}."
