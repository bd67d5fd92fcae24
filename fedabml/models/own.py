"""The names of networks: those of fedabml, and those in users' own files. This file imports no torch."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from ..errors import InputError
from ..files.user_code import UserCode, is_user_code, read_user_code, refuse_other_code

NAMES = ("mlr", "mlp", "cnn", "cnn100", "resnet18", "text")
TRAINED = ("all", "head", "lora")  # the weights of a module that may be trained, see `adapters`
_READ = (".json", ".safetensors")  # files of a folder that decide what its model computes
OWN: dict[str, UserCode] = {}  # classes and functions in users' files, by name


def named(name: str) -> str:
    """Return the name by which `build` knows a network; `mine.py:Net` is imported and registered as Net.

    Only a name that a person gave may be passed, because the file is executed. Raises InputError if it has no such
    class or function, and if another file's is registered under its name.
    """
    if not is_user_code(name):
        return name
    code = read_user_code(name)
    if code.name in NAMES:
        raise InputError(f"'{name}' has the name of a network of fedabml, {code.name}. Rename it.")
    if not callable(code.value):
        what = type(code.value).__name__
        raise InputError(f"'{name}' must be a class or function that makes a torch.nn.Module; it is of type {what}.")
    refuse_other_code(code, OWN.get(code.name))
    OWN[code.name] = code
    return code.name


def is_folder(name: str | os.PathLike[str]) -> bool:
    """Return whether a model's name is a folder of Hugging Face's, by the file config.json in it."""
    return (Path(name) / "config.json").is_file()


def folder_digest(name: str) -> str:
    """Return a hash of a Hugging Face folder's configuration and weights; unchanged files are read once."""
    files = sorted(file for file in Path(name).iterdir() if file.suffix in _READ and file.is_file())
    facts = ((file, file.stat()) for file in files)
    return _digest(tuple((os.path.realpath(f), f.name, s.st_ino, s.st_size, s.st_mtime_ns) for f, s in facts))


@cache
def _digest(files: tuple[tuple[str, str, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, name, *_ in files:
        with open(path, "rb") as file:
            digest.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
