"""Flower's messages carry the identity of a task, which tests do not have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def task_identity() -> Iterator[None]:
    """Give the process an identity while a test runs, and what it had before afterwards."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    names = ("_run_id", "_node_id", "_task_id")
    before = {name: getattr(identity, name) for name in names}
    identity.run_id, identity.node_id, identity.task_id = 1, 1, 1
    yield
    for name, value in before.items():
        setattr(identity, name, value)
