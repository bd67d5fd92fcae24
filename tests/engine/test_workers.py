"""Threads that share out clients: the same results as one, in order, and errors that reach the caller."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest
import torch

import fedabml
from fedabml.algorithms import make
from fedabml.engine import policy
from fedabml.engine.client_states import Shelf
from fedabml.engine.programs import Gate
from fedabml.engine.rounds import Simulation
from fedabml.engine.workers import map_in_threads
from fedabml.errors import InputError
from fedabml.evaluation.scoring import evaluate
from tests.cli.command import MAX_WAIT
from tests.tiers import nightly_but


def test_results_come_in_order_from_several_threads():
    names, both = set(), threading.Barrier(2)

    def work(i):
        names.add(threading.get_ident())
        if i < 2:
            both.wait(MAX_WAIT)  # the first two are at work at once, so there are two threads
        if i == 0:
            time.sleep(0.02)  # and the first ends later, most of the time
        return i, torch.is_grad_enabled(), torch.get_num_threads()

    assert list(map_in_threads(work, range(4), 2)) == [(i, False, 1) for i in range(4)]
    assert len(names) == 2 and threading.get_ident() not in names
    assert [i for i, *_ in map_in_threads(work, range(2, 5), 1)] == [2, 3, 4]


def test_an_error_is_raised_when_no_thread_is_at_work():
    running = []

    def work(i):
        running.append(i)
        if i == 0:
            raise ValueError("the first")
        time.sleep(0.05)
        running.remove(i)

    with pytest.raises(ValueError, match="the first"):
        list(map_in_threads(work, range(6), 2))
    assert running == [0]


def test_one_alone_waits_for_those_who_share_and_they_for_it():
    gate, order = Gate(), []
    inside, alone = threading.Event(), threading.Event()

    def sharing(name, wait):
        with gate.shared():
            order.append(f"{name} in")
            inside.set()
            wait.wait(MAX_WAIT)
            order.append(f"{name} out")

    def trace():
        with gate.exclusive():
            order.append("alone in")
            alone.set()
            time.sleep(0.05)
            order.append("alone out")

    go = threading.Event()
    first = threading.Thread(target=sharing, args=("a", go))
    first.start()
    assert inside.wait(MAX_WAIT)
    tracer = threading.Thread(target=trace)
    tracer.start()
    time.sleep(0.05)
    assert order == ["a in"]  # it waits
    go.set()
    assert alone.wait(MAX_WAIT)
    second = threading.Thread(target=sharing, args=("b", go))
    second.start()
    for thread in (first, tracer, second):
        thread.join(MAX_WAIT)
    assert order == ["a in", "a out", "alone in", "alone out", "b in", "b out"]


def test_who_fails_inside_lets_others_in():
    gate = Gate()
    for way in (gate.shared, gate.exclusive, gate.shared):
        with pytest.raises(ZeroDivisionError), way():
            _ = 1 / 0
    with gate.exclusive():
        pass


@pytest.fixture(scope="module")
def fed():
    pairs = []
    for n in (6, 40, 13, 33, 25):
        g = np.random.default_rng(n)
        pairs.append((g.normal(size=(n, 5)).astype("f"), g.choice(g.permutation(3)[:2], n)))
    return fedabml.Federation.from_arrays(pairs, pairs, classes=3)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("name", nightly_but({"fedabml", "scaffold"}, ["fedabml", "scaffold", "fedpop"]))
@pytest.mark.slow
def test_threads_change_nothing(fed, name, backend):
    def run(workers):
        setup = fedabml.prepare(
            fed, "mlp", make(name), participation=0.8, epochs=2, batch_size=8, dtype="float64", backend=backend,
            model_options={"hidden": (4,)}, workers=workers,
        )  # fmt: skip
        sim = Simulation(setup.cohort)
        history = sim.run(2)
        scores = evaluate(setup.cohort, sim.theta, sim.kept_for).summary
        return sim.shared, [line["loss"] for line in history], scores

    one, two = run(1), run(2)
    for key in one[0]:
        torch.testing.assert_close(one[0][key], two[0][key], rtol=0, atol=1e-9)
    assert one[1] == pytest.approx(two[1], abs=1e-9)
    assert one[2]["nll"] == pytest.approx(two[2]["nll"], abs=1e-9)


@pytest.mark.slow
def test_a_resumed_run_shares_its_clients_out_as_before(fed, tmp_path, monkeypatch):
    words = {"participation": 0.8, "epochs": 1, "batch_size": 8, "model_options": {"hidden": (4,)}, "backend": "vmap"}
    from fedabml.engine.autotune import Execution
    from fedabml.runs import prepare as run

    asked = []
    monkeypatch.setattr(run, "choose_backend", lambda *args: (asked.append(args), (Execution("vmap", 2), ""))[1])
    whole = fedabml.train(fed, "mlp", rounds=2, out=tmp_path / "a", **words)
    fedabml.train(fed, "mlp", rounds=1, out=tmp_path / "b", **words)
    monkeypatch.setattr(run, "choose_backend", lambda *args: (Execution("vmap", 1), ""))
    resumed = fedabml.train(fed, "mlp", rounds=2, out=tmp_path / "b", resume=True, **words)
    assert resumed.config["workers"] == whole.config["workers"] == 2
    for key, value in whole.prior.shared.items():
        assert torch.equal(value, resumed.prior.shared[key])


@pytest.mark.slow
def test_a_resumed_run_has_the_threads_and_the_image_layout_that_it_began_with(tmp_path, monkeypatch):
    """Products of torch's own threads round in another way, and so do convolutions of images channels-last."""
    from fedabml.engine.autotune import Execution
    from fedabml.runs import prepare as run

    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(40, 3, 16, 16)).astype("f"), g.integers(0, 3, 40)) for _ in range(3)]
    fed = fedabml.Federation.from_arrays(pairs, pairs, classes=3)
    words = {"participation": 1.0, "epochs": 1, "model_options": {"channels": (8, 16), "hidden": (400,)}}
    words |= {"backend": "loop", "evaluate": False}

    def train(folder, rounds, threads, channels_last, resume=False):
        monkeypatch.setattr(run, "choose_backend", lambda *args: (Execution("loop", 1, channels_last), ""))
        torch.set_num_threads(threads)
        return fedabml.train(fed, "cnn", make("fedavg"), rounds=rounds, out=tmp_path / folder, resume=resume, **words)

    before = torch.get_num_threads()
    try:
        whole = train("whole", 2, 2, True)
        for threads, channels_last in ((1, True), (2, False)):
            folder = f"{threads}-{channels_last}"
            train(folder, 1, 2, True)
            resumed = train(folder, 2, threads, channels_last, resume=True)
            assert torch.get_num_threads() == threads  # the caller's number is given back
            assert (resumed.config["threads"], resumed.config["channels_last"]) == (2, True)
            assert resumed.prior.digest == whole.prior.digest
        assert train("other", 2, 2, False).prior.digest != whole.prior.digest  # so the layout matters
    finally:
        torch.set_num_threads(before)
    damaged = (tmp_path / "whole" / "config.json").read_text().replace('"threads": 2', '"threads": 20000')
    (tmp_path / "whole" / "config.json").write_text(damaged)
    with pytest.raises(InputError, match=r"20000 threads|digest|damaged"):
        train("whole", 3, before, True, resume=True)


