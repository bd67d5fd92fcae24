"""The status of a federation from files that a coordinator would have written, whole and damaged."""

import json
import os
import re
import subprocess
import time
from dataclasses import replace

import pytest

from fedabml.errors import InputError
from fedabml.federation import keys, last_order, pids
from fedabml.federation.events import read_events
from fedabml.federation.folders import Member, ServerFolder, SiteFolder
from fedabml.federation.logs import last_line, log_of, one_line, tail
from fedabml.federation.messages import Order
from fedabml.federation.run_keeper import RUN_FILE
from fedabml.federation.settings import Settings, SiteSettings
from fedabml.federation.status import read, read_site
from fedabml.federation.status_page import (
    SITE_HEAD,
    facts,
    page,
    process_rows,
    rejected_rows,
    site_facts,
    site_rows,
    split_rows,
)
from fedabml.files.sealed import write_json

EVIL = "\x1b[2J\x07<script>alert(1)</script>\u202e"


def key(i):
    return f"-----BEGIN PUBLIC KEY-----\n{chr(65 + i) * 64}\n-----END PUBLIC KEY-----\n"


@pytest.fixture
def folder(tmp_path):
    made = ServerFolder(tmp_path / "fed")
    made.make()
    Settings(federation="0" * 32, name="hospitals", host="localhost", rounds=10).save(made.settings_file)
    made.save_sites([Member(name, i, key(i), removed=name == "d") for i, name in enumerate("abcd")])
    return made


def write_events(folder, *lines, end=""):
    folder.events_file.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def round_event(number, **more):
    return {
        "time": 1.0 + number,
        "event": "round",
        "round": number,
        "attempt": 1,
        "valid": ["a", "b"],
        "missing": [],
        "rejected": [],
        "connected": ["a", "b"],
        "resting": [],
        "loss": 1.0 / number,
        "seconds": {"draw": 0.5, "wait": 2.0 * number, "merge": 0.25, "save": 0.25},
        "site_seconds": {"a": {"work": 1.0}, "b": {"work": 1.5, "setup": 0.5}},
        "bytes_down": 100,
        "bytes_up": 10,
        **more,
    }


def test_a_federation_that_never_ran(folder):
    status = read(folder)
    assert (status.state, status.rounds_done, status.losses, status.seconds_left) == ("stopped", 0, [], None)
    assert [row[:2] for row in site_rows(status.sites)] == [*(("a", "–"), ("b", "–"), ("c", "–"), ("d", "removed"))]
    assert "hospitals" in page(status) and json.dumps(status.as_json(), allow_nan=False)


def test_rounds_sites_losses_traffic_and_time_left(folder):
    rejected = [{"site": "c", "reason": "not finite"}]
    write_events(
        folder,
        {"time": 0.0, "event": "start"},
        {"time": 0.5, "event": "card", "refused": {"c": "column age is missing"}},
        round_event(1),
        {**round_event(2), "event": "repeat", "valid": ["a"], "missing": ["b"], "rejected": rejected},
        round_event(2, attempt=2, missing=["c"], resting=["c"]),
        round_event(3, rejected=rejected, valid=["a"], connected=["a", "c"]),
    )
    status = read(folder)
    assert status.rounds_done == 3 and status.attempts_repeated == 1 and status.runs == 1
    assert status.losses == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert (status.bytes_down, status.bytes_up) == (400, 40)
    assert status.seconds_per_round == 5.0 and status.seconds_left == 35.0  # the median of 3, 5 and 7 s, 7 times
    a, b, c, _ = status.sites
    assert (a.counted, a.last_round, b.counted, b.last_round) == (3, 3, 2, 2)
    assert (b.missed, c.missed, c.rejected) == (1, 1, 2)
    assert status.reasons == {"not finite": 2} and c.note == "column age is missing"
    assert rejected_rows(status)[0] == ("3", "c", "not finite")
    split = dict(split_rows(status))
    assert split["wait for replies"] == "4.000 s" and split["slowest site: work"] == "1.500 s"


def test_replies_of_rounds_that_are_trained_again_stay_counted_and_the_column_says_so(folder):
    lines = [round_event(1), round_event(2), round_event(3), {"event": "back", "round": 1}, round_event(2)]
    write_events(folder, *lines)
    status = read(folder)
    assert status.rounds_done == 2 and site_rows(status.sites)[0][SITE_HEAD.index("replies counted")] == "4"


