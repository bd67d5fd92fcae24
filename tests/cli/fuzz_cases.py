"""The cases of `tests.cli.fuzz`: good files, strange words for every flag, and strange content for every file."""

# ruff: noqa: E501  lists of strange words
from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer.main
from safetensors.torch import load_file, save, save_file

from fedabml.cli import app
from tests.cli.fuzz import TINY, run

DEEP = "[" * 5000 + "]" * 5000
DIGITS = "9" * 10_000
TABLE = ["--client-column", "site", "--target-column", "y"]
COMPARE = ["--algorithms", "fedavg,local", "--seeds", "1", *TINY]
TUNE = ["--algorithms", "fedavg-ft", "--trials", "1", "--batch", "1", *TINY, "--set", "fedavg-ft.personal_epochs=1"]


def prepare(good: Path) -> None:
    """Makes good files of every kind that a command reads, by the commands themselves."""
    good.mkdir()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (40, 8, 8), dtype=np.uint8), rng.integers(0, 10, 40)
    np.savez(good / "client.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    np.savez_compressed(good / "inputs.npz", x=x[:9])
    (good / "clients").mkdir()
    for name in ("a", "b", "c"):
        np.savez(good / "clients" / f"{name}.npz", x=rng.normal(size=(20, 3)).astype("f4"), y=rng.integers(0, 3, 20))
    n = 60
    table = pd.DataFrame({"site": rng.choice(list("abc"), n), "age": rng.normal(50, 9, n).round(1)})
    table["sex"], table["y"] = rng.choice(["f", "m"], n), rng.choice(["yes", "no"], n)
    table.to_csv(good / "table.csv", index=False)
    table.to_parquet(good / "table.parquet", index=False)
    (good / "data").mkdir()
    image, label = rng.integers(0, 255, (60, 28, 28), dtype=np.uint8), rng.integers(0, 10, 60, dtype=np.uint8)
    np.savez(good / "data/mnist.npz", x_train=image, y_train=label, x_test=image[:20], y_test=label[:20])
    (good / "config.toml").write_text(
        'clients = 4\nclasses_per_client = 5\nmodel = "mlp"\nrounds = 1\nepochs = 1\nparticipation = 0.5\n'
        "[model_options]\nhidden = [8]\n[fedabml]\nlr = 0.1\n[personalize]\nepochs = 1\n"
    )
    for words in (
        ["train", *TINY, "--eval-every", "1", "--out", "run"],
        ["train", *TINY, "--algorithm", "local", "--out", "keeps"],
        ["train", "--data", "table.csv", *TABLE, "--model", "mlr", "--rounds", "1", "--epochs", "1", "--out", "tabled"],
        ["personalize", "run", "--data", "client.npz", "--epochs", "1"],
        ["personalize", "tabled", "--data", "one.csv", "--epochs", "1", "--out", "tabled.safetensors"],
        ["compare", *COMPARE, "--eval-every", "1", "--out", "comparison"],
        ["tune", *TUNE, "--out", "tuning"],
        ["train", "--config", "config.toml", "--dry-run"],
    ):
        table[table.site == "a"].to_csv(good / "one.csv", index=False)
        found = run(words, good)
        if found.fault or found.code:
            raise RuntimeError(f"{words}: {found.output}")
    weights = {f"1.{name}": t for name, t in torch.nn.Linear(64, 10).state_dict().items()}
    save_file(weights, good / "pretrained.safetensors")
    (good / "output.txt").unlink()


# -- words ----------------------------------------------------------------------------------------------------------
WHOLE = ["0", "-1", "1", "2", "-9223372036854775809", "18446744073709551616", "1" + "0" * 30, DIGITS, "nan", "", "1e3"]
WHOLE += ["0x10", "١", " 5", "1_0", "--", "None", "1.5", "true"]
LARGE = ["2147483648", "9223372036854775807", "1000000000"]  # of flags that do not say how long to work
REAL = ["nan", "inf", "-inf", "1e400", "-1", "0", "1e-400", "1", "0.5", "1e308", "-0.0", DIGITS[:400], "", "x", "0,5"]
TEXT = [
    "",
    "x",
    "none",
    "auto",
    "é\u2028😀",
    "\udcff\udcfe",
    "a" * 5000,
    "[bold]",
    "%s{}",
    "\n",
    DEEP,
    "--",
    "-",
    "a,b",
]
PATHS = ["none", "fifo", "loop", "/dev/zero", "/dev/urandom", "/dev/null", ".", "", "-", "~nobody-here/x", "a" * 300]
PATHS += [
    "bad\udcff.npz",
    "run",
    "run/config.json",
    "client.npz",
    "table.csv",
    "table.parquet",
    "posterior.safetensors",
]
PATHS += [
    "run/shared.safetensors",
    "config.toml",
    "comparison/cells.jsonl",
    "clients",
    "x" * 100 + "/" * 5000,
    "folder",
]
SETS = ["rounds", "=", "a.b.c=1", "rounds=" + DEEP, "rounds=" + DIGITS, "fedabml.lr=" + DIGITS, "fedabml.lr=nan", "x=1"]
SETS += ["model_options.hidden=" + DEEP, "model_options.hidden=[1000000000000]", "model_options.hidden=[200000,200000]"]
SETS += ["model_options.hidden=[-1]", "model_options.hidden=[0]", "model_options.hidden=x", "model_options.a=1"]
SETS += ["fedabml=1", 'data="a\\u0000b"', "seed=1979-05-27", "rounds={a=1}", "fedabml.lam=inf", "lr=[1]", "\udcff=1"]
SETS += ["dataset=\udcff", "model_options.hidden=[8]", "a" + ".a" * 3000 + "=1", "fedabml.predict_samples=1000000000"]
SETS += ["fedabml.personal_epochs=18446744073709551616", "fedabml.samples=18446744073709551616", "clients=1e3"]
LONG = {"rounds", "epochs", "trials", "clients", "samples"}  # flags for which a large number is a long wait, no mistake
BASES = {
    "train": [*TINY, "--out", "new"],
    "compare": [*COMPARE, "--out", "new"],
    "tune": [*TUNE, "--out", "new"],
    "doctor": [*TINY, "--no-estimate"],
    "evaluate": ["run"],
    "personalize": ["run", "--data", "client.npz", "--out", "new.safetensors"],
    "predict": ["posterior.safetensors", "--data", "inputs.npz", "--out", "new.csv"],
    "report": ["run", "--out", "new.html"],
    "algorithms": [],
    "data list": [],
    "data get": ["digits"],
    "data inspect": ["digits", "--clients", "4"],
    "reproduce": ["toy", "--quick", "--columns", "none"],  # refused always: a whole experiment takes minutes
    "bench": ["--quick", "--models", "none"],
    "demo": ["--out", "run"],
}


def words(rng: random.Random, good: Path, folder: Path) -> list[str]:
    """A command line: a good one with strange flags, or strange arguments, or words in another order."""
    lay_out(good, folder)
    name = rng.choice([*BASES, *["train", "evaluate", "personalize", "predict", "data inspect", "report"] * 2])
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    base = list(BASES[name])
    flags = [p for p in command.params if (p.opts + p.secondary_opts)[0].startswith("-")]
    if name in ("demo", "bench", "reproduce"):
        flags = [p for p in flags if p.name not in ("out", "models", "columns", "so_far")]
    for flag in rng.sample(flags, min(len(flags), rng.choice([1, 1, 2, 3]))):
        option = rng.choice([*flag.opts, *flag.secondary_opts])
        base += [option.strip()] if getattr(flag, "is_flag", False) else [option, strange(rng, flag)]
    if rng.random() < 0.25 and base and name not in ("demo", "bench", "reproduce"):
        place = rng.randrange(len(base))
        if not base[place].startswith("--") and (place == 0 or base[place - 1] not in ("--rounds", "--epochs")):
            base[place] = rng.choice([*PATHS, *TEXT, *WHOLE])
    if rng.random() < 0.05:
        base.pop(rng.randrange(len(base))) if base and name not in ("demo", "bench", "reproduce") else None
    return [*name.split(), *base]


def strange(rng: random.Random, flag: Any) -> str:
    """A strange value for a flag, be it of its kind or not."""
    described = getattr(flag, "type_descriptor", None)  # of newer versions of typer
    kind, name = str(described.annotation if described else flag.type).lower(), str(flag.name)
    if name == "set":
        return rng.choice(SETS)
    if rng.random() < 0.1:
        return rng.choice([*TEXT, *PATHS, *WHOLE])
    if name == "config" and rng.random() < 0.5:  # most others end the command before its other flags are looked at
        return "config.toml"
    if "int" in kind:
        return rng.choice(WHOLE if name in LONG else [*WHOLE, *LARGE])
    if "float" in kind:
        return rng.choice(REAL)
    if "path" in kind or name in ("data", "pretrained", "data_dir"):
        return rng.choice(PATHS)
    if name in ("seeds", "part", "grid"):
        return rng.choice(
            ["10000000000", "1,1", "-1", "1/0", "2/1", DIGITS, f"{DIGITS}/{DIGITS}", "lr=", "lr=nan", "=,"]
        )
    return rng.choice(
        [*TEXT, "digits", "mnist", "vmap", "loop", "float64", "bf16", "mlp", "cnn", "all", "fedavg", "paper"]
    )


def lay_out(good: Path, folder: Path) -> None:
    """Copies the good files, and adds what is no file."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    (folder / "clients" / os.fsdecode(b"\xff\xfe.npz")).write_bytes((folder / "clients/a.npz").read_bytes())


# -- files ----------------------------------------------------------------------------------------------------------
RESUME = ["train", "--resume", "--out", "run", "--rounds", "2"]
USES: dict[str, list[list[str]]] = {
    "run/config.json": [["evaluate", "run"], ["report", "run"], ["data", "inspect", "run"], RESUME],
    "run/metrics.jsonl": [["report", "run"], RESUME],
    "run/summary.json": [["report", "run"], ["report", "run", "keeps", "--out", "new.html"]],
    "run/clients.csv": [["report", "run"]],
    "run/manifest.json": [["report", "run"]],
    "run/train.log": [RESUME],
    "run/shared.safetensors": [["personalize", "run", "--data", "client.npz", "--force"], ["evaluate", "run"], ["report", "run"]],
    "run/checkpoints/round-000001.safetensors": [RESUME, ["evaluate", "run"]],
    "keeps/checkpoints/kept-000001.safetensors": [["evaluate", "keeps"], ["train", "--resume", "--out", "keeps"]],
    "tabled/shared.safetensors": [["personalize", "tabled", "--data", "one.csv", "--force"]],
    "posterior.safetensors": [["predict", "posterior.safetensors", "--data", "inputs.npz"]],
    "tabled.safetensors": [["predict", "tabled.safetensors", "--data", "one.csv"]],
    "client.npz": [["personalize", "run", "--data", "client.npz", "--force"], ["predict", "posterior.safetensors", "--data", "client.npz"]],
    "inputs.npz": [["predict", "posterior.safetensors", "--data", "inputs.npz"]],
    "clients/a.npz": [["data", "inspect", "clients"], ["train", "--data", "clients", *TINY[4:], "--out", "new"]],
    "data/mnist.npz": [["data", "inspect", "mnist", "--data-dir", "data", "--clients", "2"]],
    "table.csv": [["data", "inspect", "table.csv", *TABLE], ["train", "--data", "table.csv", *TABLE, *TINY[4:], "--out", "new"]],
    "one.csv": [["predict", "tabled.safetensors", "--data", "one.csv"], ["personalize", "tabled", "--data", "one.csv", "--force"]],
    "table.parquet": [["data", "inspect", "table.parquet", *TABLE]] * 2,
    "config.toml": [["train", "--config", "config.toml", "--out", "new"], ["personalize", "run", "--data", "client.npz", "--force", "--config", "config.toml"]],
    "pretrained.safetensors": [["train", *TINY, "--pretrained", "pretrained.safetensors", "--out", "new"]],
    "comparison/comparison.json": [["report", "comparison"], ["compare", "--resume", "--out", "comparison"]],
    "comparison/cells.jsonl": [["report", "comparison"], ["compare", *COMPARE, "--finished", "comparison/cells.jsonl", "--out", "new"]],
    "comparison/table.json": [["report", "comparison"]],
    "comparison/manifest-0.json": [["report", "comparison"]],
    "tuning/tune.json": [["tune", "--resume", "--out", "tuning"]],
    "tuning/cells.jsonl": [["tune", "--resume", "--out", "tuning"]],
    "tuning/tuned.toml": [["compare", *COMPARE[2:], "--algorithms", "fedavg-ft", "--config", "tuning/tuned.toml", "--out", "new"]],
    "cache/backends.json": [["train", "--config", "config.toml", "--out", "new"]],
}  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    10**9,
    2**63,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\udcff",
    [],
    {},
]
VALUES += [[[]] * 3, {"a": 1}, "9" * 5000, [1, "x"], [[1, 2], [3]], -(2**70), "none", 1e308]


def files(rng: random.Random, good: Path, folder: Path) -> list[str]:
    """A command that reads a file, and in its place one that is malformed."""
    lay_out(good, folder)
    name = rng.choice([*USES])
    path = folder / name
    if path.suffix == ".json" and name.startswith("cache"):
        path.parent.mkdir(exist_ok=True)
        key = {"0123456789abcdef vmap|loop": ["vmap", 1, False]}
        path.write_text(json.dumps((next(iter(good.glob("cache/backends.json")), None) and {}) or key))
    own = {".json": spoil_json, ".jsonl": spoil_lines, ".toml": spoil_text, ".csv": spoil_text, ".svg": spoil_text}
    own |= {".npz": spoil_npz, ".safetensors": spoil_tensors, ".parquet": spoil_bytes, ".log": spoil_bytes}
    spoil: Callable[[random.Random, Path], None] = own[path.suffix]
    (rng.choices([spoil, spoil_bytes, replace], [6, 3, 2])[0])(rng, path)
    return list(rng.choice(USES[name]))


def replace(rng: random.Random, path: Path) -> None:
    """Puts something in the file's place that is none, or one of another kind."""
    content = path.read_bytes()
    path.unlink()
    kind = rng.randrange(9)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(path.name)
    elif kind == 2:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/urandom", "/dev/null"]))
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.write_bytes(rng.randbytes(rng.choice([0, 1, 100, 100_000])))
    elif kind == 5:
        path.write_bytes(b"\0" * 10_000_000)
    elif kind == 6:
        path.write_text(rng.choice([DEEP, DIGITS, "[]," * 5_000_000, '{"a":' * 3000, "a" + ".a" * 20000 + " = 1\n"]))
    elif kind == 7:
        other = rng.choice([p for p in path.parent.iterdir() if p.is_file()] or [Path(__file__)])
        path.write_bytes(other.read_bytes())
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:  # as a workbook, or a pickled model
            archive.writestr("xl/workbook.xml", content)


def spoil_bytes(rng: random.Random, path: Path) -> None:
    """Flips bits, cuts, doubles or splices."""
    content = bytearray(path.read_bytes())
    kind = rng.randrange(5)
    if kind < 2 or not content:
        for _ in range(rng.choice([1, 1, 3, 20])):
            if content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del content[rng.randrange(len(content)) :]
    elif kind == 3:
        start = rng.randrange(len(content))
        content[start : start + rng.randrange(1, 50)] = rng.randbytes(rng.randrange(50))
    else:
        start = rng.randrange(len(content))
        content[start:start] = content[rng.randrange(len(content)) :]
    path.write_bytes(content)


def spoil_text(rng: random.Random, path: Path) -> None:
    """Puts strange words into cells, values and lines."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    cells = lines[number].rstrip("\n").split("," if path.suffix == ".csv" else "=")
    odd = [
        DIGITS,
        "1" * 300,
        "nan",
        "inf",
        "",
        "=cmd",
        "é😀",
        "\x00",
        '"',
        "1e400",
        DEEP,
        "0x" + "f" * 5000,
        ",,,",
        "9999999999999999999",
    ]
    cells[rng.randrange(len(cells))] = rng.choice(odd)
    lines[number] = ("," if path.suffix == ".csv" else "=").join(cells) + "\n"
    kind = rng.randrange(8)
    if kind == 0:
        rng.shuffle(lines)
    elif kind == 1:
        lines += lines[-1:] * 1000
    elif kind == 2:
        lines.insert(
            0, rng.choice(["a" + ",a" * 100_000 + "\n", "[" + "a." * 5000 + "a]\n", "\n", "#" * 100_000 + "\n"])
        )
    elif kind == 3:
        lines[number] = lines[number].rstrip("\n") + ",1" * rng.choice([1, 2, 20_000]) + "\n"
    made = "".join(lines)
    path.write_bytes(made.encode(rng.choice(["utf-8"] * 6 + ["utf-16", "utf-8-sig", "utf-32"])))


def spoil_value(rng: random.Random, value: Any) -> Any:
    """Changes, removes or nests a random part of JSON."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if rng.random() < 0.2:
            del value[key]
        else:
            value[key] = spoil_value(rng, value[key])
        return value
    return rng.choice(VALUES)


def _unsealed(content: Any) -> Any:
    return {k: v for k, v in content.items() if k not in ("sealed", "sha256")} if isinstance(content, dict) else content


def spoil_json(rng: random.Random, path: Path) -> None:
    """Changes parts of JSON, without the digest, which would else be all that is tested."""
    content = _unsealed(json.loads(path.read_text()))
    for _ in range(rng.choice([1, 1, 2, 5])):
        content = spoil_value(rng, content)
    text = json.dumps(content)
    if rng.random() < 0.1:
        text = text.replace("1", rng.choice([DEEP, DIGITS]), 1)
    path.write_text(text)


def spoil_lines(rng: random.Random, path: Path) -> None:
    """Changes a line of JSON lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    for name in ("identity",):
        if isinstance(content, dict) and name in content and rng.random() < 0.2:
            content[name] = json.dumps(spoil_value(rng, json.loads(content[name])))
    content = spoil_value(rng, content)
    end = rng.choice([b"\n", b"\n", b"", b"\xff\n", b"\n" + DEEP.encode() + b"\n", b"\x00\n"])
    lines[number] = json.dumps(content).encode() + end
    path.write_bytes(b"".join(lines))


def spoil_tensors(rng: random.Random, path: Path) -> None:
    """Changes tensors and facts of a file, which is sound otherwise and has no digest."""
    tensors = load_file(path)
    raw = path.read_bytes()
    facts = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]).get("__metadata__", {})
    inner = _unsealed(json.loads(facts["fedabml"])) if "fedabml" in facts else {}
    if rng.random() < 0.5:
        inner = spoil_value(rng, inner)
    else:
        name = rng.choice(list(tensors))
        value = tensors[name]
        kinds = [torch.int64, torch.bool, torch.float16, torch.float64, torch.bfloat16, torch.uint8, torch.complex64]
        tensors[name] = rng.choice([
            lambda: value.to(rng.choice(kinds)), lambda: value * float("nan"), lambda: value.reshape(-1)[:-1].clone(),
            lambda: value.unsqueeze(0).clone(), lambda: value * 1e38, lambda: torch.zeros(0), lambda: torch.zeros(()),
        ])()  # fmt: skip
        if rng.random() < 0.2:
            tensors[rng.choice(["q.more", "x", "shared.mean", "constant.x"])] = torch.zeros(3)
        if rng.random() < 0.2:
            tensors.pop(name)
    tensors = tensors or {"x": torch.zeros(1)}
    path.write_bytes(
        save(tensors, {"fedabml": rng.choice([json.dumps(inner)] * 20 + [DEEP, DIGITS])} if facts else None)
    )


def spoil_npz(rng: random.Random, path: Path) -> None:
    """Changes arrays, headers or the archive around them."""
    with np.load(path) as archive:
        arrays = dict(archive)
    name = rng.choice(list(arrays))
    kind = rng.randrange(6)
    if kind < 2:
        kinds = ["f2", "f8", "c8", "U3", "S3", "M8[s]", "?", "i8", "V4", "u8", "i1", "m8[s]"]
        arrays[name] = rng.choice([
            lambda a: a.astype("S8").astype("V4") if rng.random() < 0.1 else _cast(a, rng.choice(kinds)),
            lambda a: a[:0], lambda a: a[:1], lambda a: a.reshape(-1), lambda a: a[..., None], lambda a: np.array(5),
            lambda a: np.full(a.shape, np.nan), lambda a: np.full(a.shape, 1e300), lambda a: np.full(a.shape, -1),
            lambda a: np.full(a.shape, 2**62), lambda a: np.zeros((len(a), 0)), lambda a: a.astype(object),
            lambda a: np.zeros(a.shape, [("a", "i4")]), lambda a: np.zeros((10**6, 0)), lambda a: np.zeros((0, 10**12)),
        ])(arrays[name])  # fmt: skip
        if rng.random() < 0.2:
            arrays["more"] = np.zeros(3)
        if rng.random() < 0.2:
            arrays.pop(name)
        np.savez(path, **arrays)
        return
    made = io.BytesIO()
    np.lib.format.write_array(made, np.ascontiguousarray(arrays[name]))
    content = made.getvalue()
    method = zipfile.ZIP_STORED
    if kind == 2:  # a header that declares something else
        shape = rng.choice(
            ["(1000000000,)", "(10,10,10)", "(-1,)", "(" * 300 + ")" * 300, "9" * 5000, "'x'", "(2**62,)", "(1e9,)"]
        )
        dtype = rng.choice(["'<f8'", "'|O'", "'<U1000000000'", "'|V0'", "[('a','<i4')]", "3", "'" + "f" * 100, "None"])
        head = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
        head = rng.choice([head, head[:-3], b"\xff" + head, head.replace(b"shape", b"ape")])
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + content[128:]
    elif kind == 3:  # a bomb
        head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (300000000,), }".ljust(117) + b"\n"
        content, method = (
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(300_000_000),
            zipfile.ZIP_DEFLATED,
        )
    elif kind == 4:
        method = rng.choice([zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(rng.choice([f"{name}.npy"] * 5 + [name, "../x.npy", "é.npy"]), content)
        for other in arrays.keys() - {name}:
            rest = io.BytesIO()
            np.lib.format.write_array(rest, arrays[other])
            archive.writestr(f"{other}.npy", rest.getvalue())
    if kind == 5:
        raw = bytearray(path.read_bytes())
        for mark, place in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):  # encrypted, it says
            raw[raw.index(mark) + place] |= 1
        path.write_bytes(raw)


def _cast(array: np.ndarray, kind: str) -> np.ndarray:
    try:
        return array.astype(kind)
    except (TypeError, ValueError):
        return np.zeros(array.shape, kind)
