"""The documentation is true: its code runs, its tables agree with the code, its links and commands exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer

import fedabml
from fedabml.algorithms import REGISTRY, Algorithm, Entry
from fedabml.algorithms.base import Phase
from fedabml.cli import app
from fedabml.runs.config import RunConfig, names, parse_set, without_commands
from fedabml.runs.summary import SUMMARY_KEYS
from tests.algorithms import test_protocol as protocol
from tests.tiers import nightly_but

pytestmark = pytest.mark.slow  # in all; `make quick` has the rest of the suite

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs/algorithms/README.md"
TUTORIAL = ROOT / "docs/add-your-own-algorithm.md"
PAGES = sorted(set(INDEX.parent.glob("*.md")) - {INDEX})
DOCS = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", *sorted((ROOT / "results").rglob("*.md")), *DOCS]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
by_path = lambda path: str(path.relative_to(ROOT)) if isinstance(path, Path) else None


def blocks(path, *languages):
    """The fenced blocks of some languages."""
    return [text for language, text in FENCED.findall(path.read_text()) if language in languages]


def prose(path):
    """What stands outside of fenced blocks."""
    return FENCED.sub("", path.read_text())


def table(path, *head):
    """The rows of the first table with this head."""
    lines = prose(path).splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip().strip("|").split("|")]
    start = next((i for i, line in enumerate(lines) if line.startswith("|") and cells(line) == list(head)), None)
    rows = []
    for line in lines[start + 2 :] if start is not None else []:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows


# -- lines ----------------------------------------------------------------------------------------------------------
WRAPPED = [*(ROOT / name for name in ("README.md", "results/README.md", "results/speed/README.md")), *DOCS]


@pytest.mark.parametrize("path", WRAPPED, ids=by_path)
def test_no_line_of_prose_is_long(path):
    """Outside of blocks and tables a line has at most 120 characters; a link's address does not count."""
    lines = [line for line in prose(path).splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(re.sub(r"\]\([^)]*\)", "]", line)) > 120] == []


# -- an algorithm of one's own --------------------------------------------------------------------------------------
FILE, USE, REGISTER, NOISE, TESTS = blocks(TUTORIAL, "python")
WORDS = {"lr": 0.03, "momentum": 0.5, "gmf": 0.5, "weights": "samples"}  # so that every line is used
CHECKS = {
    name: check
    for name, check in vars(protocol).items()
    if name.startswith("test_")
    and any(
        mark in (protocol.EVERY.mark, protocol.LIGHT.mark, protocol.FAMILY.mark)
        for mark in getattr(check, "pytestmark", [])
    )
}


def execute(block, space):
    exec(compile(block, str(TUTORIAL), "exec"), space)
    return space


