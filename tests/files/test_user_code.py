"""Code in a user's own file: it runs where a person names it, and nowhere else."""

import math
import sys
from dataclasses import dataclass

import pytest
from torch import nn

import fedabml
from fedabml import algorithms, models
from fedabml.algorithms import REGISTRY, register_user_algorithm
from fedabml.errors import InputError
from fedabml.experiments.functions import _algorithm
from fedabml.files.user_code import code_of_class, read_user_code, refuse_other_code
from fedabml.models import register_user_network

FILE = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from fedabml.algorithms.fedavg import FedAvg
from fedabml.algorithms.hyper import hyper

@dataclass(frozen=True)
class Damped(FedAvg):
    damping: float = hyper(0.5, "share of the way", 0, 1, static=True, tune=(0.5, 1.0))

    def merge(self, shared, update, sampled, clients):
        new = super().merge(shared, update, sampled, clients)
        return {"mean": shared["mean"] + self.damping * (new["mean"] - shared["mean"])}

@dataclass(frozen=True)
class Bare(FedAvg):
    width: float = 0.5

@dataclass(frozen=True)
class Needy(FedAvg):
    def __init__(self, width):
        pass

class Net(nn.Sequential):
    def __init__(self, shape, outputs, width=8):
        super().__init__(nn.Flatten(), nn.Linear(shape[-2] * shape[-1], width), nn.ReLU(), nn.Linear(width, outputs))

def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def needs(depth):
    return nn.Linear(64, depth)

def fails():
    raise RuntimeError("no luck")

class mlp(nn.Module):
    pass

number = 3
none = lambda: None
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(algorithms, "REGISTRY", REGISTRY)
    before = dict(REGISTRY), dict(models.USER_NETWORKS)
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    yield path
    for registry, content in zip((REGISTRY, models.USER_NETWORKS), before, strict=True):
        registry.clear()
        registry.update(content)
    for name in [name for name in sys.modules if name.startswith("fedabml_user_code_")]:
        del sys.modules[name]


def test_an_algorithm_is_registered_under_its_own_name(file):
    assert register_user_algorithm(f"{file}:Damped") == "Damped"
    made = algorithms.make("Damped", damping=0.25)
    assert made.damping == 0.25 and algorithms.name_of(made) == "Damped"
    assert algorithms.digest_of(made) == {"Damped": read_user_code(f"{file}:Damped").digest}
    assert algorithms.digest_of(fedabml.FedAvg()) == {}
    assert register_user_algorithm("fedavg") == "fedavg"


def test_a_changed_file_is_another_class_with_another_digest(file):
    first = read_user_code(f"{file}:Damped")
    assert read_user_code(f"{file}:Damped").value is first.value
    register_user_algorithm(f"{file}:Damped")
    file.write_text(FILE.replace("0.5, 1.0", "0.1, 1.0"))
    second = read_user_code(f"{file}:Damped")
    assert second.value is not first.value and second.digest != first.digest
    register_user_algorithm(f"{file}:Damped")
    assert REGISTRY["Damped"].kind is second.value


def test_a_network_gets_shape_and_outputs_where_it_has_such_parameters(file):
    assert register_user_network(f"{file}:Net") == "Net" and register_user_network(f"{file}:fixed") == "fixed"
    net = models.build("Net", (8, 8), 10, width=5)
    assert net[1].weight.shape == (5, 64) and net[3].weight.shape == (10, 5)
    again = models.build("Net", (8, 8), 10, width=5)
    assert (net[1].weight == again[1].weight).all(), "weights are a function of the seed alone"
    assert (net[1].weight != models.build("Net", (8, 8), 10, seed=1, width=5)[1].weight).any()
    assert models.build("fixed", (8, 8), 10)[1].weight.shape == (10, 64)


