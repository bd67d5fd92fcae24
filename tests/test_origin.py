"""Numbers know the code and the hardware that made them."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import torch

import fedabml
from fedabml import origin


def test_the_code_is_known_by_what_its_files_say(tmp_path, monkeypatch):
    package = tmp_path / "fedabml"
    shutil.copytree(Path(fedabml.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(origin, "__file__", str(package / "origin.py"))
    digest = origin.code.__wrapped__
    before = digest()
    assert before == origin.code() and len(before) == 10
    (package / "gone.py").symlink_to(package / "nowhere.py")
    (package / "run.py").rename(package / "run2.py")
    moved = digest()
    (package / "run2.py").rename(package / "run.py")
    assert digest() == before != moved
    with (package / "run.py").open("a") as file:
        file.write("# another word")
    assert digest() != before


def test_a_processor_has_a_name(monkeypatch):
    assert origin.hardware(torch.device("cpu")) == origin._processor()
    monkeypatch.setattr(origin.Path, "read_text", lambda *args, **words: "no such line")
    assert origin._processor.__wrapped__()  # a system that says it elsewhere, or not at all


def test_a_processor_without_a_name_has_numbers(monkeypatch):
    told = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd05\n"
    monkeypatch.setattr(origin.Path, "read_text", lambda *args, **words: told)
    assert origin._processor.__wrapped__() == f"{platform.machine()}, implementer 0x41, part 0xd0c"