@pytest.fixture(scope="module")
def fednova(tmp_path_factory):
    """The page's file, imported as a user would."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "fednova.py").write_text(FILE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("fednova")
    sys.path.remove(str(folder))
    del sys.modules["fednova"]


@pytest.fixture
def registered(fednova, monkeypatch):
    monkeypatch.setitem(REGISTRY, "fednova", Entry(fednova.FedNova, {}))
    return fednova.FedNova


@pytest.fixture(scope="module")
def their_tests(fednova):
    return execute(TESTS, {})


@pytest.fixture(scope="module")
def fed():
    """The federation of the protocol test."""
    pairs = [protocol.client(n, i) for i, n in enumerate(protocol.SIZES)]
    return fedabml.Federation.from_arrays(pairs, [protocol.client(7, i) for i in range(len(pairs))], classes=3)


def test_the_algorithm_of_the_page_trains_on_digits_and_is_registered(fednova, capsys):
    before = dict(REGISTRY)
    try:
        space = execute(REGISTER, execute(USE, {}))
        found = fedabml.algorithms.name_of(space["again"])
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)
    run = space["run"]
    assert run.summary["accuracy"] > 0.9 and run.summary["prior_accuracy"] > 0.8
    assert capsys.readouterr().out.split() == [str(run.summary["accuracy"]), str(run.summary["prior_accuracy"])]
    size = 4 * run.summary["parameters"]
    assert (run.summary["bytes_down"], run.summary["bytes_up"]) == (2 * size, size + 4)
    assert found == "fednova" and space["again"].gmf == 0.9


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name == "test_where_it_settles" else ())
        for name in re.findall(r"^def (test_\w+)", TESTS, re.MULTILINE)
    ],
)
def test_the_tests_of_the_page(their_tests, name):
    their_tests[name]()


@pytest.mark.parametrize("check", nightly_but({"test_loop_equals_vmap_and_chunks_do_not_matter"}, [*CHECKS]))
def test_the_algorithm_of_the_page_keeps_the_protocol(fed, registered, tmp_path, monkeypatch, check):
    given = {"fed": fed, "algorithm": registered(**WORDS), "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    CHECKS[check](**{name: given[name] for name in inspect.signature(CHECKS[check]).parameters})


def test_there_are_checks_to_keep():
    assert len(CHECKS) >= 7


def test_the_noise_of_the_page_is_the_same_in_every_lane(fednova):
    noisy = execute(NOISE, {})["noisy"]
    keys, w = fedabml.rng.keys((3,), range(4)), torch.zeros(5)
    together = torch.vmap(noisy, (None, 0))(w, keys)
    assert torch.equal(together, torch.stack([noisy(w, key) for key in keys])) and len(together.unique()) == 20


@pytest.mark.slow
def test_the_registry_lines_of_the_page_are_all_that_the_command_line_needs(tmp_path):
    """The package with the page's file and its line, and nothing else: the very command that the page names."""
    package = tmp_path / "fedabml"
    shutil.copytree(ROOT / "fedabml", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "algorithms/fednova.py").write_text(FILE)
    home = package / "algorithms/__init__.py"
    text = home.read_text()
    for diff in blocks(TUTORIAL, "diff"):
        old, new = diff.splitlines()
        assert old.startswith(" ") and new.startswith("+") and text.count(old[1:] + "\n") == 1, old
        text = text.replace(old[1:], f"{old[1:]}\n{new[1:]}")
    home.write_text(text)
    (command,) = re.findall(r"`(fedabml train --algorithm fednova [^`]*)`", prose(TUTORIAL))
    small = shlex.split("--clients 5 --model mlr --rounds 1 --epochs 1 --no-evaluate --quiet --out run")
    words = [sys.executable, "-m", *shlex.split(command), *small]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"fednova"' in (tmp_path / "run/config.json").read_text()


def wrong(**methods):
    """An algorithm with some methods done wrong."""
    for name, method in methods.items():
        method.__name__ = name  # the engine finds the step of a phase by its name
    return dataclasses.dataclass(frozen=True)(type("Wrong", (Algorithm,), methods))(lr=0.1)


def after(change):
    """A step that does something more."""

    def step(self, carry, shared, batches, site, key, loss):
        carry, value = Algorithm.step(self, carry, shared, batches, site, key, loss)
        return change(carry, value, batches[0], self) or carry, value

    return step


def written(self, carry, shared, batches, site, key, loss):
    shared["mean"] -= 0.1 * carry["mean"]
    return carry, carry["mean"].sum()


def backward(self, carry, shared, batches, site, key, loss):
    w = carry["mean"].detach().requires_grad_()
    w.sum().backward()
    return {**carry, "mean": w.grad}, w.sum()


