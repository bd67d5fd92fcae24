"""The charts: numbers end where they should, and nothing that is not a number is drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from xml.etree import ElementTree

import pytest

from fedabml.report.canvas import Axis, finite, text, tick_labels, ticks
from fedabml.report.charts import DARK, LIGHT, PAGE, Series, Theme, bars, histogram, line_chart, ranges, scatter

NAN = float("nan")
SVG = "{http://www.w3.org/2000/svg}"


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(SVG + kind))


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0.13, 0.97)[0] <= 0.13 and ticks(0.13, 0.97)[-1] >= 0.97
    assert ticks(1, 3, integers=True) == [1, 2, 3]
    for low, high in ((-1e-9, 1e-9), (1e12, 3e12), (2.301, 2.302), (-5, 7), (0.018316, 0.018322)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 8 and found[0] <= low + 1e-15 and found[-1] >= high - 1e-15
        assert len(set(tick_labels(found, "number"))) == len(found)


@pytest.mark.parametrize("kind", ["number", "percent", "whole"])
@pytest.mark.parametrize("values", [[], [0.0], [1.0], [0.5, 0.5], [None, NAN]])
def test_an_axis_never_covers_nothing(kind: str, values: list[float | None]) -> None:
    low, high = Axis("", kind).cover(finite(v) for v in values)  # type: ignore[arg-type]
    assert math.isfinite(low) and low < high


def test_a_line_starts_and_ends_at_the_corners_of_its_frame() -> None:
    svg = line_chart([Series("a", [0.0, 1.0], [0.0, 10.0])], title="t", theme=PAGE)
    plot = ElementTree.fromstring(svg).get("data-plot", "").split()
    left, top, right, bottom = (float(v) for v in plot[:4])
    start, end = shapes(svg, "path")[0].get("d", "").removeprefix("M").split("L")
    assert [float(v) for v in start.split()] == pytest.approx([left, bottom], abs=0.1)
    assert [float(v) for v in end.split()] == pytest.approx([right, top], abs=0.1)


def test_missing_values_are_gaps_and_lonely_ones_dots() -> None:
    svg = line_chart([Series("a", [1.0, 2.0, None, 3.0, NAN, float("inf"), 2.0, 1.0])], title="t")
    assert len(shapes(svg, "path")) == 2
    assert len(shapes(svg, "circle")) == 1


def test_the_diagonal_gives_both_axes_one_range() -> None:
    svg = scatter([Series("a", [0.2, 0.9], [0.6, 0.7])], title="t", diagonal=True, theme=PAGE)
    x_low, x_high, y_low, y_high = ElementTree.fromstring(svg).get("data-plot", "").split()[4:]
    assert (x_low, x_high) == (y_low, y_high)


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars(["a", "b", "c"], [Series("s", [1.0, 2.0, None])], title="t")
    lengths = [float(r.get("width", "0")) for r in shapes(svg, "rect") if r.get("rx")]
    assert len(lengths) == 2 and lengths[1] == pytest.approx(2 * lengths[0], abs=0.2)


def test_ranges_reach_from_low_to_high_around_their_values() -> None:
    rows = Series("s", [2.0, None, 3.0], low=[1.0, 1.0, None], high=[4.0, 2.0, 3.5])
    svg = ranges(["a", "b", "c"], [rows], title="t", x=Axis("", span=(0.0, 4.0)), theme=PAGE)
    left, _, right, *_ = (float(v) for v in ElementTree.fromstring(svg).get("data-plot", "").split())
    dots = [(float(c.get("cx", "")) - left) / (right - left) * 4 for c in shapes(svg, "circle")]
    assert dots == pytest.approx([2.0, 3.0], abs=0.01)
    lines = [re.findall(r"[\d.]+(?= )", p.get("d", "")) for p in shapes(svg, "path")]
    spans = [[(float(v) - left) / (right - left) * 4 for v in line] for line in lines]
    assert spans == [pytest.approx([1.0, 4.0], abs=0.01), pytest.approx([3.0, 3.5], abs=0.01)]
    tips = [r.get("data-tip") for r in shapes(svg, "rect") if r.get("data-tip")]
    assert tips == ["a\ns: 2 (1 to 4)", "b", "c\ns: 3 (3 to 3.5)"]


def test_histogram_bars_are_as_tall_as_their_shares() -> None:
    svg = histogram([0, 1, 2], [Series("s", [0.2, 0.4])], title="t")
    heights = [float(r.get("height", "0")) for r in shapes(svg, "rect") if r.get("rx")]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)


def test_a_picture_for_a_readme_stands_alone() -> None:
    svg = line_chart([Series("<a>", [1, 2]), Series("b", [2, 1])], title="Loss & more", theme=DARK)
    assert shapes(svg, "title")[0].text == "Loss & more"
    assert "var(" not in svg and "data-tip" not in svg and DARK.paper in svg
    assert "<a>" in [t.text for t in shapes(svg, "text")]


def test_the_legend_of_a_picture_is_of_buttons_on_a_page_alone() -> None:
    series = [Series("a", [1, 2]), Series("b", [2, 1])]
    alone, page = (line_chart(series, title="t", theme=theme) for theme in (LIGHT, PAGE))
    assert "<g>" in alone and "button" not in alone and 'role="img"' in alone
    entries = [g for g in shapes(page, "g") if g.get("role") == "button"]
    assert [(g.get("aria-label"), g.get("tabindex"), g.get("data-series")) for g in entries] == [
        ("a", "0", "0"),
        ("b", "0", "1"),
    ]
    assert [g.get("data-of") for g in shapes(page, "g")] == [None, None, "0", "1"] and 'role="group"' in page
    lone = line_chart(series[:1], title="t", theme=PAGE)
    assert "data-of" not in lone and 'role="img"' in lone


def test_hover_texts_name_the_series_and_their_values() -> None:
    svg = line_chart([Series("a", [0.5]), Series("b", [0.25])], title="t", x=Axis("round", "whole"), theme=PAGE)
    assert [r.get("data-tip") for r in shapes(svg, "rect") if r.get("data-tip")] == ["round 1\na: 0.5\nb: 0.25"]


def test_thousands_of_rounds_get_a_bounded_number_of_hover_columns() -> None:
    svg = line_chart([Series("a", [float(i) for i in range(5000)])], title="t", theme=PAGE)
    assert 100 < svg.count("data-tip") <= 240


def test_a_legend_of_many_lines_leaves_the_plot_as_large() -> None:
    def heights(count: int) -> tuple[float, float]:
        svg = line_chart([Series(f"algorithm {i}", [1.0, 2.0]) for i in range(count)], title="t", theme=PAGE)
        top, bottom = (float(svg.split('data-plot="')[1].split()[i]) for i in (1, 3))
        return bottom - top, float(svg.split('viewBox="0 0 460 ')[1].split('"')[0])

    assert heights(16)[0] == pytest.approx(heights(2)[0]) and heights(16)[1] > heights(2)[1]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_empty_charts_are_still_pictures(theme: Theme) -> None:
    for svg in (
        line_chart([], title="t", theme=theme),
        scatter([Series("a", [NAN])], title="t", theme=theme),
        bars([], [], title="t", theme=theme),
    ):
        assert ElementTree.fromstring(svg).tag == SVG + "svg" and "nan" not in svg


def test_text_is_safe_in_content_and_attributes() -> None:
    assert text("<script>\"'&\x00\ud800") == "&lt;script&gt;&quot;&#x27;&amp;"


@pytest.mark.parametrize("value", [None, True, "1", NAN, float("inf"), 10**400, [1]])
def test_what_cannot_be_drawn_is_no_number(value: object) -> None:
    assert finite(value) is None


@pytest.mark.parametrize("theme", [LIGHT, DARK, PAGE])
@pytest.mark.parametrize("draw", [line_chart, scatter, partial(bars, ["row"])])
def test_two_dozen_series_look_different_and_their_keys_do(theme: Theme, draw: Callable[..., str]) -> None:
    names = [f"s{i}" for i in range(24)]
    svg = draw([Series(name, [1.0, 2.0][: 1 if draw not in (line_chart, scatter) else 2]) for name in names],
               title="t", theme=theme)  # fmt: skip
    looks = ("fill", "fill-opacity", "stroke", "stroke-dasharray")
    groups = (g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("class") != "entry")
    drawn = [(p.tag, p.get("transform") and p.get("d"), *map(p.get, looks)) for g in groups for p in list(g)[:1]]
    assert len(drawn) == len(set(drawn)) == 24
    keys = re.findall(r"(<(?:rect|path)[^>]*>(?:<path[^>]*>)?)<text[^>]*>s\d+</text>", svg)
    unplaced = {re.sub(r'(?<= )(x|y)="[^"]*"|translate\([^)]*\)|M[\d. ]+h20', "", key) for key in keys}
    assert len(keys) == len(unplaced) == 24


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out_from_the_paper(theme: Theme) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for colour in (*theme.colours, theme.ink, theme.muted):
        light, dark = sorted((luminance(colour), luminance(theme.paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour
