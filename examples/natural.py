"""Three tables with natural clients, nobody's tuning data: search on one half, read the other half once a release.

The tables come with mlmRev, a package of R. On any Debian machine, and with `pip install rdata` for the first command:

    apt-get download r-cran-mlmrev && dpkg -x r-cran-mlmrev_*.deb mlmrev
    python examples/natural.py tables mlmrev natural       # the CSV files natural/*.csv, their SHA-256 checked
    python examples/natural.py search natural runs/natural # 8 configurations per method, on first halves alone
    python examples/natural.py read natural                # trains on first halves, scores the test halves, once
    python examples/natural.py page                        # draws the tables of results/natural/README.md again

- chem97: 31,022 pupils of 131 English local authorities; which of six marks has the pupil in A-level chemistry?
- contraception: 1,922 women of 57 districts of Bangladesh; does she use contraception? Districts with fewer
  than 8 women are left out.
- hsb82: 7,185 pupils of 160 American schools; the mathematics achievement, a regression.

Half of every client's rows are its *test half*. results/natural/test_rows lists them: a line per client, its name and
the numbers of its test rows, counted from 0 among its own rows in the order of the package. They were drawn with seed
28. `tables` writes the halves to two files, NAME.first.csv and NAME.test.csv; only `read` opens the latter.

results/natural/reads.jsonl has one line for every release and table whose test half it has read: version, day, seeds,
scores, and the SHA-256 of settings and test rows. `read` refuses a version that has a line. `read --compare` trains
again with the settings of that line and compares: it writes nothing, and refuses settings that are not those of the
line. So no version chooses by these rows.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import logging
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression, Ridge

import fedabml
from fedabml.errors import InputError
from fedabml.evaluation.client_scores import classification_scores, regression_scores
from fedabml.evaluation.predictions import Prediction, Regression

HOME = Path(__file__).parents[1] / "results" / "natural"
DRAWN, SHARE, LEAST = 28, 0.5, 8  # the seed of the test rows, their share, and the rows of the smallest client
SEARCHED, SEEDS, TRIALS = (100, 101), (10, 11, 12, 13, 14), 8
PENALTIES = np.logspace(-1, 3, TRIALS)  # of the regressions by scikit-learn: as many as the others have configurations
LOCAL_LINES = ("# Made by", "# Use it", "# sha256")  # of tuned.toml: they name the folder of the search
TOLERANCE = 0.01  # between the scores of two machines
COMMON: dict[str, Any] = {"device": "cpu", "model_options": {"hidden": [16]}}
METHODS = {
    "fedabml": "FedABML",
    "fedabml-plain": "FedABML without label level",
    "fedavg-ft": "FedAvg + FT",
    "scaffold-ft": "SCAFFOLD + FT",
    "ditto": "Ditto",
    "perfedavg": "Per-FedAvg",
    "local": "Local only",
}
BASES = {
    "pooled": "regression on all rows",
    "intercepts": "regression on all rows, intercept per client",
    "base": "no features: base rate of all clients",
}
RESAMPLED = 10_000  # times, the clients, for an interval
Scores = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A table of the package, what it is called there, and the SHA-256 of both files."""

    source: str
    client: str
    target: str
    features: tuple[str, ...]
    kind: str
    first: str
    test: str
    options: dict[str, Any]  # of training
    grid: dict[str, Any] | None  # of the search's personal steps; None: the usual one, slow on larger tables

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures of the page, the main one first; the last has no interval."""
        return ("accuracy", "nll", "ece") if self.kind == "classification" else ("rmse", "nll", "coverage")

    @property
    def methods(self) -> list[str]:
        """The algorithms; a regression has no label level, so that FedABML without it is the same."""
        return [name for name in METHODS if self.kind == "classification" or name != "fedabml-plain"]


TASKS = {
    "chem97": Task(
        "Chem97", "lea", "score", ("gender", "age", "gcsescore"), "classification",
        "4bed8aefe8285d147c8e5e7afda0fb01401c3490a2e21bdd62cc4c4483a15e71",
        "c9f81f7533a73817d4309431fa11a8f13ead87134a66b71c0439891949a0f657",
        {"rounds": 60, "participation": 0.1, "epochs": 4, "batch_size": 200},
        {"personal_epochs": [1, 5, 20], "personal_lr": [0.1, 0.3]},
    ),
    "contraception": Task(
        "Contraception", "district", "use", ("livch", "age", "urban"), "classification",
        "40a95a3b0194eefc542f905a442caaa6961f67412f242cb0269ecd01d93167aa",
        "ae1df42955afd233503911cf97e9cfaa1247e49f841e1520073d9c2223bf3522",
        {"rounds": 60, "participation": 0.2}, None,
    ),
    "hsb82": Task(
        "Hsb82", "school", "mAch", ("minrty", "sx", "ses", "sector"), "regression",
        "37948071e56a6ffc36a8c95dac5ae4575ada75e63c995edf467bfc05e371c23d",
        "33d672dc32508c77c3a86d749d437b65a278572cdb72804f03479238c1a71fdb",
        {"rounds": 40, "participation": 0.1},
        {"personal_epochs": [0, 1, 5], "personal_lr": [0.01, 0.1]},
    ),
}  # fmt: skip


# -- the tables -------------------------------------------------------------------------------------------------------
def tables(package: Path) -> dict[str, pd.DataFrame]:
    """Return the package's tables by name, with the columns and clients that are used.

    `package` is the folder of `dpkg -x`. Its data lie in one file, each compressed by zlib behind four bytes of length;
    another file has their positions.
    """
    import rdata

    index = next(package.rglob("data/Rdata.rdx"), None)
    if index is None:
        raise InputError(f"{package} has no file data/Rdata.rdx. Give the folder that `dpkg -x` has written.")
    raw, found = index.with_suffix(".rdb").read_bytes(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdata has to guess the format of a file without a header
        positions = rdata.conversion.convert(rdata.parser.parse_data(index.read_bytes()))["variables"]
        for name, task in TASKS.items():
            begin, length = map(int, positions[task.source])
            frame = rdata.conversion.convert(rdata.parser.parse_data(zlib.decompress(raw[begin + 4 : begin + length])))
            frame = frame[[task.client, *task.features, task.target]].astype({task.client: int})
            frame = frame[frame.groupby(task.client)[task.client].transform("size") >= LEAST]
            if task.kind == "classification" and frame[task.target].dtype.kind == "f":
                frame = frame.astype({task.target: int})
            found[name] = frame.reset_index(drop=True)
    return found


def draw_test_rows(clients: pd.Series) -> dict[int, list[int]]:
    """Draw half of every client's rows: their numbers among the client's own rows, by client."""
    random = np.random.default_rng(DRAWN)
    sizes = clients.value_counts().sort_index()
    return {int(c): sorted(random.permutation(n)[: int(np.rint(SHARE * n))].tolist()) for c, n in sizes.items()}


def listed_test_rows(name: str) -> dict[int, list[int]]:
    """Read a table's test rows from the committed list."""
    lines = (HOME / "test_rows" / f"{name}.txt").read_text().splitlines()
    return {int(client): [int(row) for row in rows.split()] for client, rows in (line.split(":") for line in lines)}


