"""What the experiments' pictures need of the charts: bands, lines among many, logarithmic axes."""

import math
import re

import pytest

from fedabml.experiments.reproduce.pictures import banded, power
from fedabml.report.frame import PAGE, Axis, tick_labels
from fedabml.report.svg import Series, line_chart


def test_a_band_is_the_interval_and_needs_three_curves():
    rows = [[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]]
    made = banded("x", [1, 2], rows)
    half = 4.302653 / math.sqrt(3)
    assert list(made.y) == [2, 2] and made.high == pytest.approx([2 + half, 2]) and made.low == pytest.approx([0, 2])
    assert not banded("x", [1, 2], rows[:2]).low
    logs = banded("x", [1, 2], rows, log=True)
    assert list(logs.y) == [power(2), power(2)] and logs.low[0] == pytest.approx(power(2e-3))
    assert power(0.0) is None is power(math.nan) is power(None)


def test_a_band_is_drawn_and_counts_for_the_range():
    series = Series("x", [1.0, 1.0], [0, 1], low=[0.5, 0.5], high=[9.0, 9.0])
    svg = line_chart([series], title="t", y=Axis("y"))
    assert svg.count('fill-opacity=".18"') == 1 and ">10<" in svg
    assert series.band() == [(0, 0.5), (1, 0.5), (1, 9), (0, 9)]


def test_a_thin_line_has_no_hover_text_and_gaps_cut_it():
    thin = Series("many", [1, 2, None, 2, 3], [0, 1, None, 0, 1], thin=True)
    svg = line_chart([thin, Series("one", [1, 2], [0, 1])], title="t", look=PAGE)
    assert svg.count("<path") == 3 and "many: " not in svg and "one: " in svg


def test_a_power_axis_says_the_numbers_themselves():
    assert tick_labels([-2, -1, 0, 1, 2], "power") == ["0.01", "0.1", "1", "10", "100"]
    assert Axis("n", "power").write(2) == "100"
    svg = line_chart([Series("x", [0, 1], [1, 3])], title="t", x=Axis("n", "power"), y=Axis("d", "power"))
    assert {"10", "100", "1000"} <= {*re.findall(r">([\d.]+)<", svg)}
