"""Run a site whose worker is hostile: it trains as every site does, and then sends another reply than its own.

    python -m drills.poisoned_worker supervise FOLDER   # the site's real supervisor and SuperNode, with this worker
    python -m drills.poisoned_worker work FOLDER        # the worker, as that supervisor starts it

The worker is honest until the file `PLAN` lies in the site's `run` folder: names of poisons, one for each order to
train. It writes a line for every poisoned reply into `SENT`. After the plan it is honest again. The site's own secret
authenticates every reply, unless the poison says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict

from fedabml.federation import operate
from fedabml.federation.flower import codec
from fedabml.federation.flower.start import prepare_process, start_site
from fedabml.federation.flower.tasks import Task
from fedabml.federation.flower.worker import Worker
from fedabml.federation.folders import SiteFolder
from fedabml.federation.macs import reply_mac
from fedabml.federation.messages import Order, Reply
from fedabml.federation.supervisor import Supervisor

from .intruder import SERVER, Intruder, message
from .poisons import PLAN, POISONS, SCAFFOLD_POISONS, SENT, read_sent

LARGE = 100_000_000  # bytes
CHANGES = POISONS | SCAFFOLD_POISONS


class PoisonedWorker(Worker):
    """A site's worker that replaces its replies according to a plan."""

    def __init__(self, folder: SiteFolder, *rest: Any) -> None:
        super().__init__(folder, *rest)
        self._plan, self._sent = folder.run / PLAN, folder.run / SENT
        self._earlier: Reply | None = None  # the honest reply to an earlier order
        self._task: Task

    def work(self, task: Task) -> None:
        """Carry out one task; a poison may need to know which."""
        self._task = task
        super().work(task)

    def _reply(self, order: Order) -> RecordDict:
        if order.kind != "train":
            return super()._reply(order)
        name = self._next(order)
        if name is None:
            return super()._reply(order)
        reply, earlier = self._handle(order), self._earlier
        self._earlier = reply
        seen, content = "", encoded(reply, self._key)
        if name in CHANGES:
            content = encoded(dataclasses.replace(reply, **CHANGES[name][0](reply)), self._key)
        elif name in WIRE:
            content = WIRE[name](reply, self._key)
        elif name == "an earlier reply again" and earlier is not None:
            content = encoded(earlier, self._key)
        elif name == "late":
            time.sleep(self._plan_facts()["late_s"])
        elif name == "twice":
            seen = self._send_directly(content)
        with self._sent.open("a", encoding="utf-8") as file:
            line = {"kind": name, "round": order.round, "attempt": order.attempt, "nonce": order.nonce, "seen": seen}
            file.write(json.dumps(line) + "\n")
        return content

    def _plan_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._plan.read_text(encoding="utf-8"))
        return facts

    def _next(self, order: Order) -> str | None:
        """Return the poison for an order: the same one if it comes again, else the next of the plan, or None."""
        if not self._plan.exists():
            return None
        kinds, sent = self._plan_facts()["kinds"], read_sent(self._sent)
        for line in sent:
            if line["nonce"] == order.nonce:
                return str(line["kind"])
        done = len({line["nonce"] for line in sent})
        return str(kinds[done]) if done < len(kinds) else None

    def _send_directly(self, content: RecordDict) -> str:
        """Send a reply past the site's SuperNode, which then sends the same one; return what the SuperLink said."""
        task, server = self._task, self._folder.settings.server
        assert task.message is not None
        port = int(server.rpartition(":")[2])
        place: Any = SimpleNamespace(ca_certificate=self._folder.ca_certificate, settings=SimpleNamespace(port=port))
        copy = message(content, task.run_id, task.node_id, SERVER, task.message.metadata.message_id, 15.0)
        intruder = Intruder(place, self._folder.key.read_bytes())
        status, wanted, stored = intruder.push(copy, task.node_id)
        intruder.close()
        return f"status {status}, {wanted} objects wanted, {stored} stored"


def encoded(reply: Reply, secret: bytes) -> RecordDict:
    """Return a reply's content as `codec.reply_content` does, but with values that it would convert or refuse."""
    usable = {name: value for name, value in reply.tensors.items() if isinstance(value, torch.Tensor)}
    packed = codec.Packed(usable)
    packed.index += [[name, "list", [len(value)]] for name, value in reply.tensors.items() if name not in usable]
    fields = {name: getattr(reply, name) for name in codec._REPLY}
    fields["loss"] = reply.loss.hex() if isinstance(reply.loss, float) else reply.loss
    return codec._content(fields, reply_mac(secret, dataclasses.replace(reply, tensors=usable)), packed)


def _changed(content: RecordDict, **values: Any) -> RecordDict:
    """Return a content with other values in its record of fields."""
    fields: Any = content["fields"]
    return RecordDict({"fields": ConfigRecord({**fields, **values})})


def _cut(reply: Reply, secret: bytes) -> RecordDict:
    fields: Any = encoded(reply, secret)["fields"]
    return _changed(RecordDict({"fields": fields}), data=fields["data"][:-4])


def _large(reply: Reply, values: torch.Tensor) -> Reply:
    return dataclasses.replace(reply, tensors=reply.tensors | {"mean": values})


WIRE = {  # poisons of the encoded message
    "an unknown type": lambda r, secret: _changed(
        encoded(r, secret), json=encoded(r, secret)["fields"]["json"].replace("float32", "float16")
    ),
    "bytes missing": _cut,
    "no JSON": lambda r, secret: _changed(encoded(r, secret), json="{"),
    "NaN in the JSON": lambda r, secret: _changed(
        encoded(r, secret), json=encoded(r, secret)["fields"]["json"].replace('"error": ""', '"error": NaN')
    ),
    "no content": lambda r, secret: RecordDict(),
    "another's code": lambda r, secret: encoded(r, bytes(len(secret))),
    "another site's name": lambda r, secret: encoded(dataclasses.replace(r, site="a"), secret),
    "an invented nonce": lambda r, secret: encoded(dataclasses.replace(r, nonce="0" * 32), secret),
    "100 MB that repeat one part": lambda r, secret: encoded(_large(r, torch.zeros(LARGE // 4)), secret),
    "100 MB in small parts": lambda r, secret: encoded(_large(r, torch.rand(LARGE // 4)), secret),
    "100 MB in one part": lambda r, secret: _changed(encoded(r, secret), data=bytes(LARGE)),
}


def supervise(folder: SiteFolder) -> None:
    """Supervise a site as `operate.supervise` does, with this worker in place of its own."""
    node, worker = operate.site_processes(folder)
    command = [sys.executable, "-m", "drills.poisoned_worker", "work", str(folder.path)]
    Supervisor([node, dataclasses.replace(worker, command=command)], folder.run).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the supervisor or the worker of the site in a folder, until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m drills.poisoned_worker", description=__doc__)
    parser.add_argument("what", choices=("supervise", "work"))
    parser.add_argument("folder")
    options = parser.parse_args(arguments)
    if options.what == "supervise":
        supervise(SiteFolder(options.folder).check())
        return
    prepare_process()
    PoisonedWorker(*start_site(options.folder)).run()


if __name__ == "__main__":
    main()
