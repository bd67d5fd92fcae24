"""Measure the seconds per round of a local federation, and of Flower's own FedAvg with the same model and data.

    python -m drills.round_time run --turns 5 --rounds 6
    python -m drills.round_time page                       # results/reliability/round_time.md

Five arms take turns, each with its own SuperLink (TLS, node authentication, database) and three sites: `flower` is
Flower's FedAvg strategy and a plain torch client with Flower's defaults, which start a process per message; `cold` is
fedabml's app started in the same way (flower-superexec and `clientapp`); `warm` is a federation as `fedabml federation
up` runs it: resident workers, and nginx before the SuperLink; `cold-torch` and `torch` are `cold` and `warm`, but their
sites train with the torch loop of `flower` (`drills.torch_client`) in place of fedabml's engine. The arms of every turn
begin with another one. The first round of a turn is left out. Every round is one line of
results/reliability/round_time.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedabml.federation import operate
from fedabml.federation.archive import unpack
from fedabml.federation.folders import ServerFolder, SiteFolder
from fedabml.federation.init import init
from fedabml.runs.provenance import code, hardware

from . import deployment as drill
from . import torch_client
from .pages import wrapped
from .torch_client import BATCH, CLASSES, EPOCHS, FEATURES, HIDDEN, RATE

LINES = Path(__file__).resolve().parents[1] / "results/reliability/round_time.jsonl"
ARMS = ("flower", "cold", "cold-torch", "warm", "torch")
SITES = ("a", "b", "c")
SAMPLES = 1000  # of a site
MAX_WAIT = 1800.0  # seconds to wait for anything
TIMES = "FEDABML_DRILL_TIMES"  # names the file in which Flower's arm notes the end of every round

_CLIENT = '''"""The torch client of the drill."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedabml_app.torch_client import load, network, train as train_model

app = ClientApp()


