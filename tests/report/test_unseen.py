"""What models make of classes never seen, on the page of run folders that have an unseen.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedabml.errors import InputError
from fedabml.report import write

from .conftest import MakeRun

SAMPLE = {"pixels": [[0, 0.5], [1, 0]], "label": "3", "own": True, "answer": "3", "entropy": 0.04}
FOUND: dict[str, Any] = {
    "edges": [0, 1, 2], "own": [9, 1], "unseen": [2, 6], "entropy": [0.1, 0.9], "auroc": 0.875, "client": "client-0",
    "classes": "3, 5", "samples": [SAMPLE, SAMPLE | {"label": "<8>", "own": False, "answer": "5", "entropy": 1.23}],
}  # fmt: skip


def page(folders: list[Path], out: Path) -> str:
    return write(folders, out).read_text(encoding="utf-8")


def test_the_page_shows_entropies_and_samples_of_the_runs_that_have_them(make_run: MakeRun, tmp_path: Path) -> None:
    a, b = make_run("a"), make_run("b", algorithm="local")
    assert "never s" not in page([a, b], tmp_path / "without.html")
    (a / "unseen.json").write_text(json.dumps(FOUND))
    text = page([a, b], tmp_path / "with.html")
    assert "Entropy, own classes and classes never seen: fedabml" in text and "never seen: local" not in text
    assert "Mean entropy 0.100 and 0.900. AUROC 0.875" in text and "25.0%" in text and "90.0%" in text
    assert "is &lt;8&gt;" in text and "5 (1.23)" in text and "client-0 trained on 3, 5 alone" in text
    (svg,) = re.findall(r"<svg[^>]*single samples.*?</svg>", text, re.DOTALL)
    assert svg.count("<rect") == 4  # two pixels of each sample have ink


@pytest.mark.parametrize(
    "damage", [{"samples": [3]}, {"samples": [{"own": True}]}, {"own": 7}, {"samples": [SAMPLE | {"pixels": [["x"]]}]}]
)
def test_a_damaged_file_is_refused_with_the_way(make_run: MakeRun, tmp_path: Path, damage: dict[str, Any]) -> None:
    run = make_run("a")
    (run / "unseen.json").write_text(json.dumps(FOUND | damage))
    with pytest.raises(InputError, match=r"unseen\.json .* is damaged .* Remove the file"):
        write([run], tmp_path / "page.html")
