"""Each attack of `drills.strangers` returns lines that name what was tried, what came back, and the verdict."""

from __future__ import annotations

import http.client
import os
import random
import re
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedabml.errors import InputError
from fedabml.federation import keys, macs, messages, proxy
from fedabml.federation.folders import ServerFolder, SiteFolder
from fedabml.federation.meter import budget, most_kept

from . import fuzzing
from .deployment import free_ports, listed, rounds_done, until
from .intruder import SERVER, Intruder, message, nodes, orders, runs, stored_bytes, stranger

Line = dict[str, Any]
FAR = 9999  # the round of forged orders


def line(attack: str, by: str, seen: str, refused: bool, **more: Any) -> Line:
    """Return one line of the record."""
    return {"attack": attack, "by": by, "seen": seen, "refused": refused, **more}


# -- strangers --------------------------------------------------------------------------------------------------------
def unregistered_key(folder: ServerFolder, place: Path) -> list[Line]:
    """Try every call with a key that nobody registered, and start a real SuperNode with it."""
    someone, private = stranger(folder), place / "stranger.key"
    statuses = Counter(someone.send(f"/v1/fleet/{call}")[0] for call in (*proxy.CALLS, "register-node"))
    lines = [line("unregistered key, every call", "a stranger", _counts(statuses), set(statuses) == {403})]
    private.write_bytes(keys.make_site_keys().private)
    return [*lines, real_supernode(folder, place, "unregistered key", folder.ca_certificate, private)]


def wrong_authority(folder: ServerFolder, place: Path, key: Path) -> list[Line]:
    """Connect with another authority's certificate, by hand and with a real SuperNode that has a registered key."""
    other = place / "other.crt"
    other.write_bytes(keys.make_authority("other").certificate)
    try:
        status = Intruder(folder, authority=other).send("/v1/fleet/pull-messages")[0]
        result = line("wrong authority", "a client", f"status {status}", False)
    except ssl.SSLCertVerificationError as error:
        result = line("wrong authority", "a client", f"TLS: {error.verify_message}", True)
    return [result, real_supernode(folder, place, "wrong authority, registered key", other, key)]


def real_supernode(
    folder: ServerFolder, place: Path, what: str, authority: Path, key: Path, seconds: float = 120.0
) -> Line:
    """Start flower-supernode with a key and report how it was answered.

    It counts as refused if it reports the refusal itself, and the SuperLink has not activated a node with its key.
    """
    program = (
        "import sys; from flwr.supernode.cli.flower_supernode import flower_supernode; sys.exit(flower_supernode())"
    )
    command = [sys.executable, "-c", program, "--superlink", folder.settings.address, "--root-certificates"]
    command += [str(authority), "--auth-supernode-private-key", str(key), "--isolation", "process"]
    env = os.environ | {"FLWR_HOME": str(place / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
    env |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    public, log = Intruder(folder, key.read_bytes()).public_key, place / "supernode.log"
    before = activations(folder).get(public)

    def answered() -> str:
        words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace")).split())
        found = re.search(r"403 Forbidden|CERTIFICATE_VERIFY_FAILED|SSL/TLS handshake error", words)
        return found[0] if found else ""

    def ended() -> bool:
        return process.poll() is not None or activations(folder).get(public) != before or bool(answered())

    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(free_ports(1)[0])], stdout=output, stderr=subprocess.STDOUT, env=env
        )
    try:
        _waited(ended, seconds, pause=2.0)
        after, code = activations(folder).get(public), process.poll()
    finally:
        process.kill()
        process.wait()
    seen = answered() or f"no refusal in its log: {log.read_text(errors='replace')[-200:]!r}"
    seen += f", {'still trying' if code is None else f'exit code {code}'}; the SuperLink's list of nodes: "
    seen += "not on it" if after is None else "activated" if after != before else "not activated"
    return line(what, "a real SuperNode", seen, after == before and bool(answered()))


