"""Attack a real federation as strangers and as an insider: TLS, authentication, nginx, three sites that train.

    python -m drills.strangers [--requests 10000] [--out results/reliability/strangers.jsonl]
    python -m drills.strangers page [--out results/reliability/strangers.jsonl]

Sites a, b and c train without pause while every attack of `drills.attacks` is tried; site d is registered and hostile.
At the end θ must have the bits of the simulator with the replies that counted, no process may have been restarted, and
of floods of equal length the later ones must add little to the SuperLink's memory (see `later_floods`). Then an
undisturbed twin trains: the same federation without attacks. Its θ must have the bits of the attacked one's after the
last attack before which no reply was lost. `page` writes the record as a page beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fedabml.engine.server import ServerState
from fedabml.federation import operate, pids
from fedabml.federation.archive import unpack
from fedabml.federation.folders import ServerFolder, SiteFolder
from fedabml.federation.supervisor import PIDS
from fedabml.files.sheets import markdown_table
from fedabml.runs.provenance import code, hardware

from . import attacks
from .deployment import (
    Deployment,
    counted_sites,
    differences,
    end,
    listed,
    make,
    rounds_done,
    saved_state,
    wait_for_round,
)
from .intruder import Intruder, stored_bytes
from .pages import write_page

OUT = Path("results/reliability/strangers.jsonl")
SITES = ("a", "b", "c")
FLOODS = tuple(f"flood {number}" for number in range(1, 9))
SLACK = 16.0  # MB that later floods may add to the SuperLink's memory, if a quarter of the earlier ones' is less
VERDICTS = {  # where "refused" would claim too much
    "a foreign app": "not run; its run waits while ours is under way",
    "a foreign app's hash": "not on the lists, which were read; no order of it was sent",
    "fuzzed requests: Flower's messages with changed fields": "accepted only with its own node (`drills/fuzzing.py`)",
    "storing without end": "within the bound of a round",
    "memory after eight floods": "bounded, or grows by less than 4 MB per flood",
}


def drill(
    place: Path, requests: int = 10_000, parts: tuple[str, ...] = (), flood: float = 30.0
) -> list[dict[str, Any]]:
    """Run the attacks in a new deployment and return the record; `parts` names the attacks, by default all."""
    deployment = federation(place / "attacked", 1_000_000)
    folder, hostile = deployment.folder, unpack(deployment.folder.archive("d"), place / "hostile")
    lines: list[dict[str, Any]] = []
    states: list[ServerState] = []  # of the server, after every attack
    try:
        operate.up(folder.path, {name: deployment.paths[name] for name in SITES})
        wait_for_round(folder, 2)
        first, started, begun = memory(folder), time.monotonic(), rounds_done(folder)
        for name, attack in _attacks(folder, hostile, place, requests, flood).items():
            if not parts or name in parts:
                before, whole = memory(folder)["superlink"], _incomplete(folder)
                found = attack()
                wait_for_round(folder, rounds_done(folder) + 1)
                more = {"part": name, "superlink_mb": [before, memory(folder)["superlink"]]}
                more["incomplete_rounds"] = _incomplete(folder)[len(whole) :]
                states.append(saved_state(folder).state)
                found = [each | more for each in found]
                lines += found
                for each in found:
                    print(json.dumps(each), flush=True)
        for each in later_floods(lines):
            lines.append(each)
            print(json.dumps(each), flush=True)
        wait_for_round(folder, rounds_done(folder) + 2)
        states.append(saved_state(folder).state)
        last, records = memory(folder), pids.records(folder.run / PIDS)
        restarts = {record.name: record.restarts for record in records if record.restarts}
        kept, seconds = stored_bytes(folder), time.monotonic() - started
    finally:
        left = end(folder)
    rounds = counted_sites(folder)
    wrong = differences(deployment, rounds)
    lost = min((each["round"] for each in _incomplete(folder)), default=len(rounds) + 1)
    twin = compare_with_twin(place / "twin", [state for state in states if state.round < lost])
    summary: dict[str, Any] = {"summary": True, "rounds": len(rounds), "rounds_during": len(rounds) - begun}
    summary |= {"seconds": round(seconds, 1), "incomplete_rounds": len(_incomplete(folder))}
    summary |= {
        "theta_equal": not wrong,
        "differences": wrong,
        **twin,
        "memory_mb": [first, last],
        "restarts": restarts,
    }
    summary |= {"stored_bytes": kept, "left_processes": len(left), "refused_all": all(x["refused"] for x in lines)}
    return [*lines, summary | {"code": code(), "hardware": hardware(torch.device("cpu"))}]


def federation(place: Path, rounds: int) -> Deployment:
    """Make the federation that is attacked, or its twin."""
    place.mkdir(exist_ok=True)
    return make(
        place, (*SITES, "d"), rounds=rounds, round_timeout=15.0, max_message_mb=1, rest_rounds=1, prior_every=0
    )  # a prior at a site would be one that a forged order brought


def compare_with_twin(place: Path, states: list[ServerState]) -> dict[str, Any]:
    """Train the same federation without attacks, and compare its state with the last of the attacked one's states."""
    if not states:
        return {"twin_rounds": 0, "twin_equal": None}
    attacked = states[-1]
    deployment = federation(place, attacked.round)
    folder = deployment.folder
    try:
        operate.up(folder.path, {name: deployment.paths[name] for name in SITES})
        wait_for_round(folder, attacked.round)
        counted = counted_sites(folder)
    finally:
        end(folder)
    twin = saved_state(folder).state
    parts = [(getattr(attacked, name), getattr(twin, name)) for name in ("shared", "average", "velocity")]
    equal = all(ours.keys() == theirs.keys() for ours, theirs in parts) and all(
        torch.equal(value, theirs[name]) for ours, theirs in parts for name, value in ours.items()
    )
    whole = all(set(names) == set(SITES) for names in counted)
    return {"twin_rounds": twin.round, "twin_equal": equal and twin.round == attacked.round, "twin_whole": whole}