def test_a_round_whose_event_a_kill_prevented_is_done(folder):
    write_events(folder, round_event(9), {"event": "start"}, {"event": "card", "round": 10})
    assert read(folder).rounds_done == 10 and read(folder).seconds_left == 0


def test_a_site_rests_until_an_event_says_otherwise(folder):
    write_events(folder, round_event(1, resting=["b"]))
    assert "rests" in site_rows(read(folder).sites)[1][-1]
    write_events(folder, round_event(1, resting=["b"]), round_event(2))
    assert site_rows(read(folder).sites)[1][-1] == ""


def test_a_resting_site_shows_why_its_last_reply_did_not_count(folder):
    def note(**more):
        write_events(folder, round_event(1, sites=["a", "b", "c"], resting=["c"], valid=["a", "b"], **more))
        return site_rows(read(folder).sites)[2][-1]

    late = {"site": "c", "reason": "late: it answers round 1, attempt 1"}
    assert note(missing=["c"]) == note(missing=["c"], rejected=[late]) == "rests: it did not answer in time"
    code = {"site": "c", "reason": "the order's code is wrong"}
    others = [
        late,
        code | {"reason": "twice: this order was answered before"},
        code | {"reason": "its nonce was never sent"},
    ]
    assert note(rejected=[code, *others]) == "rests: the order's code is wrong"
    assert "rests: the order" in page(read(folder))
    silent = round_event(2, sites=["c"], resting=["c"], missing=["c"], valid=[])
    write_events(folder, round_event(1, sites=["c"], resting=["c"], rejected=[code], valid=[]), silent)
    assert site_rows(read(folder).sites)[2][-1] == "rests: it did not answer in time"


def test_scores_are_on_the_page(folder):
    write_events(folder, round_event(1, scores={"accuracy": 0.875, "nll": 0.25}), round_event(2))
    status = read(folder)
    assert dict(facts(status))["accuracy"] == "0.875" and dict(facts(status))["rejected"] == "none"
    assert "0.875" in page(status) and "of the sites that send scores" in page(status)


def test_a_site_beside_its_server_is_shown_with_the_servers_processes(supervised):
    site = SiteFolder(supervised.path / "local/a")
    site.make()
    SiteSettings(federation="0" * 32, name="a", server="localhost:8443").save(site.settings_file)
    assert site.operator == supervised and read_site(site).state == "stopped"  # `up` did not name it
    pids.Record("a-worker", "running", "t", pids.identity(os.getpid())).save(supervised.run / "pids")
    found = read_site(site)
    assert found.state == "running" and [each.name for each in found.processes] == ["a-worker"]
    alone = SiteFolder(supervised.path.parent / "a")
    alone.make()
    site.settings.save(alone.settings_file)
    assert alone.operator is None and read_site(alone).state == "stopped"


def test_a_site_shows_the_digest_of_its_prior(folder):
    site = SiteFolder(folder.path.parent / "a")
    site.make()
    SiteSettings(federation="0" * 32, name="a", server="localhost:8443").save(site.settings_file)
    assert dict(site_facts(read_site(site)))["prior"] == "none yet"
    site.prior_file.touch()
    write_json(site.prior_facts_file, {"round": 7, "digest": "ab12"})
    assert dict(site_facts(read_site(site)))["prior"] == "of round 7, digest ab12"
    write_json(site.prior_facts_file, {"round": 7})  # as an earlier version wrote it
    assert dict(site_facts(read_site(site)))["prior"] == "of round 7"


def test_a_site_shows_its_last_order_and_its_problem(folder, supervised):
    site = SiteFolder(supervised.path / "local/a")
    site.make()
    SiteSettings(federation="0" * 32, name="a", server="localhost:8443").save(site.settings_file)
    assert dict(site_facts(read_site(site)))["last order"] == "none yet"
    order = Order("train", "0" * 32, "", "a", 0, 1, 1, "0" * 32)
    last_order.note_reply(site, order, order.refuse(f"The data {EVIL} cannot be read."))
    found = read_site(site)
    shown = dict(site_facts(found))
    assert re.fullmatch(r"train, \S.* ago", shown["last order"])
    assert shown["problem"].startswith("The data ") and shown["problem"].isprintable()
    assert found.as_json()["problem"] == shown["problem"] and found.as_json()["last_order"] == "train"
    last_order.note_reply(site, order, order.reply())
    assert "problem" not in dict(site_facts(read_site(site)))
    last_order.path(site).write_text('{"kind": 3, "time": "x", "problem')
    assert dict(site_facts(read_site(site)))["last order"] == "none yet"


