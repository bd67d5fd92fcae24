"""What commands read may be strange in every way: each case is a sentence and code 2, and none takes time or memory."""

import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import fedabml
from fedabml.data.files import read_npz
from fedabml.data.frames import read_frame
from fedabml.engine import autotune
from fedabml.errors import InputError
from fedabml.experiments.ledger import Ledger
from fedabml.files.paths import write
from fedabml.files.sealed import read_tensors, write_tensors
from fedabml.models import build, with_weights
from fedabml.runs.config import RunConfig, parse_set, read_toml
from fedabml.vectors import Network
from tests.cli.command import MAX_WAIT, SMALL, run

pytestmark = pytest.mark.usefixtures("one_thread_here")
DEEP, DIGITS = "[" * 5000 + "]" * 5000, "9" * 10_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run and a client's file, to be copied before they are spoiled."""
    base = tmp_path_factory.mktemp("finished")
    run("train", *SMALL, "--rounds", 2, "--eval-every", 1, "--out", base / "run", "--quiet")
    digits = fedabml.load("digits")
    np.savez(base / "client.npz", x=digits.x_test[:20], y=digits.y_test[:20])
    run("personalize", base / "run", "--data", base / "client.npz", "--out", base / "posterior.safetensors")
    return base


@pytest.fixture
def trained(finished, tmp_path):
    """The folder of a run, beside a client's file and its posterior."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def changed(path, change):
    """Changes a JSON file, and leaves its digest out."""
    content = json.loads(path.read_text())
    content = {k: v for k, v in content.items() if k not in ("sealed", "sha256")}
    change(content)
    path.write_text(json.dumps(content))


# -- TOML and words ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [f"rounds = {DEEP}", f"rounds = {DIGITS}", f"rounds = 0x{'f' * 5000}", "a" + ".a" * 20_000 + " = 1", "x" * 300_000],
)
def test_strange_toml_is_refused(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(InputError, match=r"c\.toml"):
        read_toml(tmp_path / "c.toml")


def test_a_line_of_many_fractions_is_no_deep_key(tmp_path):
    (tmp_path / "c.toml").write_text("x = [\n" + "0.5, " * 200 + "\n]\n")
    assert len(read_toml(tmp_path / "c.toml")["x"]) == 200


@pytest.mark.parametrize("value", [DEEP, DIGITS, "18446744073709551616", "0x" + "f" * 5000])
def test_strange_values_of_set_are_refused(value):
    with pytest.raises(InputError, match="rounds"):
        RunConfig.of(overrides=parse_set([f"rounds={value}"]))


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "run", "--epochs", 2**64),
        ("personalize", "run", "--data", "client.npz", "--out", "p", "--epochs", 2**64),
        ("personalize", "run", "--data", "client.npz", "--out", "p", "--seed", 2**64),
        ("train", "--seed", 2**64),
        ("train", "--rounds", DIGITS),
        ("compare", "--algorithms", "local", "--seeds", 10**12),
        ("compare", "--algorithms", "local", "--seeds", 10**30),
        ("compare", "--algorithms", "local", "--seeds", ","),
        ("compare", "--algorithms", "local", "--seeds", f"{2**64},"),
        ("reproduce", "toy", "--part", f"1/{DIGITS}"),
        ("data", "inspect", "digits", "--clients", 10**12),
    ],
)
@pytest.mark.slow
def test_numbers_beyond_all_bounds_are_refused(trained, words):
    run(*words, code=2)


def test_a_network_beyond_the_memory_is_refused_before_it_is_built():
    with pytest.raises(InputError, match="too many for this machine"):
        build("mlp", (64,), 10, hidden=[10**12])


# -- what is no file --------------------------------------------------------------------------------------------------
TABLE = ("--client-column", "a", "--target-column", "b")
RESUME = ("train", "--resume", "--out", "run", "--rounds", 3)
READ = [
    ("x.npz", ("personalize", "run", "--data", "x.npz", "--out", "p")),
    ("x.csv", ("data", "inspect", "x.csv", *TABLE)),
    ("x.parquet", ("data", "inspect", "x.parquet", *TABLE)),
    ("x.toml", ("train", "--config", "x.toml", "--dry-run")),
    ("prior.safetensors", ("personalize", "prior.safetensors", "--data", "client.npz", "--out", "p")),
    ("posterior.safetensors", ("predict", "posterior.safetensors", "--data", "client.npz")),
    ("weights.safetensors", ("train", *SMALL, "--pretrained", "weights.safetensors", "--dry-run")),
    ("x.jsonl", ("compare", "--algorithms", "local", *SMALL, "--finished", "x.jsonl")),
    ("run/config.json", ("evaluate", "run")),
    ("run/metrics.jsonl", ("report", "run")),
    ("run/metrics.jsonl", RESUME),
    ("run/manifest.json", ("report", "run")),
    ("run/clients.csv", ("report", "run")),
    ("run/shared.safetensors", ("report", "run")),
    ("run/train.log", RESUME),
    ("mnist-files/train-images-idx3-ubyte.gz", ("data", "inspect", "mnist", "--data-dir", ".")),
]


@pytest.mark.parametrize("target", ["fifo", "loop", "/dev/zero", "/dev/urandom"])
@pytest.mark.parametrize(("name", "words"), READ)
@pytest.mark.slow
def test_what_is_no_file_is_named(trained, monkeypatch, target, name, words):
    def no_network(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(Path(target).absolute())
    assert path.name in run(*words, code=2).stderr


@pytest.mark.slow
def test_links_in_a_circle_are_refused(trained):
    Path("loop").symlink_to("loop")
    run("predict", "posterior.safetensors", "--data", "client.npz", "--out", "loop", code=2)
    run("compare", "--algorithms", "local", *SMALL, "--data", "loop", code=2)
    run("train", *SMALL, "--out", "loop", code=2)
    run("data", "list", "--data-dir", "~no-such-person/x")


# -- arrays -----------------------------------------------------------------------------------------------------------
def archive(path, head, data=b"", method=zipfile.ZIP_STORED, name="x.npy"):
    """An .npz file whose one array has this header."""
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr(name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data)
    return path


def head(shape, kind="'|u1'"):
    return f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".encode()


@pytest.mark.parametrize(
    "header",
    [
        *(head("(6000000000,)"), head("(-1,)"), head("(1e9,)"), head("(2,)", "'|O'"), head("(2,)", "'<U1000000000'")),
        *(
            head("(" * 3000 + ")" * 3000),
            head("(9,)")[:-4],
            head("'x'"),
            b"\xff",
            b"{'descr': '<f8",
            head(DIGITS[:5000]),
        ),
    ],
)
def test_broken_headers_of_arrays_are_refused(tmp_path, header):
    with pytest.raises(InputError, match=r"a\.npz"):
        read_npz(archive(tmp_path / "a.npz", header, b"12"))


@pytest.mark.slow
def test_an_archive_that_declares_more_than_it_could_hold_is_refused_unread(tmp_path):
    big = 100 << 20
    path = archive(tmp_path / "a.npz", head(f"({big},)"), bytes(big), zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="declares a content"):
        read_npz(path)
    np.savez_compressed(path, x=np.zeros(1 << 20, np.uint8))  # tight, but small
    assert read_npz(path)["x"].shape == (1 << 20,)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_ways_of_packing_are_refused(tmp_path, method):
    with pytest.raises(InputError, match="packs"):
        read_npz(archive(tmp_path / "a.npz", head("(2,)"), b"12", method))


def test_an_entry_that_is_marked_as_encrypted_is_refused(tmp_path):
    path = archive(tmp_path / "a.npz", head("(2,)"), b"12")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(InputError, match="encrypted"):
        read_npz(path)


def test_sound_archives_are_read_as_numpy_reads_them(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.array(3), "c": np.zeros((0, 4), "<i2"), "d": np.array(["x"])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = read_npz(tmp_path / "a.npz")
        assert list(found) == list(arrays)
        for name, value in arrays.items():
            assert np.array_equal(found[name], value) and found[name].dtype == value.dtype
            assert found[name].flags.writeable


# -- tables -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_damaged_parquet_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    frame = pd.DataFrame({"a": ["x", "y"] * 9, "b": range(18)})
    facts = {"pandas": json.dumps({"columns": [{"name": "a"}], "index_columns": ["a"], "column_indexes": [{}]})}
    parquet.write_table(pa.Table.from_pandas(frame).replace_schema_metadata(facts), tmp_path / "t.parquet")
    with pytest.raises(InputError, match="PARQUET"):
        read_frame(tmp_path / "t.parquet")
    frame.to_parquet(tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    for place in range(0, len(whole), 7):
        (tmp_path / "t.parquet").write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        with suppress(InputError):
            read_frame(tmp_path / "t.parquet")


def test_a_table_of_too_many_columns_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a" + ",a" * 100_000 + "\n")
    with pytest.raises(InputError, match="columns"):
        read_frame(tmp_path / "t.csv")


def test_a_number_of_ten_thousand_digits_in_a_table_is_refused(tmp_path):
    rows = "".join(f"{site},{i % 2},{i}\n" for site in "ab" for i in range(30))
    (tmp_path / "t.csv").write_text("site,y,x\n" + rows + f"a,1,{DIGITS}\n")
    run("data", "inspect", "t.csv", "--client-column", "site", "--target-column", "y", code=2)


# -- runs, priors and posteriors --------------------------------------------------------------------------------------
def respoiled(path, change):
    """Writes a file of tensors anew, with sound digests, after a change of its tensors and facts."""
    tensors, facts = read_tensors(path)
    change(tensors, facts)
    write_tensors(path, tensors, facts)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", ["posterior.safetensors", "run/shared.safetensors"])
def test_weights_that_are_no_floats_are_refused(trained, kind, name):
    leaf = "q.mean" if name == "posterior.safetensors" else "shared.mean"
    respoiled(name, lambda tensors, facts: tensors.update({leaf: tensors[leaf].to(kind)}))
    prior = ("personalize", "run", "--data", "client.npz", "--out", "other.safetensors")
    said = run(*(prior if leaf == "shared.mean" else ("predict", name, "--data", "client.npz")), code=2).stderr
    assert leaf in said


@pytest.mark.parametrize("claim", [10**9, -1, "many", None, 2**64])
def test_a_posterior_that_claims_too_many_samples_is_refused(trained, claim):
    respoiled("posterior.safetensors", lambda tensors, facts: facts.update(samples=claim))
    run("predict", "posterior.safetensors", "--data", "client.npz", code=2)


def test_too_many_samples_of_a_prediction_are_refused(trained):
    run("predict", "posterior.safetensors", "--data", "client.npz", "--samples", 10**9, code=2)


def test_a_prior_that_claims_a_larger_network_than_it_holds_is_refused(trained):
    def larger(tensors, facts):
        facts["model"] |= {"name": "mlp", "options": {"hidden": [100_000, 10_000]}}

    respoiled("run/shared.safetensors", larger)
    assert "more than the file holds" in run("personalize", "run", "--data", "client.npz", "--out", "p", code=2).stderr


@pytest.mark.parametrize("change", [lambda t: t[:0].clone(), lambda t: t.to(torch.int64)])
def test_kept_states_that_do_not_fit_are_refused(tmp_path, change):
    run("train", *SMALL, "--rounds", 1, "--algorithm", "local", "--out", "run", "--quiet")
    file = next(Path("run/checkpoints").glob("kept-*.safetensors"))
    name = next(iter(read_tensors(file)[0]))
    respoiled(file, lambda tensors, facts: tensors.update({name: change(tensors[name])}))
    assert "checkpoint" in run("evaluate", "run", code=2).stderr
    assert "checkpoint" in run("train", "--resume", "--out", "run", "--rounds", 2, code=2).stderr


def test_pretrained_weights_that_are_no_floats_are_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    save_file({name: t.to(torch.int64) for name, t in model.state_dict().items()}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="int64"):
        with_weights(model, tmp_path / "w.safetensors")


def test_a_configuration_without_split_or_backend_is_scored_all_the_same(trained):
    for name in ("split", "backend", "chunk"):
        changed(trained / "config.json", lambda content: content.pop(name))
    run("evaluate", "run")
    changed(trained / "config.json", lambda content: content.update(backend=[], split={}))
    run("evaluate", "run", code=2)


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"round": 1, "loss": "\xff"}', b'{"loss": 1}', b'{"round": Infinity, "loss": 1}', b"[1]", DEEP.encode()),
        *(b'{"round": 1, "loss": Infinity, "bytes_up": 1, "bytes_down": 1}', b'{"round": 1}', DIGITS.encode()),
    ],
)
@pytest.mark.slow
def test_a_damaged_line_of_metrics_is_left_out_of_a_resumed_run(trained, line):
    path = trained / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes().splitlines(keepends=True)[-1] + line)
    run(*RESUME)
    assert [json.loads(text)["round"] for text in path.read_text().splitlines()] == [2, 3]


def test_a_damaged_line_of_metrics_is_named_by_a_report(trained):
    with open(trained / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\n")
    assert "metrics.jsonl" in run("report", "run", code=2).stderr


@pytest.mark.parametrize("line", [DEEP, "{}", "[]", '{"identity": "[1]", "label": 1, "config": 1, "scores": [1]}'])
def test_a_damaged_line_of_cells_is_named(tmp_path, line):
    (tmp_path / "cells.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match="line 1"):
        Ledger(tmp_path / "cells.jsonl")


# -- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_names_that_are_not_utf8_become_readable(tmp_path):
    (tmp_path / "own").mkdir()
    rng = np.random.default_rng(0)
    for name in (b"a", b"\xff\xfe"):
        x, y = rng.normal(size=(9, 3)), np.arange(9) % 2
        np.savez(tmp_path / "own" / os.fsdecode(name + b".npz"), x_train=x, y_train=y, x_test=x, y_test=y)
    out = os.fsdecode(b"run\xff")
    program = [sys.executable, "-m", "fedabml", "train", "--data", "own", *SMALL[2:], "--out", out]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    found = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, timeout=MAX_WAIT)
    assert found.returncode == 0, found.stderr
    assert "\\xff\\xfe" in (tmp_path / out / "clients.csv").read_text()
    assert "\\xff\\xfe" in (tmp_path / out / "report.html").read_text()


# -- what was remembered ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", ['{"%s": ["vmap", 1000000000]}', '{"%s": ["loop", -1]}', DEEP, DIGITS, "[1]", None])
def test_strange_memories_of_backends_are_measured_anew(tmp_path, monkeypatch, content):
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path))
    file = autotune.choices_file()
    if content is None:
        os.mkfifo(file)
    else:
        write(file, content.replace("%s", "0123 vmap|loop"))
    assert autotune._read_choices(file) == {}
    way, _ = autotune.choose_backend("auto", Network(torch.nn.Linear(3, 2)), torch.zeros(8, 3), torch.device("cpu"))
    assert way.workers <= autotune.LANES


def test_a_file_that_names_very_many_layers_is_refused_before_they_are_built():
    with pytest.raises(InputError, match="1,001 layers"):
        fedabml.models.build("mlp", [3], 2, hidden=[10] * 1001)


def test_an_archive_of_very_many_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "many.npz", **{f"a{i}": np.zeros(1) for i in range(1001)})
    with pytest.raises(InputError, match="1,001 arrays"):
        read_npz(tmp_path / "many.npz")
