"""The page of the records of `drills.serve`, and what in a record breaks a promise of the service."""

from __future__ import annotations

from typing import Any

from fedabml.files.sheets import markdown_table

from .pages import wrapped
from .serve_requests import MAX_BYTES

ARMS = ("load", "wrong", "random")
WORST = 1e-6  # difference of a probability from `predict`
GROWTH = 1.25  # times its memory after the warm-up that the service may take


def page(records: list[dict[str, Any]]) -> str:
    """Return the page of the records: the load on the service, and wrong and random requests."""
    by_arm: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for record in records:
        by_arm[record.get("arm", "load")].append(record)
    parts = [
        "# Serving\n",
        *([_load_part(by_arm["load"])] if by_arm["load"] else []),
        *([_odd_part(by_arm["wrong"] + by_arm["random"])] if by_arm["wrong"] + by_arm["random"] else []),
        "The records: [serving.jsonl](serving.jsonl).\n",
    ]
    return wrapped("\n".join(parts))


def _load_part(records: list[dict[str, Any]]) -> str:
    head = ["clients", "rows", "seconds", "requests", "per second", "p50 ms", "p99 ms", "5xx", "lost", "wrong"]
    head += ["processor ms per request", "memory MiB, first and most", "load average"]
    rows = [
        [
            f"{r['clients']}", f"{r['rows']}", f"{r['seconds']:.0f}", f"{r['requests']}", f"{r['per_second']:.0f}",
            f"{r['p50_ms']:.0f}", f"{r['p99_ms']:.0f}", f"{_of_class(r, '5')}",
            f"{r['lost']}", f"{r['wrong']}", f"{r['processor_ms_per_request']:.1f}",
            f"{_mib(r['memory_first'])}, {_mib(r['memory_most'])}", f"{r['load_average']:.0f}",
        ]
        for r in records
    ]  # fmt: skip
    last = records[-1]
    worst, weights = max(r["worst_difference"] for r in records), last["weights"]
    return f"""    {last["command"]}

starts `fedabml serve` with the posterior of an MLP on a synthetic table, as a process of its own. All clients
ask without pause: half of the requests are JSON, half CSV, and one in twenty must be refused. Halfway a newer
posterior takes the place of the first by `/reload`. Every answer is compared with `Posterior.predict`; it is wrong if
a probability differs by more than {WORST:g}, or if a good request is refused.

{markdown_table(head, rows)}

- The machine has {last["cores"]} cores ({last["hardware"]}), for clients and service together. Code: {last["code"]}.
- The load average tells how many programs wanted them. Above {last["cores"]}, other programs ran at the same time, and
  the service had only a part of a core. The figures hold for those conditions; they are no measure of a free machine.
- The largest difference of a probability from `Posterior.predict` is {worst:.1g}.
- {_swap(records)}
- A prediction of one row takes {weights["drawn_ms"]:.0f} ms if it draws its {last["weight_samples"]} weight samples and
  {weights["kept_ms"]:.0f} ms if they are kept: {weights["ratio"]:.1f} times less, measured in turn in one process.
"""


def _swap(records: list[dict[str, Any]]) -> str:
    """Return what the records say about the replacement of one posterior by the other."""
    silent = sum(not _both_answered(record) for record in records)
    lost = sum(record["lost"] for record in records)
    if not silent and not lost:
        return "Both posteriors answered requests, and no request was lost while one replaced the other."
    return f"**Only one posterior answered in {silent} of {len(records)} loads, and {lost} requests were lost.**"


def problems(record: dict[str, Any]) -> list[str]:
    """Return what a record shows against the promises of the service; nothing if they were kept."""
    found = []
    if record.get("lost"):
        found.append(f"{record['lost']} requests were lost")
    if record["wrong"]:
        found.append(f"{record['wrong']} answers were wrong or not expected")
    if failed := _of_class(record, "5"):
        found.append(f"{failed} answers had a status 5xx")
    if record.get("arm", "load") == "load" and not _both_answered(record):
        found.append("only one of the two posteriors answered")
    if record.get("answers_after", 200) != 200:
        found.append(f"a good request was answered with {record['answers_after']} afterwards")
    if record["memory_most"] > GROWTH * record["memory_first"]:
        found.append(f"the memory grew from {_mib(record['memory_first'])} to {_mib(record['memory_most'])} MiB")
    return found


def _both_answered(record: dict[str, Any]) -> bool:
    return len(record["answers_by_posterior"]) == 2


def _odd_part(records: list[dict[str, Any]]) -> str:
    names = {"wrong": "wrong, to /predict", "random": "random, to every page"}
    head = ["requests", "number", "2xx", "3xx", "4xx", "5xx", "closed", "unexpected", "memory MiB, first, last, most"]
    rows = [
        [
            names[r["arm"]], f"{r['requests']}", *(f"{_of_class(r, digit)}" for digit in "23450"), f"{r['wrong']}",
            ", ".join(_mib(r[f"memory_{name}"]) for name in ("first", "last", "most")),
        ]
        for r in records
    ]  # fmt: skip
    made = sorted({(r["code"], r["hardware"]) for r in records})
    return f"""## Wrong and random requests

    {records[-1]["command"]}

{markdown_table(head, rows)}

- *wrong*: malformed, oversized and poisoned bodies (`drills/serve_requests.py`), among them NaN, infinities, other
  types, unknown words, deep nesting, and 100 MB with and without a declared length, where {MAX_BYTES:,} bytes are
  allowed. Each must be refused with its own status and a sentence that names the fault.
- *random*: requests made from the service's own description (OpenAPI). Two of three are bodies to `/predict`: good
  ones, with odd values, or with damaged bytes. The others go to all pages with random methods, headers, bodies and
  tokens. An answer is unexpected if the description does not list its status, or if a refusal is no sentence.
- *closed*: the service closed the connection while a body far beyond the limit was still on its way.
- The first memory is that after a warm-up with requests of the same kind.
{chr(10).join(f"- Code: {digest}. Machine: {name}." for digest, name in made)}
"""


def _of_class(record: dict[str, Any], digit: str) -> int:
    return sum(count for status, count in record["statuses"].items() if status[0] == digit)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"
