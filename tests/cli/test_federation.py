"""`fedabml federation` without Flower: help, refusals, the status of a folder, and the end of its processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from fedabml.cli import app
from fedabml.federation import operate, pids
from fedabml.federation.folders import SiteFolder
from fedabml.federation.settings import SiteSettings
from tests.cli.command import MAX_WAIT, run
from tests.federation.test_status import EVIL, round_event, write_events
from tests.federation.test_status import folder as folder

ROOT = Path(__file__).resolve().parents[2]
GROUP = typer.main.get_command(app).commands["federation"]
COMMANDS = [
    *("init", "up", "join", "status", "resume", "down", "add-site", "remove-site", "renew", "personalize"),
]


def refused(*words):
    """The paragraph of an error."""
    said = run("federation", *words, code=2).stderr
    assert said.startswith("Error: ") and "Traceback" not in said
    return said


def test_the_group_has_its_commands():
    assert list(GROUP.commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_explained_and_every_command_has_an_example(name):
    command = GROUP.commands[name]
    assert f"fedabml federation {name} " in command.help
    assert all(param.help for param in command.params if param.name != "help")
    sentences = [line for line in command.help.split("\n\n") if not line.startswith(("Example", "- "))]
    assert all(each.strip().endswith((".", "`")) for each in sentences)


def test_help_needs_neither_flower_nor_cryptography_nor_torch():
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from fedabml.cli import app\n"
        "for words in ('federation --help', 'federation up --help', 'federation status --help'):\n"
        "    assert CliRunner().invoke(app, words.split()).exit_code == 0\n"
        "print(sorted({'torch', 'flwr', 'cryptography'} & set(sys.modules)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=MAX_WAIT)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("words", [["up"], ["resume"], ["add-site", "x"], ["remove-site", "x"], ["renew"]])
def test_without_the_extra_a_command_names_it(folder, monkeypatch, words):
    monkeypatch.setattr(operate.importlib.util, "find_spec", lambda name: None)
    error = refused(words[0], folder.path, *words[1:])
    assert "pip install 'fedabml[flower]'" in error


@pytest.mark.parametrize("command", ["status", "down", "resume", "up", "personalize"])
def test_a_folder_of_another_kind_is_refused(tmp_path, monkeypatch, command):
    monkeypatch.setattr(operate, "require_extra", lambda: None)
    assert "fedabml federation" in refused(command, tmp_path)


@pytest.mark.parametrize("words", ["a", "a=", "=x", "a=x,a=y", "a=x,b"])
def test_sites_are_names_with_paths(folder, words):
    assert "NAME=PATH" in refused("up", folder.path, "--sites", words)


@pytest.mark.parametrize(("words", "starts"), [([], 1), (["--no-start"], 0)])
def test_a_site_that_another_program_starts_joins_without_a_start(tmp_path, monkeypatch, words, starts):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operate, "require_extra", lambda: None)
    monkeypatch.setattr(operate, "set_up_site", lambda archive, folder, data: SiteFolder(folder))
    started = []
    monkeypatch.setattr(operate, "start", lambda site, foreground: started.append(site))
    shown = run("federation", "join", "north.tar.gz", "--data", "north.csv", *words).stdout
    assert len(started) == starts
    assert ("fedabml federation resume north" in shown) == (starts == 0)


def test_a_join_that_starts_nothing_has_no_foreground():
    assert "--no-start" in refused("join", "a.tar.gz", "--data", "a.csv", "--no-start", "--foreground")


# -- status ---------------------------------------------------------------------------------------------------------
def test_status_in_words_as_json_and_as_a_page(folder, tmp_path):
    rejected = [{"site": "c", "reason": "the update is not finite"}]
    write_events(folder, {"event": "start"}, round_event(1), round_event(2, rejected=rejected))
    shown = run("federation", "status", folder.path, "--page", tmp_path / "page.html").stdout
    assert "2 of 10" in shown and "the update is not finite" in shown and "Stopped" in shown
    assert "hospitals" in (tmp_path / "page.html").read_text()
    data = json.loads(run("federation", "status", folder.path, "--json").stdout)
    assert (data["rounds_done"], data["reasons"]) == (2, {"the update is not finite": 1})


def test_status_shows_no_control_characters(folder):
    write_events(folder, round_event(1, rejected=[{"site": EVIL, "reason": EVIL}]))
    for words in ([], ["--json"]):
        shown = run("federation", "status", folder.path, *words).stdout
        assert not set(shown) & set("\x1b\x07\u202e")


def test_watching_ends_when_the_federation_has_stopped(folder):
    write_events(folder, round_event(1))
    assert "1 of 10" in run("federation", "status", folder.path, "--watch").stdout
    assert "above 0" in refused("status", folder.path, "--every", 0)


def test_a_failure_is_an_exit_code(folder):
    write_events(folder, round_event(1), {"event": "gave_up", "reason": "1 of 3 sites"})
    (folder.run / "pids").mkdir()
    pids.Record("supervisor", "running", "", identity=pids.identity(os.getpid())).save(folder.run / "pids")
    (folder.run / "run.json").write_text('{"state": "gave up"}')
    assert "1 of 3 sites" in run("federation", "status", folder.path, code=1).stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "--data PATH for an example, --schema FILE"),
        (["--data", "x.csv", "--schema", "x.toml"], "--data PATH for an example, --schema FILE"),
        (["--schema", "x.toml", "--target-column", "ill"], "--target-column belongs to --data"),
    ],
)
def test_the_inputs_come_from_data_or_from_a_schema(tmp_path, words, reason):
    said = refused("init", tmp_path / "fed", "--host", "localhost", "--sites", "a", *words)
    assert reason in " ".join(said.split()) and not (tmp_path / "fed").exists()


@pytest.fixture
def site(tmp_path):
    made = SiteFolder(tmp_path / "north")
    made.make()
    SiteSettings(federation="0" * 32, name="north", server="localhost:8443", data="/x.csv").save(made.settings_file)
    return made


def test_status_of_a_site(site):
    shown = run("federation", "status", site.path).stdout
    assert "north" in shown and "localhost:8443" in shown and "none yet" in shown and "updates only" in shown
    data = json.loads(run("federation", "status", site.path, "--json").stdout)
    assert data["state"] == "stopped" and data["prior_round"] is None
    assert "--page" in refused("status", site.path, "--page", "x.html")


# -- down -----------------------------------------------------------------------------------------------------------
def test_down_ends_what_a_crash_left_and_may_be_repeated(folder):
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:
        try:
            (folder.run / "pids").mkdir()
            pids.Record("superlink", "running", "t", pids.identity(child.pid)).save(folder.run / "pids")
            for _ in range(2):
                assert "stopped" in run("federation", "down", folder.path).stdout
            assert child.wait(MAX_WAIT) == -9
        finally:
            child.kill()


def test_personalize_before_there_is_a_prior(site):
    assert "no prior yet" in refused("personalize", site.path)
