"""The Flower app: the same bytes everywhere, and Flower's own checks accept it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.cli.config_utils import load_and_validate

from fedabml.federation.flower.app import app_hash, write_app

pytestmark = pytest.mark.flower


def test_the_hash_depends_on_the_files_alone(tmp_path: Path) -> None:
    for name in ("a", "b/app"):
        write_app(tmp_path / name)
    digest = app_hash(tmp_path / "a")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert app_hash(tmp_path / "b/app") == digest
    module = tmp_path / "a" / "fedabml_app" / "client_app.py"
    module.write_text(module.read_text() + "import os\n")
    assert app_hash(tmp_path / "a") != digest


def test_flower_accepts_the_app(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    assert load_and_validate(tmp_path / "app" / "pyproject.toml")[1] == []
