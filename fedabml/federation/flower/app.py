"""Write the Flower app of a federation: a folder for `flwr run`, the same for every federation.

Its files hold no settings and no version of fedabml, so its hash changes only when these texts do. The workers of
fedabml check that hash and run none of its code; the code serves stock Flower deployments (`flower-superexec`).
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from flwr.cli.build import build_fab_from_disk

from ...files.paths import write

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedabml-app"
version = "1.0.0"
description = "Federated learning with uncertainty: the ServerApp and ClientApp of fedabml"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0,<1.42", "fedabml"]

[tool.flwr.app]
publisher = "fedabml"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["LICENSE", "fedabml_app/*.py"]

[tool.flwr.app.components]
serverapp = "fedabml_app.server_app:app"
clientapp = "fedabml_app.client_app:app"

[tool.flwr.app.config]
"""
_LICENSE = "The code of this app is a call of fedabml and has fedabml's licence.\n"
_MODULE = '"""{title}."""\n\nfrom fedabml.federation.flower import {module}\n\napp = {module}.app\n'
_FILES = {
    "pyproject.toml": _PROJECT,
    "LICENSE": _LICENSE,
    "fedabml_app/__init__.py": '"""The Flower app of a fedabml federation."""\n',
    "fedabml_app/server_app.py": _MODULE.format(title="The ServerApp", module="serverapp"),
    "fedabml_app/client_app.py": _MODULE.format(title="The ClientApp", module="clientapp"),
}


def write_app(folder: Path) -> None:
    """Write the app's files into a folder."""
    for name, text in _FILES.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text)


def bundle(folder: Path) -> bytes:
    """Return the app as Flower bundles it (a FAB). Equal files give equal bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from a library that Flower uses
        return build_fab_from_disk(Path(folder))


def app_hash(folder: Path) -> str:
    """Return the SHA-256 digest by which Flower and the lists of allowed apps name the app."""
    return hashlib.sha256(bundle(folder)).hexdigest()
