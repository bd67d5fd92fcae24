"""The registry: names without an import of torch, classes on first use, and algorithms of a user's own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fedabml import algorithms
from fedabml.algorithms import REGISTRY, Entry, FedAvg, make, name_of


@pytest.mark.slow
def test_the_names_of_algorithms_and_datasets_cost_no_import_of_torch_or_numpy():
    script = """
import sys
from fedabml.algorithms import REGISTRY
from fedabml.data.catalogue import SOURCES
assert "scaffold" in REGISTRY and "mnist" in SOURCES
print({"torch", "numpy", "pandas"} & sys.modules.keys())
print(REGISTRY["scaffold"].kind.__name__, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "Scaffold True"]


@pytest.mark.parametrize("name", REGISTRY)
def test_the_class_of_a_name_is_importable_from_the_package(name):
    kind = REGISTRY[name].kind
    assert getattr(algorithms, kind.__name__) is kind and type(make(name)) is kind


def test_an_attribute_that_no_entry_has_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'FedNone'"):
        algorithms.FedNone  # noqa: B018


@dataclasses.dataclass(frozen=True)
class Own(FedAvg):
    """A class of a user's own."""


@pytest.mark.parametrize("home", [Own, f"{__name__}:Own"], ids=["class", "text"])
def test_a_class_may_be_registered_itself_or_by_its_place(monkeypatch, home):
    monkeypatch.setitem(REGISTRY, "own", Entry(home, {"personal_epochs": 2}))
    made = make("own", lr=0.5)
    assert type(made) is Own and (made.personal_epochs, made.lr) == (2, 0.5) and name_of(made) == "own"
