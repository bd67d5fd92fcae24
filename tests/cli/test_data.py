"""`fedabml data inspect` on tables, and the way of an ID column from training to predictions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedabml.federation.schema import Schema, check, draft
from fedabml.federation.site_data import open_data
from tests.cli.command import run
from tests.federation.start import TABLE, frame

pd = pytest.importorskip("pandas")


def table(n=90):
    rng = np.random.default_rng(0)
    days = pd.date_range("2023-01-01", periods=n, freq="5D").strftime("%Y-%m-%d")
    columns = {"site": [f"s{i % 3}" for i in range(n)], "case": [f"{i:04d}" for i in range(n)], "admitted": days}
    return pd.DataFrame({**columns, "age": rng.normal(50, 9, n).round(1), "ill": rng.choice(["no", "yes"], n)})


WORDS = ("--client-column", "site", "--target-column", "ill", "--id-column", "case")


def test_inspect_shows_columns_and_warnings_even_where_training_would_refuse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table().assign(leak=table().ill).to_csv("t.csv", index=False)
    refused = run("data", "inspect", "t.csv", *WORDS, code=2)
    assert "'admitted' holds dates" in refused.stderr and "columns" in refused.stdout
    found = run("data", "inspect", "t.csv", *WORDS, "--split-by", "admitted", "--out", "look")
    said = " ".join(found.stdout.split())
    assert "Warning: Column 'leak' equals the target 'ill'" in said and "warnings 1" in said
    content = json.loads((tmp_path / "look" / "inspection.json").read_text())
    assert [column["use"] for column in content["columns"]] == ["client", "ID", "split", "feature", "target", "feature"]
    assert (tmp_path / "look" / "inspection.html").is_file() and (tmp_path / "look" / "manifest.json").is_file()
    assert "exists" in run("data", "inspect", "t.csv", *WORDS, "--split-by", "admitted", "--out", "look", code=2).stderr


def test_a_site_describes_its_data_without_any_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame(0).assign(ward=["Zaphod-Xylophone"] * 3 + ["north", "south"] * 18 + ["north"]).to_csv("a.csv", index=False)
    words = ("--target-column", "ill", "--id-column", "patient", "--date-columns", "admitted", "--drop-columns", "note")
    said = run("data", "inspect", "--data", "a.csv", *words, "--schema", "schema.toml").stdout
    assert "schema.toml" in said and list(tmp_path.glob("*.toml")) == [tmp_path / "schema.toml"]
    assert Schema.load("schema.toml") == draft("a.csv", **TABLE)
    text = (tmp_path / "schema.toml").read_text()
    assert "Zaphod" not in text and "free text" not in text and "0-0001" not in text  # rare words, rows, identifiers
    assert "exists" in run("data", "inspect", "a.csv", *words, "--schema", "schema.toml", code=2).stderr
    run("data", "inspect", "a.csv", *words, "--schema", "schema.toml", "--force")


def test_a_site_chooses_the_positive_class_of_its_schema(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame(0).drop(columns=["patient", "admitted", "note"]).to_csv("a.csv", index=False)
    words = ("--data", "a.csv", "--target-column", "ill", "--positive-class")
    run("data", "inspect", *words, "no", "--schema", "schema.toml")
    assert Schema.load("schema.toml").classes == ("yes", "no")
    site = open_data(tmp_path / "a.csv")
    assert check(Schema.load("schema.toml"), site) == check(draft("a.csv", target_column="ill"), site)
    refused = run("data", "inspect", *words, "perhaps", "--schema", "other.toml", code=2).stderr
    assert "no class 'perhaps'" in refused and not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a.csv", "--data", "a.csv"], "both name data"),
        (["a.csv", "--schema", "s.toml", "--clients", 3], "Leave out --clients"),
        (["a.csv", "--schema", "s.toml", "--out", "x"], "Leave out --out"),
        (["digits", "--schema", "s.toml"], "your own data"),
        (["a.csv", "--schema", "s.toml"], "--target-column"),
    ],
)
def test_what_describes_no_site_is_refused(tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    frame(0).to_csv("a.csv", index=False)
    assert reason in " ".join(run("data", "inspect", *words, code=2).stderr.split())
    assert not (tmp_path / "s.toml").exists()


@pytest.mark.slow
def test_an_id_goes_from_the_table_into_the_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table().to_csv("t.csv", index=False)
    words = ("--date-columns", "admitted", "--model", "mlr", "--rounds", 1, "--participation", 1, "--device", "cpu")
    run("train", "--data", "t.csv", *WORDS, *words, "--out", "run")
    mine = table().query("site == 's1'").rename(columns={"case": "nr"})
    mine.drop(columns="site").to_csv("mine.csv", index=False)
    run("personalize", "run", "--data", "mine.csv", "--id-column", "nr", "--out", "posterior.safetensors")
    run("predict", "posterior.safetensors", "--data", "mine.csv", "--out", "p.csv")
    found = pd.read_csv("p.csv", dtype=str)
    assert found.columns[:3].tolist() == ["row", "nr", "label"] and found.nr.tolist() == mine.nr.tolist()
    mine.assign(age=999.0).rename(columns={"nr": "p_nr"}).to_csv("odd.csv", index=False)
    words = ("--data", "odd.csv", "--id-column", "p_nr", "--out", "odd-p.csv", "--report", "odd.html")
    run("predict", "posterior.safetensors", *words)
    page = (tmp_path / "odd.html").read_text(encoding="utf-8")
    assert ">p_nr<" in page and all(case in page for case in mine.nr) and "p_yes" not in page
    other = ("--id-column", "number", "--out", "q.csv")
    assert "no column 'number'" in run("predict", "posterior.safetensors", "--data", "mine.csv", *other, code=2).stderr


def test_inspect_warns_of_identical_samples_in_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).normal(size=(20, 5)), np.arange(20) % 2
    for name in ("a", "b"):
        (tmp_path / "npz").mkdir(exist_ok=True)
        np.savez(tmp_path / "npz" / f"{name}.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    said = " ".join(run("data", "inspect", "npz").stdout.split())
    assert "Warning: Clients share identical rows: 'a' and 'b' (24)." in said
    assert "Warning: 8 test rows are also among the training rows" in said and "warnings 2" in said
    image = pytest.importorskip("PIL.Image")
    pixels = [np.random.default_rng(i).integers(0, 256, (5, 5, 3)).astype(np.uint8) for i in range(2)]
    for client in ("a", "b"):
        for split in ("train", "test"):
            for label in ("cat", "dog"):
                (tmp_path / "images" / client / split / label).mkdir(parents=True)
                for i in range(2):
                    image.fromarray(pixels[i]).save(tmp_path / "images" / client / split / label / f"{i}.png")
    said = " ".join(run("data", "inspect", "images").stdout.split())
    assert "Warning: Clients share identical images: 'a' and 'b' (8)." in said and "warnings 3" in said
    assert "8 test images are also" in said and "2 different images are in the data with more than one label" in said
