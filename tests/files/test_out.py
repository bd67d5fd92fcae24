"""--out of every command: devices, FIFOs and links stay what they are, and a file is replaced only with --force."""

import json
import os
import shutil
import stat
from contextlib import suppress

import numpy as np
import pytest

import fedabml
from tests.cli.command import SMALL, run

pytestmark = pytest.mark.usefixtures("one_thread_here")
LOCAL = ("--algorithms", "local", *SMALL)
# By command, what comes before --out. The first write a folder, the others a file.
FOLDERS = {
    "train": ["train", *SMALL],
    "demo": ["demo"],
    "compare": ["compare", "--seeds", 1, *LOCAL],
    "tune": ["tune", "--trials", 1, *LOCAL],
    "reproduce": ["reproduce", "toy", "--quick"],
    "evaluate": ["evaluate", "run"],
    "data inspect": ["data", "inspect", "digits"],
}
FILES = {
    "personalize": ["personalize", "run", "--data", "client.npz"],
    "predict": ["predict", "posterior.safetensors", "--data", "client.npz"],
    "report": ["report", "run"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run, a client's data and its posterior."""
    place = tmp_path_factory.mktemp("made")
    run("train", *SMALL, "--out", place / "run", "--quiet")
    data = fedabml.load("digits")
    np.savez(place / "client.npz", x=data.x_train[:30], y=data.y_train[:30])
    run("personalize", place / "run", "--data", place / "client.npz", "--out", place / "posterior.safetensors")
    return place


@pytest.fixture
def here(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def obstacles(folder):
    """What may stand where a command is to write, by name: as it was, it must stay."""
    os.mkfifo(folder / "fifo")
    (folder / "target").write_text("not ours")
    (folder / "link").symlink_to("target")
    (folder / "loop").symlink_to("loop")
    with suppress(PermissionError):  # only root may, and not in a namespace or container of its own
        os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    names = ("fifo", "target", "link", "loop", "device")
    return {name: (folder / name).lstat() for name in names if os.path.lexists(folder / name)}


@pytest.mark.parametrize("command", [*FOLDERS, *FILES])
@pytest.mark.slow
def test_what_is_no_new_file_stays(here, command):
    for name, before in obstacles(here).items():
        said = run(*(FOLDERS | FILES)[command], "--out", name, code=2).stderr
        assert f"'{name}" in said and said.count("\n") == 1, said
        now = (here / name).lstat()
        assert (now.st_ino, now.st_mode, now.st_rdev) == (before.st_ino, before.st_mode, before.st_rdev)
    assert (here / "target").read_text() == "not ours"


@pytest.mark.parametrize("command", FILES)
def test_a_file_is_replaced_only_with_force(here, command):
    (here / "old").write_text("not ours")
    (here / "link").symlink_to("old")
    for name in ("old", "link"):
        assert "--force" in run(*FILES[command], "--out", name, code=2).stderr
        assert (here / "old").read_text() == "not ours"
    run(*FILES[command], "--out", "link", "--force")
    assert (here / "link").is_symlink() and (here / "old").read_bytes()[:8] != b"not ours"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["evaluate", "run"], ("evaluation.json", "evaluation.csv")),
        (["data", "inspect", "digits"], ("manifest.json", "partition.svg")),
    ],
)
def test_files_in_a_folder_are_replaced_only_with_force(here, words, files):
    for name in files:
        (here / "other").mkdir()
        (here / "other" / name).write_text("not ours")
        assert "--force" in run(*words, "--out", "other", code=2).stderr
        assert [(path.name, path.read_text()) for path in (here / "other").iterdir()] == [(name, "not ours")]
        shutil.rmtree(here / "other")
    (here / "other").mkdir()
    (here / "other" / files[0]).write_text("not ours")
    run(*words, "--out", "other", "--force")
    assert sorted(path.name for path in (here / "other").iterdir()) == sorted(files)


@pytest.mark.slow
def test_own_folders_are_written_again_without_force(here):
    for _ in range(2):
        run("evaluate", "run")
        run("report", "run")
        run("report", "run", "--out", "run/report.html")
    run("report", "run", "run")
    assert "--force" in run("report", "run", "run", code=2).stderr  # report.html in the present folder


OURS = ["train.log", "metrics.jsonl", ".lock", "config.json", "summary.json", "clients.csv", "report.html"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.slow
def test_a_link_or_fifo_planted_in_a_run_is_not_written_to(here, name):
    (here / "target").write_text("not ours")
    for plant in (lambda path: path.symlink_to(here / "target"), os.mkfifo):
        (here / "run" / name).unlink(missing_ok=True)
        plant(here / "run" / name)
        assert name in run("train", "--resume", "--out", "run", "--rounds", 4, code=2).stderr
        assert (here / "target").read_text() == "not ours"


def test_checkpoints_elsewhere_are_left_alone(here):
    (here / "run/checkpoints").rename(here / "elsewhere")
    (here / "run/checkpoints").symlink_to(here / "elsewhere")
    before = {path.name: path.read_bytes() for path in (here / "elsewhere").iterdir()}
    assert "is a link" in run("train", "--resume", "--out", "run", "--rounds", 4, code=2).stderr
    assert {path.name: path.read_bytes() for path in (here / "elsewhere").iterdir()} == before


def test_a_page_that_is_a_link_is_left_alone(here):
    (here / "target").write_text("not ours")
    (here / "run/report.html").unlink()
    (here / "run/report.html").symlink_to(here / "target")
    assert "is a link" in run("report", "run", code=2).stderr and (here / "target").read_text() == "not ours"


def test_posteriors_and_kept_states_are_their_owners_alone(here):
    assert stat.S_IMODE((here / "posterior.safetensors").stat().st_mode) == 0o600
    run("train", *SMALL, "--algorithm", "ditto", "--out", "kept", "--quiet")
    kept = [*(here / "kept/checkpoints").glob("kept-*")]
    assert kept and {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_predictions_that_are_not_finite_are_refused(here):
    """Weights that are finite but overflow in the network."""
    posterior = fedabml.load_posterior("posterior.safetensors")
    wild = type(posterior.q)(posterior.q.mean.sign() * 3e38, posterior.q.logstd)
    type(posterior)(wild, posterior.input_spec, posterior.offset, posterior.samples).save("wild.safetensors")
    said = run("predict", "wild.safetensors", "--data", "client.npz", "--out", "p.csv", code=2).stderr
    assert "not finite" in said and not (here / "p.csv").exists()
    prior = fedabml.load_prior("run/shared.safetensors")
    shared = prior.shared | {"mean": prior.shared["mean"].sign() * 3e38}
    type(prior)(prior.algorithm, shared, prior.input_spec, prior.batch_size).save("run/shared.safetensors")
    said = run("evaluate", "run", "--epochs", 0, code=2).stderr
    assert "not finite" in said and not (here / "run/evaluation.json").exists()


def test_the_digest_of_a_prior_is_that_of_its_file(here):
    prior = fedabml.load_prior("run/shared.safetensors")
    summary = json.loads((here / "run/summary.json").read_text())
    same = type(prior)(prior.algorithm, prior.shared, prior.input_spec, prior.batch_size)
    assert prior.digest == same.digest == summary["prior_digest"] and len(prior.digest) == 64
    assert fedabml.load_posterior("posterior.safetensors").prior == prior.digest
    assert f"digest {prior.digest[:16]}" in repr(prior)
    other = type(prior)(prior.algorithm, prior.shared, prior.input_spec, prior.batch_size + 1)
    other.save("other.safetensors")
    assert prior.digest != other.digest == fedabml.load_prior("other.safetensors").digest