def activations(folder: ServerFolder) -> dict[bytes, str]:
    """Return when each node on the SuperLink's list was last activated, by its public key; empty: never."""
    from flwr.proto.control_pb2 import ListNodesRequest

    from fedabml.federation.flower import control

    with control._control(folder) as client:
        listed_nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return {bytes(node.public_key): node.last_activated_at for node in listed_nodes}


def no_tls(folder: ServerFolder) -> list[Line]:
    """Speak plain HTTP, and TLS 1.1."""
    connection = http.client.HTTPConnection("127.0.0.1", folder.settings.port, timeout=60)
    connection.request("POST", "/v1/fleet/pull-messages", b"")
    status = connection.getresponse().status
    connection.close()
    lines = [line("plain HTTP", "a stranger", f"status {status}", status == 400)]
    context = ssl.create_default_context(cafile=str(folder.ca_certificate))
    context.set_ciphers("ALL:@SECLEVEL=0")  # this client would accept it
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old = http.client.HTTPSConnection("127.0.0.1", folder.settings.port, context=context, timeout=60)
    try:
        old.request("POST", "/v1/fleet/pull-messages", b"")
        lines.append(line("TLS 1.1", "a stranger", f"status {old.getresponse().status}", False))
    except OSError as error:
        lines.append(line("TLS 1.1", "a stranger", f"TLS: {getattr(error, 'reason', None) or error}", True))
    finally:
        old.close()
    return lines


def other_interfaces(folder: ServerFolder, insider: Intruder) -> list[Line]:
    """Call every path of the SuperLink's control and runtime interfaces through the proxy, as a registered site."""
    import flwr

    root, paths = Path(flwr.__file__).parent, {"/health", "/docs", "/openapi.json", "/", "/v1/responses"}
    for source in root.rglob("*.py"):
        paths |= set(re.findall(r'"(/v1/(?:control|runtime)/[a-z-]+)"', source.read_text(encoding="utf-8")))
    statuses = Counter(insider.send(path, method=method)[0] for path in sorted(paths) for method in ("POST", "GET"))
    what = f"control and runtime interfaces ({len(paths)} paths, POST and GET)"
    return [line(what, "a registered site", _counts(statuses), set(statuses) == {403})]


def foreign_app(folder: ServerFolder, sites: list[SiteFolder], place: Path) -> list[Line]:
    """Submit a run of another app directly to the SuperLink, as a program on the server's machine could.

    Its run waits while ours is under way. So the drill then takes its task in our executor's place.
    """
    import hashlib

    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    from fedabml.federation.flower import app, control

    mark, source = place / "foreign-code-ran", place / "foreign"
    app.write_app(source)
    for path in source.rglob("*.py"):
        path.write_text(f"open({str(mark)!r}, 'a').write(__name__)\n" + path.read_text(encoding="utf-8"))
    content = app.bundle(source)
    digest = hashlib.sha256(content).hexdigest()
    before = rounds_done(folder)
    with control._control(folder) as client:
        run = client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(digest, content, {})))).run_id
    _waited(lambda: rounds_done(folder) >= before + 3, 300)
    state = control.run_status(folder, run)
    seen = f"run {state}, none of its code ran" if not mark.exists() else "its code ran"
    lines = [line("a foreign app", "the server's machine", seen, not mark.exists())]
    return [*lines, foreign_order(folder, sites[0], run, digest, mark)]


