"""The study of natural tables: its lists of test rows, its ledger, and the tables of its page agree."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedabml
from fedabml.errors import InputError

ROOT = Path(__file__).parents[2]
TABLES = ("chem97", "contraception", "hsb82")
PACKAGE = os.environ.get("FEDABML_MLMREV")  # the folder that `dpkg -x` has written
needs_package = pytest.mark.skipif(
    PACKAGE is None, reason="$FEDABML_MLMREV names no folder of the package r-cran-mlmrev; see examples/natural.py"
)


@pytest.fixture(scope="module")
def study():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import natural

        yield natural
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture
def small(study):
    """Rows of six clients, twelve each, whose use depends on age and client."""
    random = np.random.default_rng(0)
    district, age = np.repeat(np.arange(6), 12), random.normal(size=72)
    use = np.where(random.random(72) < 1 / (1 + np.exp(-age - district / 3 + 1)), "Y", "N")
    use[::12], use[1::12] = "Y", "N"
    columns = {"district": district, "livch": random.choice(["0", "3+"], 72), "age": age, "urban": "Y", "use": use}
    return pd.DataFrame(columns)


@needs_package
@pytest.mark.parametrize("name", TABLES)
def test_the_script_draws_the_committed_rows_and_writes_the_known_files(study, name, tmp_path):
    pytest.importorskip("rdata", reason="the package rdata reads the tables")
    frame = study.tables(Path(PACKAGE))[name]
    assert study.draw_test_rows(frame[study.TASKS[name].client]) == study.listed_test_rows(name)
    study.write_tables(Path(PACKAGE), tmp_path)
    assert len(study.read_half(tmp_path, name, "first")) + len(study.read_half(tmp_path, name, "test")) == len(frame)


@pytest.mark.parametrize("name", TABLES)
def test_seed_28_draws_the_committed_rows_of_every_client(study, name):
    """This needs no table: a client with m test rows has 2m − 1, 2m or 2m + 1 rows, and one of these gives the list."""
    listed = study.listed_test_rows(name)
    assert list(listed) == sorted(listed) and all(rows == sorted(set(rows)) for rows in listed.values())
    random = np.random.default_rng(study.DRAWN)
    for rows in listed.values():
        for size in (2 * len(rows) - 1, 2 * len(rows), 2 * len(rows) + 1):
            before = random.bit_generator.state
            if sorted(random.permutation(size)[: int(np.rint(size / 2))].tolist()) == rows:
                break
            random.bit_generator.state = before
        else:
            pytest.fail("seed 28 does not draw these rows")


def test_halves_are_disjoint_and_the_federation_keeps_them(study, small):
    rows = study.draw_test_rows(small.district)
    first, test = study.halves(small, "district", rows)
    assert len(first) == len(test) == 36 and not set(first.index) & set(test.index)
    fed = study.federation("contraception", first, test)
    column = next(c for c in fed.x.T if len(np.unique(c)) > 2)  # the age, standardised
    assert np.argsort(column[fed.test.index]).tolist() == np.argsort(test.age.to_numpy()).tolist()
    assert not len(study.federation("contraception", first).test.index)


def test_base_lines_predict_what_their_names_say(study, small):
    fed = study.federation("contraception", *study.halves(small, "district", study.draw_test_rows(small.district)))
    share = np.bincount(fed.y[fed.train.index]) / 36
    summary, _ = study.base_scores(fed, "base", 1.0)
    y = fed.y[fed.test.index]
    assert summary["nll_pooled"] == pytest.approx(-np.log(share[y]).mean(), rel=1e-3)
    assert study.base_scores(fed, "pooled", 0.1)[0]["nll"] != study.base_scores(fed, "intercepts", 0.1)[0]["nll"]
    assert study.choose_penalty(fed, "pooled") in study.PENALTIES


def test_a_changed_file_is_refused(study, tmp_path):
    (tmp_path / "hsb82.first.csv").write_text("school\n1\n")
    with pytest.raises(InputError, match="SHA-256"):
        study.read_half(tmp_path, "hsb82", "first")
    with pytest.raises(InputError, match="is missing"):
        study.read_half(tmp_path, "hsb82", "test")


def test_a_release_reads_a_test_half_once(study, tmp_path, monkeypatch):
    """A version with a line in the ledger is refused before any data are opened; so are other settings."""
    monkeypatch.setattr(study, "HOME", tmp_path)
    for folder, end in (("settings", "toml"), ("test_rows", "txt")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"hsb82.{end}").write_text("1")
    absent = tmp_path / "absent"
    with pytest.raises(InputError, match="nothing to compare with"):
        study.read(absent, "hsb82", compare=True)
    with pytest.raises(InputError, match="is missing"):
        study.read(absent, "hsb82", compare=False)
    line = {"version": fedabml.__version__, "table": "hsb82", "day": "a day", "basis": study.basis("hsb82")}
    (tmp_path / "reads.jsonl").write_text(json.dumps(line | {"scores": {}}) + "\n")
    with pytest.raises(InputError, match="has read the test half of hsb82 on a day"):
        study.read(absent, "hsb82", compare=False)
    with pytest.raises(InputError, match="is missing"):  # the same settings may be compared
        study.read(absent, "hsb82", compare=True)
    (tmp_path / "settings" / "hsb82.toml").write_text("2")
    with pytest.raises(InputError, match="not those with which"):
        study.read(absent, "hsb82", compare=True)


def test_a_reading_is_noted_drawn_and_the_same_when_repeated(study, small, tmp_path, monkeypatch, capsys):
    """The whole way on a small table: two methods, two rounds, a ledger and a page of its own."""
    rows, digests = study.draw_test_rows(small.district), {}
    for part, half in zip(("first", "test"), study.halves(small, "district", rows), strict=True):
        half.to_csv(tmp_path / f"contraception.{part}.csv", index=False)
        digests[part] = hashlib.sha256((tmp_path / f"contraception.{part}.csv").read_bytes()).hexdigest()
    monkeypatch.setattr(study, "HOME", tmp_path)
    monkeypatch.setattr(study, "TASKS", {"contraception": replace(study.TASKS["contraception"], **digests)})
    monkeypatch.setattr(study, "METHODS", {"fedabml": "FedABML", "local": "Local only"})
    monkeypatch.setattr(study, "SEEDS", (0, 1))
    for folder, end, text in (("settings", "toml", "rounds = 2\nparticipation = 1.0\n"), ("test_rows", "txt", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"contraception.{end}").write_text(text)
    study.read(tmp_path, "contraception", compare=False)
    line = study.noted(fedabml.__version__, "contraception")
    assert list(line["scores"]) == ["fedabml", "local", *study.BASES] and line["seeds"] == [0, 1]
    (tmp_path / "README.md").write_text("# Head\n\n### \n\n## Notes\n\n- One.\n")
    study.draw_page()
    study.draw_page()
    page = (tmp_path / "README.md").read_text()
    assert page.count("### contraception: 6 clients") == page.count("## Notes\n\n- One.\n") == 1
    assert f"| FedABML | {100 * line['scores']['fedabml']['accuracy']:.2f}" in page.replace("**", "")
    study.read(tmp_path, "contraception", compare=True)
    assert "largest difference" in capsys.readouterr().out
    line["scores"]["local"]["nll"] += 0.1
    (tmp_path / "reads.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit, match="not the same reading"):
        study.read(tmp_path, "contraception", compare=True)


def test_the_interval_of_a_lead_is_that_of_the_mean_over_clients(study):
    gap = np.random.default_rng(1).normal(0.3, 1.0, 400)
    middle, low, high = study.lead(gap + 5.0, np.full(400, 5.0))
    half = 1.96 * gap.std() / 20
    assert middle == pytest.approx(gap.mean())
    assert [low, high] == pytest.approx([gap.mean() - half, gap.mean() + half], abs=0.01)


def test_the_page_the_records_and_the_ledger_agree(study):
    assert study.page_tables() in (study.HOME / "README.md").read_text()
    lines = [json.loads(line) for line in (study.HOME / "reads.jsonl").read_text().splitlines()]
    read = {(line["version"], line["table"]) for line in lines}
    assert len(read) == len(lines)
    for file in (study.HOME / "records").glob("*.jsonl"):
        line = [line for line in lines if line["table"] == file.stem][-1]
        records = [json.loads(text) for text in file.read_text().splitlines()]
        assert line["scores"] == {record["method"]: record["scores"] for record in records}
        assert line["basis"] == study.basis(file.stem)