# What the page's table warns of: the methods, a part of a batch's message, and the loop's message (None: no error).
WARNINGS = {
    "item": ({"step": after(lambda c, v, b, a: v.item() and None)}, "calling .item()", None),
    "if": ({"step": after(lambda c, v, b, a: c if v > 0 else None)}, "data-dependent control flow", None),
    "random": (
        {"step": after(lambda c, v, b, a: {**c, "mean": c["mean"] + torch.randn(1)})}, "called random operation", None,
    ),
    "mask": ({"step": after(lambda c, v, b, a: b.x[b.mask > 0] is None or None)}, "dynamic shape", None),
    "written": ({"step": written}, "inplace arithmetic", None),
    "backward": ({"step": backward}, "Tensor.requires_grad_()", "element 0 of tensors does not require grad"),
    "float": (
        {"end": lambda self, carry, *_: ({"mean": carry["mean"], "n": 1.0}, {})}, "must only return Tensors", "Tensor",
    ),
    "lambda": (
        {"phases": lambda self, epochs: [Phase(epochs, lambda *a: self.step(*a))]},
        "not a method of the algorithm", "not a method of the algorithm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("name", WARNINGS)
def test_what_the_page_warns_of(fed, name, backend):
    methods, *messages = WARNINGS[name]
    message = messages[backend == "loop"]
    if message is None:
        protocol.simulate(fed, wrong(**methods), rounds=1, backend=backend)
        return
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError), match=re.escape(message)):
        protocol.simulate(fed, wrong(**methods), rounds=1, backend=backend)
    if backend == "vmap":
        assert message in TUTORIAL.read_text()


def test_hyperparameters_are_tensors_in_steps_and_floats_in_merge(fed):
    seen = []

    def merge(self, shared, update, sampled, clients):
        seen.append(("merge", type(self.lr), type(self.momentum)))
        return update

    step = after(lambda c, v, b, a: seen.append(("step", type(a.lr), type(a.momentum))))
    protocol.simulate(fed, wrong(step=step, merge=merge), rounds=1)
    assert set(seen) == {("step", torch.Tensor, float), ("merge", float, float)}


# -- a page for every algorithm -------------------------------------------------------------------------------------
HEAD = ("name", "symbol", "meaning", "default")
page_of = lambda name: INDEX.parent / f"{name.removesuffix('-ft').removesuffix('-plain')}.md"
named = lambda path: {name for name in REGISTRY if page_of(name) == path}


def own(name):
    """The hyperparameters that an algorithm's class, or a variant's entry, declares, with their defaults."""
    kind = REGISTRY[name].kind
    common = {field.name: field for field in dataclasses.fields(Algorithm)}
    fields = {field.name: field.default for field in dataclasses.fields(kind) if field is not common.get(field.name)}
    varied = {word for entry in REGISTRY.values() if entry.kind is kind for word in entry.defaults}
    made = fedabml.algorithms.make(name)
    return fields | {word: getattr(made, word) for word in varied}


def default(cell, name):
    """A default as the page has it, for one of the names on the page: `a`: 0, `b`: 5, or the same for all."""
    each = dict(re.findall(r"`([\w-]+)`: ([^,]+)", cell))
    return each.get(name, "") if each else cell.strip("`")


def same(cell, value):
    if isinstance(value, int | float) and not isinstance(value, bool):
        return re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell) is not None and float(cell) == value
    return cell == ("none" if value is None else str(value).lower())


@pytest.mark.parametrize("name", REGISTRY)
def test_every_algorithm_stands_in_the_index_and_has_a_page(name):
    links = [row[0] for row in table(INDEX, "name", "what it is", "down / up", "kept", "scored")]
    assert links.count(f"[`{name}`]({page_of(name).name})") == 1
    text = page_of(name).read_text()
    assert f"`{name}`" in text and text.startswith("# ")
    parts = ["Equations", "Hyperparameters", "What is sent, kept and scored", "Notes", "Reference"]
    assert re.findall(r"^## (.*)$", FENCED.sub("", text), re.MULTILINE) == parts


def test_the_index_names_no_other():
    rows = table(INDEX, "name", "what it is", "down / up", "kept", "scored")
    assert [re.match(r"\[`([\w-]+)`\]", row[0])[1] for row in rows] == list(REGISTRY)
    assert {page_of(name) for name in REGISTRY} == set(PAGES)


@pytest.mark.parametrize("name", REGISTRY)
def test_hyperparameters_of_a_page(name):
    rows = {row[0].strip("`"): row for row in table(page_of(name), *HEAD)}
    assert rows.keys() == own(name).keys()
    for word, value in own(name).items():
        assert rows[word][0] == f"`{word}`" and rows[word][2]
        assert same(default(rows[word][3], name), value), f"{word} is {value}, not {rows[word][3]}"


def test_hyperparameters_that_all_have():
    rows = table(INDEX, *HEAD)
    assert [row[0] for row in rows] == [f"`{field.name}`" for field in dataclasses.fields(Algorithm)]
    for row, field in zip(rows, dataclasses.fields(Algorithm), strict=True):
        assert row[2] and same(row[3], field.default), f"{field.name} is {field.default}, not {row[3]}"


@pytest.mark.parametrize("page", [INDEX, *PAGES], ids=by_path)
def test_a_page_names_no_hyperparameter_that_does_not_exist(page):
    """Every word of code on the page is a hyperparameter of its algorithms, one of their choices, or a known name."""
    kinds = {REGISTRY[name].kind for name in named(page) or REGISTRY}
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    known = {field.name for field in fields} | {word for field in fields for word in field.metadata["choices"]}
    known |= {*REGISTRY, *names("model"), *(f.name for f in dataclasses.fields(RunConfig)), "auto"}
    known |= {word for words in SUMMARY_KEYS.values() for word in words}
    for code in re.findall(r"`([^`]+)`", prose(page)):
        word = re.fullmatch(r"([a-z][a-z0-9_-]*)( ?= ?.*)?", code)
        assert word is None or word[1] in known, code
        for algorithm, hyper in re.findall(r"([\w-]+)\.(\w+)=", code):
            assert hyper in {field.name for field in dataclasses.fields(REGISTRY[algorithm].kind)}, code


def numbers(words, sizes):
    """`d_b + 2d_h` as a number."""
    terms = [re.fullmatch(r"(\d*)(d_b|d_h|d)?", term.strip()) for term in words.split("+")]
    return sum(int(term[1] or 1) * (sizes[term[2]] if term[2] else 1) for term in terms)


@pytest.mark.parametrize("name", REGISTRY)
def test_messages_and_what_is_kept_have_the_sizes_of_the_index(fed, name):
    """An MLP 5 → 4 → 3: a body of 24 weights and a head of 15."""
    sims, sizes = [], {"d": 39, "d_b": 24, "d_h": 15}
    words = {"rounds": 1, "participation": 1, "epochs": 1, "batch_size": 64, "device": "cpu", "evaluate": False}
    run = fedabml.train(
        fed, "mlp", fedabml.algorithms.make(name), model_options={"hidden": (4,)},
        on_start=lambda setup, sim: sims.append(sim), **words,
    )  # fmt: skip
    (row,) = [row for row in table(INDEX, "name", "what it is", "down / up", "kept", "scored") if f"`{name}`" in row[0]]
    down, up = (numbers(words, sizes) for words in row[2].split("/"))
    assert (run.history[0]["bytes_down"], run.history[0]["bytes_up"]) == (4 * down, 4 * up)
    kept = sum(t.numel() for t in sims[0].kept.states.get(0, {}).values())
    assert kept == (0 if row[3] == "–" else numbers(re.search(r"\((.*)\)", row[3])[1], sizes))


# -- links and commands ---------------------------------------------------------------------------------------------
def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", TEXTS, ids=by_path)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`]*`", "", prose(path))
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands(path):
    """The command lines of a page: those of its blocks, and those in its text."""
    lines = "\n".join(blocks(path, "", "sh", "bash", "console")).replace("\\\n", " ").splitlines()
    return [(line, True) for line in lines if line.startswith("fedabml ")] + [
        (code, False) for code in re.findall(r"`(fedabml [^`]+)`", prose(path))
    ]


def parsed(command, words):
    """A click command's options and arguments, without calling it."""
    context = command.context_class(command, info_name=command.name)
    context.allow_interspersed_args = not hasattr(command, "commands")
    options, rest, _ = command.make_parser(context).parse_args(list(words))
    return options, rest


