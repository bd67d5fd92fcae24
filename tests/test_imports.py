"""The house as its imports draw it: no circle, no arrow that runs up, few modules at the root.

Every import counts: at the top of a file, inside a function, and for type checkers alone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fedabml"
# From the ground up: a module may import its own room and the rooms before it. docs/design.md draws the same.
FLOORS = (
    ("version", "errors", "arguments", "files"),
    ("accel",),
    ("rng", "vectors", "gaussian", "likelihoods", "models"),
    ("data", "algorithms"),
    ("engine",),
    ("evaluation",),
    ("report",),
    ("runs",),
    ("experiments", "bench", "serve", "federation"),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ROOT_MODULES = 10
# What is still to be mended: this list only ever becomes shorter.
UPWARD: set[tuple[str, str]] = set()
CIRCLES: set[frozenset[str]] = set()


def modules() -> dict[str, Path]:
    """Every module of the package by its name, without the package's own."""
    found = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in found.items() if parts != ("__init__",)}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Which modules every module imports, of this package; a package's face stands for what is defined in it."""
    known = modules()
    return {name: set(_imported(name, path, known)) - {name} for name, path in known.items()}


def _imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    here = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = here[: len(here) + 1 - node.level] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            for found in (".".join([*base, alias.name]), ".".join(base)):
                if found in known:
                    yield found
                    break


def room(name: str) -> str:
    return name.split(".")[0]


def circles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that reach each other (strongly connected components of more than one)."""
    reached = {name: set(direct) for name, direct in arrows.items()}
    for middle in arrows:
        for far in reached.values():
            if middle in far:
                far |= reached[middle]
    return {
        frozenset({name} | {other for other in far if name in reached[other]})
        for name, far in reached.items()
        if name in far
    }


def test_every_room_has_a_floor():
    assert {room(name) for name in modules()} == set(FLOOR)


def test_no_arrow_runs_up():
    arrows = {
        (name, other) for name, found in imports().items() for other in found if FLOOR[room(other)] > FLOOR[room(name)]
    }
    assert arrows == UPWARD


def test_rooms_on_one_floor_do_not_circle():
    between = {(room(name), room(other)) for name, found in imports().items() for other in found}
    assert not {(a, b) for a, b in between if a < b and (b, a) in between and FLOOR[a] == FLOOR[b]}


def test_no_modules_import_each_other_in_a_circle():
    assert circles(imports()) == CIRCLES


def test_the_root_stays_small():
    assert len(list(PACKAGE.glob("*.py"))) <= ROOT_MODULES


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset("bc")}


def test_the_design_page_draws_these_rooms():
    """The tree in docs/design.md has a line per floor, the highest first, with the rooms before two spaces."""
    text = (PACKAGE.parent / "docs/design.md").read_text(encoding="utf-8")
    tree = text.split("```\nfedabml/\n")[1].split("```")[0].splitlines()
    drawn = [{name.rstrip("/") for name in line.strip().split("  ")[0].split()} for line in tree]
    assert drawn == [set(rooms) for rooms in reversed(FLOORS)]
    packages = {name for line in tree for name in line.split() if name.endswith("/")}
    assert packages >= {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
