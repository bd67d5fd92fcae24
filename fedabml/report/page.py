"""A page as one HTML file that needs nothing else: its parts are data, and templates/page.html lays them out.

Jinja2 escapes every text, so names from files never become markup. Only pictures, which this package draws itself, are
inserted as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from .canvas import DARK, LIGHT, PAGE, without_control_characters


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
    """A number shown large, with its label above and its meaning below; `css_class` is its style."""

    label: str
    value: str
    meaning: str
    css_class: str = ""


@dataclass(frozen=True)
class TableCell:
    """A cell of a table: its text, the number it is sorted by, and whether it is the best of its column."""

    text: str
    value: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table; the first cell is its heading. `run` is the legend entry of the row."""

    cells: Sequence[TableCell]
    run: int | None = None
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """A table that is sorted by its headings. `fold` is the line behind which it is folded away, if any."""

    head: Sequence[str]
    rows: Sequence[Row]
    hints: Sequence[str] = ()
    css_class: str = ""
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
    context = {"title": title, "subtitle": subtitle, "sections": sections, "data": vars(data or PageData())}
    return _environment().get_template("page.html").render(context)


@cache
def _environment() -> Environment:
    def clean(value: Any) -> Any:
        markup = not isinstance(value, str) or isinstance(value, Markup)
        return value if markup else without_control_characters(value)

    environment = Environment(
        loader=PackageLoader("fedabml.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=clean
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["clean"] = without_control_characters
    environment.globals |= {"LIGHT": LIGHT, "DARK": DARK, "PAGE": PAGE}
    return environment