def check_command(line, whole):
    """Refuses a command line with unknown commands or flags; a whole one must have all it needs."""
    command, words = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        options, words = parsed(command, words)
        if not words:
            return
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options, _ = parsed(command, words)
    if whole:
        assert not [p.name for p in command.params if p.required and options.get(p.name) in (None, ())]
    for algorithm, table in parse_set(options.get("set") or []).items():
        known = REGISTRY.get(algorithm)
        if known and isinstance(table, dict):
            assert table.keys() <= {field.name for field in dataclasses.fields(known.kind)}, line


@pytest.mark.parametrize("path", TEXTS, ids=by_path)
def test_commands_and_flags_exist(path):
    for line, whole in commands(path):
        check_command(line, whole)


def test_the_pages_have_commands():
    assert all(len(commands(ROOT / name)) >= 4 for name in ("README.md", "docs/guide.md"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fedabml trian --lr 0.1", "no command trian"),
        ("fedabml train --learning-rate 0.1", "--learning-rate"),
        ("fedabml train --lr", "--lr"),
        ("fedabml data fetch mnist", "no command fetch"),
        ("fedabml train --set ditto.lamb=0.5", "lamb"),
        ("fedabml predict posterior.safetensors", "data"),
    ],
)
def test_a_wrong_command_would_be_found(line, words):
    with pytest.raises(Exception, match=words):
        check_command(line, True)


@pytest.mark.parametrize("path", [path for path in TEXTS if blocks(path, "toml")], ids=by_path)
def test_configurations_are_read(path):
    for block in blocks(path, "toml"):
        RunConfig.of(without_commands(tomllib.loads(block))).algorithm_object()


@pytest.mark.parametrize("path", TEXTS, ids=by_path)
def test_public_names_exist(path):
    """`fedabml.NAME` in Python blocks and in the text: of the package, or a module that is imported by its own name."""
    code = "\n".join([*blocks(path, "python"), *re.findall(r"`([^`]+)`", prose(path))])
    for name in set(re.findall(r"(?<![\w/\"'-])fedabml\.([A-Za-z_]+)\b(?!\s*=)", code)):
        assert hasattr(fedabml, name) or importlib.util.find_spec(f"fedabml.{name}"), name


@pytest.mark.nightly
def test_the_section_from_python_of_the_guide_runs(capsys):
    pytest.importorskip("optuna")
    (block,) = [text for text in blocks(ROOT / "docs/guide.md", "python") if "fedabml.compare(" in text]
    space = execute(block, {})
    assert {row.label for row in space["comparison"].rows} == {"fedabml", "fedavg-ft", "local"}
    assert len(space["comparison"].frame()) == 3 * 2 * 20 and len(space["tuned"].frame()) == 2 + 1
    assert len(space["run"].frame()) == 20 and "n_train" in capsys.readouterr().out


# -- the README -----------------------------------------------------------------------------------------------------
def test_the_quickstart_prints_what_the_readme_shows(tmp_path, monkeypatch, capsys):
    """The numbers may differ a little between machines; the lines may not."""
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(ROOT / "README.md", "python")[0], "README.md", "exec"), {})
    (shown,) = blocks(ROOT / "README.md", "text")
    number = re.compile(r"-?\d+\.\d+")
    printed = capsys.readouterr().out
    assert number.sub("#", printed) == number.sub("#", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    assert all(abs(float(a) - float(b)) <= 0.05 + 0.2 * abs(float(b)) for a, b in pairs), printed


def test_the_readme_shows_the_whole_class_of_fedprox():
    lines = blocks(ROOT / "README.md", "python")[1].splitlines()
    body = "".join((ROOT / "fedabml/algorithms/fedprox.py").read_text().split())
    assert all("".join(line.split()) in body for line in lines if "def step" not in line)


def test_the_readme_and_the_results_page_stay_short():
    for name, most in (("README.md", 150), ("results/README.md", 120)):
        assert len((ROOT / name).read_text().splitlines()) <= most, name
