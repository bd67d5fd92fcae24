"""Every public function answers a wrong argument with one clear sentence, never with an error from its inside."""

import inspect
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedabml
from fedabml import algorithms, models, report
from fedabml.data import Rows, datasets, features, read_client, save_manifest
from fedabml.errors import InputError, TrainingError
from fedabml.serve import ServeOptions, create_app
from tests.tiers import nightly_but

pytestmark = pytest.mark.usefixtures("one_thread_here")


CALLBACKS = ("on_start", "on_round", "progress")


class NoOutput(nn.Module):
    """A module of a user's that forgets to return."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        self.layer(x)


class Many(nn.Linear):
    """A module that returns more than its outputs."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x), x


WRONG = {
    "none": lambda: None,
    "generator": lambda: (i for i in range(3)),
    "word": lambda: "nonsense",
    "empty word": lambda: "",
    "negative": lambda: -1,
    "fraction": lambda: 1.5,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "huge": lambda: 10**30,
    "true": lambda: True,
    "bytes": lambda: b"bytes",
    "nested": lambda: [[1, [2]], "x"],
    "empty list": lambda: [],
    "dict": lambda: {"a": 1},
    "object": object,
    "class": lambda: int,
    "array": lambda: np.zeros((2, 3, 4, 5), np.float32),
    "words": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([None, {}], dtype=object),
    "tensor": lambda: torch.zeros(2),
    "complex": lambda: 1j,
    "folder": lambda: Path(),
    "function": lambda: len,
    "module": NoOutput,
    "module class": lambda: nn.Linear,
    "algorithm class": lambda: fedabml.FedAvg,
    "list of pairs": lambda: [(None, None), (1, 2)],
}


def pairs(clients=3, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(6, 3)), np.arange(6) % 2) for _ in range(clients)]


def small():
    return fedabml.Federation.from_arrays(pairs())


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """Good arguments for everything."""
    folder = tmp_path_factory.mktemp("things")
    fed = fedabml.Federation.from_arrays(pairs(), pairs(seed=1))
    quick = {"rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu", "backend": "loop"}
    run = fedabml.train(fed, "mlr", fedabml.FedABML(personal_epochs=1), **quick, out=folder / "run")
    x, y = pairs(1)[0]
    posterior = run.prior.personalize(x, y)
    posterior.save(folder / "posterior.safetensors")
    frame = pd.DataFrame({"a": x[:, 0], "who": ["p", "q"] * 3, "y": [*"nnyyny"]})
    frame.to_csv(folder / "table.csv", index=False)
    (folder / "clients").mkdir()
    for i in range(2):
        np.savez(folder / "clients" / f"{i}.npz", x=x, y=y)
    table = fedabml.read_table(folder / "table.csv", client="who", target="y", test_share=0)
    return {
        "folder": folder,
        "fed": fed,
        "run": run,
        "posterior": posterior,
        "table": table,
        "frame": frame,
        "digits": fedabml.load("digits"),
        "quick": quick,
        "x": x,
        "y": y,
        "rows": Rows.of([[0, 1], [2]]),
    }


@pytest.fixture(scope="module")
def toy(things):
    """The finished cells that the good arguments of `reproduce` name: it then trains nothing."""
    fedabml.reproduce("toy", quick=True, seeds=1, out=things["folder"] / "toy", device="cpu")


