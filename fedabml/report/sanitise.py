"""Drawings from files, made safe to put inside a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

_SVG = "http://www.w3.org/2000/svg"
_ELEMENTS = re.compile(
    "svg|g|rect|path|line|circle|ellipse|polyline|polygon|text|tspan|title|desc|defs|linearGradient|stop"
)
_ATTRIBUTES = re.compile(
    "viewBox|width|height|preserveAspectRatio|role|aria-label|id|transform|shape-rendering"
    "|x|y|x1|y1|x2|y2|dx|dy|cx|cy|r|rx|ry|d|points|offset|opacity|stop-color|stop-opacity|gradientUnits|gradientTransform"
    "|fill|fill-opacity|fill-rule|stroke|stroke-(width|opacity|dasharray|linecap|linejoin)"
    "|font-(family|size|weight|style)|text-anchor|dominant-baseline"
)
_ELSEWHERE = re.compile(r"(?i)url\s*\((?!\s*#)|javascript:|expression\s*\(|\\")


def plain_svg(source: str) -> str | None:
    """The drawing, written anew from what is known to be harmless, or `None` if the text is not a plain SVG drawing.

    Only shapes, text and gradients are let through, and only attributes that draw. Anything that could run or load
    something (scripts, handlers, links, style sheets, foreign content, entities) means `None`; an unknown attribute
    that cannot is dropped. The picture fills its box: a fixed size becomes a `viewBox`.
    """
    if "<!ENTITY" in source.upper():
        return None
    try:
        root = ElementTree.fromstring(source)
    except (ElementTree.ParseError, ValueError):
        return None
    if root.tag != f"{{{_SVG}}}svg":
        return None
    for node in root.iter():
        name = str(node.tag).removeprefix(f"{{{_SVG}}}")
        if not _ELEMENTS.fullmatch(name):
            return None
        if any(key.lower().startswith("on") or key.endswith("href") for key in node.attrib):
            return None
        drawn = {key: value for key, value in node.attrib.items() if _ATTRIBUTES.fullmatch(key)}
        if any(_ELSEWHERE.search(value) for key, value in drawn.items() if key != "aria-label"):
            return None
        node.tag, node.attrib = name, drawn
    size = [re.fullmatch(r"([\d.]+)(px)?", root.get(side, "")) for side in ("width", "height")]
    if "viewBox" not in root.attrib and size[0] and size[1]:
        root.set("viewBox", f"0 0 {size[0][1]} {size[1][1]}")
    for side in ("width", "height"):
        root.attrib.pop(side, None)
    root.set("xmlns", _SVG)
    root.set("role", "img")
    return ElementTree.tostring(root, encoding="unicode")