def foreign_order(folder: ServerFolder, site: SiteFolder, run: int, digest: str, mark: Path) -> Line:
    """Take a foreign run's task with the SuperLink's own secret, and send a site an order of that app.

    The order is authenticated with the site's true secret, so only the hash of the app distinguishes it from ours.
    """
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.common.serde import message_from_proto
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.supercore.constant import TaskType

    from fedabml.federation.flower import places, tasks, uploads
    from fedabml.federation.flower.runtime import Heartbeat, Link

    name, certificate = site.settings.name, folder.ca_certificate.read_bytes()
    member = next(each for each in folder.members() if each.name == name)

    def connect(token: str = "") -> Link:
        secret = None if token else places.server_secret(folder)
        return Link.open(places.superlink_address(folder), certificate, token=token, secret=secret, patience=60.0)

    def reply() -> Any:
        found = task.link.call("PullMessages", PullAppMessagesRequest(message_ids=sent)).messages_list
        return message_from_proto(found[0]) if found else None

    with closing(connect()) as link:
        task = until(lambda: tasks.acquire(link, TaskType.SERVER_APP, connect), 60, "the foreign run's task")
    try:
        task.pull_input({digest})
        fields = {"kind": "prior", "number": member.number, "round": FAR, "attempt": 1, "counted": FAR, "clients": 3}
        content = forged_content(folder, macs.read_secret(folder.site_secret(name)), name, **fields)
        with Heartbeat(task.link):
            order = message(content, run, SUPERLINK_NODE_ID, nodes(folder)[name])
            sent = uploads.Upload.of([order]).send(task.link, run, SUPERLINK_NODE_ID)
            answer = until(reply, 120, "the site's answer to the foreign app's order")
        task.finish("The drill has ended this run.")
    finally:
        task.link.close()
    error = answer.error if answer.has_error() else None
    refused = error is not None and error.code == ErrorCode.INVALID_FAB and "not on the list" in error.reason
    seen = f"reply to run {run}: {f'error {error.code}, {error.reason}' if error else 'an answer without an error'}"
    harmed = mark.exists() or keeps_far(site)
    return line("a foreign app's order", "the server's machine", seen, refused and not harmed)


def keeps_far(site: SiteFolder) -> bool:
    """Return whether a site has kept what a forged order brought."""
    return site.prior_file.exists() or str(FAR) in " ".join(path.name for path in site.state.iterdir())


# -- insiders ---------------------------------------------------------------------------------------------------------
def forged_content(folder: ServerFolder, secret: bytes, site: str, **fields: Any) -> RecordDict:
    """Return an order or a reply that names one site but is authenticated with the secret of another."""
    from fedabml.federation.flower import codec

    common = {"federation": folder.settings.federation, "card": "0" * 64, "site": site, "nonce": "1" * 32, **fields}
    if "number" in fields:
        return codec.order_content(messages.Order(**common), secret)
    return codec.reply_content(messages.Reply(**common), secret)


def forged_reply(folder: ServerFolder, insider: Intruder, secret: bytes) -> list[Line]:
    """Answer an order of site a with the key and the secret of another registered site."""
    known, run = nodes(folder), runs(folder)[0]
    own, victim = known["d"], known["a"]
    lines = []
    # An insider does not know the number of an order, so it guesses one.
    content = forged_content(folder, secret, "a", kind="train", round=1, attempt=1, samples=5)
    guess = insider.push(message(content, run, victim, SERVER, "0" * 64), own)
    lines.append(line("a reply in another's name, guessed order", "a registered site", _pushed(guess), guess[1] == 0))
    # Here it knows the number of a pending order, which only the server and site a should know.
    tried: list[tuple[int, int, int]] = []

    def attack() -> bool:
        for name, left in orders(folder, victim):
            tried.append(insider.push(message(content, run, victim, SERVER, name, max(1.0, left - 1)), own))
        return any(stored for _, _, stored in tried) and _reasons(folder, "code is wrong") > 0

    done = _waited(attack, 120, pause=0.0)
    seen = f"{len(tried)} sent, {sum(stored > 0 for *_, stored in tried)} stored by the SuperLink, "
    seen += f"{_reasons(folder, 'code is wrong')} rejected by the coordinator: the code is wrong"
    lines.append(line("a reply in another's name, known order", "a registered site", seen, done))
    return lines


def forged_order(folder: ServerFolder, insider: Intruder, secret: bytes, site: SiteFolder) -> list[Line]:
    """Send site a an order in the server's name."""
    known, run = nodes(folder), runs(folder)[0]
    own, member = known["d"], next(m for m in folder.members() if m.name == "a")
    kept = sorted(path.name for path in site.state.iterdir())
    common = {"kind": "prior", "number": member.number, "round": FAR, "attempt": 1, "counted": FAR, "clients": 3}
    content = forged_content(folder, secret, "a", **common)
    pushed = insider.push(message(content, run, SERVER, known["a"]), own)

    def reported() -> bool:
        return "not written by the server" in (site.run / "worker.log").read_text(errors="replace")

    took = _waited(reported, 300)
    seen = f"{_pushed(pushed)}; the site {'refused it: its code is wrong' if took else 'did not report it'}"
    return [
        line("an order in the server's name", "a registered site", seen, took and not keeps_far(site), kept=len(kept))
    ]


