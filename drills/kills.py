"""Kill processes with SIGKILL at random moments while a federation trains on this machine.

    python -m drills.kills site --drills 20 --seed 1       # a site's SuperNode or worker
    python -m drills.kills server --drills 20 --seed 2     # the SuperLink or the executor of the ServerApp
    python -m drills.kills site --drills 5 --algorithm ditto
    python -m drills.kills page                            # results/reliability/kills.md

Several drills share one federation. A drill waits for a random moment within a round's time, kills, and waits until
all sites count again. Every drill is one line of results/reliability/kills.jsonl. At the end of a federation its
state must have the bits of the simulator, with those sites in each round whose replies counted; where the server was
killed, these must be all sites in every round, as in a run without a kill.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fedabml.federation import operate, pids
from fedabml.federation.folders import ServerFolder
from fedabml.federation.supervisor import PIDS
from fedabml.runs.provenance import code, hardware

from . import deployment as drill
from .deployment import Deployment

LINES = Path(__file__).resolve().parents[1] / "results/reliability/kills.jsonl"
SITES = ("a", "b", "c")
TIMEOUT, SLACK = 20.0, 5.0  # seconds: the time-out of a round, and by how much a round may exceed it
PART = 5  # drills that share a federation
MAX_WAIT = 900.0  # seconds to wait for anything


def main() -> None:
    """Run drills, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("site", "server", "page"))
    parser.add_argument("--drills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", default="scaffold", help="of every algorithm, what its sites keep is compared")
    parser.add_argument("--out", type=Path, default=LINES, help="the file of lines; the page lies beside it")
    options = parser.parse_args()
    if options.what != "page":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the federation is ended, too
        chance = random.Random(options.seed)
        for first in range(0, options.drills, PART):
            count = min(PART, options.drills - first)
            with tempfile.TemporaryDirectory(prefix="drill") as place:
                lines = _federation(Path(place), options.what, count, chance, options.algorithm)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                for line in lines:
                    file.write(json.dumps({"seed": options.seed, **line}) + "\n")
    text = page(options.out)
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def _federation(place: Path, what: str, count: int, chance: random.Random, algorithm: str) -> list[dict[str, Any]]:
    """Run drills in one federation; return a line for each."""
    timeout = TIMEOUT if what == "site" else 300.0
    settings = {"algorithm": algorithm, "rounds": 1_000_000, "round_timeout": timeout, "attempts": 20}
    settings |= {"min_replies": 2 if what == "site" else len(SITES)}
    deployment = drill.make(place, SITES, **settings)
    folder = deployment.folder
    lines: list[dict[str, Any]] = []
    try:
        operate.up(folder.path, deployment.paths)
        drill.wait_for_round(folder, 2, MAX_WAIT)
        usual = drill.listed(folder, "round")[-1]["seconds"]
        length = sum(usual.values())
        for number in range(count):
            line = _drill(folder, what, chance, max(length, 1.0))
            lines.append(line)
            print(number, json.dumps(line), flush=True)
        time.sleep(chance.uniform(0, 3))
    finally:
        left = drill.end(folder)
    verdict = {"algorithm": algorithm, **_verdict(deployment, what, left)}
    verdict |= {"code": code(), "hardware": hardware(torch.device("cpu"))}
    print(json.dumps(verdict), flush=True)
    return [{**line, **verdict} for line in lines]


