"""The heat map of a partition: what it shows of a federation, and what it makes of strange manifests."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from fedabml.data import Federation, federate, load, read_table
from fedabml.report import save_heat_map
from fedabml.report.heat_map import Partition, heat_map


def picture(fed, path):
    save_heat_map(fed, path)
    return ET.parse(path).getroot(), path.read_text()


def test_heat_map_shows_every_cell(tmp_path):
    fed = federate(load("digits"), clients=12, classes_per_client=3)
    _, text = picture(fed, tmp_path / "a.svg")
    assert sum(map(int, re.findall(r'data-cells="(\d+)"', text))) == (fed.label_counts() > 0).sum()
    assert "12 clients" in text and "1,442 training samples" in text


@pytest.mark.parametrize(
    ("clients", "words"), [(1, "1 client "), (700, "700 clients"), (1200, "the first 1,000 shown")]
)
def test_heat_map_of_any_number_of_clients(tmp_path, clients, words):
    x, y = np.zeros((2 * clients, 1)), np.arange(2 * clients) % 3
    fed = Federation.from_arrays(list(zip(np.split(x, clients), np.split(y, clients), strict=True)), classes=3)
    root, text = picture(fed, tmp_path / "a.svg")
    assert words in text and 0 < float(root.get("viewBox").split()[3]) < 1300


def test_heat_map_of_many_classes_is_a_small_file(tmp_path):
    labels_of = [np.arange(100) for _ in range(1000)]  # every client has every class, the most cells there can be
    fed = Federation.from_arrays([(np.zeros((100, 1)), y) for y in labels_of], classes=100)
    _, text = picture(fed, tmp_path / "a.svg")
    assert len(text) < 1_000_000 and "1,000 clients (the first 200 shown)" in text


def test_heat_map_names_few_clients_and_the_classes_of_a_table(tmp_path):
    def words(people, classes=("dry", "wet <")):
        lines = [f"{name},{i},{kind}" for name in people for i, kind in enumerate(classes * 3)]
        (tmp_path / "t.csv").write_text("\n".join(["who,a,kind", *lines]))
        fed = read_table(tmp_path / "t.csv", client="who", target="kind", test_share=0)
        return re.findall(r"<text[^>]*>([^<]*)</text>", picture(fed, tmp_path / "a.svg")[1])

    assert {"Oslo", "Rome", "dry", "wet &lt;"} <= set(words(["Oslo", "Rome"]))
    assert {"0", "1"} <= set(words(["Oslo", "the hospital beyond the hills"]))
    assert {"0", "40"} <= set(words([f"town {i}" for i in range(41)]))
    upright = words(["Oslo", "Rome"], tuple(f"a kind of no. {i}" for i in range(20)))
    assert "a kind of no. 19" in upright
    many = words(["Oslo", "Rome"], tuple(f"kind {i}" for i in range(60)))
    assert "kind 1" not in many and "10" in many
    numbered = Federation.from_arrays([(np.zeros((5, 2)), np.arange(5))] * 3)
    _, text = picture(numbered, tmp_path / "a.svg")
    assert ">2</text>" in text and "client-2" not in text


def test_heat_map_of_a_regression_and_of_a_strange_name(tmp_path):
    fed = Federation.from_arrays([(np.zeros((5, 2)), np.arange(5.0) / 8)] * 3, dataset="<a & b>")
    assert "samples per client" in picture(fed, tmp_path / "a.svg")[1]


def test_a_manifest_of_an_older_version_gives_the_same_picture():
    """Those had no sizes: they follow from the rows, or from the counts."""
    for fed in (
        federate(load("digits"), clients=5),
        Federation.from_arrays([(np.zeros((5, 2)), np.arange(5.0) / 8)] * 3),
    ):
        now = fed.manifest_rows()
        before = {key: value for key, value in now.items() if key != "sizes"}
        pictures = [Partition.read(each) for each in (now, before, fed.manifest_rows(rows=False))]
        assert all(pictures) and len({heat_map(each) for each in pictures}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"counts": {"train": [[1, 2]]}}, {"counts": {"train": [["<b>"]]}}, {"counts": 3},
        {"counts": {"train": [[1], [1, 2]]}},
        {"sizes": {"train": [-1] * 5}}, {"sizes": {"train": [1]}}, {"clients": 10**30}, {"clients": None},
        {"samples": []},
        {"names": 7}, {"rows": {"train": [3]}, "sizes": None},
    ],
)  # fmt: skip
def test_a_manifest_whose_lists_do_not_fit_together_gives_no_picture(change):
    assert Partition.read(federate(load("digits"), clients=5).manifest_rows() | change) is None
    assert Partition.read({}) is None
