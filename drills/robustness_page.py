"""This module writes the page of the drills with malicious sites and dropouts, and holds the constants of both."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedabml.files.sheets import markdown_table

from .pages import wrapped

ALGORITHMS = ("fedavg", "fedabml")
RULES = ("mean", "trimmed-mean", "median", "krum", "mean with norm bound")
ATTACKS = {"flips signs, times 10": -10.0, "scales, times 10": 10.0}
FALSE = (0, 1, 2, 3)  # of SITES
SITES, ROUNDS = 10, 20
NORM_FACTOR, TRIM = 3.0, 0.3
MANY, LONG = 100, 100  # sites and rounds of the drill with dropouts
SHARES = (0.0, 0.1, 0.3, 0.5)
LEAST, TIMEOUT = 25, 60.0  # valid replies that a round of the dropouts needs, and how long it waits
Line = dict[str, Any]
_DRILLS = {"malicious": "false sites", "deployed": "between real processes", "dropouts": "sites that drop out"}
_EARLIER = {"5b20a21a41": "; its norm bound knew the median of the distances from the coordinatewise median alone"}
_NAMES = ("drill", "algorithm", "rule", "attack", "false", "sites", "share", "seed", "rounds")


def key(line: Line) -> str:
    """Return what identifies a result."""
    return json.dumps([line.get(name) for name in _NAMES])


def read(path: Path) -> list[Line]:
    """Return the records in a file, without a last line that a kill has cut short."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"A line of {path.name} is cut short and left out.")
    return lines


def page(path: Path) -> Path:
    """Write the page of the records in a file, and return the page's path."""
    usual = {"malicious": ROUNDS, "deployed": ROUNDS, "dropouts": LONG}
    lines = [line for line in read(path) if line["rounds"] == usual[line["drill"]]]
    cells: dict[tuple[Any, ...], dict[int, Line]] = {}  # the lines of a cell by seed
    for line in (line for line in lines if line["drill"] == "malicious"):
        cells.setdefault(tuple(line[n] for n in _NAMES[1:5]), {})[line["seed"]] = line
    columns = [("none", 0), *((attack, n) for attack in ATTACKS for n in FALSE if n)]
    names = [f"{n} {attack}" for attack, n in columns[1:]]
    parts = [_HEAD]
    for algorithm in ALGORITHMS:
        found = {rule: [cells.get((algorithm, rule, *column), {}) for column in columns] for rule in RULES}
        found = {rule: row for rule, row in found.items() if row[0]}
        if found:
            rows = [
                [rule, *(f"{_mean(_accuracies(cell))}{_ended(cell)}" for cell in row)] for rule, row in found.items()
            ]
            parts += [f"### {algorithm}, accuracy in %", markdown_table(["rule", "all honest", *names], rows)]
            rows = [[rule, *(_mean(_losses(row[0], cell)) for cell in row[1:])] for rule, row in found.items()]
            parts += [f"### {algorithm}, accuracy lost in points", markdown_table(["rule", *names], rows)]
    if not cells:
        parts.append("There are no records of false sites yet.")
    newest = {key(line): line for line in lines if line["drill"] == "deployed"}
    if newest:
        header = ["rule", "false sites", "rounds", "the run", "accuracy in %"]
        header += ["θ is that within one process", "processes left"]
        rows = [
            [
                line["rule"], f"{line['false']} {line['attack']}", f"{line['rounds done']} of {line['rounds']}",
                line["ended"], f"{100 * line['accuracy']:.1f}", "yes" if line["equal"] else "NO",
                str(line["processes left"]),
            ]
            for line in newest.values()
        ]  # fmt: skip
        parts += [_DEPLOYED, markdown_table(header, rows)]
    table = [
        [
            f"{line['share']:.0%}", str(line["seed"]), f"{line['rounds done']} of {line['rounds']}",
            str(line["abandoned"]), "{least} / {median:g} / {most}".format(**line["valid"]), str(line["missing"]),
            str(line["waited"]),
            f"{100 * line['accuracy']:.1f}", "yes" if line["equal"] else "NO",
        ]
        for line in sorted((x for x in lines if x["drill"] == "dropouts"), key=lambda x: (x["share"], x["seed"]))
    ]  # fmt: skip
    if table:
        header = ["dropping out", "seed", "rounds ended", "abandoned", "valid: least / median / most", "missing"]
        header += ["seconds waited", "accuracy in %", "θ is the simulator's"]
        parts += [_DROPOUTS, markdown_table(header, table)]
    parts += [_origins(lines), f"The lines: [{path.name}]({path.name}).\n"]
    target = path.with_suffix(".md")
    target.write_text("\n\n".join(parts), encoding="utf-8")
    return target