def test_a_site_says_that_its_server_cannot_be_reached(supervised):
    site = SiteFolder(supervised.path / "local/a")
    site.make()
    SiteSettings(federation="0" * 32, name="a", server="localhost:8443").save(site.settings_file)
    record = pids.Record("a-supernode", "running", "t", pids.identity(os.getpid()))
    record.save(supervised.run / "pids")
    log = site.run / "supernode.log"
    log.write_text("WARNING :  Connection attempt failed, retrying in 5.00 seconds\n")
    assert "cannot be reached, or it refuses this site" in dict(site_facts(read_site(site)))["problem"]
    log.write_text(log.read_text() + "INFO :  Connection successful after 5.02 seconds and 2 tries.\n")
    assert read_site(site).problem == ""
    log.write_text("permission denied\n")
    replace(record, failures=2, since=time.time()).save(supervised.run / "pids")
    assert read_site(site).problem == "The process a-supernode ended 2 times in a row: permission denied"
    replace(record, failures=2, since=time.time() - 3600).save(supervised.run / "pids")
    assert read_site(site).problem == ""  # it ended long ago and has run since
    pids.Record("supervisor", "running", "", identity=None).save(supervised.run / "pids")
    assert read_site(site).problem == ""  # a site that was stopped has no connection


@pytest.mark.flower
@pytest.mark.parametrize(("days", "warns"), [(59, True), (62, False)])
def test_the_status_says_in_time_that_the_certificate_expires(folder, monkeypatch, days, warns):
    pytest.importorskip("cryptography")
    assert read(folder).certificate == ""
    monkeypatch.setattr(keys, "SERVER_DAYS", days)
    made = keys.make_server_certificate(keys.make_authority("x"), "localhost")
    folder.server_certificate.write_bytes(made.certificate)
    status = read(folder)
    shown = dict(facts(status))
    assert shown["certificate"] == f"valid until {keys.expires(made.certificate, 'it'):%Y-%m-%d}"
    assert ("renew" in shown.get("problem", "")) == warns and ("renew" in page(status)) == warns
    write_events(folder, round_event(1), {"event": "gave_up", "reason": "round 2: one reply"})
    assert read(folder).problem.startswith("round 2: one reply")


def test_texts_of_sites_cannot_steer_a_terminal_or_a_page(folder):
    rejected = [{"site": EVIL, "reason": EVIL * 1000}]
    write_events(folder, round_event(1, rejected=rejected, scores={EVIL: 1.0}), {"event": "gave_up", "reason": EVIL})
    status = read(folder)
    shown = json.dumps([facts(status), rejected_rows(status), split_rows(status)], ensure_ascii=False)
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown and len(shown) < 5000
    html = page(status)
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html and "\x1b" not in html


@pytest.mark.parametrize(
    "line",
    [
        {"event": "round"},
        {
            "event": "round",
            "round": "x",
            "valid": 7,
            "missing": {"a": 1},
            "rejected": ["a"],
            "seconds": [1],
            "loss": "x",
        },
        {
            "event": "round",
            "round": True,
            "valid": [[]],
            "site_seconds": {"a": 3},
            "bytes_up": -1.5,
            "scores": {"x": {}},
        },
        {"event": "round", "round": 1, "loss": float("nan"), "seconds": {"wait": float("inf")}},
        {"event": 3},
        ["event"],
        "event",
    ],
)
def test_strange_events_do_not_break_the_status(folder, line):
    write_events(folder, line, round_event(2))
    status = read(folder)
    assert status.rounds_done == 2 and page(status)
    json.dumps(status.as_json(), allow_nan=False)


def test_a_damaged_line_is_counted_and_an_unfinished_one_waits(folder):
    write_events(folder, round_event(1), end='{"event": "round", "rou')
    assert read(folder).damaged_lines == 0 and len(list(read_events(folder))) == 1
    write_events(folder, round_event(1), end='{"event": \n')
    status = read(folder)
    assert status.damaged_lines == 1 and "1 lines" in dict(facts(status))["damaged"]