@app.train()
def train(message, context):
    x, y = load(context.node_config["data"])
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_model(model, x, y)
    metrics = MetricRecord({"num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
'''
_COLD_TORCH = '''"""fedabml's ClientApp, with sites that train with the torch loop of Flower's arm."""

from drills.torch_site import TorchSite
from fedabml.federation import site
from fedabml.federation.flower import clientapp

site.Site = TorchSite  # clientapp loads it with the first message
app = clientapp.app
'''
_SERVER = f'''"""Flower's FedAvg."""

import os
import time

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedabml_app.torch_client import network

app = ServerApp()


def note(number, arrays):
    with open(os.environ["{TIMES}"], "a") as file:
        file.write(f"{{number}} {{time.time()}}\\n")


@app.main()
def main(grid, context):
    count = {len(SITES)}
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, evaluate_fn=note)
'''


def main() -> None:
    """Run turns, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--turns", type=int, default=5, help="a multiple of the number of arms")
    parser.add_argument("--rounds", type=int, default=6, help="of a turn; the first is left out")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path, default=LINES, help="the file of lines; the page lies beside it")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the federation is ended, too
    if options.what == "run":
        started = int(time.time())
        for turn in range(options.turns):
            for arm in rotated(options.arms, turn):
                load = os.getloadavg()[0]
                with tempfile.TemporaryDirectory(prefix="drill") as place:
                    seconds = run_turn(arm, Path(place), options.rounds)
                facts = {"started": started, "arm": arm, "turn": turn, "load": load, **machine()}
                with options.out.open("a", encoding="utf-8") as file:
                    for number, value in enumerate(seconds, 2):
                        file.write(json.dumps({**facts, "round": number, "seconds": round(value, 3)}) + "\n")
                print(f"turn {turn} {arm}: {' '.join(f'{value:.1f}' for value in seconds)} s (load {load:.1f})")
    text = wrapped(page(options.out))
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def rotated(arms: Sequence[str], turn: int) -> list[str]:
    """Return the arms in the order of a turn, so that each is in every place equally often."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def machine() -> dict[str, Any]:
    """Return what influences the seconds: cores, version of Python, this package's code, and the machine."""
    made = {"code": code(), "hardware": hardware(torch.device("cpu"))}
    return {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **made}


def run_turn(arm: str, place: Path, rounds: int) -> list[float]:
    """Run one arm from its start to its end; return the seconds of all its rounds except the first."""
    generator = np.random.default_rng(1)
    data = {name: place / f"{name}.npz" for name in SITES}
    for path in data.values():
        x, y = generator.normal(size=(SAMPLES, FEATURES)).astype(np.float32), np.arange(SAMPLES) % CLASSES
        np.savez(path, x=x, y=y)
    port, superlink_port = drill.free_ports(2)
    settings: dict[str, Any] = {
        **{"algorithm": "fedavg", "model": "mlp", "model_options": {"hidden": list(HIDDEN)}, "rounds": rounds},
        **{"epochs": EPOCHS, "batch_size": BATCH, "hyper": {"lr": RATE}, "round_timeout": 600.0, "min_replies": 3},
        **{"port": port, "superlink_port": superlink_port},
    }
    folder = init(place / "federation", "127.0.0.1", list(SITES), data["a"], **settings)
    with ExitStack() as stack:
        if arm in ("warm", "torch"):
            stack.callback(drill.end, folder)
            operate.up(folder.path, data if arm == "warm" else {})
            if arm == "torch":
                _start_torch_sites(stack, folder, data)
            return _our_seconds(folder, rounds)
        times = place / "times"
        if arm == "flower":
            _write_flower_app(folder.app, rounds)
        if arm == "cold-torch":
            (folder.app / "fedabml_app" / "client_app.py").write_text(_COLD_TORCH, encoding="utf-8")
        _start_stock(stack, arm, folder, data, times)
        if arm in ("cold", "cold-torch"):
            return _our_seconds(folder, rounds)
        _wait(lambda: len(_noted(times)) > rounds, f"Flower's round {rounds}")
        return [b - a for a, b in pairwise(_noted(times)[1:])]


def _wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds. Checks are rare, because they take time from what is measured."""
    end = time.monotonic() + MAX_WAIT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come in {MAX_WAIT:.0f} s")
        time.sleep(2.0)


def _our_seconds(folder: ServerFolder, rounds: int) -> list[float]:
    """Return the seconds from the end of each round to the end of the next, from the coordinator's events."""
    _wait(lambda: drill.rounds_done(folder) >= rounds, f"round {rounds}")
    ends = [float(event["time"]) for event in drill.listed(folder, "round")]
    return [b - a for a, b in pairwise(ends)]


def _noted(path: Path) -> list[float]:
    """Return the times at which Flower's rounds ended; the first entry is the start of round 1."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [float(line.split()[1]) for line in lines if len(line.split()) == 2]


def _write_flower_app(app: Path, rounds: int) -> None:
    """Replace the modules of the federation's app by those of one with Flower's FedAvg."""
    texts = {"client_app": _CLIENT, "server_app": _SERVER.replace("ROUNDS", str(rounds))}
    texts["torch_client"] = Path(torch_client.__file__).read_text(encoding="utf-8")
    for name, text in texts.items():
        (app / "fedabml_app" / f"{name}.py").write_text(text, encoding="utf-8")


def _start_stock(stack: ExitStack, arm: str, folder: ServerFolder, data: dict[str, Path], times: Path) -> None:
    """Start a SuperLink and SuperNodes that start a process for every message, and submit a run."""
    from fedabml.federation.flower import commands

    address, port = commands.superlink_address(folder), folder.settings.superlink_port
    environment = commands.environment(folder) | {TIMES: str(times)} | _path_of_drills()
    if arm == "flower":
        del environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
    link = _without(commands.superlink_command(folder), "--isolation", "--superexec-auth-secret-file")
    stack.enter_context(_process(link, environment, folder.run / "superlink.log"))
    _wait(operate.health_check(folder, port), "the SuperLink")
    commands.register_sites(folder)
    for name, path in data.items():
        site = unpack(folder.archive(name), folder.path / "local" / name, path)
        stack.enter_context(_process(_node(arm, site, address, path), environment, site.run / "supernode.log"))
    commands.submit_run(folder)


def _start_torch_sites(stack: ExitStack, folder: ServerFolder, data: dict[str, Path]) -> None:
    """Start all sites, with workers that train with the torch loop of Flower's arm."""
    place = folder.path.parent / "torch"
    sites = [operate.set_up_site(folder.archive(name), place / name, path) for name, path in data.items()]
    for site in sites:
        site.make()
    words = ["supervise", "torch", str(place / "run"), *(str(site.path) for site in sites)]
    (place / "run").mkdir()
    command = [sys.executable, "-m", "drills.other_site", *words]
    stack.enter_context(_process(command, _path_of_drills(), place / "supervisor.log"))


def _path_of_drills() -> dict[str, str]:
    """Return the PYTHONPATH with which other processes find this package."""
    root = str(Path(__file__).resolve().parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))}


def _node(arm: str, site: SiteFolder, address: str, data: Path) -> list[str]:
    """Return the command of a SuperNode with Flower's own pauses or with fedabml's."""
    from fedabml.federation.flower import commands

    command = _without(commands.supernode_command(site), "--isolation", "--superexec-auth-secret-file", "--superlink")
    if arm == "flower":
        start = "import sys; from flwr.supernode.cli import flower_supernode; sys.exit(flower_supernode())"
        command[1:3] = ["-c", start]
        config = f'data="{data}"'
    else:
        config = f'folder="{site.path}"'
    return [*command, "--superlink", address, "--node-config", config]


def _without(command: list[str], *options: str) -> list[str]:
    """Return a command without some options and their values."""
    kept = list(command)
    for option in options:
        at = kept.index(option)
        del kept[at : at + 2]
    return kept


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """Run a process; the process and all that it starts end with the block."""
    programs = str(Path(sys.executable).parent)  # a SuperNode starts flower-superexec by its name
    variables = {**os.environ, **environment, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, start_new_session=True)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def page(record: Path) -> str:
    """Return the page of all recorded rounds."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []
    head = [
        "# Seconds per round beside Flower's own FedAvg",
        "",
        f"Three sites on one machine, an MLP {FEATURES}-{'-'.join(map(str, HIDDEN))}-{CLASSES} in float32, {SAMPLES} "
        f"samples a site, {EPOCHS} epoch in minibatches of {BATCH}, learning rate {RATE}. TLS, node authentication and "
        "a database in every arm; resident workers pass nginx, too. The arms took turns. A round's seconds run from "
        "the end of one round to the end of the next; the first round of a turn is left out.",
        "",
        "The local work is the same in every arm: network, data, epochs, minibatches and learning rate. The arms "
        "that name the torch loop run the same one (`drills/torch_client.py`); they differ in transport, processes and "
        "checks. The others train with fedabml's engine, so beside Flower's they compare whole systems.",
        "",
        "| arm | rounds | median | least | most | turns: median beside Flower's of the same turn |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        values = [line["seconds"] for line in lines if line["arm"] == arm]
        if values:
            ratios = ", ".join(f"{ratio:.2f}×" for ratio in _ratios(lines, arm))
            numbers = f"{statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f}"
            head.append(f"| {_NAMES[arm]} | {len(values)} | {numbers} | {ratios} |")
    loads = [line["load"] for line in lines]
    if loads:
        cores = sorted({line["cores"] for line in lines})
        head += ["", f"Cores: {cores}. Load of the machine before a turn: {min(loads):.1f} to {max(loads):.1f}."]
        made = sorted({(line.get("code", "not recorded"), line.get("hardware", "not recorded")) for line in lines})
        head += [f"Code: {digest}. Machine: {name}." for digest, name in made]
    return "\n".join(
        [*head, "", *_LEFT_OUT, "", "Made by `python -m drills.round_time run`; lines: `round_time.jsonl`.", ""]
    )


_LEFT_OUT = (  # about the published record; the lines of the first two runs were not kept
    "Left out: two runs of 2026-11-20 that were stopped in their first turn, after their first ratios had been seen,",
    "because tests and another study used the same two cores. A process per message then took 0.97× and 1.04× of",
    "Flower's median, and 1.19× with the torch loop of Flower's arm. In both, Flower's arm had run first, with less",
    "beside it; the resident workers were not reached. So a machine that is busy for one arm alone can turn the first",
    "two ratios. Left out, too: the last turn of the run that followed, which was stopped before Flower's arm.",
)

_NAMES = {
    "flower": "Flower's FedAvg, plain torch loop",
    "cold": "fedabml, a process per message",
    "cold-torch": "fedabml, a process per message, the torch loop of Flower's arm",
    "warm": "fedabml, resident workers",
    "torch": "fedabml, resident workers, the torch loop of Flower's arm",
}


def _ratios(lines: list[dict[str, Any]], arm: str) -> list[float]:
    """Return an arm's median seconds divided by Flower's, for every turn that has both."""
    by_turn: dict[tuple[int, int], dict[str, list[float]]] = {}
    for line in lines:
        by_turn.setdefault((line["started"], line["turn"]), {}).setdefault(line["arm"], []).append(line["seconds"])
    pairs = [turn for turn in by_turn.values() if arm in turn and "flower" in turn]
    return [statistics.median(turn[arm]) / statistics.median(turn["flower"]) for turn in pairs]


if __name__ == "__main__":
    main()
