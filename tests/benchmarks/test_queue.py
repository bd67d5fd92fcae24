"""Lists of experiments: what a line means, in which order chains run, and what is left when they are stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.queue import Chain, Queue, chains
from fedabml.cli import app
from fedabml.engine.autotune import free_bytes
from fedabml.errors import InputError
from tests.cli.command import MOST

LISTS = sorted((Path(__file__).parents[2] / "benchmarks" / "lists").glob("*.txt"))


def queue(tmp_path, text, workers=1, seconds=MOST):
    told = tmp_path / "list.txt"
    told.write_text(text)
    return Queue([told], tmp_path / "out", tmp_path / "data", workers, time.time() + seconds)


def has_begun(log):
    """Whether a command has written that it is at work."""
    return log.exists() and log.read_text().endswith("\n1\n")


def ended(tmp_path):
    lines = (tmp_path / "out" / "queue.jsonl").read_text().splitlines()
    return [(line["chain"], line["code"]) for line in map(json.loads, lines)]


def test_a_line_is_a_chain_of_commands():
    text = "# remark\n\na cifar10,svhn: tune --out OUT/t ; compare --set x='a b'\nb -: demo\n"
    first, second = chains(text)
    commands = (("tune", "--out", "OUT/t"), ("compare", "--set", "x=a b"))
    assert first == Chain("a", ("cifar10", "svhn"), commands, text.splitlines()[2])
    assert second == Chain("b", (), (("demo",),), "b -: demo")


@pytest.mark.parametrize("line", ["a tune --out OUT", "a: tune", "a b c: tune", "a -: tune ;  ; compare"])
def test_another_line_is_refused(line):
    with pytest.raises(SystemExit, match="NAME NEEDS"):
        chains(line)


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_our_lists_are_commands_that_there_are(file, tmp_path):
    known, chosen = typer.main.get_command(app), tmp_path / "tuned.toml"
    chosen.touch()
    found = chains(file.read_text())
    assert found and len({each.name for each in found}) == len(found)
    for name, *words in (command for each in found for command in each.commands):
        if name != "python":
            there = [str(chosen) if word.endswith("/tuned.toml") else word for word in words]
            known.commands[name].make_context(name, there)  # checks names and types of all options


def test_chains_run_in_order_until_one_fails(tmp_path):
    text = (
        "a -: python -c \"open('OUT.txt', 'w').write('one')\" ; python -c \"open('OUT.txt', 'a').write(' two')\"\n"
        "b -: python -c 'raise SystemExit(3)' ; python -c \"open('OUT.txt', 'w')\"\n"
        "c -: python -c 'print(7)'\n"
    )
    queue(tmp_path, text).serve()
    assert ended(tmp_path) == [("a", 0), ("b", 3), ("c", 0)]
    assert (tmp_path / "out" / "a.txt").read_text() == "one two"
    assert not (tmp_path / "out" / "b.txt").exists()
    assert (tmp_path / "out" / "c.log").read_text().endswith("7\n")


def test_the_same_again_goes_on_with_what_is_left(tmp_path):
    text = "a -: python -c 'print(1)'\nb -: python -c \"open('OUT/there')\"\n"
    queue(tmp_path, text).serve()
    (tmp_path / "out" / "b").mkdir()
    (tmp_path / "out" / "b" / "there").touch()
    queue(tmp_path, text).serve()
    assert ended(tmp_path) == [("a", 0), ("b", 1), ("b", 0)]


def test_a_chain_that_is_another_now_is_run_again(tmp_path):
    queue(tmp_path, "a -: python -c 'print(1)'\n").serve()
    queue(tmp_path, "a -: python -c 'print(1)'\n").serve()
    queue(tmp_path, "a -: python -c 'print(2)'\n").serve()
    assert ended(tmp_path) == [("a", 0), ("a", 0)]


def test_lists_that_cannot_be_read_are_refused(tmp_path):
    for text, words in (("a tune", "NAME NEEDS"), ("a -: demo\na -: doctor\n", "one name: a")):
        with pytest.raises(SystemExit, match=words):
            queue(tmp_path, text)
    with pytest.raises(SystemExit, match="no list"):
        Queue([tmp_path / "none.txt"], tmp_path / "out", tmp_path, 1, 0.0)


def test_a_list_that_is_being_written_is_as_it_was(tmp_path):
    own = queue(tmp_path, "a -: demo\n")
    (tmp_path / "list.txt").write_text("a -: demo\nb half a li")
    assert [each.name for each in own.left()] == ["a"]
    (tmp_path / "list.txt").write_text("a -: demo\nb -: doctor\n")
    assert [each.name for each in own.left()] == ["a", "b"]


def test_a_chain_that_is_stopped_between_its_commands_is_not_done(tmp_path, monkeypatch):
    own = queue(tmp_path, "a -: python -c 'print(1)' ; python -c 'print(2)'\n")
    wait = subprocess.Popen.wait

    def stopped(process, *args, **kwargs):
        code = wait(process, *args, **kwargs)
        own.stopped = True
        return code

    monkeypatch.setattr(subprocess.Popen, "wait", stopped)
    own.run(own.next())
    assert ended(tmp_path) == [("a", -1)] and own.failed == 1


@pytest.mark.slow
def test_a_chain_waits_for_its_data_and_time_ends(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "here.npz").touch()
    sleep = "python -c 'import time; print(1, flush=True); time.sleep(36000)'"
    text = f"a missing: python -c 'print(1)'\nb here: python -c 'print(1)'\nc -: {sleep}\n"
    own = queue(tmp_path, text, workers=2)
    run = own.run

    def ending(chain):
        run(chain)
        if chain.name == "b":
            while not has_begun(tmp_path / "out" / "c.log"):
                time.sleep(0.01)
            own.until = time.time()

    own.run = ending
    own.serve()
    assert sorted(ended(tmp_path)) == [("b", 0), ("c", -2)]  # interrupted


@pytest.mark.slow
def test_a_queue_that_is_killed_stops_its_commands(tmp_path):
    (tmp_path / "list.txt").write_text("a -: python -c 'import time; print(1, flush=True); time.sleep(36000)'\n")
    words = ["-m", "benchmarks.queue", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]
    process, log = subprocess.Popen([sys.executable, *words], cwd=LISTS[0].parents[2]), tmp_path / "out" / "a.log"
    try:
        end = time.time() + MOST
        while not has_begun(log):
            assert process.poll() is None and time.time() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(MOST) and ended(tmp_path) == [("a", -2)]
    finally:
        process.kill()


def test_processes_are_told_of_each_other_and_of_the_data(tmp_path):
    show = "import os; print(os.environ['FEDABML_PROCESSES'], os.environ['FEDABML_DATA'])"
    queue(tmp_path, f'a -: python -c "{show}"\n', workers=3).serve()
    assert (tmp_path / "out" / "a.log").read_text().endswith(f"3 {tmp_path / 'data'}\n")


def test_processes_share_the_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80, 100))
    gpu = torch.device("cuda")
    assert free_bytes(gpu) == 40
    monkeypatch.setenv("FEDABML_PROCESSES", "4")
    assert free_bytes(gpu) == 10
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("FEDABML_PROCESSES", wrong)
        with pytest.raises(InputError, match="from 1 on"):
            free_bytes(gpu)
