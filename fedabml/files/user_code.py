"""Code in a user's own file: `mine.py:FedDyn` names a class in it.

Only what a person names is imported: the command line's flags and arguments of Python functions are read here, names
in priors, run folders and TOML files never are. The digest of the file is kept with results, so that a resumed run with
a changed file is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from .paths import read_bytes

MARK = ".py:"
MAX_SOURCE_BYTES = 1 << 24  # bytes of a file

_DIGESTS: dict[str, str] = {}  # of imported files, by the name of their module


@dataclass(frozen=True)
class UserCode:
    """A class or function of a user's: as the user named it, its own name, the digest of its source, and itself.

    `origin` is where it was defined: the real path of its file, or the module of a class that is in no file.
    """

    typed: str
    name: str
    digest: str
    value: Any
    origin: str = ""


def is_user_code(text: object) -> bool:
    """Return whether a text has the form FILE.py:NAME."""
    return isinstance(text, str) and MARK in text


def read_user_code(text: str) -> UserCode:
    """Import the file that FILE.py:NAME names, and return what it calls NAME.

    A file that has not changed is imported once. Other modules beside it are found only if Python's path has them.
    Raises InputError where there is no such file or name, and where the file cannot be imported.
    """
    file, _, name = text.rpartition(":")
    if not name.isidentifier():
        raise InputError(f"'{text}' must have the form FILE.py:NAME, such as mine.py:Net.")
    if not os.path.isfile(file):  # noqa: PTH113  a path of any form
        raise InputError(f"There is no file '{file}'. Name your code as FILE.py:NAME, such as mine.py:{name}.")
    source = read_bytes(file, MAX_SOURCE_BYTES)
    digest = hashlib.sha256(source).hexdigest()
    module_name = f"fedabml_user_code_{digest[:16]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
        try:
            exec(compile(source, file, "exec"), vars(module))  # the very bytes that the digest is of
        except Exception as error:
            del sys.modules[module_name]
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"'{file}' cannot be imported: {reason}. Python must find every module that it imports (PYTHONPATH)."
            ) from error
    _DIGESTS[module_name] = digest
    content = vars(sys.modules[module_name])
    if name not in content:
        own = [key for key, v in content.items() if getattr(v, "__module__", "") == module_name and key[0] != "_"]
        raise InputError(f"'{file}' has no '{name}'. It defines: {', '.join(own) or 'nothing'}.")
    return UserCode(text, name, digest, content[name], os.path.realpath(file))


def refuse_other_code(code: UserCode, registered: UserCode | None) -> None:
    """Refuse code with the name of other code that is registered, which it would replace.

    A file that was edited, or a class that was defined again in its module, does replace what it was before.
    """
    if registered and code.origin != registered.origin and code.digest != registered.digest:
        raise InputError(
            f"'{code.typed}' has the name of '{registered.typed}', which this session has named before and which is "
            f"other code (in '{registered.origin}'). Rename one of them."
        )


def code_of_class(kind: type) -> UserCode:
    """Return a class that a caller has in Python; its digest is that of its source, where Python has one.

    The digest of a class in an imported file is that of the file as it was imported, even if it was edited since.
    """
    module = sys.modules.get(kind.__module__)
    if kind.__module__ in _DIGESTS and module is not None:
        file = str(module.__file__)
        digest = _DIGESTS[kind.__module__]
        return UserCode(f"{file}:{kind.__name__}", kind.__name__, digest, kind, os.path.realpath(file))
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # typed into an interpreter
        source = kind.__qualname__
    digest = hashlib.sha256(source.encode()).hexdigest()
    path = getattr(module, "__file__", None)
    return UserCode(kind.__name__, kind.__name__, digest, kind, os.path.realpath(path) if path else kind.__module__)