def test_threads_read_a_shelf_side_by_side():
    shelf = Shelf({"v": torch.zeros(2000)}, 50)
    for client in range(50):
        shelf[client] = {"v": torch.full((2000,), float(client))}
    read = lambda client: bool((shelf[client]["v"] == client).all())
    assert all(map_in_threads(read, list(range(50)) * 20, 2))


def test_no_more_results_are_held_than_there_are_threads():
    made = []

    def work(i):
        out = torch.zeros(8)
        made.append(weakref.ref(out))
        return out

    most = 0
    for _ in map_in_threads(work, range(30), 2):
        most = max(most, sum(ref() is not None for ref in made))
    assert len(made) == 30 and most <= 6


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_how_weights_are_used_is_known_before_threads_start(fed, estimator):
    algorithm = make("fedabml", estimator=estimator, s=1)
    words = {"backend": "vmap", "model_options": {"hidden": (4,)}, "workers": 2}
    setup = fedabml.prepare(fed, "mlp", algorithm, **words)
    assert not setup.cohort.noise.on_weights
    other = fedabml.prepare(fed, "mlp", make("fedabml", estimator="weight"), **words)
    assert other.cohort.noise.on_weights and not other.cohort.using(algorithm).noise.on_weights


def test_a_step_is_traced_for_carries_of_any_layout(monkeypatch):
    """A network of one parameter, clients of unequal sizes: the first carry is the same memory for all lanes."""
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(record_after=0))
    g = np.random.default_rng(0)
    pairs = [(g.normal(size=(n, 1, 2, 2)).astype("f"), g.integers(0, 3, n)) for n in (8, 16, 8, 8)]
    fed = fedabml.Federation.from_arrays(pairs, pairs, classes=3)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2, bias=False), torch.nn.Flatten())
    words = {"participation": 1.0, "epochs": 1, "batch_size": 8, "backend": "vmap", "chunk": 2, "workers": 1}
    setup = fedabml.prepare(fed, model, make("fedavg"), **words)
    Simulation(setup.cohort).run(2)
    assert all(setup.cohort.executor.recordings.values())
