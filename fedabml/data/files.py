"""Reading a client's arrays with care: nothing pickled is loaded, and no false size is believed."""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from ..arguments import checks_arguments
from ..errors import InputError, nearest
from ..files.limits import check_unpacked
from ..files.paths import open_regular

MAX_ARRAYS = 1000  # in an .npz file; each costs time, however small it is
CLIENT_KEYS = ("x_train", "y_train", "x_test", "y_test")
# What zipfile, zlib and numpy raise for damaged bytes; numpy reads a header with Python's own tokenizer and parser, and
# warns of some, which may be an error where warnings are.
_DAMAGE = (
    *(ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, RuntimeError, SyntaxError, Warning),
    *(zlib.error, struct.error, tokenize.TokenError),
)


def data_dir(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of datasets: the one given, else $FEDABML_DATA, else ~/.cache/fedabml/data."""
    path = folder or os.environ.get("FEDABML_DATA") or "~/.cache/fedabml/data"
    return Path(os.path.expanduser(path))  # noqa: PTH111  pathlib's raises where there is no such home


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read every array of an .npz file; pickled objects, damage and false sizes are InputErrors that name the file."""
    path = Path(path)
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(_ShortReads(file)) as archive:
                members = archive.infolist()
                if len(members) > MAX_ARRAYS:
                    raise InputError(f"{path} holds {len(members):,} arrays; at most {MAX_ARRAYS:,} are read.")
                check_unpacked(path, os.fstat(file.fileno()).st_size, sum(m.file_size for m in members))
                return {member.filename.removesuffix(".npy"): _array(path, archive, member) for member in members}
        except InputError:
            raise
        except zipfile.BadZipFile as error:
            raise InputError(
                f"{path} is not an .npz file, or is damaged or cut short ({error}). Write it with numpy.savez and copy "
                "it whole."
            ) from error
        except _DAMAGE as error:
            raise InputError(f"{path} is damaged ({error}). Write it again with numpy.savez.") from error


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read one array. Its header must declare as many bytes as there are before any are allocated."""
    name = member.filename
    if not name.endswith(".npy"):
        raise InputError(f"{path} holds '{name}', which is no array. Write the file with numpy.savez.")
    if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{path} packs '{name}' as numpy does not, or it is encrypted. Write it with numpy.savez.")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in header:
            raise InputError(f"{path} has '{name}' in version {version} of the format. Save plain arrays of numbers.")
        shape, _, dtype = header[version](file)
        if dtype.hasobject:
            raise InputError(
                f"{path} holds Python objects, which fedabml never loads because they can run code. Save plain arrays "
                "of numbers (dtype object is what to avoid)."
            )
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise InputError(
                f"{path} is damaged: '{name}' declares {dtype} of shape {list(shape)}, which does not fit its "
                f"{member.file_size} bytes. Write it again with numpy.savez."
            )
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


class _ShortReads:
    """A file for `zipfile`, which would otherwise read whatever length an archive declares for its directory."""

    MOST = 16 << 20  # bytes

    def __init__(self, file: IO[bytes]):
        self.seek, self.tell, self.seekable, self._file = file.seek, file.tell, file.seekable, file

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, self.MOST) if size >= 0 else self.MOST)


@checks_arguments
def read_client(path: str | os.PathLike[str], *, labels: bool = True) -> dict[str, np.ndarray]:
    """Read one client's .npz: x_train, y_train and, if it has them, x_test, y_test. `x` and `y` mean training data.

    With `labels=False` a file of inputs alone will do, as for prediction.
    """
    content = read_npz(path)
    for key in content:
        if key not in (*CLIENT_KEYS, "x", "y"):
            raise InputError(f"{path} holds '{key}', which no client's file has.{nearest(key, CLIENT_KEYS)}")
        if f"{key}_train" in content:
            raise InputError(f"{path} holds both {key} and {key}_train, which mean the same. Keep one of them.")
    arrays = {{"x": "x_train", "y": "y_train"}.get(key, key): value for key, value in content.items()}
    needed = {"x_train", "y_train"} | {f"{letter}{key[1:]}" for key in arrays for letter in "xy"}
    missing = [key for key in sorted(needed - arrays.keys()) if labels or key[0] == "x"]
    if missing:
        raise InputError(
            f"{path} lacks {' and '.join(missing)}. A client's file holds x_train and y_train (or x and y), "
            f"and x_test and y_test if there are test data."
        )
    return arrays