def _drill(folder: ServerFolder, what: str, chance: random.Random, length: float) -> dict[str, Any]:
    """Kill one process at a random moment; return what happened."""
    site = chance.choice(SITES)
    kinds = [f"{site}-supernode", f"{site}-worker"] if what == "site" else ["superlink", "executor"]
    name = chance.choice(kinds)
    before = drill.rounds_done(folder)
    drill.wait_for_round(folder, before + 1, MAX_WAIT)
    time.sleep(chance.uniform(0, length))
    old = drill.kill(folder, name)
    killed, wall = time.monotonic(), time.time()
    done = drill.rounds_done(folder)
    drill.wait_for_round(folder, done + 1, MAX_WAIT)
    first = time.monotonic() - killed
    drill.until(lambda: drill.identity(folder, name) not in (None, old), MAX_WAIT, f"the restart of {name}")
    record = pids.read_record(folder.run / PIDS / f"{name}.json")
    restarted = (record.since if record else time.time()) - wall

    def whole() -> dict[str, Any] | None:
        """Return the first round that began after the restart and counted every site."""
        for event in drill.listed(folder, "round"):
            begun = event["time"] - sum(event["seconds"].values())
            if begun > wall + restarted and set(event["valid"]) == set(SITES):
                return event
        return None

    drill.until(whole, MAX_WAIT, "a round of all sites")
    attempts = [e for e in drill.listed(folder, "round", "repeat") if e["time"] > wall]
    longest = max(event["seconds"]["draw"] + event["seconds"]["wait"] for event in attempts)
    timeout = folder.settings.round_timeout
    return {
        "what": what,
        "killed": name.replace(site, "site") if what == "site" else name,
        "next_round_s": round(first, 2),
        "restarted_s": round(restarted, 2),
        "whole_s": round(time.monotonic() - killed, 2),
        "longest_round_s": round(longest, 2),
        "timeout_s": timeout,
        "in_time": longest <= timeout + SLACK,
        "repeats": sum(event["event"] == "repeat" for event in attempts),
        "rounds_without": sum(site not in e["valid"] for e in attempts if e["event"] == "round")
        if what == "site"
        else 0,
    }


def _verdict(deployment: Deployment, what: str, left: list[int]) -> dict[str, Any]:
    """Compare the final state with the simulator's, and count the processes that were left."""
    counted = drill.counted_sites(deployment.folder)
    saved = drill.saved_state(deployment.folder)
    counted = counted[: saved.state.round]
    differences = drill.differences(deployment, counted)
    whole = all(set(names) == set(SITES) for names in counted)
    runs = len(drill.listed(deployment.folder, "start"))
    equal = not differences and saved.state.round == len(counted) and (whole or what == "site")
    return {"equal": equal, "rounds": saved.state.round, "coordinators": runs, "left": len(left)}


def page(record: Path) -> str:
    """Return the page of all recorded drills."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["killed"], line.get("algorithm", "scaffold")), []).append(line)
    rows = []
    for (killed, algorithm), group in sorted(groups.items()):
        back = sorted(line["whole_s"] for line in group)
        longest = max(line.get("longest_round_s", line.get("longest_wait_s")) for line in group)
        rows.append(
            f"| {killed} | {algorithm} | {len(group)} | {sum(line['in_time'] for line in group)} | "
            f"{longest:.1f} of {group[0]['timeout_s']:.0f} | {back[len(back) // 2]:.0f} ({back[-1]:.0f}) | "
            f"{sum(line['equal'] for line in group)} | {sum(line['left'] for line in group)} |"
        )
    made = Counter((line.get("code", ""), line.get("hardware", "")) for line in lines)
    named = [f"code {digest} on {machine}: {count}" for (digest, machine), count in made.items() if digest]
    named += [f"no record of code and machine: {made['', '']}"] if made["", ""] else []
    return "\n".join([*_HEAD, *rows, "", *_NOTES, *(f"- Drills with {text}." for text in named)]) + "\n"


_HEAD = [
    "# Kills at random moments",
    "",
    "Real processes on one machine of two cores: TLS, node authentication, nginx, three sites. A process is killed",
    "with SIGKILL at a random moment of a round. `python -m drills.kills` repeats the drills.",
    "kills.jsonl has one line per drill.",
    "",
    "| killed | algorithm | drills | rounds in time | longest wait of a round, s | whole again after s, median (most) "
    "| bits equal | processes left |",
    "|---|---|---|---|---|---|---|---|",
]
_NOTES = [
    "- *rounds in time*: every attempt of a round after the kill ended within its time-out + 5 s. It begins with the",
    "  choice of sites, which waits for absent ones. Lines without `longest_round_s` count the wait for replies alone.",
    "- *whole again*: the first round that began after the restart and counted all three sites has ended. A SuperNode",
    "  waits 65 s before its restart, because the SuperLink refuses it for 60 s.",
    "- A worker that is killed while it fetches an order loses it. Its site misses the round, and after the time-out",
    "  rests for at least 60 s, although the worker is back after a second: hence a worker's *whole again* above 60 s.",
    "- *bits equal*: the server's state at the end of the federation equals the simulator's, with those sites in each",
    "  round whose replies counted. Where the server was killed, all sites counted in every round.",
]


if __name__ == "__main__":
    sys.exit(main())
