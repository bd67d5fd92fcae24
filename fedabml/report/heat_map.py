"""The heat map of a partition on a page: its colours follow the page's theme."""

from __future__ import annotations

import re

from ..data.picture import EMPTY, FAINT, INK, LINE, PAPER, RAMP, shades

_AT_NIGHT = ((0x1D, 0x3B, 0x5C), (0x3B, 0x8A, 0xCB), (0xDC, 0xEE, 0xFC))  # from few samples to most, on black
_ROLES = {PAPER: "paper", INK: "ink", FAINT: "muted", EMPTY: "back", LINE: "grid"}


def themed(svg: str) -> str:
    """A heat map as `fedabml.data.heat_map` draws it, with the page's colours; other drawings keep their own."""
    names = _ROLES | {colour: f"heat{i}" for i, colour in enumerate(shades(RAMP))}
    return re.sub('"(#[0-9a-f]{6})"', lambda m: f'"var(--{names[m[1]]})"' if m[1] in names else m[0], svg)


def variables(dark: bool) -> dict[str, str]:
    """The shades that such a picture takes from the page."""
    return {f"heat{i}": colour for i, colour in enumerate(shades(_AT_NIGHT if dark else RAMP))}