@pytest.mark.parametrize(
    ("register", "name", "says"),
    [
        (register_user_algorithm, "Nothing", "has no 'Nothing'. It defines: Damped, Bare"),
        (register_user_algorithm, "Net", "must be a subclass of fedabml.Algorithm; it is the class Net"),
        (register_user_algorithm, "number", "must be a subclass of fedabml.Algorithm; it is an object of type int"),
        (register_user_algorithm, "Bare", "must be declared with fedabml.algorithms.hyper.hyper"),
        (register_user_algorithm, "Needy", "made without arguments"),
        (
            register_user_network,
            "number",
            "must be a class or function that makes a torch.nn.Module; it is of type int",
        ),
        (register_user_network, "mlp", "the name of a network of fedabml, mlp. Rename it"),
        (register_user_network, "1x", "must have the form FILE.py:NAME"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(file, register, name, says):
    with pytest.raises(InputError, match=says) as refusal:
        register(f"{file}:{name}")
    assert "mine.py" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("needs", {}, "needs a value for depth: --set model_options.depth="),
        ("Net", {"widht": 3}, "takes no option 'widht'. Did you mean 'width'"),
        ("fails", {}, "cannot be made with no arguments: RuntimeError: no luck"),
        ("none", {}, "must make a torch.nn.Module; it makes an object of type NoneType"),
    ],
)
def test_a_network_that_cannot_be_made_is_refused_by_name(file, name, options, says):
    register_user_network(f"{file}:{name}")
    with pytest.raises(InputError, match=says):
        models.build(name, (8, 8), 10, **options)


def test_a_file_that_is_missing_or_broken_is_named(file, tmp_path):
    with pytest.raises(InputError, match=r"There is no file '.*none.py'"):
        register_user_algorithm(str(tmp_path / "none.py:A"))
    file.write_text("import nothing_of_this_name")
    with pytest.raises(InputError, match=r"mine.py' cannot be imported: ModuleNotFoundError.*PYTHONPATH"):
        register_user_algorithm(f"{file}:A")
    file.write_text("def")
    with pytest.raises(InputError, match="SyntaxError"):
        register_user_algorithm(f"{file}:A")


@dataclass(frozen=True)
class Session(fedabml.FedAvg):
    """A class of this module, as a session has it."""


def test_a_class_of_a_session_has_the_digest_of_its_source(file):
    assert register_user_algorithm(Session) == "Session" and register_user_algorithm(fedabml.FedABML) == "fedabml"
    assert len(code_of_class(Session).digest) == 64
    kind = read_user_code(f"{file}:Damped").value
    assert code_of_class(kind).digest == read_user_code(f"{file}:Damped").digest


def test_a_class_keeps_the_digest_of_its_file_as_it_was_imported(file):
    first = read_user_code(f"{file}:Damped")
    file.write_text(FILE.replace("self.damping *", "0.5 *"))
    again = code_of_class(first.value)
    assert again.value is first.value and again.digest == first.digest
    name, _ = _algorithm(first.value(damping=0.3))
    assert REGISTRY[name].kind is first.value, "an object is compared with its own class, not with the edited one"


@pytest.mark.parametrize(("register", "name"), [(register_user_algorithm, "Damped"), (register_user_network, "Net")])
def test_code_of_another_file_with_the_same_name_is_refused(file, tmp_path, register, name):
    register(f"{file}:{name}")
    other = tmp_path / "other.py"
    other.write_text(FILE)
    assert register(f"{other}:{name}") == name, "the same code may be in two places"
    third = tmp_path / "third.py"
    third.write_text(FILE + "# other\n")
    with pytest.raises(InputError, match=rf"third.py:{name}' has the name of '.*:{name}'.*Rename one of them"):
        register(f"{third}:{name}")


def test_two_classes_of_one_name_are_not_compared_as_one(file, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(FILE.replace("0.5, 1.0", "0.1, 1.0"))
    fed = fedabml.federate(fedabml.load("digits"), clients=6)
    with pytest.raises(InputError, match="Rename one of them"):
        fedabml.compare(fed, "mlr", {"old": f"{file}:Damped", "new": f"{other}:Damped"}, seeds=1)
    old, new = Session(), dataclass(frozen=True)(type("Session", (fedabml.FedAvg,), {"__module__": __name__}))()
    for call in (
        lambda: fedabml.compare(fed, "mlr", {"old": old, "new": new}, seeds=1),
        lambda: fedabml.tune(fed, "mlr", [old, new], trials=1),
    ):
        with pytest.raises(InputError, match="Two different classes have the name 'Session'"):
            call()


QUICK = {"rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu", "backend": "loop"}


def test_a_prior_of_own_code_loads_only_where_it_is_named_again(file, tmp_path, caplog):
    fed = fedabml.federate(fedabml.load("digits"), clients=6)
    damped = algorithms.make(register_user_algorithm(f"{file}:Damped"), damping=0.3, personal_epochs=1)
    run = fedabml.train(fed, f"{file}:Net", damped, **QUICK, model_options={"width": 4}, out=tmp_path / "run")
    prior = tmp_path / "run" / "shared.safetensors"
    x, y = fed.x[fed.train[0]], fed.y[fed.train[0]]
    run.prior.personalize(x, y).save(tmp_path / "posterior.safetensors")
    assert run.config["code"].keys() == {"Damped", "Net"} and run.summary["algorithm"] == "Damped"
    assert math.isfinite(run.summary["nll"])
    del REGISTRY["Damped"], models.USER_NETWORKS["Net"]  # as in another process
    with pytest.raises(InputError, match=r"no model 'Net'.*name its file: FILE.py:Net"):
        fedabml.load_prior(prior)
    with pytest.raises(InputError, match=r"no algorithm 'Damped'.*name its file: FILE.py:Damped"):
        fedabml.load_prior(prior, f"{file}:Net")
    loaded = fedabml.load_prior(prior, model=f"{file}:Net", algorithm=f"{file}:Damped")
    assert loaded.digest == run.prior.digest and not caplog.records
    assert fedabml.load_posterior(tmp_path / "posterior.safetensors", f"{file}:Net").q.mean.numel() > 0
    with pytest.raises(InputError, match="Its network is Net, and the model given is fixed"):
        fedabml.load_prior(prior, model=f"{file}:fixed")
    file.write_text(FILE + "# changed\n")
    fedabml.load_prior(prior, model=f"{file}:Net", algorithm=f"{file}:Damped")
    assert [r.message.split(" is not the code")[0] for r in caplog.records] == ["'Net'", "'Damped'"]
    with pytest.raises(InputError, match=r"code\.Net"):
        fedabml.train(
            fed, f"{file}:Net", damped, **QUICK, model_options={"width": 4}, out=tmp_path / "run", resume=True
        )


def test_a_module_of_ones_own_still_needs_itself(tmp_path):
    fed = fedabml.federate(fedabml.load("digits"), clients=6)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fedabml.train(fed, net, fedabml.FedAvg(personal_epochs=1), **QUICK, out=tmp_path / "run")
    with pytest.raises(InputError, match="your own module"):
        fedabml.load_prior(tmp_path / "run" / "shared.safetensors")


def test_a_file_named_by_path_and_imported_is_one_origin(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    import mine

    registered = read_user_code(f"{file}:Damped")
    refuse_other_code(code_of_class(mine.Damped), registered)
    assert code_of_class(mine.Damped).origin == registered.origin
    sys.modules.pop("mine")
