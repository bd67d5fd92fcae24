"""A page as one HTML file that needs nothing else: its parts are plain data, and templates/page.html lays them out.

Jinja2 escapes every text, so names from files never become markup. Only pictures, which this package draws itself, are
inserted as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from .canvas import DARK, LIGHT, PAGE, Look, without_control_characters


@dataclass(frozen=True)
class Figure:
    """A picture (SVG), its heading, and a sentence on how to read it.

    `run` is the legend entry that hides the figure. `choices` are the runs (number, name) between which a reader
    chooses for the two axes.
    """

    heading: str
    svg: str
    reading: str
    run: int | None = None
    choices: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class Tile:
    """A number shown large, with its label above and its meaning below; `kind` is a CSS class."""

    label: str
    value: str
    meaning: str
    kind: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the number it is sorted by, and whether it is the best of its column."""

    text: str
    value: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table; the first cell is its heading. `run` is the legend entry of the row."""

    cells: Sequence[Cell]
    run: int | None = None
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """A table that is sorted by its headings. `fold` is the line behind which it is folded away, if any."""

    head: Sequence[str]
    rows: Sequence[Row]
    hints: Sequence[str] = ()
    kind: str = ""
    fold: str = ""
    commands: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A part of a page, in the order in which it is shown; without a heading it is the page's summary."""

    heading: str = ""
    points: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    commands: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def holds_anything(self) -> bool:
        """Whether there is anything to show under the heading."""
        return any((self.points, self.tiles, self.figures, self.tables, self.commands, self.notes))


@dataclass(frozen=True)
class PageData:
    """What the page's script needs to compare two runs client by client; empty for other pages."""

    runs: Sequence[str] = ()
    marks: Sequence[Mapping[str, Any]] = ()  # the styles of the runs' dots
    percent: bool = True
    clients: Sequence[str] = ()  # those that are drawn
    values: Mapping[int, Sequence[float | None]] = field(default_factory=dict)  # by run, of the drawn clients
    tally: Mapping[int, Mapping[int, Sequence[int]]] = field(default_factory=dict)  # see `run_page.tally`


def document(title: str, subtitle: str, sections: Sequence[Section], data: PageData | None = None) -> str:
    """Return a complete HTML document; the runs of `data` get a legend whose names hide and show them."""
    found = data or PageData()
    style, script = _colours() + _asset("page.css"), _asset("page.js")
    facts = {"data": vars(found), "legend": found.runs, "style": style, "script": script}
    return _environment().get_template("page.html").render(title=title, subtitle=subtitle, sections=sections, **facts)


@cache
def _environment() -> Environment:
    def clean(value: Any) -> Any:
        plain = isinstance(value, str) and not isinstance(value, Markup)
        return without_control_characters(value) if plain else value

    environment = Environment(
        loader=PackageLoader("fedabml.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=clean
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["swatch"] = _swatch
    environment.filters["breakable"] = _breakable
    return environment


def _swatch(run: int) -> Markup:
    """Draw a run's colour and shape for its legend entry and its rows."""
    style = PAGE.style(run)
    width = 11 if style.solid else 20
    size = f'viewBox="0 0 {width} 11" width="{width}" height="11"'
    return Markup(f'<i><svg {size} aria-hidden="true">{style.key(0, 0)}</svg></i>')


def _breakable(key: str) -> Markup:
    """Allow a line break after each part of a dotted name."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(without_control_characters(key)))))


def _asset(name: str) -> str:
    return resources.files("fedabml.report").joinpath("templates", name).read_text(encoding="utf-8")


def _colours() -> str:
    """Return the pictures' two looks as CSS variables: light, dark by the system's preference, dark by the button."""

    def variables(look: Look, scheme: str, back: str) -> str:
        named = {"ink": look.ink, "muted": look.muted, "grid": look.grid, "paper": look.paper, "back": back}
        named |= {f"c{i}": colour for i, colour in enumerate(look.colours)}
        return f"color-scheme:{scheme};" + "".join(f"--{name}:{value};" for name, value in named.items())

    light, dark = variables(LIGHT, "light", "#f4f6f8"), variables(DARK, "dark", "#0e1115")
    preferred = f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    return f":root{{{light}}}\n{preferred}\n:root[data-theme=dark]{{{dark}}}\n"