def _origins(lines: Sequence[Line]) -> str:
    """Return a list of the code and the machine that computed the lines of each drill, with the number of lines."""
    names = ("drill", "code", "machine")
    counts = Counter(tuple(line.get(name, "not recorded") for name in names) for line in lines)
    drills: list[str] = [*_DRILLS]
    items: list[str] = []
    for (drill, code, machine), count in sorted(counts.items(), key=lambda item: (drills.index(item[0][0]), item)):
        number = f"{count} {'line' if count == 1 else 'lines'}"
        items.append(f"- {_DRILLS[drill]}: code {code} on {machine}, {number}{_EARLIER.get(code, '')}")
    return wrapped("\n".join(["The code and the machine of each part:", "", *items]))


def _accuracies(cell: dict[int, Line]) -> list[float]:
    return [line["accuracy"] for line in cell.values()]


def _losses(honest: dict[int, Line], cell: dict[int, Line]) -> list[float]:
    """Return for every seed how much accuracy is lost, compared with the same rule and seed without false sites."""
    return [honest[seed]["accuracy"] - line["accuracy"] for seed, line in cell.items() if seed in honest]


def _ended(cell: dict[int, Line]) -> str:
    """Return a remark if a federation gave up before its last round."""
    done = sorted(line.get("rounds done", line["rounds"]) for line in cell.values())
    early = [count for count, line in zip(done, cell.values(), strict=True) if count < line["rounds"]]
    return f" (ended after {', '.join(map(str, done))} rounds)" if early else ""


def _mean(values: Sequence[float]) -> str:
    """Return the mean in percent and, for several seeds, the standard deviation."""
    if not values:
        return ""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


_HEAD = f"""# False sites and sites that drop out

    python -m drills.robustness malicious --seeds 3
    python -m drills.robustness dropouts --seeds 1
    python -m drills.false_sites
    python -m drills.robustness page

The coordinator, the sites, their folders and all checks of replies are those of a deployment; the network is a function
call. The data are the embedded digits.

## False sites

{SITES} sites with different shares of the classes (Dirichlet, α = 1), {ROUNDS} rounds of 2 epochs, an MLP with 32
hidden units. A false site sends the state it received plus −10 or 10 times its change. Its replies are well-formed, so
the checks pass unless a value leaves its range. `trim` is {TRIM}. The norm bound (`norm_factor` = {NORM_FACTOR:g})
refuses a reply whose distance from the coordinatewise median of all is more than {NORM_FACTOR:g} times the median of
these distances or, if that is larger, of the distances of all replies from the state that they received.

The first table of an algorithm has the accuracy of the server's own model on all test rows, after the last round that
was done: mean and standard deviation over seeds. Where false sites had spoilt the state so far that honest ones could
no longer train, the federation gave up. Then the table has the number of rounds that were done, for every seed. The
second table has the accuracy that the false sites cost: the difference from the same rule and seed with honest sites
alone. A negative number is a gain."""
_DEPLOYED = """### Between real processes

The same federations with FedABML, seed 0 and three false sites, between processes on loopback: TLS, node authentication
and nginx. The state that the server has saved at the end is compared, bit by bit, with that of the drill above."""
_DROPOUTS = f"""## Sites that drop out

{MANY} sites, of which half are drawn for each of {LONG} rounds of SCAFFOLD. Each drawn site drops out with the given
probability: it is silent, or loses its connection until the next round. A round needs {LEAST} valid replies and waits
{TIMEOUT:g} s; with fewer it is abandoned and repeated from the state before it. The last column compares θ, bit by bit,
with the simulator, in which each round has the sites whose replies counted."""
