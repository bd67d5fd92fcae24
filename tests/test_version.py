"""The digest of the code differs for every change of a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import fedabml
from fedabml import version


def test_the_code_is_known_by_what_its_files_say(tmp_path, monkeypatch):
    package = tmp_path / "fedabml"
    shutil.copytree(Path(fedabml.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(version, "__file__", str(package / "version.py"))
    digest = version.code.__wrapped__
    before = digest()
    assert before == version.code() and len(before) == 10
    (package / "gone.py").symlink_to(package / "nowhere.py")
    (package / "runs/train.py").rename(package / "run2.py")
    moved = digest()
    (package / "run2.py").rename(package / "runs/train.py")
    assert digest() == before != moved
    with (package / "runs/train.py").open("a") as file:
        file.write("# another word")
    assert digest() != before