def halves(frame: pd.DataFrame, client: str, rows: Mapping[int, Iterable[int]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Divide a table into the first half and the test half, whose rows are given by client."""
    chosen = {(c, row) for c, of_client in rows.items() for row in of_client}
    number = frame.groupby(client).cumcount()
    test = np.array([pair in chosen for pair in zip(frame[client], number, strict=True)])
    return frame[~test], frame[test]


def write_tables(package: Path, data: Path) -> None:
    """Write both halves of every table; refuse a package whose tables are others."""
    data.mkdir(parents=True, exist_ok=True)
    for name, frame in tables(package).items():
        task = TASKS[name]
        for part, half in zip(("first", "test"), halves(frame, task.client, listed_test_rows(name)), strict=True):
            half.to_csv(data / f"{name}.{part}.csv", index=False, lineterminator="\n")
            read_half(data, name, part)
        print(f"{name}: {len(frame):,} rows, {frame[task.client].nunique()} clients")


def read_half(data: Path, name: str, part: str) -> pd.DataFrame:
    """Read a half, "first" or "test", after a check of its SHA-256."""
    file = data / f"{name}.{part}.csv"
    if not file.exists():
        raise InputError(f"{file} is missing. `python examples/natural.py tables` writes it.")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != getattr(TASKS[name], part):
        raise InputError(f"{file} has the SHA-256 {digest}, which is not that of the table of this study.")
    return pd.read_csv(file)


def federation(name: str, first: pd.DataFrame, test: pd.DataFrame | None = None) -> fedabml.Federation:
    """Make the federation of a table; statistics of columns come from first halves alone."""
    task = TASKS[name]
    frame = pd.concat([first.assign(half=1), *([] if test is None else [test.assign(half=2)])], ignore_index=True)
    share = 0.0 if test is None else SHARE
    fed = fedabml.read_table(
        frame, client=task.client, target=task.target, task=task.kind, test_share=share, split_by="half"
    )
    assert (frame.half.to_numpy()[fed.test.index] == 2).all() and len(fed.train.index) == len(first)
    return fed


# -- the search -------------------------------------------------------------------------------------------------------
def search(data: Path, out: Path, names: Iterable[str]) -> None:
    """Give every method the same search on the first half, and write what it chose to results/natural/settings."""
    for name in names:
        task = TASKS[name]
        fed = federation(name, read_half(data, name, "first"))
        folder, file = out / name, HOME / "settings" / f"{name}.toml"
        tuned = fedabml.tune(
            fed, "mlp", task.methods, trials=TRIALS, seeds=SEARCHED, measure="nll", grid=task.grid, out=folder,
            progress=True, **COMMON, **task.options,
        )  # fmt: skip
        file.parent.mkdir(exist_ok=True)
        lines = (folder / "tuned.toml").read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not line.startswith(LOCAL_LINES)))
        print(name, tuned)


def choose_penalty(fed: fedabml.Federation, kind: str) -> float:
    """Return the penalty with the lowest NLL on the validation rows of the search; the base rate has none to choose."""
    if kind == "base":
        return 1.0

    def nll(penalty: float) -> float:
        held = [fed.hold_out(0.2, seed) for seed in SEARCHED]
        return float(np.mean([base_scores(each, kind, penalty, "val")[0]["nll"] for each in held]))

    return float(min(PENALTIES, key=nll))


def base_scores(fed: fedabml.Federation, kind: str, penalty: float, split: str = "test") -> tuple[Scores, Scores]:
    """Return the summary and the scores by client of a method that sees all clients' training rows at once.

    `kind` is "base" (label frequencies, or mean and deviation), "pooled" (features alone), or "intercepts" (and a
    column per client). Features are standardised; the penalty is on all coefficients alike.
    """
    rows, train = fed.rows(split), fed.train
    x, y = (fed.x - fed.x[train.index].mean(0)) / (fed.x[train.index].std(0) + 1e-9), fed.y

    def inputs(index: np.ndarray, owner: np.ndarray) -> np.ndarray:
        parts = {"base": [x[index] * 0], "pooled": [x[index]], "intercepts": [x[index], np.eye(fed.clients)[owner]]}
        return np.hstack(parts[kind])

    seen, asked = inputs(train.index, train.owner), inputs(rows.index, rows.owner)
    if fed.task == "classification":
        model = LogisticRegression(C=1 / penalty, max_iter=2000).fit(seen, y[train.index])
        probs = model.predict_proba(asked)
        found = classification_scores(Prediction(probs, np.zeros(len(probs))), y[rows.index], rows.owner, fed.clients)
    else:
        model = Ridge(alpha=penalty).fit(seen, y[train.index])
        mean = model.predict(asked).reshape(-1, 1)
        std = np.full_like(mean, np.sqrt(np.mean((model.predict(seen).reshape(-1, 1) - y[train.index]) ** 2)))
        p = Regression(mean, std, std * 0, np.concatenate([mean, std], 1)[None])
        found = regression_scores(p, y[rows.index], rows.owner, fed.clients)
    by_client, pooled, _ = found
    return {key: float(values.mean()) for key, values in by_client.items()} | pooled, by_client


# -- the reading ------------------------------------------------------------------------------------------------------
def basis(name: str) -> str:
    """Return the SHA-256 of a table's chosen settings and list of test rows: what a reading rests on."""
    files = (HOME / "settings" / f"{name}.toml", HOME / "test_rows" / f"{name}.txt")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def read(data: Path, name: str, compare: bool) -> None:
    """Score a table's test half and note it in the ledger; or, with `compare`, compare with what the ledger has."""
    version, line = fedabml.__version__, noted(fedabml.__version__, name)
    if line and not compare:
        raise InputError(
            f"fedabml {version} has read the test half of {name} on {line['day']}. Settings are not chosen by these "
            "rows: the next release reads them again. --compare trains with the settings of that reading and compares."
        )
    if compare and not line:
        raise InputError(f"fedabml {version} has not read the test half of {name}: there is nothing to compare with.")
    if line and line["basis"] != basis(name):
        raise InputError(f"Settings or test rows of {name} are not those with which fedabml {version} read them.")
    records = measure(name, read_half(data, name, "first"), read_half(data, name, "test"))
    scores = {record["method"]: record["scores"] for record in records}
    if line:
        gaps = {row: max(abs(scores[row][m] - v) for m, v in of_row.items()) for row, of_row in line["scores"].items()}
        worst = max(gaps, key=lambda row: gaps[row])
        print(f"{name}: largest difference to the reading of {line['day']} is {gaps[worst]:.2g}, of {worst}")
        if gaps[worst] > TOLERANCE:
            raise SystemExit(f"{name}: more than {TOLERANCE}, so this is not the same reading")
        return
    facts = {"version": version, "table": name, "day": str(datetime.date.today()), "seeds": SEEDS}
    with (HOME / "reads.jsonl").open("a") as ledger:
        ledger.write(json.dumps(facts | {"basis": basis(name), "scores": scores}) + "\n")
    (HOME / "records").mkdir(exist_ok=True)
    (HOME / "records" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def noted(version: str, name: str) -> Scores | None:
    """Return the ledger's line of a version and table, None if that version has not read its test half."""
    file = HOME / "reads.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((line for line in lines if (line["version"], line["table"]) == (version, name)), None)


def measure(name: str, first: pd.DataFrame, test: pd.DataFrame) -> list[Scores]:
    """Train every method on a table's first half with every seed, and return its scores on the test half.

    A record has the means over seeds, also by client, and the lowest and highest value of any seed.
    """
    task, searched, fed = TASKS[name], federation(name, first), federation(name, first, test)
    comparison = fedabml.compare(
        fed, "mlp", task.methods, seeds=SEEDS, config=HOME / "settings" / f"{name}.toml", device="cpu"
    )
    found: dict[str, list[tuple[Scores, Scores]]] = {}
    for method in task.methods:
        results = comparison.finished(method)
        if len(results) < len(SEEDS):
            logging.warning("%s: %s diverged with %d seeds", name, method, len(SEEDS) - len(results))
        found[method] = [(result.scores[0].summary, result.scores[0].clients) for result in results.values()]
    for kind in BASES:
        found[kind] = [base_scores(fed, kind, choose_penalty(searched, kind))]
    records = []
    for method, runs in found.items():
        record = {"table": name, "method": method, "runs": len(runs), "scores": {}, "range": {}, "clients": {}}
        for key in task.measures:
            values = [float(summary[key]) for summary, _ in runs]
            record["scores"][key] = round(float(np.mean(values)), 5)
            record["range"][key] = [round(min(values), 5), round(max(values), 5)]
            if key not in ("ece", "coverage"):  # of few rows they say little
                record["clients"][key] = np.mean([by_client[key] for _, by_client in runs], 0).round(4).tolist()
        records.append(record)
    return records


# -- the page ---------------------------------------------------------------------------------------------------------
def lead(a: Iterable[float], b: Iterable[float]) -> tuple[float, float, float]:
    """Return the mean of a − b over clients, and the ends of its 95% interval by the bootstrap over clients."""
    gap = np.asarray(list(a)) - np.asarray(list(b))
    random = np.random.default_rng(DRAWN)
    means = gap[random.integers(0, len(gap), (RESAMPLED, len(gap)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(gap.mean()), float(low), float(high)


def page_tables() -> str:
    """Return the tables of the page, drawn from what `read` has recorded."""
    parts = []
    for name, task in TASKS.items():
        file = HOME / "records" / f"{name}.jsonl"
        if not file.exists():
            continue
        own = {record["method"]: record for record in map(json.loads, file.read_text().splitlines())}
        main, nll, last = task.measures
        best = {m: (max if m == "accuracy" else min)(r["scores"][m] for r in own.values()) for m in (main, nll)}
        factor = 100 if main == "accuracy" else 1

        def cell(record: Scores, key: str, factor: float = 1, best: Mapping[str, float] = best) -> str:
            value = record["scores"][key]
            text = f"{factor * value:.{2 if factor > 1 else 3}f}"
            return f"**{text}**" if best.get(key) == value else text

        def gap(record: Scores, key: str, factor: float = 1, own: Mapping[str, Scores] = own) -> str:
            if record["method"] == "fedabml":
                return ""
            sides = (record["clients"][key], own["fedabml"]["clients"][key])
            middle, low, high = (factor * v for v in lead(*sides))
            digits = 2 if factor > 1 else 4
            return f"{middle:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-", "−")

        heading = {"accuracy": "accuracy", "rmse": "RMSE", "nll": "NLL", "ece": "ECE", "coverage": "coverage of 90%"}
        lines = [
            f"### {name}: {len(own['fedabml']['clients'][nll])} clients",
            "",
            f"| method | {heading[main]} | difference to FedABML | NLL | difference to FedABML | {heading[last]} |",
            "|---|---|---|---|---|---|",
        ]
        for method, record in own.items():
            lines.append(
                f"| {(METHODS | BASES)[method]} | {cell(record, main, factor)} | {gap(record, main, factor)} "
                f"| {cell(record, nll)} | {gap(record, nll)} | {cell(record, last)} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def draw_page() -> None:
    """Write the tables into the page, between its head and its notes."""
    page = HOME / "README.md"
    head, rest = page.read_text().split("\n### ", 1)
    page.write_text(f"{head}\n{page_tables()}\n\n## Notes{rest.split('## Notes', 1)[1]}")


def main() -> None:
    """Read the arguments and do what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    folders = {"tables": ["package", "data"], "search": ["data", "out"], "read": ["data"], "page": []}
    for command, names in folders.items():
        sub = commands.add_parser(command)
        for folder in names:
            sub.add_argument(folder, type=Path)
        if command in ("search", "read"):
            sub.add_argument("--tables", default=",".join(TASKS), help="names, separated by commas")
        if command == "read":
            sub.add_argument("--compare", action="store_true", help="train again and compare with the ledger's line")
    options = parser.parse_args()
    try:
        if options.command == "tables":
            write_tables(options.package, options.data)
        elif options.command == "search":
            search(options.data, options.out, options.tables.split(","))
        elif options.command == "read":
            for name in options.tables.split(","):
                read(options.data, name, options.compare)
        else:
            draw_page()
    except InputError as error:
        raise SystemExit(f"natural: {error}") from None


if __name__ == "__main__":
    main()
