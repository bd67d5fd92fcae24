"""Measure `fedabml serve` under load: it runs as a separate process, and many clients call it at once.

    python -m drills.serve [--arms load,wrong,random] [--seconds 60] [--clients 50] [--rows 1]
        [--out results/reliability/serving.jsonl]

`load`: half of the requests are JSON and half CSV; one in twenty is malformed and must be refused. Halfway, a newer
posterior replaces the first, and no request may be lost. Every answer is compared with `Posterior.predict`. The record
has requests per second, quantiles of the latency seen by clients, statuses, and the service's memory and processor
time.
`wrong`: every request of `drills.serve_requests.BAD_TABLES`, and bodies of 100 MB, again and again; each must be
refused with its status and its sentence.
`random`: random requests to every page, made from the service's own description.
Both record the statuses by class and the service's memory before, during and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import torch

import fedabml
from fedabml.files.sealed import tensors_digest
from fedabml.runs.prediction_columns import output_columns
from fedabml.runs.provenance import code, hardware

from .serve_page import ARMS, WORST, page, problems
from .serve_requests import BAD_TABLES, JSON, MAX_BYTES, MAX_ROWS, ROW, fuzz

TOKEN = "a token for a benchmark"
BAD = b'{"rows": [{"age": "old"}]}'
LARGE = 100_000_000  # bytes of a body that must not reach the memory


def patients(n: int, seed: int) -> pd.DataFrame:
    """Return a synthetic table: numbers with gaps, words, and a class that depends on them."""
    g = np.random.default_rng(seed)
    age, sex = g.normal(60, 10, n).round(), g.choice(["f", "m"], n)
    frame = pd.DataFrame({"site": g.choice([*"abc"], n), "age": age, "bmi": g.normal(25, 3, n), "sex": sex})
    frame["smoker"] = g.choice(["no", "yes", "former"], n)
    frame["ill"] = np.where(age + 5 * (sex == "m") + g.normal(0, 4, n) > 62, "yes", "no")
    frame.loc[g.random(n) < 0.05, "bmi"] = np.nan
    return frame


def posteriors(drop: tuple[str, ...] = ()) -> list[fedabml.Posterior]:
    """Return two posteriors of one prior, an MLP on the synthetic table without some columns."""
    fed = fedabml.read_table(patients(600, 0).drop(columns=[*drop]), client="site", target="ill")
    run = fedabml.train(fed, "mlp", fedabml.FedABML(lr=0.05), rounds=5, participation=1.0, epochs=1, evaluate=False)
    own = patients(200, 1).assign(site="a").drop(columns=[*drop])
    return [run.prior.personalize(own, validation=0.3, seed=seed, epochs=seed + 1) for seed in (0, 1)]


@contextmanager
def service(path: Path, folder: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start the service; yields its port and process."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    command = [sys.executable, "-m", "fedabml", "serve", str(path), "--port", "0", "--token-file", str(token)]
    command += options
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("serving"))
        yield int(address.rpartition(":")[2].removesuffix("/docs")), process
    finally:
        process.terminate()
        process.wait(60)


@dataclass
class Tally:
    """The tally counts what the clients saw."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0  # requests without an answer
    wrong: int = 0  # answers that differ from `predict`
    worst: float = 0.0
    used: Counter[str] = field(default_factory=Counter)  # answers by posterior