def calls(t):
    """Every public function with good arguments, by name."""
    f, fed, x, y, prior, posterior = t["folder"], t["fed"], t["x"], t["y"], t["run"].prior, t["posterior"]
    measured = fedabml.Federation.from_arrays([(x, np.abs(x[:, 0]) + 0.1)])
    predicted = fedabml.Regression.of(torch.zeros(2, 3, 2), np.zeros(1), np.ones(1))
    owned = {"x": x.astype(np.float32), "y": y, "owner": np.array([0, 0, 0, 1, 1, 1]), "test": np.zeros(6, bool)}
    run = {"fed": fed, "model": "mlr", "algorithm": fedabml.FedAvg(personal_epochs=1), **t["quick"], "batch_size": 5}
    run |= {"seed": 0, "dtype": "float32", "chunk": 2, "compile": False, "likelihood": fedabml.Categorical(2)}
    run |= {"model_options": {}, "pretrained": None, "class_weights": "balanced", "train": "all", "lora_rank": 4}
    run |= {"specificity": 0.95}
    weights = {"class_weights": [1, 2], "calibration": "none"}
    scoring = {"evaluate": True, "eval_every": 0, "eval_clients": 2, "eval_all": True, "split": "test", "out": None}
    scoring |= {"resume": False, "extra": {}, "on_start": lambda setup, sim: None, "on_round": lambda line: None}
    scoring |= {"progress": False}
    arrays = {"train": pairs(), "test": pairs(seed=1), "val": None, "names": ["a", "b", "c"]}
    told = {"task": "classification", "classes": 2, "normalize": "auto", "dataset": "arrays", "drop_small": False}
    read = {"task": None, "drop_small": False, "image_size": None}
    columns = [{"value": row, "label": int(label)} for row, label in zip(x, y, strict=True)]
    sets = {"train": {"a": columns, "b": columns}, "test": None, "val": None, "x": "value", "y": "label"}
    sets |= {"padding": None}
    divided = {"dataset": t["digits"], "partition": "classes", "clients": 10, "classes_per_client": 2, "alpha": 0.5}
    divided |= {"distinct": False, "min_samples": 2, "groups": None, "drop_small": False, "seed": 0}
    table = {"path": f / "table.csv", "client": "who", "target": "y", "task": None, "test_share": 0.0, "seed": 0}
    columns = {"drop": [], "id": None, "dates": [], "split_by": None, "positive_class": None, "drop_small": False}
    looked = {name: value for name, value in columns.items() if name not in ("positive_class", "drop_small")}
    frame = {**table, "frame": t["frame"], "dataset": "table"}
    del frame["path"]
    site = {"prior": prior, "x": x, "y": y, "validation": 0.4, "seed": 0, "device": "cpu", "encoded": False}
    site |= {"epochs": 1, "lr": 0.1, "batch_size": 5, "class_weights": [1, 2], "posterior": None}
    own = {
        "x": x,
        "y": y,
        "epochs": 1,
        "seed": 0,
        "lr": 0.1,
        "batch_size": 4,
        "device": "cpu",
        "encoded": False,
        "id": None,
    }
    asked = {"x": x, "samples": 2, "seed": 0, "device": "cpu", "encoded": False, "id": None}
    served = {"path": f / "posterior.safetensors", "options": ServeOptions(), "token": "a" * 20, "model": None}
    limits = {"max_rows": 1, "max_bytes": 1, "max_requests": 1, "timeout": 1.0, "batch_wait": 0.0, "watch": 0.0}
    limits |= {"unknown": "refuse", "quantiles": [], "samples": None, "seed": 0, "device": "cpu"}
    hyper = {"lr": 0.1, "momentum": 0.0, "personal_epochs": 1, "weights": "uniform", "label_alpha": 0.1}
    experiment = {"fed": fed, "model": "mlr", "config": None, "preset": None, "out": None, "resume": False}
    experiment |= {"finished": [], "progress": False, **t["quick"]}
    paper = {"experiment": "toy", "protocol": "paper", "quick": True, "columns": [], "algorithms": [], "seeds": 1}
    paper |= {"trials": None, "grid": [], "search_seed": None, "chosen": [], "out": None, "tuning": None}
    paper |= {
        "finished": [f / "toy" / "cells.jsonl"],
        "part": None,
        "so_far": False,
        "device": "cpu",
        "dtype": "float32",
        "compile": None,
    }
    paper |= {"data_dir": None, "progress": False}
    return {
        "train": (fedabml.train, run | scoring),
        "prepare": (fedabml.prepare, run | {"workers": None, "channels_last": None}),
        "from_arrays": (fedabml.Federation.from_arrays, arrays | told),
        "from_datasets": (fedabml.Federation.from_datasets, sets | told),
        "from_owners": (fedabml.Federation.from_owners, owned | told),
        "from_folder": (fedabml.Federation.from_folder, {"path": f / "clients", **read}),
        "read_table": (fedabml.read_table, table | columns),
        "from_frame": (fedabml.Federation.from_frame, frame | columns),
        "inspect_table": (
            fedabml.inspect_table,
            {"path": f / "table.csv", "client": "who", "target": "y", "task": None, **looked},
        ),
        "load": (fedabml.load, {"name": "digits", "data_dir": None, "offline": True, "progress": None}),
        "federate": (fedabml.federate, divided),
        "federate dirichlet": (fedabml.federate, divided | {"partition": "dirichlet"}),
        "federate natural": (
            fedabml.federate,
            divided | {"partition": "natural", "groups": (t["digits"].y_train, t["digits"].y_test)},
        ),
        "rows": (fed.rows, {"split": "test"}),
        "label_counts": (fed.label_counts, {"split": "test"}),
        "hold_out": (fed.hold_out, {"share": 0.2, "seed": 0}),
        "select": (fed.select, {"clients": [0, 1]}),
        "with_positive_target": (measured.with_positive_target, {"transform": "log"}),
        "load_prior": (
            fedabml.load_prior,
            {"path": f / "run" / "shared.safetensors", "model": None, "algorithm": None},
        ),
        "load_posterior": (fedabml.load_posterior, {"path": f / "posterior.safetensors", "model": None}),
        "personalize": (
            prior.personalize,
            own
            | {"kept": None, "validation": 0.4, "aim": "", "coverage": 0.5, "false_alarms": 0.1}
            | weights
            | {"trained_on": False},
        ),
        "compare_at_site": (fedabml.compare_at_site, site),
        "predict": (posterior.predict, asked),
        "quantile": (predicted.quantile, {"level": 0.5}),
        "prior.save": (prior.save, {"path": "prior.safetensors"}),
        "posterior.save": (posterior.save, {"path": "posterior.safetensors"}),
        "compare": (fedabml.compare, experiment | {"algorithms": ["fedavg"], "seeds": 1}),
        "tune": (
            fedabml.tune,
            experiment
            | {"algorithms": ["fedavg-ft"], "seeds": [100], "trials": 1, "measure": None, "batch": 1}
            | {"grid": {"lr": [0.1], "personal_epochs": [1], "personal_lr": [0.1]}, "fixed": None},
        ),
        "reproduce": (fedabml.reproduce, paper),
        "Prior": (
            fedabml.Prior,
            {"algorithm": prior.algorithm, "shared": prior.shared, "input_spec": prior.input_spec, "batch_size": 5},
        ),
        "Posterior": (
            fedabml.Posterior,
            {
                "q": posterior.q,
                "input_spec": posterior.input_spec,
                "offset": posterior.offset,
                "samples": 3,
                "prior": "",
                "trust": None,
                "ranges": None,
                "range_limit": None,
            },
        ),
        "create_app": (create_app, served),
        "ServeOptions": (ServeOptions, limits),
        "FedABML": (fedabml.FedABML, hyper),
        "make": (algorithms.make, {"name": "fedavg", **hyper}),
        "build": (models.build, {"name": "mlp", "shape": [3], "outputs": 2, "seed": 0, "most": 100, "hidden": [4]}),
        "with_weights": (models.with_weights, {"model": nn.Linear(3, 2), "path": f / "none.safetensors"}),
        "Categorical": (fedabml.Categorical, {"classes": 2, "weights": ()}),
        "Bernoulli": (fedabml.Bernoulli, {"labels": 2}),
        "StepCategorical": (fedabml.StepCategorical, {"classes": 2, "steps": 3}),
        "GaussianNoise": (fedabml.GaussianNoise, {"targets": 1, "noise": 0.5, "learn": True, "by_input": False}),
        "replace_batchnorm": (fedabml.replace_batchnorm, {"module": nn.BatchNorm2d(4), "groups": 2}),
        "report.write": (report.write, {"runs": [f / "run"], "out": Path("report.html"), "title": None}),
        "datasets": (datasets, {"folder": None}),
        "features": (features, {"table": t["frame"], "recipe": t["table"].recipe}),
        "report.save_heat_map": (report.save_heat_map, {"federation": fed, "path": "map.svg"}),
        "read_client": (read_client, {"path": f / "clients" / "0.npz", "labels": True}),
        "save_manifest": (save_manifest, {"federation": fed, "path": "manifest.json"}),
        "Rows": (Rows, {"index": t["rows"].index, "offsets": t["rows"].offsets}),
        "Rows.of": (Rows.of, {"lists": [[0], [1]]}),
    }


