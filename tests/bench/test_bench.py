"""What is timed is the same work: the eager loop's losses and weights are the engine's. No test looks at a clock."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch

import fedabml
from benchmarks import cells, gpu, rivals
from benchmarks.peers import common
from fedabml import accel
from fedabml.bench import measure, table
from fedabml.bench.loop import Loop, best_format
from fedabml.bench.workloads import SUITES, WORKLOADS, Workload, workload
from fedabml.cli.bench import MODELS
from fedabml.engine import programs
from fedabml.engine.rounds import Simulation
from tests.cli.command import MAX_WAIT, run

CPU = torch.device("cpu")
SMALL = Workload("small", "a small MLP", "mlp", (1, 4, 4), 3, clients=5, cohort=3, samples=11, batch=4, epochs=2)
NETWORKS = {
    "mlr": dataclasses.replace(SMALL, model="mlr"),
    "mlp": SMALL,
    "cnn": dataclasses.replace(SMALL, model="cnn", shape=(3, 16, 16), cohort=2, samples=6, epochs=1),
    "dropout": dataclasses.replace(SMALL, model="pfl", shape=(3, 8, 8), samples=6, epochs=1),
    "resnet18": dataclasses.replace(
        SMALL, model="resnet18", shape=(3, 8, 8), clients=2, cohort=2, samples=3, batch=2, epochs=1
    ),
}
pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]


def unequal(work):
    """The same federation with clients of different sizes."""
    sizes = [work.samples - i % 3 * 2 for i in range(work.clients)]
    draw = np.random.default_rng(0)
    pairs = [(draw.integers(0, 256, (n, *work.shape), np.uint8), np.arange(n) % work.classes) for n in sizes]
    return fedabml.Federation.from_arrays(pairs, classes=work.classes)


def both(work, fed, algorithm, rounds=2, **options):
    """Losses and vectors of the engine and of the loop, in float64."""
    setup = measure.setup_of(work, fed, algorithm, "cpu", "float64")
    sim = Simulation(setup.cohort)
    loop = Loop(setup, keyed=True, **options)
    losses = []
    for _ in range(rounds):
        loop.prepare()
        losses.append((sim.step()["loss"], loop.step()))
    ends = [(sim.shared["mean"], vector(loop, loop.mean))]
    if "logstd" in sim.shared:
        ends.append((sim.shared["logstd"], vector(loop, loop.logstd)))
    return losses, ends


def vector(loop, buffer):
    """The values of one of the loop's buffers in the order of the engine's vectors."""
    return torch.cat([view.reshape(-1) for view in loop.views(buffer)])


def agree(losses, ends, tolerance=1e-9):
    for ours, theirs in losses:
        assert math.isclose(ours, theirs, rel_tol=tolerance)
    for ours, theirs in ends:
        torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)
        assert len(ours) > 1


@pytest.mark.parametrize("name", ["mlr", "mlp", "cnn", "dropout"])
@pytest.mark.parametrize("optimiser", [False, True])
def test_fedavg(name, optimiser):
    work = NETWORKS[name]
    agree(*both(work, work.federation(), fedabml.FedAvg(lr=0.1), optimiser=optimiser))


@pytest.mark.slow
@pytest.mark.nightly
def test_fedavg_with_a_deep_network():
    work = NETWORKS["resnet18"]
    agree(*both(work, work.federation(), fedabml.FedAvg(lr=0.1), rounds=1))


@pytest.mark.parametrize("name", ["mlp", "cnn", "dropout"])
@pytest.mark.parametrize("hyper", [{"s": 1}, {"s": 3, "prior_std": "learned"}, {"s": 2, "lr_std": 0.3, "lam": 1.0}])
def test_fedabml(name, hyper):
    work = NETWORKS[name]
    algorithm = dataclasses.replace(measure.weight_samples(0.1), **hyper)
    agree(*both(work, work.federation(), algorithm))


@pytest.mark.parametrize("algorithm", [fedabml.FedAvg(lr=0.1), measure.weight_samples(0.1, 2)])
def test_clients_of_unequal_sizes_and_another_memory_format(algorithm):
    agree(*both(SMALL, unequal(SMALL), algorithm))
    cnn = NETWORKS["cnn"]
    agree(*both(cnn, unequal(cnn), algorithm, channels_last=True))


def test_torchs_own_noise_is_another_draw_of_the_same():
    work = SMALL
    setup = measure.setup_of(work, work.federation(), measure.weight_samples(0.05, 4), "cpu", "float32")
    found = []
    for keyed in (True, False):
        loop = Loop(setup, keyed=keyed)
        loop.prepare()
        found.append(loop.step())
    assert found[0] != found[1] and math.isclose(*found, rel_tol=0.05)
    assert best_format(setup) is False  # there is nothing to choose for an MLP


def test_what_the_loop_does_not_know_is_refused():
    fed = SMALL.federation()
    for algorithm in (
        fedabml.Local(lr=0.1),
        fedabml.FedABML(lr=0.1, prior_every="batch", rho=0.5),
        fedabml.FedAvg(lr=0.1, momentum=0.9),
    ):
        setup = measure.setup_of(SMALL, fed, algorithm, "cpu", "float32")
        with pytest.raises(fedabml.InputError, match="eager loop"):
            Loop(setup)
    with pytest.raises(fedabml.InputError, match="resnet18"):
        workload("resnet", "gpu")


def test_workloads_are_the_issues():
    for suite in SUITES.values():
        assert suite.keys() == WORKLOADS.keys()
        for work in suite.values():
            assert work.samples % work.batch == 0 and work.cohort <= work.clients
    assert all(SUITES["short"][name].steps > 1 for name in MODELS)  # of one, what comes around it decides
    sizes = {name: sum(p.numel() for p in w.network().parameters()) for name, w in WORKLOADS.items()}
    assert sizes["mlr"] == 7850 and sizes["mlp"] == 209_662 and sizes["cnn"] == 307_842
    assert sizes["pfl"] == 3 * 32 * 9 + 32 + 32 * 64 * 9 + 64 + 12544 * 128 + 128 + 1290
    assert WORKLOADS["pfl"].steps == 5 and WORKLOADS["mlr"].steps == 30
    one, two = (WORKLOADS["mlr"].federation().x for _ in range(2))
    assert one.dtype == np.uint8 and np.array_equal(one, two)


class Fake:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def prepare(self):
        self.log.append("prepare")

    def step(self):
        self.log.append(self.name)
        return 1.0


def test_sides_take_turns():
    log = []
    runners = {n: measure.Runner(lambda n=n: Fake(log, n), lambda n=n: log.append(f"arrange {n}")) for n in "ab"}
    found = measure.race(runners, CPU, turns=3, budget=1e9)
    assert [word for word in log if word in "ab"] == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b"]
    assert log[:3] == ["arrange a", "prepare", "a"]
    assert all(len(t.warm) == 3 and t.round in t.warm for t in found.values())
    assert len(measure.race(runners, CPU, turns=9, budget=0)["a"].warm) == 2


def test_a_side_that_diverges_has_no_time():
    work = SMALL
    side = measure.Engine(measure.setup_of(work, work.federation(), fedabml.FedAvg(lr=1e38), "cpu", "float32"))
    side.block = 5
    with pytest.raises(fedabml.TrainingError, match="diverged"):
        side.timed()


@pytest.mark.nightly
def test_records_and_tables(monkeypatch, caplog):
    work = SMALL
    terms = measure.Terms(work, work.federation(), CPU, turns=2, budget=0)
    records = []
    for name in ("fedavg", "fedabml5"):
        record = measure.race_loop(terms, measure.algorithms(work.lr)[name])
        assert record["agree"] and record["apart"] < 1e-4 and record["ratio"]["loop"] > 0
        assert ("loop_sgd" in record["ratio"]) == (name == "fedavg")
        records.append({"kind": "loop", "algorithm": name, **record})
    step = cells.race_steps(terms)
    assert step["ratio"].keys() == {"fedabml", "fedabml-batch"} and step["steps"] == work.steps
    monkeypatch.setattr(programs, "compile_program", lambda function, inputs, warn: function)  # which takes long
    both = cells.race_steps(terms._replace(compile=True))
    assert "neither recorded nor compiled" not in caplog.text
    assert both["ratio"].keys() == {f"fedabml{kind}{how}" for kind in ("", "-batch") for how in ("", " compiled")}
    graphs = cells.race_graphs(terms, fedabml.FedAvg(lr=0.1))
    assert graphs["ratio"].keys() == {"launches"} and graphs["warm"].keys() == {"graphs", "launches"}
    records += [
        {"kind": "step", **step},
        {"kind": "step", **both},
        {"kind": "graphs", "algorithm": "fedavg", **graphs},
        {"cell": "x", "error": "no"},
    ]
    saved = json.loads(json.dumps(records))
    made = [*table.tables(saved), cells.rooflines(saved[:2], {"float32": 1e11, "bytes": 1e10})]
    assert len(made) == 4
    for each in made:
        assert all(len(row) == len(each.head) for row in each.rows) and each.markdown().startswith("## ")
    # 16→200→200→3: two products of the forward pass in the backward pass, but none for the inputs.
    products = 16 * 200 + 200 * 200 + 200 * 3
    flops = 2 * work.batch * (3 * products - 16 * 200) * work.cohort
    assert records[0]["roofline"]["flops"] == flops and records[1]["roofline"]["flops"] == 5 * flops
    least, binding = cells.floor(records[0], {"float32": flops, "bytes": 1e30})
    assert least == 1 and binding == "operations"


@pytest.mark.nightly
def test_our_engine_is_raced_without_its_accelerators():
    terms = measure.Terms(SMALL, SMALL.federation(), CPU, turns=2, budget=0)
    record = measure.race_without(terms, measure.algorithms(SMALL.lr)["fedabml5"], ["recorder", "1"])
    assert record["ratio"].keys() == record["cpu"].keys() == {"recorder", "1"} and accel.enabled("recorder")
    made = table.without([{"algorithm": "fedabml5", **record}])
    assert made.head[-1] == "without 1 (processor)" and all(len(row) == len(made.head) for row in made.rows)


def test_losses_that_differ_are_reported(monkeypatch):
    monkeypatch.setattr(Loop, "loss", lambda self, x, y, offset, key: 2 * LOSS(self, x, y, offset, key))
    terms = measure.Terms(SMALL, SMALL.federation(), CPU, turns=2, budget=0)
    record = measure.race_loop(terms, fedabml.FedAvg(lr=0.1))
    assert not record["agree"]
    (made,) = table.tables([{"kind": "loop", "algorithm": "fedavg", **record}])
    assert any("losses differ" in cell for cell in made.rows[0])


LOSS = Loop.loss


@pytest.mark.nightly
def test_ceilings_are_numbers():
    found = measure.ceilings(CPU, ("float32",))
    assert found.keys() == {"float32", "bytes"} and all(v > 0 for v in found.values())


# -- the commands ---------------------------------------------------------------------------------------------------
def test_cells_are_resumed_and_errors_kept(tmp_path):
    book = cells.Book(tmp_path / "b.jsonl", "abc")
    calls = []
    good = lambda: calls.append(1) or {"ratio": {"loop": 2.0}}

    def bad():
        raise RuntimeError("out of memory")

    todo = [("loop/a", good), ("loop/b", bad)]
    assert cells.execute(book, todo, 1, CPU) == []
    book = cells.Book(tmp_path / "b.jsonl", "abc", resume=True)
    assert book.has("loop/a") and not book.has("loop/b") and "out of memory" in book.records[1]["error"]
    cells.execute(book, [("loop/a", good), ("loop/b", good)], 1, CPU)
    assert len(calls) == 2 and book.has("loop/b") and len(book.records) == 2
    assert cells.execute(book, [("loop/c", good)], 0, CPU) == ["loop/c"]
    later = cells.Book(tmp_path / "b.jsonl", "def", resume=True)
    assert len(later.records) == 2 and not later.has("loop/a")
    rows = (tmp_path / "history.csv").read_text().splitlines()
    assert rows[0] == "date,machine,row,ratio,commit"
    assert [row.split(",")[1:] for row in rows[1:]] == [["b", "loop/a", "2", "abc"], ["b", "loop/b", "2", "abc"]]
    names = [name for name, _ in cells.chosen(cells.cells("gpu", torch.device("cuda"), 1, 1), None)]
    assert len(names) == len(set(names)) and {
        "loop/cnn/fedabml5/float32",
        "step/resnet18/tf32",
        "graphs/mlr/fedavg",
    } < {*names}
    assert [name for name, _ in cells.chosen(iter(todo), "loop/b,x")] == ["loop/b"]


@pytest.mark.nightly
def test_the_gpus_command_on_what_there_is(tmp_path, monkeypatch, capsys):
    tiny = {name: dataclasses.replace(SMALL, name=name) for name in WORKLOADS}
    monkeypatch.setitem(SUITES, "quick", tiny)
    words = ["gpu", "--device", "cpu", "--quick", "--only", "mlr", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    text = (tmp_path / "gpu.md").read_text()
    assert "Against the eager loop" in text and "| mlr | FedABML, s=5" in text and text in capsys.readouterr().out
    cell_names = [json.loads(line)["cell"] for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert cell_names == ["machine", "loop/mlr/fedavg/float32", "loop/mlr/fedabml5/float32", "step/mlr/float32"]


def test_what_the_aims_speak_of_is_raced():
    names = [name for name, _ in cells.cells("gpu", torch.device("cuda"), 1, 1.0)]
    assert len(set(names)) == len(names) and set(gpu.AIMS) < set(names)


def test_other_libraries_have_our_resnet18():
    """Weight by weight in the same order, with the same outputs."""
    ours = fedabml.models.build("resnet18", (3, 16, 16), 10)
    theirs = common.resnet18(10)
    for mine, own in zip(ours.parameters(), theirs.parameters(), strict=True):
        own.data = mine.data
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.slow
@pytest.mark.nightly
def test_another_library_gets_the_same_work(monkeypatch):
    """The plain loop stands for all of them: it reads the federation as they do, and ends with our weights."""
    monkeypatch.setattr(rivals, "CONTESTS", {"mlr": ("ours", "loop", "fedjax")})
    monkeypatch.setitem(rivals.PACKAGES, "fedjax", "surely_not_installed")
    work = dataclasses.replace(WORKLOADS["mlr"], clients=6, cohort=2, samples=20, batch=10, epochs=2)
    record = rivals.compare("mlr", work, sys.executable, 1)
    assert record["sides"].keys() == {"ours", "loop"} and "not installed" in record["skipped"]["fedjax"]
    loop = record["sides"]["loop"]
    assert loop["apart"] < 1e-4 and loop["round1"] < 1e-4 and loop["agree"]
    made = rivals.table([record]).splitlines()
    assert len(made) == 5 and "weights differ" not in "".join(made)
    assert len({line.count("|") for line in made}) == 1
    none = rivals.compare("mlr", work, None, 1)
    assert none["skipped"].keys() == {"loop", "fedjax"} and "--peers" in none["skipped"]["loop"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_library_that_does_other_work_is_reported(monkeypatch):
    """One with another step size, by 3%, has no ratio."""
    launch = rivals.launch

    def other(side, python, folder, limit):
        lr = json.loads((folder / "task.json").read_text())["lr"]
        rivals.revise(folder, lr=lr * (1 if side == "ours" else 1.03))
        told = launch(side, python, folder, limit)
        rivals.revise(folder, lr=lr)
        return told

    monkeypatch.setattr(rivals, "launch", other)
    monkeypatch.setattr(rivals, "CONTESTS", {"mlr": ("ours", "loop")})
    work = dataclasses.replace(WORKLOADS["mlr"], clients=6, cohort=2, samples=20, batch=10, epochs=1)
    record = rivals.compare("mlr", work, sys.executable, 1)
    assert record["sides"]["loop"]["agree"] is False and record["sides"]["ours"]["agree"]
    row = rivals.table([record]).splitlines()[-1]
    assert "**weights differ**" in row and "×" not in row


@pytest.mark.slow
@pytest.mark.nightly
def test_dropout_is_off_where_weights_are_compared(tmp_path):
    work = dataclasses.replace(WORKLOADS["pfl"], clients=2, cohort=1, samples=10, batch=5, epochs=1)
    rivals.export(work, 1, tmp_path)
    rivals.revise(tmp_path, rounds=1, dropout=False)
    ours, loop = (rivals.launch(side, sys.executable, tmp_path, MAX_WAIT)["weights"] for side in ("ours", "loop"))
    assert rivals.share(ours, loop, np.load(tmp_path / "first.npy")) < rivals.LIMIT


def test_flower_runs_on_every_workload():
    assert rivals.CONTESTS.keys() == WORKLOADS.keys()
    assert all({"ours", "flower", "pfl", "fedlab", "fedjax"} <= {*sides} for sides in rivals.CONTESTS.values())


def test_bench(monkeypatch):
    monkeypatch.setitem(
        SUITES, "quick", {**SUITES["quick"], "mlr": dataclasses.replace(SMALL, name="mlr", model="mlr")}
    )
    said = run("bench", "--quick", "--models", "mlr", "--device", "cpu", "--precision", "float32").stdout
    assert "Against the eager loop" in said and "FedAvg" in said and "FedABML" not in said and "bf16" not in said
    assert "no workload" in run("bench", "--models", "mpl", code=2).stderr
    assert "no dtype" in run("bench", "--precision", "float31", code=2).stderr


@pytest.mark.nightly
def test_the_bench_of_a_network_races_fedabml_too(monkeypatch):
    monkeypatch.setitem(SUITES, "short", {**SUITES["short"], "mlp": dataclasses.replace(SMALL, name="mlp")})
    output = run("bench", "--models", "mlp", "--device", "cpu").stdout
    assert "FedABML, s=5" in output and "a small MLP" in output
