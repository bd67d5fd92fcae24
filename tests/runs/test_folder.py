"""Crash safety: what is on disk after a failure at any moment, and how a run goes on from it."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedabml
from fedabml import FedABML, FedAvg, InputError, Local, TrainingError
from fedabml.engine.checkpoint import Checkpoint
from fedabml.engine.rounds import Simulation
from fedabml.files import paths, sealed
from fedabml.runs.folder import Folder
from fedabml.runs.summary import last_ten


def state(round, value=None):
    shared = {"mean": torch.full((3,), float(round if value is None else value))}
    return Checkpoint(round, shared, {"mean": shared["mean"] / 2}, {}, 1.5 * round)


def kept(*clients, value=0.0):
    return {c: {"mean": torch.full((2,), value + c)} for c in clients}


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.create({"rounds": 5, "algorithm": {"name": "x", "hyper": {"lr": 0.1}}})
    return folder


def names(folder, kind="*"):
    return sorted(p.name for p in (folder.path / "checkpoints").glob(f"{kind}-*"))


def again(folder):
    return Folder(folder.path)


# -- files ---------------------------------------------------------------------------------------------------------
def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = paths.write(tmp_path / "a.json", "old")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(InputError, match="No space left on device"):
                paths.write(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    paths.write(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file.*Not a directory"):
        paths.write(tmp_path / "file" / "below" / "a.json", "x")
    assert (tmp_path / "file").read_text() == "in the way"


def test_tensors_and_facts_come_back(tmp_path):
    tensors = {"a": torch.arange(3), "b.c": torch.ones(2, 2).double().T}
    path = sealed.write_tensors(tmp_path / "t.safetensors", tensors, {"x": [1, None]})
    read, facts = sealed.read_tensors(path)
    assert facts == {"x": [1, None]} and read.keys() == tensors.keys()
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in tensors.items())
    assert sealed.group(sealed.prefixed("p", read), "p").keys() == read.keys()


class Bomb:
    def __reduce__(self):
        return (os._exit, (13,))


FOREIGN = {
    "pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "torch": lambda path: torch.save({"mean": torch.zeros(2)}, path),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "another safetensors": lambda path: save_file({"w": torch.zeros(2)}, path),
    "header that is no JSON": lambda path: save_file({"w": torch.zeros(2)}, path, {"fedabml": "{"}),
    "header that is a list": lambda path: save_file({"w": torch.zeros(2)}, path, {"fedabml": "[]"}),
    "truncated": lambda path: path.write_bytes(
        sealed.write_tensors(path, {"w": torch.zeros(99)}, {}).read_bytes()[:-40]
    ),
    "truncated header": lambda path: path.write_bytes(
        sealed.write_tensors(path, {"w": torch.zeros(99)}, {}).read_bytes()[:20]
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused(kind, tmp_path):
    path = tmp_path / "round-000001.safetensors"
    FOREIGN[kind](path)
    with pytest.raises(InputError, match="round-000001"):
        sealed.read_tensors(path)
    for load in (fedabml.load_prior, fedabml.load_posterior):
        with pytest.raises(InputError, match="round-000001"):
            load(path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_run_with_foreign_checkpoints_alone_is_refused(kind, folder):
    (folder.path / "checkpoints").mkdir()
    FOREIGN[kind](folder.path / "checkpoints" / "round-000001.safetensors")
    with pytest.raises(InputError, match=r"No checkpoint in .* can be read"):
        again(folder).reopen({"rounds": 5, "algorithm": {"name": "x", "hyper": {"lr": 0.1}}}, set())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no file"):
        sealed.read_tensors(tmp_path / "gone.safetensors")
    with pytest.raises(InputError, match=r"gone.json"):
        sealed.read_json(tmp_path / "gone.json")
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(InputError, match="not valid JSON"):
        sealed.read_json(tmp_path / "cut.json")


# -- checkpoints ---------------------------------------------------------------------------------------------------
def test_a_checkpoint_comes_back(folder):
    folder.save(state(1), kept(3, 0))
    found = again(folder).load_latest()
    assert (found.round, found.seconds) == (1, 1.5)
    assert found.shared["mean"].tolist() == [1, 1, 1] and found.average["mean"].tolist() == [0.5] * 3
    assert {c: s["mean"].tolist() for c, s in found.kept.items()} == {3: [3, 3], 0: [0, 0]}


def test_the_last_two_are_kept(folder):
    for t in range(1, 6):
        folder.save(state(t), {})
        assert names(folder) == [f"round-{r:06d}.safetensors" for r in range(max(1, t - 1), t + 1)]


def test_a_server_that_owns_nothing(folder):
    folder.save(Checkpoint(1, {}, {}, {}, 0.0), kept(0))
    found = again(folder).load_latest()
    assert found.shared == found.average == {} and found.kept[0]["mean"].tolist() == [0, 0]


def test_of_the_kept_states_only_what_changed_is_written(folder):
    folder.save(state(1), kept(0, 1, value=10))
    folder.save(state(2), kept(1, 2, value=20))
    assert sealed.read_tensors(folder.path / "checkpoints" / "kept-000002.safetensors")[0].keys() == {
        "1.mean",
        "2.mean",
    }
    found = again(folder).load_latest()
    assert {c: s["mean"][0].item() for c, s in found.kept.items()} == {0: 10, 1: 21, 2: 22}


def test_kept_files_go_when_nothing_names_them_and_not_before(folder):
    folder.save(state(1), kept(0, 1))
    folder.save(state(2), kept(0, value=20))
    folder.save(state(3), kept(2, value=30))
    assert names(folder, "kept") == [f"kept-00000{r}.safetensors" for r in (1, 2, 3)]  # 1 still holds client 1
    folder.save(state(4), kept(1, value=40))
    assert "kept-000001.safetensors" in names(folder, "kept")  # checkpoint 3 still names it
    folder.save(state(5), {})
    assert names(folder, "kept") == [f"kept-00000{r}.safetensors" for r in (2, 3, 4)]
    found = again(folder).load_latest()
    assert {c: s["mean"][0].item() for c, s in found.kept.items()} == {0: 20, 1: 41, 2: 32}


@pytest.mark.parametrize("reopened", [False, True])
def test_both_checkpoints_are_whole_after_every_round(folder, reopened):
    """Whatever was drawn, with or without a restart in between: each of the two can be loaded with all it names."""
    g = np.random.default_rng(0)
    truth: dict[int, dict[int, float]] = {0: {}}
    for t in range(1, 12):
        if reopened:
            folder = again(folder)
            folder.load_latest()
        clients = g.choice(5, 2, replace=False).tolist()
        folder.save(state(t), kept(*clients, value=10.0 * t))
        truth[t] = truth[t - 1] | {c: 10.0 * t + c for c in clients}
        for r in range(max(1, t - 1), t + 1):
            found = again(folder)._load(folder._file("round", r))
            assert {c: s["mean"][0].item() for c, s in found.kept.items()} == truth[r]
    assert len(names(folder, "kept")) <= 7  # no more than the clients, and the two last


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("broken", ["round", "kept"])
def test_the_older_checkpoint_serves_when_the_newest_is_truncated(folder, broken):
    folder.save(state(1), kept(0, 1, value=10))
    folder.save(state(2), kept(1, value=20))
    cut(folder.path / "checkpoints" / f"{broken}-000002.safetensors")
    found = again(folder).load_latest()
    assert found.round == 1 and found.kept[1]["mean"][0].item() == 11


def test_the_older_checkpoint_still_serves_after_a_restart(folder):
    """A restart must not forget which kept files the checkpoint before the next one names."""
    folder.save(state(1), kept(0, 1, value=10))
    folder.save(state(2), kept(2, value=20))
    folder = again(folder)
    folder.load_latest()
    folder.save(state(3), kept(0, 1, value=30))
    cut(folder.path / "checkpoints" / "round-000003.safetensors")
    found = again(folder).load_latest()
    assert found.round == 2 and sorted(found.kept) == [0, 1, 2]


def test_a_checkpoint_with_a_strange_header_is_passed_over(folder):
    folder.save(state(1), {})
    path = folder.path / "checkpoints" / "round-000002.safetensors"
    for facts in ({}, {"round": 2, "seconds": 1, "kept": []}, {"round": 2, "seconds": 1, "kept": {"a": "b"}}):
        sealed.write_tensors(path, {"shared.mean": torch.zeros(1)}, facts)
        assert again(folder).load_latest().round == 1


def test_files_of_others_are_left_alone(folder):
    folder.save(state(1), {})
    mine = folder.path / "checkpoints" / "round-of-my-own-1.safetensors"
    mine.write_text("hello")
    for t in (2, 3, 4):
        folder.save(state(t), {})
    assert mine.read_text() == "hello"


def test_no_checkpoint_yet(folder):
    assert again(folder).load_latest() is None


# -- the configuration ----------------------------------------------------------------------------------------------
CONFIG = {"rounds": 5, "algorithm": {"name": "x", "hyper": {"lr": 0.1}}}


def test_an_existing_run_is_never_overwritten(folder):
    with pytest.raises(InputError, match=r"already holds a run.*--resume"):
        again(folder).create({})
    assert sealed.read_json(folder.path / "config.json") == CONFIG


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="There is no run in"):
        Folder(tmp_path).reopen({}, set())


def test_resuming_with_another_configuration_names_the_keys(folder):
    other = {"rounds": 5, "algorithm": {"name": "x", "hyper": {"lr": 0.2}}, "extra": True}
    with pytest.raises(InputError) as error:
        again(folder).reopen(other, {"rounds"})
    text = str(error.value)
    assert "algorithm.hyper.lr (was 0.1, now 0.2)" in text and "extra (was unset, now True)" in text
    assert "rounds" not in text.split("configuration:")[1] and "algorithm.name" not in text
    assert sealed.read_json(folder.path / "config.json") == CONFIG


def test_the_free_keys_may_change(folder):
    folder.save(state(3), {})
    assert again(folder).reopen(CONFIG | {"rounds": 9}, {"rounds"}).round == 3
    assert sealed.read_json(folder.path / "config.json")["rounds"] == 9


def test_a_run_cannot_be_resumed_into_its_past(folder):
    folder.save(state(3), {})
    with pytest.raises(InputError, match=r"already has 3 rounds"):
        again(folder).reopen(CONFIG | {"rounds": 2}, {"rounds"})
    assert sealed.read_json(folder.path / "config.json") == CONFIG


def test_a_configuration_is_compared_as_it_is_written(folder):
    folder.path.joinpath("config.json").write_text(json.dumps({"hidden": [4, 4]}))
    again(folder).reopen({"hidden": (4, 4)}, set())


def test_metrics_are_cut_to_the_checkpoint(folder):
    for t in (1, 2, 3):
        folder.log({"round": t, "loss": 1 / t})
    folder.save(state(2), {})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "lo')  # killed while writing
    opened = again(folder)
    opened.reopen(CONFIG, set())
    assert [line["round"] for line in opened.history] == [1, 2]
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [sealed.parse_sealed(line, "") for line in lines] == [{"round": 1, "loss": 1.0}, {"round": 2, "loss": 0.5}]
    opened.log({"round": 3})
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 3


def full(*args):
    raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_says_how_to_go_on(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"No space.*--resume"):
            folder.log({"round": 1})
    (folder.path / "metrics.jsonl").unlink()
    os.mkfifo(folder.path / "metrics.jsonl")
    with pytest.raises(InputError, match="is a FIFO"):
        folder.log({"round": 1})


def test_a_damaged_line_of_metrics_is_left_out_with_a_warning(folder, caplog):
    for t in (1, 2, 3):
        folder.log({"round": t, "loss": 1 / t})
    folder.save(state(3), {})
    path = folder.path / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.5", "0.7"))
    opened = again(folder)
    opened.reopen(CONFIG, set())
    assert [line["round"] for line in opened.history] == [1, 3]
    assert "1 of 3 rounds cannot be read (first round 2)" in caplog.text
    caplog.clear()
    opened = again(folder)
    opened.reopen(CONFIG, set())
    assert [line["round"] for line in opened.history] == [1, 3] and caplog.text


# -- whole runs ------------------------------------------------------------------------------------------------------
def federation():
    g = np.random.default_rng(0)
    client = lambda n: (g.normal(size=(n, 4)).astype(np.float32), g.integers(0, 3, n))
    return fedabml.Federation.from_arrays([client(n) for n in (9, 20, 14, 7)], [client(5) for _ in range(4)], classes=3)


def run(out, rounds=4, algorithm=None, resume=False, **options):
    words = {
        "participation": 0.5,
        "epochs": 1,
        "batch_size": 8,
        "seed": 3,
        "device": "cpu",
        "model_options": {"hidden": (4,)},
    }
    algorithm = algorithm or FedABML(prior_std="learned", prior_every="batch", rho=0.5)
    return fedabml.train(federation(), "mlp", algorithm, rounds=rounds, out=out, resume=resume, **(words | options))


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedABML(prior_std="learned", average=0.5), Local(momentum=0.5)], ids=["a", "b"])
@pytest.mark.parametrize("moment", ["after a round", "before the checkpoint", "before the kept states", "in the log"])
def test_a_crash_at_any_moment_costs_nothing(tmp_path, monkeypatch, algorithm, moment):
    run(tmp_path / "whole", algorithm=algorithm)
    with monkeypatch.context() as patch:
        if moment == "after a round":
            patch.setattr(Folder, "_remove_old", lambda self, t: crash(t >= 3))
        elif moment == "before the checkpoint":
            real = Folder._file
            late = lambda content, t: content == "round" and t >= 3
            patch.setattr(Folder, "_file", lambda self, content, t: crash(late(content, t)) or real(self, content, t))
        elif moment == "before the kept states":
            save = Folder.save
            patch.setattr(Folder, "save", lambda self, s, c: crash(s.round >= 3) or save(self, s, c))
        else:
            log = Folder.log
            patch.setattr(Folder, "log", lambda self, line: crash(line["round"] >= 3) or log(self, line))
        with pytest.raises(Killed):
            run(tmp_path / "cut", algorithm=algorithm)
    assert not (tmp_path / "cut" / "summary.json").exists()
    resumed = run(tmp_path / "cut", algorithm=algorithm, resume=True)
    whole, again = (sealed.read_tensors(tmp_path / name / "shared.safetensors") for name in ("whole", "cut"))
    assert whole[1] == again[1] and whole[0].keys() == again[0].keys()
    assert all(torch.equal(t, again[0][name]) for name, t in whole[0].items())
    assert (tmp_path / "whole/shared.safetensors").read_bytes() == (tmp_path / "cut/shared.safetensors").read_bytes()
    assert (tmp_path / "whole/clients.csv").read_text() == (tmp_path / "cut/clients.csv").read_text()
    strip = lambda lines: [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    metrics = [sealed.parse_sealed(s, "") for s in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert strip(resumed.history) == strip(metrics)


def crash(now):
    if now:
        raise Killed


@pytest.mark.slow
def test_rounds_may_be_extended(tmp_path):
    run(tmp_path / "short", rounds=2)
    longer = run(tmp_path / "short", rounds=4, resume=True)
    whole = run(tmp_path / "whole", rounds=4)
    assert all(torch.equal(v, whole.prior.shared[k]) for k, v in longer.prior.shared.items())
    assert [line["round"] for line in longer.history] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, r"seed \(was 3, now 4\)"),
        ({"epochs": 2}, r"epochs \(was 1, now 2\)"),
        ({"algorithm": FedABML(lr=0.5, prior_std="learned", prior_every="batch", rho=0.5)}, r"algorithm\.hyper\.lr"),
        ({"algorithm": FedAvg()}, r"algorithm\.name \(was 'fedabml', now 'fedavg-ft'\)"),
        ({"dtype": "float64"}, "dtype"),
        ({"model_options": {"hidden": (5,)}}, "model_options.hidden"),
        ({"backend": "loop"}, "backend"),
    ],
)
@pytest.mark.slow
def test_a_run_resumed_otherwise_is_refused(tmp_path, change, words):
    run(tmp_path, rounds=1)
    before = (tmp_path / "checkpoints/round-000001.safetensors").read_bytes()
    with pytest.raises(InputError, match=words):
        run(tmp_path, rounds=2, resume=True, **change)
    assert (tmp_path / "checkpoints/round-000001.safetensors").read_bytes() == before


@pytest.mark.slow
def test_the_chunk_of_the_first_start_is_reused(tmp_path):
    run(tmp_path, rounds=1, chunk=1, backend="loop")
    assert run(tmp_path, rounds=2, resume=True).config["chunk"] == 1
    assert sealed.read_json(tmp_path / "config.json")["backend"] == "loop"


@pytest.mark.slow
def test_a_run_of_a_version_without_a_hyperparameter_goes_on(tmp_path):
    plain = FedABML(server_momentum=0)  # as all were then
    whole = run(tmp_path / "whole", 2, plain)
    run(tmp_path / "old", 1, plain)
    config = sealed.read_json(tmp_path / "old/config.json")
    for name in ("server_momentum", "lr_decay"):
        del config["algorithm"]["hyper"][name]
    sealed.write_json(tmp_path / "old/config.json", config)
    with pytest.raises(InputError, match=r"hyper.server_momentum \(was .*, now 0.4\)"):  # today's default
        run(tmp_path / "old", 2, resume=True, algorithm=FedABML())
    found = run(tmp_path / "old", 2, plain, resume=True)
    assert all(torch.equal(v, found.prior.shared[k]) for k, v in whole.prior.shared.items())
    assert sealed.read_json(tmp_path / "old/config.json")["algorithm"]["hyper"]["server_momentum"] == 0
    del config["algorithm"]["hyper"]["momentum"]  # all versions had it
    sealed.write_json(tmp_path / "old/config.json", config)
    with pytest.raises(InputError, match=r"hyper.momentum \(was unset, now"):
        run(tmp_path / "old", 3, plain, resume=True)


def test_divergence_names_the_round_and_the_clients_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    real = Simulation.draw

    def poisoned(self):
        if self.round == 2:
            self.cohort.data.x[self.cohort.fed.train[1]] = float("inf")
        return real(self)

    monkeypatch.setattr(Simulation, "draw", poisoned)
    with pytest.raises(TrainingError, match=r"round 3: .*client\(s\) client-1 are"):
        run(tmp_path, participation=1.0)
    assert Folder(tmp_path).load_latest().round == 2


def test_last_ten():
    history = [{"round": t, "eval": {"accuracy": t / 100}} for t in range(1, 21)] + [{"round": 21}]
    assert last_ten(history, 20, "accuracy", 0.9) == pytest.approx((sum(range(11, 20)) / 100 + 0.9) / 10)
    assert last_ten([], 5, "accuracy", 0.5) == 0.5 and last_ten([], 5, "accuracy", None) is None


def test_another_sealed_file_in_place_of_kept_states_is_refused(tmp_path):
    run(tmp_path, algorithm=Local())
    newest = {kind: sorted((tmp_path / "checkpoints").glob(f"{kind}-*"))[-1] for kind in ("round", "kept")}
    newest["kept"].write_bytes(newest["round"].read_bytes())
    with pytest.raises(InputError, match="holds no kept states of clients"):
        dict(Folder(tmp_path).load_latest().kept)
