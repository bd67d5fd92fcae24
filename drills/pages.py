"""Write the pages of drills: Markdown whose paragraphs have lines of bounded length."""

from __future__ import annotations

import textwrap
from pathlib import Path

WIDTH = 120


def wrapped(text: str) -> str:
    """Return Markdown with the lines of paragraphs and of list items wrapped; tables and code stay as they are."""
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        if code or len(line) <= WIDTH or line.startswith(("|", "#", "```")):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)


def write_page(record: Path, text: str) -> Path:
    """Write the page of a record of measurements beside it, and return its path."""
    page = record.with_suffix(".md")
    page.write_text(wrapped(text), encoding="utf-8")
    return page
