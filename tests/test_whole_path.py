"""The whole path of docs/guide.md, from a CSV to a served prediction: its commands and its Python are executed."""

import csv
import io
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.command import MAX_WAIT, run

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def section():
    """The blocks of the section, by language."""
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    text = guide.partition("## From a CSV to a served prediction\n")[2].partition("\n## ")[0]
    return re.findall(r"```(\w+)\n(.*?)```", text, re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the examples, as in the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(line):
    _, script, *words = shlex.split(line)
    subprocess.run([sys.executable, script, *words], check=True, capture_output=True)


def test_it_takes_ten_commands_or_twenty_lines_at_most():
    commands = [line for kind, block in section() if kind == "sh" for line in block.splitlines()]
    lines = [line for kind, block in section() if kind == "python" for line in block.splitlines() if line]
    assert 5 <= len(commands) <= 10 and 5 <= len(lines) <= 20


@pytest.mark.nightly
def test_the_commands_lead_to_a_served_prediction(folder):
    commands = [line for kind, block in section() if kind == "sh" for line in block.splitlines()]
    generate(commands[0])
    *offline, serve, ask = commands[1:]
    for line in offline:
        run(*shlex.split(line)[1:])
    predicted = list(csv.DictReader(io.StringIO((folder / "predictions.csv").read_text(encoding="utf-8"))))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = shlex.split(serve.replace("8000", str(port)))[1:]
    server = subprocess.Popen([sys.executable, "-m", "fedabml", *words], stdout=subprocess.DEVNULL)
    try:
        url, *options = shlex.split(ask.replace("8000", str(port)))[1:]
        headers = dict(option.split(": ") for option in options if ": " in option)
        body = (folder / options[-1].removeprefix("@")).read_bytes()
        reply = answered(server, url, body, headers)
    finally:
        server.terminate()
        server.wait(60)
    served = list(csv.DictReader(io.StringIO(reply.text)))
    assert len(served) == len(predicted) == 60
    assert [row["label"] for row in served] == [row["label"] for row in predicted]
    assert [float(row["p_yes"]) for row in served] == pytest.approx(
        [float(row["p_yes"]) for row in predicted], rel=1e-4
    )


def answered(server, url, body, headers):
    """The service's answer, as soon as it listens."""
    for _ in range(10 * MAX_WAIT):
        assert server.poll() is None
        try:
            reply = httpx.post(url, content=body, headers=headers, timeout=MAX_WAIT)
        except httpx.ConnectError:
            time.sleep(0.1)
            continue
        assert reply.status_code == 200, reply.text
        return reply
    raise AssertionError("the service never listened")


def test_the_python_leads_to_a_served_prediction(folder, capsys):
    generate(next(block for kind, block in section() if kind == "sh").splitlines()[0])
    (code,) = [block for kind, block in section() if kind == "python"]
    exec(compile(code, "guide.md", "exec"), {})
    assert "deaths predicted" in (printed := capsys.readouterr().out) and "60 rows served" in printed
