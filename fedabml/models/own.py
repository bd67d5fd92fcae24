"""The names of networks: those of fedabml, and those in users' own files. This file imports no torch."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from ..errors import InputError
from ..files.user_code import UserCode, is_user_code, read_user_code, refuse_other_code

NETWORK_NAMES = ("mlr", "mlp", "cnn", "cnn100", "resnet18", "text")
TRAINED = ("all", "head", "lora")  # the weights of a module that may be trained, see `adapters`
_READ = (".json", ".safetensors")  # files of a folder that decide what its model computes
USER_NETWORKS: dict[str, UserCode] = {}  # classes and functions in users' files, by name


def register_user_network(name: str) -> str:
    """Return the name by which `build` knows a network; `mine.py:Net` is imported and registered as Net.

    Only a name that a person gave may be passed, because the file is executed. Raises InputError if it has no such
    class or function, and if another file's is registered under its name.
    """
    if not is_user_code(name):
        return name
    code = read_user_code(name)
    if code.name in NETWORK_NAMES:
        raise InputError(f"'{name}' has the name of a network of fedabml, {code.name}. Rename it.")
    if not callable(code.value):
        kind = type(code.value).__name__
        raise InputError(f"'{name}' must be a class or function that makes a torch.nn.Module; it is of type {kind}.")
    refuse_other_code(code, USER_NETWORKS.get(code.name))
    USER_NETWORKS[code.name] = code
    return code.name


def is_folder(name: str | os.PathLike[str]) -> bool:
    """Return whether a model's name is a folder of Hugging Face's, by the file config.json in it."""
    return (Path(name) / "config.json").is_file()


def folder_digest(name: str) -> str:
    """Return a hash of a Hugging Face folder's configuration and weights; unchanged files are read once."""
    files = sorted(file for file in Path(name).iterdir() if file.suffix in _READ and file.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + bytes.fromhex(file_digest(file)))
    return digest.hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 digest of a file, or "" if there is no such file; an unchanged file is read once."""
    if not Path(path).is_file():
        return ""
    status = Path(path).stat()
    return _digest(os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns)


@cache
def _digest(path: str, inode: int, size: int, changed: int) -> str:
    """Return the digest of a file; inode, size and time of change are those of the content that was read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
