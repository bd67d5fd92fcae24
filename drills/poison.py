"""Send poisoned and broken replies in a real federation: TLS, node authentication, nginx, three sites that train.

    python -m drills.poison [--algorithms fedabml,scaffold,ditto,fedpop] [--out results/reliability/poison.jsonl]
    python -m drills.poison page [--out results/reliability/poison.jsonl]

Site c is registered and hostile (`drills.poisoned_worker`): in every round it sends another poison. Each must be
rejected with its reason, no process may be restarted, and at the end θ must be finite and have the bits of the
simulator in which c took part only in rounds of honest replies. `page` writes the record as a page beside it.

A federation tries at most `PART` poisons, and its lines are written when it has ended. So an interrupted drill goes on
where it was when the same command is repeated; what other code has recorded is tried again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fedabml.federation import operate, pids
from fedabml.federation.folders import ServerFolder, SiteFolder
from fedabml.federation.proxy import run_folder
from fedabml.federation.supervisor import PIDS
from fedabml.files.paths import write
from fedabml.files.sheets import markdown_table
from fedabml.runs.provenance import code, hardware

from .deployment import counted_sites, differences, end, listed, make, rounds_done, saved_state, start_module, until
from .pages import write_page
from .poisons import HONEST, PLAN, POISONS, SCAFFOLD_POISONS, SENT, read_sent

OUT = Path("results/reliability/poison.jsonl")
SITES = ("a", "b", "c")
BAD = "c"
TIMEOUT = 20.0  # seconds of a round
MAX_WAIT = 900.0  # seconds to wait for anything
PART = 12  # poisons that share a federation
# Words of the reasons: of poisons that the encoded message cannot carry, so that it is refused when it is decoded...
DECODED = {
    "extra with control characters": "printable name",
    "no tensor": "type that is not accepted",
    "samples beyond 64 bits": "a whole number beyond",
    "its own refusal": "'error' is not a text of at most",
}
# ... and of poisons that only exist between processes. An empty text: a missing reply is reason enough.
WIRE = {
    "an unknown type": "type that is not accepted",
    "bytes missing": "bytes are missing",
    "no JSON": "not valid JSON",
    "NaN in the JSON": "not valid JSON",
    "no content": "records that are not part",
    "another's code": "code is wrong",
    "another site's name": "code is wrong",
    "an invented nonce": "never sent",
    "an earlier reply again": "late: it answers round",
    "late": "",
    "twice": "",
    "100 MB that repeat one part": "bytes; at most",
    "100 MB in small parts": "",
    "100 MB in one part": "",
}
WORDS = {name: words for name, (_, words) in (POISONS | SCAFFOLD_POISONS).items()} | DECODED | WIRE
# The poisons by algorithm. Sites of the other algorithms keep a state, which must not follow a rejected reply.
_KEPT = ("NaN everywhere", "empty", "negative samples", "loss NaN", "another's code", "twice", "late")
FEDERATIONS: dict[str, tuple[str, ...]] = {
    "fedabml": (*POISONS, *WIRE),
    "scaffold": (*_KEPT, "share 0"),
    "ditto": _KEPT,
    "fedpop": _KEPT,
}


def drill(place: Path, algorithm: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Send the poisons of these kinds in a new deployment and return the record."""
    chosen = {"algorithm": algorithm, "hyper": {"weights": "samples"}, "rounds": 1_000_000, "rest_rounds": 0}
    deployment = make(place, SITES, round_timeout=TIMEOUT, max_message_mb=8, **chosen)
    folder, paths = deployment.folder, deployment.paths
    hostile = operate.join(folder.archive(BAD), paths[BAD], place / "hostile", start_now=False)
    plan = [HONEST]  # "an earlier reply again" needs one
    plan += [each for kind in kinds for each in (kind, *([HONEST] if kind in WIRE else []))]
    supervisor = None
    try:
        operate.up(folder.path, {name: paths[name] for name in SITES if name != BAD})
        hostile.make()
        words = ["supervise", str(hostile.path)]
        supervisor = start_module("drills.poisoned_worker", words, place / "hostile.log")
        until(lambda: _counts(folder, after=0), MAX_WAIT, "a round with the hostile site while it is honest")
        facts = {"kinds": plan, "late_s": TIMEOUT + 3}
        (hostile.run / "plan.new").write_text(json.dumps(facts), encoding="utf-8")
        (hostile.run / "plan.new").replace(hostile.run / PLAN)
        proxy = _watch(folder, hostile, len(plan))
        done = rounds_done(folder)
        again = _waited(lambda: _counts(folder, after=done))
        restarts = {}
        for where, path in (("", folder.run), ("hostile ", hostile.run)):
            restarts |= {f"{where}{r.name}": r.restarts for r in pids.records(path / PIDS) if r.restarts}
    finally:
        found = pids.records(hostile.run / PIDS)
        operate.down(hostile.path)
        if supervisor is not None:
            supervisor.terminate()
            supervisor.wait()
        left = [*end(folder), *pids.members(found)]
    shutil.copytree(hostile.path, folder.path / "local" / BAD)  # so that its kept state is compared, too
    lines = verdicts(listed(folder, "round", "repeat"), read_sent(hostile.run / SENT))
    lines = [each | ({"proxy": proxy[each["kind"]]} if each["kind"] in proxy else {}) for each in lines]
    wrong = differences(deployment, counted_sites(folder))
    theta = saved_state(folder).state.shared
    summary: dict[str, Any] = {"summary": True, "kinds": len(lines), "rounds": rounds_done(folder)}
    summary |= {"rejected_all": all(each["rejected"] for each in lines), "theta_equal": not wrong}
    summary |= {"differences": wrong, "finite": all(bool(torch.isfinite(v).all()) for v in theta.values())}
    summary |= {"repeats": len(listed(folder, "repeat")), "coordinators": len(listed(folder, "start"))}
    summary |= {"incomplete": sum(not {"a", "b"} <= set(names) for names in counted_sites(folder))}
    summary |= {"counted_again": again, "restarts": restarts, "left_processes": len(left), "timeout_s": TIMEOUT}
    made = {"code": code(), "hardware": hardware(torch.device("cpu"))}
    return [{"algorithm": algorithm, **each, **made} for each in [*lines, summary]]