def flood(folder: ServerFolder, key: bytes, threads: int = 3, seconds: float = 60.0) -> list[Line]:
    """Fill the SuperLink's storage: send orders in the server's name, each with an object of 4 MB, until it refuses."""
    known, run, size = nodes(folder), runs(folder)[0], 4_000_000
    first, before = rounds_done(folder), stored_bytes(folder)
    end, statuses, stored, most = time.monotonic() + seconds, Counter[int](), Counter[int](), 0

    def work(number: int) -> None:
        generator, insider = random.Random(number), Intruder(folder, key)
        while time.monotonic() < end:
            record = RecordDict({"x": ConfigRecord({"x": generator.randbytes(size)})})
            status, _, parts = insider.push(message(record, run, SERVER, known["a"], ttl=5.0), known["d"])
            statuses[status] += 1
            stored[number] += size * bool(parts)
        insider.close()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        most = max(most, stored_bytes(folder) - before)
        time.sleep(0.5)
    rounds, allowed = rounds_done(folder) - first, budget(folder.settings)
    limit = most_kept(folder.settings)
    total = sum(stored.values())
    seen = f"{total:,} bytes stored in {rounds} rounds (budget of a round: {allowed:,}), at most {most:,} at a time; "
    seen += f"orders answered {_counts(statuses)}"
    refused = most <= limit and total <= (rounds + 1) * limit
    return [line("storing without end", "a registered site", seen, refused, limit=limit)]


# -- fuzzing ----------------------------------------------------------------------------------------------------------
def fuzz(folder: ServerFolder, insider_key: bytes, count: int, messages: bool) -> list[Line]:
    """Send random requests (see `drills.fuzzing`), half of them with the key and a good signature of a site."""
    log = folder.run / "superlink.log"
    before, start, size = rounds_done(folder), time.monotonic(), log.stat().st_size
    answers = fuzzing.fuzz(folder, insider_key, count, messages)
    errors = fuzzing.logged_errors(log.read_bytes()[size:].decode(errors="replace"))
    common = {"seconds": round(time.monotonic() - start, 1), "rounds": rounds_done(folder) - before}
    what = "fuzzed requests: Flower's messages with changed fields" if messages else "fuzzed requests: random bytes"
    lines = []
    for name, seen in answers.items():
        reaching = messages and name == "a registered site"
        found = fuzzing.findings(seen, errors if reaching else None)
        text = _counts(seen) + (f"; errors in the SuperLink: {_counts(errors) or 'none'}" if reaching else "")
        lines.append(line(what, name, text, not found, findings=found, requests=seen.total(), **common))
    return lines


# -- small parts ------------------------------------------------------------------------------------------------------
def _reasons(folder: ServerFolder, words: str) -> int:
    """Return how many replies the coordinator rejected for a reason that contains these words."""
    found = [each for event in listed(folder, "round", "repeat", "answers") for each in event.get("rejected", [])]
    return rejections(found, words)


def rejections(rejected: list[dict[str, Any]], words: str) -> int:
    """Return how many replies a list of rejections counts, each with its `times`, for a reason with these words."""
    return sum(int(each.get("times", 1)) for each in rejected if words in str(each.get("reason")))


def _waited(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    try:
        until(condition, seconds, "it")
    except (TimeoutError, InputError):
        return False
    time.sleep(pause)
    return True


def _pushed(result: tuple[int, int, int]) -> str:
    return f"status {result[0]}, {result[1]} objects wanted, {result[2]} stored"


def _counts(statuses: Counter[Any]) -> str:
    return ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items(), key=lambda item: str(item[0])))


def secret_of(site: SiteFolder) -> bytes:
    """Return a site's secret."""
    return macs.read_secret(site.secret)
