"""What the experiments' pictures need of the charts: bands, lines among many, logarithmic axes."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedabml.experiments.paper import uncertainty
from fedabml.experiments.paper.experiment import Context, Request
from fedabml.experiments.paper.findings import Mean, band, power
from fedabml.report.canvas import LIGHT, PAGE, Axis, tick_labels
from fedabml.report.charts import Series, line_chart
from fedabml.runs.config import RunConfig

PAPER, TUNED = (Context(Request("uncertainty", protocol), Path(), Path()) for protocol in ("paper", "tuned"))


def test_a_band_is_the_interval_and_needs_three_curves():
    means = [Mean({0: 1.0, 1: 2.0, 2: 3.0}), Mean({0: 2.0, 1: 2.0, 2: 2.0})]
    line = band("x", [1, 2], means)
    half = 4.302653 / math.sqrt(3)
    assert list(line.y) == [2, 2] and line.high == pytest.approx([2 + half, 2]) and line.low == pytest.approx([0, 2])
    assert not band("x", [1], [Mean({0: 1.0, 1: 2.0})]).bands()
    assert list(band("x", [1, 2], means, greatest=3.0).high) == [3, 2]
    logs = band("x", [1, 2], means, log=True)
    assert list(logs.y) == [power(2), power(2)] and logs.low[0] == pytest.approx(power(2e-3))
    below = band("x", [1, 2], [Mean({0: -2.0, 1: -1.0, 2: 0.0}), Mean({})], least=-math.inf)
    (outline,) = below.bands()
    assert outline == [(1, pytest.approx(-1 - half)), (1, pytest.approx(-1 + half))]
    assert below.points() == [(1, -1), None]
    parted = band("x", [1, 2, 3], [means[1], Mean({0: 5.0}), means[1]])
    assert parted.bands() == [[(1, 2), (1, 2)], [(3, 2), (3, 2)]] and len(parted.points()) == 3
    assert power(0.0) is None is power(math.nan) is power(None)


def test_a_band_is_drawn_and_counts_for_the_range():
    series = Series("x", [1.0, 1.0], [0, 1], low=[0.5, 0.5], high=[9.0, 9.0])
    svg = line_chart([series], title="t", y=Axis("y"))
    assert svg.count('fill-opacity=".18"') == 1 and ">10<" in svg
    assert series.bands() == [[(0, 0.5), (1, 0.5), (1, 9), (0, 9)]]


def test_a_thin_line_has_no_hover_text_and_gaps_cut_it():
    thin = Series("many", [1, 2, None, 2, 3], [0, 1, None, 0, 1], thin=True)
    svg = line_chart([thin, Series("one", [1, 2], [0, 1])], title="t", theme=PAGE)
    assert svg.count("<path") == 3 and "many: " not in svg and "one: " in svg


def test_a_power_axis_says_the_numbers_themselves():
    assert tick_labels([-2, -1, 0, 1, 2], "power") == ["0.01", "0.1", "1", "10", "100"]
    assert Axis("n", "power").write(2) == "100"
    svg = line_chart([Series("x", [0, 1], [1, 3])], title="t", x=Axis("n", "power"), y=Axis("d", "power"))
    assert {"10", "100", "1000"} <= {*re.findall(r">([\d.]+)<", svg)}


MANY = [[1.0, 4.0], [2.0, 2.0], [None, None]]
CLIENTS = ["ann", "<bob>", "cid"]


def test_many_lines_lie_pale_around_a_strong_one_and_say_whose_they_are():
    strong = Series("inside", [1.5, 3.0], [0, 1], members=MANY, who=CLIENTS)
    svg = line_chart([strong], title="t", theme=PAGE)
    thin = re.findall(r'stroke-opacity="([\d.]+)"[^>]* data-tip="([^"]*)" data-client="([^"]*)"', svg)
    assert thin == [
        ("0.5", "ann&#10;inside", "ann"),
        ("0.5", "&lt;bob&gt;&#10;inside", "&lt;bob&gt;"),
    ]  # cid has no values
    assert 'class="hit"' not in svg  # which would lie above the lines
    last = re.findall(r"<path[^>]*>", svg)[-2:]
    assert [re.search(r'stroke="(.*?)" stroke-width="(\d)"', p).groups() for p in last] == [
        ("var(--paper)", "5"),
        ("var(--c0)", "2"),
    ]
    assert "data-" not in line_chart([strong], title="t", theme=LIGHT).replace("data-label", "")
    crowd = line_chart([replace(strong, members=MANY[:2] * 100, who=())], title="t", theme=PAGE)
    assert 'stroke-opacity="0.14"' in crowd and "data-client" not in crowd


def test_a_mirror_axis_has_its_zero_in_the_middle_and_says_squares():
    y = Axis("density", "mirror", (-2.0, 3.0))
    svg = line_chart([Series("x", [-2, 3], [0, 1])], title="t", y=y, theme=PAGE)
    labels = re.findall(r'text-anchor="end" >([\d.]+)<', svg)
    assert [float(v) for v in labels if float(v) in (0, 1, 4, 9)] == [4, 1, 0, 1, 4, 9]
    assert y.write(-2.0) == "4" and Axis("", "number").write(-2.0) == "-2"
    _, top, _, bottom = map(float, re.search(r'data-plot="([^"]*)"', svg)[1].split()[:4])
    lines = [float(v) for v in re.findall(r'y1="([\d.]+)"[^>]*stroke="var\(--muted\)"', svg)]
    assert lines == pytest.approx([bottom, top + 3 / 5 * (bottom - top)], abs=0.1)


def test_a_line_chart_may_have_a_diagonal():
    axes = {"x": Axis("x", span=(0.0, 1.0)), "y": Axis("y", span=(0.0, 1.0))}
    svg = line_chart([Series("x", [0.2, 1.0], [0, 1])], title="t", **axes, theme=PAGE, diagonal=True)
    left, top, right, bottom = map(float, re.search(r'data-plot="([^"]*)"', svg)[1].split()[:4])
    ends = re.search(r'<line x1="(\S+)" y1="(\S+)" x2="(\S+)" y2="(\S+)"[^>]*stroke-dasharray', svg).groups()
    assert [float(v) for v in ends] == pytest.approx([left, bottom, right, top], abs=0.1)
    assert "stroke-dasharray" not in line_chart([Series("x", [0.2, 1.0], [0, 1])], title="t", **axes, theme=PAGE)


def _finished(density, clients):
    found = {"edges": [0.0, 1.0, 2.0], "density": density}
    return SimpleNamespace(result=SimpleNamespace(found=found), cell=SimpleNamespace(config=RunConfig(clients=clients)))


def test_densities_have_one_axis_for_all_methods_and_name_clients_whose_place_is_known():
    kinds = {"in": [[0.0, 1.0], [0.25, 0.75]], "out": [[1.0, 0.0], [None, None]]}
    peak = {"in": [[9.0, 0.0]], "out": [[0.5, 0.5]]}  # as an earlier version left a client out
    own = {"fedabml": _finished(kinds, 2), "fedavg-ft": _finished(peak, 2)}
    first, second = (drawing.draw(PAGE) for drawing in uncertainty._densities(PAPER, "digits", own))
    spans = [re.search(r'data-plot="([^"]*)"', svg)[1].split()[4:] for svg in (first, second)]
    assert spans[0] == spans[1] == ["0", "2", "-1.02", "3.06"]
    assert re.findall('data-client="(.*?),', first) == ["client 0", "client 1", "client 0"]
    assert "data-client" not in second and second.count("<path") == 6


def test_the_place_of_a_client_is_kept_where_it_has_no_samples():
    edges = np.array([0.0, 1.0, 2.0])
    assert uncertainty._density(np.array([]), edges) == [None, None]
    assert uncertainty._density(np.array([0.5, 1.5, 1.5, 5.0]), edges) == [0.25, 0.75]


def _scored(algorithm, known, other):
    record = {"column": "digits", "algorithm": algorithm}
    return record | {"accuracy": Mean({0: known}), "other_accuracy": Mean({0: other})}


def test_where_labels_shift_the_share_is_said_below_which_the_label_level_pays():
    level, bare = _scored("fedabml", 0.9, 0.1), _scored("fedabml-plain", 0.8, 0.4)  # they meet at a share of a quarter
    assert uncertainty._pays(TUNED, [level, bare])[0].endswith("FedABML + label level pays below 25.0%.")
    (with_it, without) = uncertainty._shifted(TUNED, "t", [level, bare]).rows
    assert with_it[4] == without[4] == "70.00" and (with_it[1], with_it[-1]) == ("90.00", "10.00")
    for known, other, verdict in ((0.8, 0.3, "does not pay."), (0.9, 0.5, "pays at every share.")):
        assert uncertainty._pays(TUNED, [_scored("fedabml", known, other), bare])[0].endswith(verdict)
    assert uncertainty._pays(TUNED, [level]) == []
    (line,) = re.findall(r'data-plot="([^"]*)"', uncertainty._shifts(TUNED, [level, bare]).draw(PAGE))
    assert line.split()[4:] == ["0", "1", "0", "1"]