def _counts(folder: ServerFolder, after: int) -> bool:
    """Return whether the hostile site's reply counted in a round after this one."""
    return any(BAD in event["valid"] for event in listed(folder, "round") if event["round"] > after)


def _waited(condition: Any) -> bool:
    try:
        return bool(until(condition, MAX_WAIT, "it"))
    except TimeoutError:
        return False


def _watch(folder: ServerFolder, hostile: SiteFolder, count: int) -> dict[str, str]:
    """Wait until all orders of the plan are answered and their rounds have ended.

    Returns, for the poisons during which the proxy refused requests, the statuses of these.
    """
    seen: dict[str, str] = {}
    before, shown = _refusals(folder), 0

    def finished() -> bool:
        nonlocal shown, before
        sent = read_sent(hostile.run / SENT)
        for each in verdicts(listed(folder, "round", "repeat"), sent)[shown:]:
            now = _refusals(folder)
            if more := now - before:
                seen[each["kind"]] = ", ".join(f"{status}: {number}" for status, number in sorted(more.items()))
            print(json.dumps(each), seen.get(each["kind"], ""), flush=True)
            before, shown = now, shown + 1
        return len({each["nonce"] for each in sent}) >= count and rounds_done(folder) >= sent[-1]["round"]

    until(finished, 2 * MAX_WAIT, "the end of the plan")
    return seen