def campaign(function, good):
    """Calls a function with every wrong argument; returns how many calls ended in no sentence for a person."""
    raw = {}
    for parameter in good:
        for kind, wrong in WRONG.items():
            if parameter in CALLBACKS and callable(wrong()):
                continue  # what a callback of the user's raises is the user's
            try:
                function(**(good | {parameter: wrong()}))
            except (InputError, TrainingError) as error:
                if (
                    len(str(error)) > 700
                    or " object at 0x" in str(error)
                    or not str(error).rstrip().endswith((".", "?"))
                ):
                    raw[f"{parameter}={kind}"] = f"unclear: {error}"
            except Exception as error:
                raw[f"{parameter}={kind}"] = f"{type(error).__name__}: {error}"
    return raw


NAMES = (
    *("train", "prepare", "from_arrays", "from_datasets", "from_owners", "from_folder", "read_table", "from_frame"),
    *("inspect_table", "load"),
    *("federate", "federate dirichlet", "federate natural", "rows", "label_counts", "hold_out", "select"),
    *("with_positive_target", "load_prior", "load_posterior", "personalize", "compare_at_site", "predict", "quantile"),
    *("prior.save", "posterior.save", "compare", "tune", "reproduce", "Prior"),
    *("Posterior", "create_app", "ServeOptions", "FedABML"),
    *(
        "make",
        "build",
        "with_weights",
        "Categorical",
        "Bernoulli",
        "StepCategorical",
        "GaussianNoise",
        "replace_batchnorm",
        "report.write",
    ),
    *("datasets", "features", "report.save_heat_map", "read_client", "save_manifest", "Rows", "Rows.of"),
)


