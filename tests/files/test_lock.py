"""One process at a time works in a folder, and a folder that was removed does not come back in part."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fedabml.errors import InputError
from fedabml.files import paths
from fedabml.files.paths import folder_lock
from tests.cli.command import SMALL
from tests.cli.test_process import ENV, MAX_WAIT, TRAIN, finish, start, wait_for_round

HOLD = """
import sys
from fedabml.files.paths import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    input()
"""


def test_a_folder_has_one_lock(tmp_path):
    with folder_lock(tmp_path / "deep/run"):
        with pytest.raises(InputError, match="Another process is at work in"), folder_lock(tmp_path / "deep/run"):
            pass
        with folder_lock(tmp_path / "deep"), folder_lock(tmp_path / "deep/run", ".other"):
            paths.write(tmp_path / "deep/run/a", "x")
    with folder_lock(tmp_path / "deep/run"):
        pass
    assert [path.name for path in (tmp_path / "deep/run").iterdir()] == ["a"]


def test_a_shared_lock_admits_others_that_share(tmp_path):
    with folder_lock(tmp_path, shared=True):
        with folder_lock(tmp_path, shared=True):
            paths.write(tmp_path / "a", "x")
        paths.write(tmp_path / "b", "x")
        with pytest.raises(InputError, match="Another process"), folder_lock(tmp_path):
            pass
    with folder_lock(tmp_path), pytest.raises(InputError, match="Another"), folder_lock(tmp_path, shared=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_was_not_begun_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), folder_lock(tmp_path / "deep/run"):
        raise ZeroDivisionError
    assert not [*tmp_path.iterdir()]


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("loop")
    (tmp_path / "loop").symlink_to("dangling")
    with pytest.raises(InputError, match="is a file, not a folder"), folder_lock(tmp_path / "file"):
        pass
    for name in ("file", "fifo", "file/below", "loop"):
        with pytest.raises(InputError, match=name), folder_lock(tmp_path / name):
            pass
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["a.json", "below/a.json", "below/deeper/a.json"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_folder_does_not_come_back(tmp_path, name, replaced):
    out = tmp_path / "run"
    with folder_lock(out):
        paths.write(out / name, "x")
        shutil.rmtree(out)
        if replaced:
            out.mkdir()
        for act in (paths.write, lambda path, text: paths.open_append(path).close()):
            with pytest.raises(InputError, match="was removed or replaced"):
                act(out / name, "x")
    assert not [*out.iterdir()] if replaced else not out.exists()


def test_the_lock_ends_with_the_process(tmp_path):
    words = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENV}
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], **words) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="Another process"), folder_lock(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(MAX_WAIT)
        with folder_lock(tmp_path):
            pass


@pytest.mark.slow
@pytest.mark.nightly
def test_of_two_runs_started_at_once_in_one_folder_one_runs(tmp_path):
    pair = [start(tmp_path, *TRAIN[:-1], seed, "--out", "run", "--quiet") for seed in (1, 2)]
    said = [process.communicate(timeout=MAX_WAIT)[1] for process in pair]
    codes = [process.returncode for process in pair]
    assert sorted(codes) == [0, 2], said
    loser = said[codes.index(2)]
    assert "Another process is at work in 'run'" in loser or "'run' already holds a run" in loser
    lines = [json.loads(line)["round"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 41))
    assert json.loads((tmp_path / "run/config.json").read_text())["seed"] == codes.index(0) + 1


@pytest.mark.slow
@pytest.mark.nightly
def test_nobody_else_works_in_the_folder_of_a_run_until_it_is_dead(tmp_path):
    words = [*TRAIN, "--rounds", "4000", "--out", "run", "--quiet"]
    with start(tmp_path, *words) as process:
        wait_for_round(process, tmp_path / "run", 2)
        for others in (["train", "--resume"], ["compare", "--algorithms", "local", *SMALL], ["demo"], ["tune", *SMALL]):
            more = ["--algorithms", "local"] if others[0] == "tune" else []
            code, _, error = finish(tmp_path, *others, *more, "--out", "run")
            assert code == 2 and "Another process is at work in 'run'" in error, error
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=MAX_WAIT)
    done = wait_for_round(process, tmp_path / "run", 2)
    assert finish(tmp_path, "train", "--resume", "--out", "run", "--rounds", str(done + 1), "--quiet")[0] == 0


@pytest.mark.slow
def test_a_run_whose_folder_is_taken_away_stops_and_does_not_bring_it_back(tmp_path):
    with start(tmp_path, *TRAIN, "--rounds", "4000", "--out", "run", "--quiet") as process:
        wait_for_round(process, tmp_path / "run", 2)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        _, error = process.communicate(timeout=MAX_WAIT)
    assert process.returncode == 2 and "was removed or replaced" in error
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "elsewhere/config.json").exists()