def _refusals(folder: ServerFolder) -> Counter[str]:
    """Count the proxy's answers to large requests other than 200, by their status."""
    log = run_folder(folder) / "access.log"
    rows = [line.split(" ") for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return Counter(words[3] for words in rows if len(words) == 5 and words[3] != "200")


def verdicts(events: list[dict[str, Any]], sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for every poison whose round has ended: its round, why it was rejected, and whether it was.

    `events` are those of rounds and repeated rounds, `sent` the lines of the hostile worker.
    """
    by_round = {(event["round"], event["attempt"]): event for event in events}
    lines = []
    for each in {each["nonce"]: each for each in sent if each["kind"] != HONEST}.values():
        kind, place = each["kind"], (each["round"], each["attempt"])
        event = by_round.get(place)
        if event is None:
            continue
        found = [entry for entry in event["rejected"] if entry["site"] == BAD]
        after = f"late: it answers round {place[0]}, attempt {place[1]}"
        found += [e for other in events for e in other["rejected"] if e["site"] == BAD and e["reason"] == after]
        reasons = list(dict.fromkeys(entry["reason"] for entry in found))
        if BAD in event["missing"]:
            reasons.append("no usable reply came before the round's time-out")
        if kind == "twice":
            rejected = BAD in event["valid"]
            reasons = [*reasons, f"counted once; the first was sent past the SuperNode ({each['seen']})"]
        else:
            rejected = BAD not in event["valid"] and any(WORDS[kind] in reason for reason in reasons)
        line = {"kind": kind, "reason": "; ".join(reasons), "rejected": rejected, "round": place[0]}
        times = sum(entry.get("times", 1) for entry in found)
        lines.append(line | {"times": times, "seconds": round(sum(event["seconds"].values()), 2)})
    return lines


def page(record: Path) -> Path:
    """Write the page of a record into the same folder."""
    lines = _read(record)
    by_algorithm: dict[str, list[dict[str, Any]]] = {}
    for each in lines:
        by_algorithm.setdefault(each["algorithm"], []).append(each)
    poisons = [each for each in lines if "kind" in each]
    summaries = [each for each in lines if each.get("summary")]
    codes, machines = (", ".join(sorted({each[name] for each in summaries})) for name in ("code", "hardware"))
    text = (
        "# Poisoned and broken replies\n\n"
        "Federations on loopback: TLS, node authentication, nginx, sites a, b and c; site c is registered and hostile. "
        "Its real SuperNode carries poisoned replies, one kind per round. The site's own secret authenticates them, "
        f"where the kind does not say otherwise. **{sum(each['rejected'] for each in poisons)} of {len(poisons)}** "
        "did not count, or counted once where the site sent one reply twice. For "
        f"{sum(each['kind'] != 'twice' and not each['times'] for each in poisons)} of them the events list no "
        "rejection, but the site as missing: nothing complete had reached the coordinator.\n\n"
        f"{''.join(_section(name, part) for name, part in by_algorithm.items())}"
        "## What the columns mean\n\n"
        "- *times*: how often the coordinator rejected a reply of this kind. A reply that cannot be decoded, or has a "
        "wrong authentication code, may be another's work. So the order is sent again up to three times, which takes "
        "some seconds.\n"
        f"- *round*: seconds of the round. After a reply that answers no open order, the round waits for the right "
        f"one until its time-out of {TIMEOUT:.0f} s. Such a site slows rounds down until the operator "
        "removes it.\n"
        "- *proxy*: nginx's answers other than 200 to messages and their parts since the row before, with the number "
        "of each. 413: a part is too large. 503: the site has used up its bytes of the round.\n"
        "- *no usable reply came before the round's time-out*: the events list the site as missing.\n"
        "- A reply in another site's name that is sent over Flower as that site's is on the page "
        "[strangers](strangers.md).\n\n"
        f"Data: `{record.name}`. Code: {codes}. Machine: {machines}.\n"
        "Reproduce: `python -m drills.poison --out FILE`, then `python -m drills.poison page --out FILE`.\n"
    )
    return write_page(record, text)


def _section(algorithm: str, lines: list[dict[str, Any]]) -> str:
    """Return the page's section on the federations with one algorithm."""
    kinds, parts = [each for each in lines if "kind" in each], [each for each in lines if each.get("summary")]
    restarts: Counter[str] = sum((Counter(part["restarts"]) for part in parts), Counter())
    total = {name: sum(part[name] for part in parts) for name in ("rounds", "incomplete", "repeats", "left_processes")}
    always = {name: all(part[name] for part in parts) for name in ("finite", "theta_equal", "counted_again")}
    rows = [
        [
            each["kind"],
            each["reason"] + (f" (proxy: {each['proxy']})" if each.get("proxy") else ""),
            str(each["times"]),
            f"{each['seconds']:.1f}",
            ("counted once" if each["kind"] == "twice" else "rejected") if each["rejected"] else "**not rejected**",
        ]
        for each in kinds
    ]
    return (
        f"## {algorithm}\n\n"
        f"{markdown_table(['reply of site c', 'reason in the events', 'times', 'round, s', 'verdict'], rows)}\n\n"
        f"- Federations: {len(parts)}, with {total['rounds']} rounds. θ at the end of each is finite: "
        f"**{_yes(always['finite'])}**. θ and the states that sites keep have the bits of the simulator in which site "
        f"c takes part only in the rounds in which its reply counted: **{_yes(always['theta_equal'])}**.\n"
        f"- Rounds in which the reply of site a or b did not count: {total['incomplete']}. Repeated rounds: "
        f"{total['repeats']}.\n"
        f"- Restarts of processes: {_restarts(restarts)}. Starts of the coordinator in each federation: "
        f"{', '.join(str(part['coordinators']) for part in parts)}. Processes left after the end: "
        f"{total['left_processes']}.\n"
        f"- Site c counted again when it was honest at the end: {_yes(always['counted_again'])}.\n"
        f"{''.join('- ' + part['note'] + chr(10) for part in parts if part.get('note'))}\n"
    )


def _read(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, or nothing if it does not exist."""
    return [json.loads(text) for text in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _restarts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items()) or "none"


def main(arguments: list[str] | None = None) -> int:
    """Run the drill or write its page. The exit code is 1 if anything was not rejected or θ differs."""
    parser = argparse.ArgumentParser(prog="python -m drills.poison", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--algorithms", default=",".join(FEDERATIONS))
    parser.add_argument("--kinds", default="", help="some kinds, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.what == "page":
        print(page(options.out))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the federation is ended, too
    options.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = {name: _split(options.kinds) or FEDERATIONS[name] for name in _split(options.algorithms)}
    for algorithm, kinds in chosen.items():
        left = to_do(_read(options.out), algorithm, kinds)
        for first in range(0, len(left), PART):
            with tempfile.TemporaryDirectory(prefix="drill") as place:
                lines = drill(Path(place), algorithm, left[first : first + PART])
            print(json.dumps(lines[-1]), flush=True)
            earlier = [each for each in _read(options.out) if each["algorithm"] != algorithm or _current(each)]
            write(options.out, "".join(json.dumps(each) + "\n" for each in [*earlier, *lines]))
    summaries = [each for each in _read(options.out) if each.get("summary") and each["algorithm"] in chosen]
    return 0 if all(each[name] for each in summaries for name in ("rejected_all", "theta_equal", "finite")) else 1


def to_do(lines: list[dict[str, Any]], algorithm: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds that this code has not yet recorded for an algorithm."""
    done = {each.get("kind") for each in lines if each["algorithm"] == algorithm and _current(each)}
    return tuple(kind for kind in kinds if kind not in done)


def _current(line: dict[str, Any]) -> bool:
    return bool(line.get("code") == code())


def _split(words: str) -> tuple[str, ...]:
    return tuple(filter(None, words.split(",")))


if __name__ == "__main__":
    sys.exit(main())
