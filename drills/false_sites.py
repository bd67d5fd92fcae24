"""Train between real processes with false sites, and compare the state with that of the drill within one process.

    python -m drills.false_sites [--rules mean,krum] [--out results/reliability/robustness.jsonl]

Ten sites with TLS, node authentication and nginx, of which the last ones multiply their change (`drills.false_site`).
Rounds, data and rules are those of `drills.robustness malicious`. Afterwards the same federation is led within this
process, with the replies that counted in each round. Each one is a line of the file, from which `python -m
drills.robustness page` writes the page. A line that the file already has from this code is not computed again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

import torch

from fedabml.federation import operate, status
from fedabml.federation.folders import ServerFolder
from fedabml.federation.init import init
from fedabml.federation.run_keeper import ENDS
from fedabml.runs.provenance import code, hardware

from .deployment import counted_sites, end, free_ports, listed, saved_state, start_module, until
from .robustness import DEFAULTS, OUT, accuracy, federation, led_with_liars, liars_of, settings_of, write_data
from .robustness_page import ATTACKS, ROUNDS, RULES, SITES, Line, key, read

ATTACK, FALSE = "flips signs, times 10", 3
TIMEOUT, MAX_WAIT = 120.0, 3600.0  # seconds of a round, and to wait for the end of a federation


def drill(place: Path, cell: Line) -> Line:
    """Lead a federation between processes and, with the same replies, within this one; compare their bits."""
    fed = federation(SITES, cell["seed"])
    whole, paths = write_data(place, fed)
    port, superlink_port = free_ports(2)
    chosen = {"round_timeout": TIMEOUT, **DEFAULTS, **settings_of(cell), "rest_rounds": 0}
    chosen |= {"port": port, "superlink_port": superlink_port}
    folder = init(place / "federation", "127.0.0.1", list(paths), whole, **chosen)
    liars = liars_of(cell)
    kind = f"false{ATTACKS[cell['attack']]:g}"
    sites = [operate.set_up_site(folder.archive(name), place / "liars" / name, paths[name]) for name in sorted(liars)]
    for site in sites:
        site.make()
    try:
        operate.up(folder.path, {name: path for name, path in paths.items() if name not in liars})
        (place / "run").mkdir()
        words = ["supervise", kind, str(place / "run"), *(str(site.path) for site in sites)]
        supervisor = start_module("drills.other_site", words, place / "liars.log")
        try:
            state = until(lambda: _ended(folder), MAX_WAIT, "the end of the federation")
        finally:
            supervisor.terminate()
            supervisor.wait()
    finally:
        left = end(folder)
    (place / "within").mkdir()
    torch.set_num_threads(1)  # as the sites' processes: the bits depend on it
    counted = counted_sites(folder)
    coordinator, _ = led_with_liars(place / "within", fed, cell, dict(enumerate(counted, 1)))
    ours, theirs = saved_state(folder), coordinator.saved
    equal = all(torch.equal(ours.state.shared[name], value) for name, value in theirs.state.shared.items())
    facts = {"ended": state, "rounds done": len(counted), "rounds within one process": coordinator.round}
    facts |= {"accuracy": round(accuracy(coordinator, fed), 4)}
    facts |= {"least replies": min(map(len, counted), default=0), "processes left": len(left)}
    return facts | {"equal": equal and len(counted) == coordinator.round}


def _ended(folder: ServerFolder) -> str:
    """Return "finished" after the last round, else the state of a run that has ended, or an empty text."""
    if listed(folder, "finished"):  # the run goes on, for newcomers
        return "finished"
    state = str(status.run_state(folder).get("state", ""))
    return state if state in ENDS else ""


def main(arguments: list[str] | None = None) -> int:
    """Run the drill for some rules; the exit code is 1 if a state differs."""
    parser = argparse.ArgumentParser(prog="python -m drills.false_sites", description=__doc__)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the federation is ended, too
    where = {"machine": hardware(torch.device("cpu")), "code": code()}
    done = {key(line) for line in read(options.out) if line.get("code") == where["code"]}
    equal = True
    for rule in options.rules.split(","):
        cell: Line = {"drill": "deployed", "algorithm": "fedabml", "rule": rule, "attack": ATTACK}
        cell |= {"false": FALSE, "seed": 0, "rounds": options.rounds}
        if key(cell) in done:
            continue
        with tempfile.TemporaryDirectory(prefix="drill") as place:
            line = cell | drill(Path(place), cell) | where
        equal &= line["equal"]
        print(json.dumps(line), flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