async def call(
    stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], method: str, path: str, body: bytes, kind: str
) -> tuple[int, bytes]:
    """Send a request over a persistent connection, and return the status and body of the response."""
    reader, writer = stream
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
    writer.write(f"{head}content-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    top = await reader.readuntil(b"\r\n\r\n")
    status, length = int(top.split(b" ", 2)[1]), 0
    for line in top.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, await reader.readexactly(length)


async def client(port: int, number: int, end: float, cases: list[Any], tally: Tally) -> None:
    """Send requests one after another until the end of the drill."""
    g = np.random.default_rng(number)
    stream = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        case, bad, csv = g.integers(len(cases)), g.random() < 0.05, g.random() < 0.5
        bodies, expected = cases[case]
        body, kind = (
            (BAD, "application/json") if bad else (bodies[int(csv)], ("application/json", "text/csv")[int(csv)])
        )
        begun = time.perf_counter()
        try:
            status, answer = await call(stream, "POST", "/predict", body, kind)
        except (OSError, asyncio.IncompleteReadError):
            tally.lost += 1
            stream = await asyncio.open_connection("127.0.0.1", port)
            continue
        tally.seconds.append(time.perf_counter() - begun)
        tally.statuses[status] += 1
        if status == 200:
            reply = json.loads(answer)
            tally.used[reply["posterior"]] += 1
            got = [row["p_yes"] for row in reply["predictions"]]
            off = float(np.abs(np.subtract(got, expected[reply["posterior"]])).max())
            tally.worst, tally.wrong = max(tally.worst, off), tally.wrong + (off > WORST)
        else:
            tally.wrong += not bad
    stream[1].close()


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has used. Other programs on the machine hardly change it."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int) -> int:
    """Return the resident bytes of a process, or 0 where the system does not report them."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


async def load(
    port: int, process: int, path: Path, newer: bytes, args: argparse.Namespace, cases: Any
) -> dict[str, Any]:
    """Run all clients, replace the posterior halfway, and return what was seen."""
    warm, tally, sizes = Tally(), Tally(), []
    await client(port, 10**6, time.perf_counter() + min(2.0, args.seconds / 4), cases, warm)
    begun, used = time.perf_counter(), processor_seconds(process)
    end = begun + args.seconds
    clients = [asyncio.create_task(client(port, i, end, cases, tally)) for i in range(args.clients)]
    swapped = False
    while time.perf_counter() < end:
        await asyncio.sleep(min(0.5, args.seconds / 10))
        sizes.append(memory(process))
        if not swapped and time.perf_counter() > begun + args.seconds / 2:
            aside = path.with_suffix(".part")
            aside.write_bytes(newer)
            aside.replace(path)
            stream = await asyncio.open_connection("127.0.0.1", port)
            status, answer = await call(stream, "POST", "/reload", b"", "application/json")
            assert status == 200 and json.loads(answer)["replaced"], answer
            stream[1].close()
            swapped = True
    await asyncio.gather(*clients)
    seconds, used = time.perf_counter() - begun, processor_seconds(process) - used
    p50, p90, p99 = (1000 * float(q) for q in np.quantile(tally.seconds, [0.5, 0.9, 0.99]))
    return {
        "requests": len(tally.seconds), "per_second": len(tally.seconds) / seconds, "p50_ms": p50, "p90_ms": p90,
        "p99_ms": p99, "most_ms": 1000 * max(tally.seconds), "lost": tally.lost, "wrong": tally.wrong,
        "worst_difference": tally.worst, "statuses": {str(k): v for k, v in sorted(tally.statuses.items())},
        "answers_by_posterior": list(tally.used.values()), "memory_first": sizes[0], "memory_last": sizes[-1],
        "memory_most": max(sizes), "seconds": seconds,
        "processor_ms_per_request": 1000 * used / len(tally.seconds), "load_average": os.getloadavg()[0],
    }  # fmt: skip


class Watched:
    """The resident bytes of a process, looked at now and then."""

    def __init__(self, process: int) -> None:
        self._process, self.sizes = process, [memory(process)]

    def look(self) -> None:
        """Note the bytes of this moment."""
        self.sizes.append(memory(self._process))

    def found(self) -> dict[str, int]:
        """Return the bytes at first, at last and at most."""
        self.look()
        return {"memory_first": self.sizes[0], "memory_last": self.sizes[-1], "memory_most": max(self.sizes)}


def wrong(url: str, process: int, turns: int) -> dict[str, Any]:
    """Send every wrong request in turns, and return what was answered."""
    statuses: Counter[int] = Counter()
    unexpected, seen = [], None
    limits = httpx.Limits(max_keepalive_connections=1)
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60, limits=limits) as client:
        for turn in range(turns + 1):
            for name, (body, headers, status, words) in {**BAD_TABLES, **_large()}.items():
                try:
                    reply = client.post("/predict", content=body() if callable(body) else body, headers=headers)
                    found, text = reply.status_code, reply.text
                except httpx.TransportError:  # closed while the body was on its way; allowed for a large one
                    found, text = 0, ""
                refused = found == status and words in json.loads(text)["detail"]
                if not refused and not (found == 0 and callable(body)):
                    unexpected.append([name, found, text[:200]])
                statuses[found] += turn > 0
                if seen and callable(body):
                    seen.look()
            seen = seen or Watched(process)  # the first turn warms the service up
        answer = client.post("/predict", json={"rows": [ROW]}).status_code
    assert seen is not None
    return _counted(statuses, unexpected) | {"cases": len(BAD_TABLES) + 2, "answers_after": answer, **seen.found()}


def _large() -> dict[str, Any]:
    """Return the bodies that are far larger than the limit: one with its length declared, and one without."""

    def chunks() -> Iterator[bytes]:
        for _ in range(LARGE // 1_000_000):
            yield bytes(1_000_000)

    declared = JSON | {"content-length": str(LARGE)}
    return {
        "100 MB, declared": (chunks, declared, 413, "bytes"),
        "100 MB, in chunks": (chunks, JSON, 413, "bytes"),
    }


def random_requests(url: str, process: int, requests: int, parts: int = 10) -> dict[str, Any]:
    """Send random requests to every page, and return what was answered."""
    fuzz(url, requests // parts, seed=10**6, token=TOKEN)  # warms the service up
    seen, statuses, unexpected, pages = Watched(process), Counter[int](), list[Any](), set[str]()
    for part in range(parts):
        found = fuzz(url, requests // parts, seed=part, token=TOKEN)
        statuses += sum(found.statuses.values(), Counter[int]())
        unexpected += [[repr(sent)[:300], status, text] for sent, status, text in found.wrong]
        pages |= found.statuses.keys()
        seen.look()
    return _counted(statuses, unexpected) | {"pages": sorted(pages), **seen.found()}


def _counted(statuses: Counter[int], unexpected: list[Any]) -> dict[str, Any]:
    found = {"statuses": {str(status): count for status, count in sorted(statuses.items())}}
    return {"requests": statuses.total(), **found, "wrong": len(unexpected), "examples": unexpected[:5]}


def keeping(posterior: fedabml.Posterior, turns: int = 30) -> dict[str, float]:
    """Return the milliseconds to predict one row, with weight samples drawn anew and with samples kept in memory."""
    frame, times = patients(1, 3), {"drawn_ms": [0.0] * 0, "kept_ms": [0.0] * 0}
    read = posterior.read(frame)
    for _ in range(turns):
        vars(posterior).pop("_kept", None)
        for name in times:
            begun = time.perf_counter()
            posterior.predict_inputs(read)
            times[name].append(1000 * (time.perf_counter() - begun))
    medians = {name: float(np.median(each)) for name, each in times.items()}
    return medians | {"ratio": medians["drawn_ms"] / medians["kept_ms"]}


def main() -> None:
    """Measure, print the records, add them to a file of JSON lines, and write the page beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="some of the arms, separated by commas")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1, help="rows of a request")
    parser.add_argument("--turns", type=int, default=50, help="of all wrong requests")
    parser.add_argument("--requests", type=int, default=10_000, help="random ones")
    parser.add_argument("--out", type=Path, help="file of JSON lines to add the records to")
    args = parser.parse_args()
    for arm in filter(None, args.arms.split(",")):
        record = {"arm": arm, "command": " ".join(["python -m drills.serve", *sys.argv[1:]])}
        record |= measure_load(args) if arm == "load" else measure_odd(arm, args)
        record |= {"cores": os.cpu_count(), "code": code(), "hardware": hardware(torch.device("cpu"))}
        print(json.dumps(record, indent=1), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            records = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
            args.out.with_suffix(".md").write_text(page(records), encoding="utf-8")
        if found := problems(record):
            raise SystemExit(f"The arm {arm} does not keep its promise: {'; '.join(found)}.")


def measure_load(args: argparse.Namespace) -> dict[str, Any]:
    """Start the service, put the load on it, and return what was seen."""
    old, new = posteriors()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, newer = old.save(folder / "posterior.safetensors"), new.save(folder / "newer.safetensors")
        digests = [tensors_digest(each) for each in (path, newer)]
        cases = []
        for seed in range(20):
            frame = patients(args.rows, 100 + seed).drop(columns=["site", "ill"])
            rows = [{k: None if v != v else v for k, v in row.items()} for row in frame.to_dict("records")]
            expected = {
                str(digest)[:16]: output_columns(each.predict(frame), each.input_spec)["p_yes"]
                for digest, each in zip(digests, (old, new), strict=True)
            }
            cases.append(((json.dumps({"rows": rows}).encode(), frame.to_csv(index=False).encode()), expected))
        with service(path, folder) as (port, process):
            seen = asyncio.run(load(port, process.pid, path, newer.read_bytes(), args, cases))
    record = {"clients": args.clients, "rows": args.rows, **seen}
    return record | {"weights": keeping(old), "weight_samples": old.samples}


def measure_odd(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the service, send wrong or random requests, and return what was seen."""
    posterior = posteriors(drop=("smoker",))[0]
    with tempfile.TemporaryDirectory() as name:
        path = posterior.save(Path(name) / "posterior.safetensors")
        limits = ("--max-rows", str(MAX_ROWS), "--max-bytes", str(MAX_BYTES))
        with service(path, Path(name), *limits) as (port, process):
            begun, url = time.perf_counter(), f"http://127.0.0.1:{port}"
            found = (
                wrong(url, process.pid, args.turns)
                if arm == "wrong"
                else random_requests(url, process.pid, args.requests)
            )
    return found | {"seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    main()