def _attacks(folder: ServerFolder, hostile: SiteFolder, place: Path, requests: int, flood: float) -> dict[str, Any]:
    """Return the attacks by name, in order. Those that can change which sites take part come last."""
    key, secret = hostile.key.read_bytes(), attacks.secret_of(hostile)
    insider = Intruder(folder, key)
    sites = [SiteFolder(folder.path / "local" / name) for name in SITES]
    return {
        "key": lambda: attacks.unregistered_key(folder, place),
        "authority": lambda: attacks.wrong_authority(folder, place, hostile.key),
        "tls": lambda: attacks.no_tls(folder),
        "interfaces": lambda: attacks.other_interfaces(folder, insider),
        "app": lambda: attacks.foreign_app(folder, sites, place),
        "fuzz": lambda: attacks.fuzz(folder, key, requests // 2, messages=False),
        "order": lambda: attacks.forged_order(folder, insider, secret, sites[0]),
        "reply": lambda: attacks.forged_reply(folder, insider, secret),
        "messages": lambda: attacks.fuzz(folder, key, requests - requests // 2, messages=True),
        **{name: lambda: attacks.flood(folder, key, seconds=flood) for name in FLOODS},
    }


def later_floods(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on the SuperLink's memory after floods of equal length, or nothing if some are missing.

    Memory that a flood took and that later ones use again is bounded; memory that grows with every flood is not. What
    is resident after one flood varies by tens of MB, so the medians of both halves are compared. The second may exceed
    the first by a quarter of what the first half added, or by `SLACK` if that is more. So steady growth of less than
    4 MB per flood is not noticed.
    """
    found = {each["part"]: each["superlink_mb"] for each in lines if each["part"] in FLOODS}
    if len(found) < len(FLOODS):
        return []
    before, after = found[FLOODS[0]][0], [found[name][1] for name in FLOODS]
    half = len(FLOODS) // 2
    first, second = statistics.median(after[:half]), statistics.median(after[half:])
    most = max(SLACK, (first - before) / 4)
    sizes = ", ".join(f"{each:.1f}" for each in after)
    seen = f"SuperLink: {before:.1f} MB before, {sizes} after the floods; the median of the last four is "
    seen += f"{second - first:+.1f} MB from that of the first four; at most {most:.1f} is bounded"
    verdict = {"attack": "memory after eight floods", "by": "a registered site", "seen": seen}
    return [verdict | {"refused": second - first <= most, "part": "memory", "incomplete_rounds": []}]


def _incomplete(folder: ServerFolder) -> list[dict[str, Any]]:
    """Return the rounds in which a site's reply did not count, with who was missing or rejected, and why."""
    return [
        {key: event.get(key) for key in ("round", "sites", "missing", "rejected", "resting")}
        for event in listed(folder, "round")
        if set(event["valid"]) != set(SITES)
    ]


def memory(folder: ServerFolder) -> dict[str, float]:
    """Return the resident megabytes of the SuperLink, the executor and all of nginx."""
    result = {}
    for name in ("superlink", "executor"):
        record = pids.read_record(folder.run / PIDS / f"{name}.json")
        result[name] = _resident(record.identity.pid) if record and record.identity else 0.0
    master = (folder.run / "nginx" / "nginx.pid").read_text(encoding="ascii").strip()
    children = Path(f"/proc/{master}/task/{master}/children").read_text(encoding="ascii").split()
    return result | {"nginx": round(sum(_resident(int(pid)) for pid in (master, *children)), 1)}


def _resident(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return round(int(text.split("VmRSS:")[1].split()[0]) / 1024, 1)


def page(record: Path) -> Path:
    """Write the page of a record into the same folder."""
    lines = [json.loads(text) for text in record.read_text(encoding="utf-8").splitlines()]
    summary = next(each for each in lines if each.get("summary"))
    rows = [
        [
            each["attack"],
            each["by"],
            _seen(each),
            VERDICTS.get(each["attack"], "refused") if each["refused"] else "**not refused**",
        ]
        for each in lines
        if not each.get("summary")
    ]
    before, after = summary["memory_mb"]
    text = (
        "# Strangers and insiders\n\n"
        f"One federation on loopback: TLS, node authentication, nginx, sites a, b and c training; site d is registered "
        f"and hostile. {summary['rounds_during']} rounds ran during {summary['seconds']:.0f} s of attacks. What an "
        "insider could not know (numbers of nodes, of the run, of orders) was read from the server's database, in the "
        "attacker's favour.\n\n"
        f"{markdown_table(['attack', 'by', 'seen', 'verdict'], rows)}\n\n"
        f"- θ after {summary['rounds']} rounds has the bits of the simulator with the replies that counted: "
        f"**{'yes' if summary['theta_equal'] else 'no'}**. {_missed(lines, summary)}\n"
        f"{_twin(summary)}"
        f"{_stored(lines)}"
        f"- Memory in MB, before and after: SuperLink {before['superlink']} and {after['superlink']}, executor "
        f"{before['executor']} and {after['executor']}, nginx {before['nginx']} and {after['nginx']}.\n"
        f"- Restarts of processes: {summary['restarts'] or 'none'}. Processes left after the end: "
        f"{summary['left_processes']}. Bytes of objects that the SuperLink keeps: {summary['stored_bytes']:,}.\n\n"
        "## What is not bounded\n\n"
        "- A registered site that connects and never answers delays rounds by the time-out, until the operator removes "
        "it.\n"
        "- A registered site can fill its budget of bytes in every round. The SuperLink keeps what nobody fetches "
        "until the run ends. So the database grows in every round by the budget, and by what passes between two looks "
        "of the meter, until the operator removes the site.\n"
        "- TLS handshakes of strangers cost nginx time; a firewall can limit connections per address.\n"
        "- Someone who knows a site's public key can use up that site's rate of requests, not its budget of bytes.\n\n"
        f"Data: `{record.name}`. Code: {summary['code']}. Machine: {summary['hardware']}.\n"
        "Reproduce: `python -m drills.strangers --out FILE`, then `python -m drills.strangers page --out FILE`.\n"
    )
    return write_page(record, text)


def _seen(each: dict[str, Any]) -> str:
    """Return what an attack saw. Rejected replies are counted from the rounds of its record, where these list more.

    Records of earlier code counted equal rejections of a round once.
    """
    rejected = [entry for event in each.get("incomplete_rounds", []) for entry in event["rejected"] or []]
    count = attacks.rejections(rejected, "code is wrong")
    return re.sub(
        r"\d+(?= rejected by the coordinator: the code is wrong)",
        lambda found: str(max(int(found[0]), count)),
        each["seen"],
    )


def _twin(summary: dict[str, Any]) -> str:
    """Return the item about the undisturbed twin, if there was one."""
    if summary.get("twin_equal") is None:
        return ""
    return (
        "- An undisturbed twin, the same federation without attacks, has the same bits of θ after "
        f"{summary['twin_rounds']} rounds: **{'yes' if summary['twin_equal'] else 'no'}**. It is compared at the last "
        "attack before which no reply was lost.\n"
    )


def _stored(lines: list[dict[str, Any]]) -> str:
    """Return the item about floods: how much may be stored in a round, and how much the largest flood stored."""
    floods = [each for each in lines if each.get("part") in FLOODS]
    if not floods:
        return ""
    limit, most = floods[0]["limit"], max(int(each["seen"].split()[0].replace(",", "")) for each in floods)
    text = (
        "- *storing without end*: a round's budget, and what may pass between two readings of the meter, are "
        f"{limit:,} bytes. The largest flood stored {most:,} bytes in all its rounds"
    )
    return f"{text}{', so none could reach that bound' if most < limit else ''}. Status 503: the budget is used up.\n"


def _missed(lines: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    """Return sentences about the rounds in which a site's reply did not count, by attack where that was noted."""
    if not summary["incomplete_rounds"]:
        return "All sites' replies counted in all rounds, so it is also θ of the undisturbed run."
    parts = {each["part"]: (each["attack"], len(each["incomplete_rounds"])) for each in lines if each.get("part")}
    lost: Counter[str] = Counter()
    for attack, count in parts.values():
        lost[attack] += count
    named = "; ".join(f"{count} during “{attack}”" for attack, count in lost.items() if count)
    return (
        f"In {summary['incomplete_rounds']} rounds a site's reply did not count{f' ({named})' if named else ''}: θ is "
        "that of a run without these replies, not of the undisturbed one. Forged replies that the SuperLink stores "
        "can keep the genuine one from being counted. During a flood of forged orders, the "
        "SuperLink reports genuine orders to the same site as unavailable. In all other rounds every site's reply "
        "counted, as in the undisturbed run. The record has the reason of each."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the drill or write its page. The exit code is 1 if a promise was broken.

    That is: something was not refused, θ differs, a process was restarted, or one was left behind.
    """
    parser = argparse.ArgumentParser(prog="python -m drills.strangers", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--parts", default="", help="some of the attacks, separated by commas")
    parser.add_argument("--flood", type=float, default=30.0, help="seconds of each flood")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.what == "page":
        print(page(options.out))
        return 0
    with tempfile.TemporaryDirectory() as place:
        lines = drill(Path(place), options.requests, tuple(filter(None, options.parts.split(","))), options.flood)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    print(json.dumps(lines[-1]))
    summary = lines[-1]
    good = summary["theta_equal"] and summary["refused_all"] and summary["twin_equal"] is not False
    return 0 if good and not summary["restarts"] and not summary["left_processes"] else 1


if __name__ == "__main__":
    sys.exit(main())