def test_the_campaign_is_large_and_knows_every_public_function(things):
    found = calls(things)
    assert tuple(found) == NAMES
    assert sum(len(good) * len(WRONG) for _, good in found.values()) > 4_000
    tried = {function for function, _ in found.values()}
    functions = {name for name in fedabml.__all__ if inspect.isfunction(getattr(fedabml, name))}
    assert functions == {name for name in functions if getattr(fedabml, name) in tried}
    for function, good in found.values():
        parameters = inspect.signature(function).parameters.values()
        named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        assert named <= good.keys() or function is fedabml.FedABML, function


@pytest.mark.parametrize("name", nightly_but({*NAMES} - {"reproduce", "tune"}, NAMES))
@pytest.mark.slow
def test_no_wrong_argument_ends_in_an_error_from_the_inside(request, things, name):
    if name == "reproduce":
        request.getfixturevalue("toy")
    assert campaign(*calls(things)[name]) == {}


def test_good_arguments_are_taken(things):
    for name, (function, good) in calls(things).items():
        if name not in ("with_weights", "reproduce"):
            function(**good)


@pytest.mark.nightly
@pytest.mark.usefixtures("toy")
def test_good_arguments_of_reproduce_are_taken(things):
    function, good = calls(things)["reproduce"]
    function(**good)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fedabml.train(None), "train: fed must be a Federation, as .* returns; it is None."),
        (
            lambda: fedabml.Federation.from_arrays(p for p in pairs()),
            "train must be a list; it is an object of type gen",
        ),
        (lambda: fedabml.train(small(), NoOutput()), "The model returns None; one tensor of outputs"),
        (lambda: fedabml.train(small(), Many()), r"The model returns a tuple of 0 \(shape \(2, 2\)\).*Name it"),
        (lambda: fedabml.train(small(), nn.Linear), "it is the class Linear"),
        (lambda: fedabml.train(small(), algorithm="fedavg"), r"an object such as fedabml.FedABML\(lr=0.03\).*'fedavg'"),
        (lambda: fedabml.train(small(), rounds=10**30), "rounds must be a whole number"),
        (lambda: small().select([0, "one"]), "a list whose every entry is a whole number"),
    ],
)
def test_the_sentence_says_what_is_wrong_and_what_to_do(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_a_missing_or_unknown_argument_stays_the_error_of_python():
    with pytest.raises(TypeError, match=r"train\(\) missing 1 required positional argument: 'fed'"):
        fedabml.train()
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'round'"):
        fedabml.train(small(), round=3)


def test_numbers_of_numpy_are_numbers(things):
    words = things["quick"] | {"rounds": np.int64(1), "participation": np.float32(1)}
    run = fedabml.train(things["fed"], "mlr", fedabml.FedAvg(lr=np.float32(0.1)), **words, out="run")
    assert run.summary["rounds"] == 1
