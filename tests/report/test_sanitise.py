"""Only plain drawings enter the page."""

from __future__ import annotations

import pytest

from fedabml.report.sanitise import plain_svg

OPEN = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'


def test_a_drawing_keeps_its_shapes_and_fills_its_box() -> None:
    drawing = plain_svg(
        OPEN.replace(">", ' width="200px" height="100">') + '<rect x="1" fill="#abc"/><text>a &lt; b</text></svg>'
    )
    assert drawing is not None
    assert 'viewBox="0 0 200 100"' in drawing and "height=" not in drawing
    assert '<rect x="1" fill="#abc" />' in drawing and "a &lt; b" in drawing


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>",
        '<rect onload="alert(1)"/>',
        '<a href="javascript:alert(1)"><text>x</text></a>',
        '<image xlink:href="http://example.org/a.png"/>',
        "<style>body{display:none}</style>",
        '<foreignObject><body xmlns="http://www.w3.org/1999/xhtml"/></foreignObject>',
        '<rect fill="url(http://example.org/#a)"/>',
        '<rect fill="u\\72l(http://example.org)"/>',
        '<set attributeName="onclick" to="alert(1)"/>',
        '<x:script xmlns:x="http://www.w3.org/1999/xhtml">alert(1)</x:script>',
        "<rect",
    ],
)
def test_anything_that_could_run_or_load_is_refused(inside: str) -> None:
    assert plain_svg(f"{OPEN}{inside}</svg>") is None


@pytest.mark.parametrize(
    "source", ["", "no drawing", "<html/>", "<svg/>", '<!DOCTYPE svg [<!ENTITY a "b">]><svg/>', "\0"]
)
def test_what_is_not_svg_is_refused(source: str) -> None:
    assert plain_svg(source) is None


def test_unknown_harmless_attributes_are_dropped() -> None:
    drawing = plain_svg(f'{OPEN}<rect data-a="1" style="position:fixed" width="3"/></svg>')
    assert drawing is not None and '<rect width="3" />' in drawing