def test_what_is_no_federation_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a federation's folder"):
        read(ServerFolder(tmp_path))


# -- processes ------------------------------------------------------------------------------------------------------
@pytest.fixture
def supervised(folder):
    """A folder with a supervisor (this process), a running process and a waiting one."""
    run = folder.run / "pids"
    run.mkdir()
    pids.Record("supervisor", "running", "", identity=pids.identity(os.getpid())).save(run)
    with subprocess.Popen(["sleep", "1000"]) as child:
        pids.Record("superlink", "running", "t", pids.identity(child.pid)).save(run)
        gone = pids.Identity(child.pid, 1, "another boot")
        pids.Record("executor", "running", "t", gone, restarts=2, last_exit="signal SIGKILL").save(run)
        yield folder
        child.kill()


def test_processes_are_those_that_live(supervised):
    status = read(supervised)
    assert [(p.name, p.state) for p in status.processes] == [("executor", "stopped"), ("superlink", "running")]
    assert process_rows(status.processes)[0] == ("executor", "stopped", "2", "signal SIGKILL")
    assert status.state == "starting"


def test_connected_are_those_of_the_last_event(supervised):
    write_events(supervised, round_event(1, connected=["a", "b"]), round_event(2, connected=["a", "c"]))
    assert [site.connected for site in read(supervised).sites] == [True, False, True, False]


def test_sites_that_are_waited_for_are_named(supervised):
    write_events(supervised, {"event": "start"}, {"event": "waiting", "sites": ["b", "c"]})
    assert dict(facts(read(supervised)))["state"] == "Starting: waiting for b, c."


def test_a_site_that_joins_after_the_end_is_connected_and_has_the_prior(supervised):
    prior = {"event": "prior", "round": 10, "sites": ["c"], "missing": ["b"]}
    write_events(supervised, round_event(10, connected=["a", "b"]), prior)
    rows = {row[0]: row for row in site_rows(read(supervised).sites)}
    assert rows["c"][1] == "yes" and rows["c"][-1] == "has the prior of round 10" and rows["b"][-1] == ""
    assert rows["b"][5] == "0"


def test_a_process_that_fails_again_and_again_is_shown_with_its_last_line(supervised):
    (supervised.run / "runs.log").write_text("Traceback\n\x1b[31mValueError: no pyproject.toml\n\n")
    pids.Record("runs", "waiting", "t", failures=3, last_exit="exit code 1").save(supervised.run / "pids")
    problem = read(supervised).problem
    assert "runs ended 3 times" in problem and "ValueError: no pyproject.toml" in problem and "\x1b" not in problem


def test_logs_have_a_place_and_an_end(tmp_path):
    assert log_of(tmp_path, "superlink") == tmp_path / "run/superlink.log"
    assert log_of(tmp_path, "north-1-worker") == tmp_path / "local/north-1/run/worker.log"
    assert tail(tmp_path / "none") == last_line(tmp_path / "none") == "(no log)"
    (tmp_path / "log").write_text("a" * 9999 + "\nb\nc\n")
    assert tail(tmp_path / "log", 10).endswith("a b c") and last_line(tmp_path / "log") == "c"


def test_the_state_follows_rounds_and_failures(supervised):
    write_events(supervised, round_event(1))
    assert read(supervised).state == "running"
    write_events(supervised, round_event(10))
    assert read(supervised).state == "finished"
    write_events(supervised, round_event(1), {"event": "gave_up", "reason": "only one site answered"})
    write_json(supervised.run / RUN_FILE, {"state": "gave up", "message": "x"})
    status = read(supervised)
    assert (status.state, status.problem) == ("gave up", "only one site answered")
    write_events(supervised)
    write_json(supervised.run / RUN_FILE, {"state": "failed", "message": "5 runs in a row"})
    assert read(supervised).problem == "5 runs in a row"
    (supervised.run / RUN_FILE).write_text("{")
    assert read(supervised).state == "starting"


# -- words ----------------------------------------------------------------------------------------------------------
def test_one_line_is_short_and_printable():
    assert one_line("a\tb\nc\x1b[0m") == "a b c [0m" and len(one_line("x" * 10**6)) == 300 and one_line(7) == "7"
