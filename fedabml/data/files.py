"""Reading a client's arrays with care: nothing pickled is loaded."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedabml.arguments import checks_arguments
from fedabml.errors import InputError, nearest
from fedabml.files import open_regular

CLIENT_KEYS = ("x_train", "y_train", "x_test", "y_test")


def data_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of datasets: the one given, else $FEDABML_DATA, else ~/.cache/fedabml/data."""
    return Path(given or os.environ.get("FEDABML_DATA") or "~/.cache/fedabml/data").expanduser()


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Every array of an .npz file. Pickled objects are refused, and a damaged file is named."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            if not zipfile.is_zipfile(file):
                raise InputError(
                    f"{path} is not an .npz file, or is cut short. Write it with numpy.savez and copy it whole."
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "pickle" in str(error).lower():
            raise InputError(
                f"{path} holds Python objects, which fedabml never loads because they can run code. "
                f"Save plain arrays of numbers (dtype object is what to avoid)."
            ) from error
        raise InputError(f"{path} is damaged ({error}). Write it again with numpy.savez.") from error
    foreign = next((key for key, value in arrays.items() if not isinstance(value, np.ndarray)), None)
    if foreign is not None:
        raise InputError(f"{path} holds '{foreign}', which is no array. Write the file with numpy.savez.")
    return arrays


@checks_arguments
def read_client(path: str | os.PathLike[str], *, labels: bool = True) -> dict[str, np.ndarray]:
    """One client's .npz: x_train, y_train and, if it has them, x_test, y_test. `x` and `y` mean training data.

    With `labels=False` a file of inputs alone will do, as for prediction.
    """
    arrays = {{"x": "x_train", "y": "y_train"}.get(key, key): value for key, value in _own_keys(path).items()}
    needed = {"x_train"} | ({"y_train"} if labels else set())
    needed |= {f"y{key[1:]}" for key in arrays if labels and key[0] == "x"}
    needed |= {f"x{key[1:]}" for key in arrays if key[0] == "y"}
    if missing := sorted(needed - arrays.keys()):
        raise InputError(
            f"{path} lacks {' and '.join(missing)}. A client's file holds x_train and y_train (or x and y), "
            f"and x_test and y_test if there are test data."
        )
    return arrays


def _own_keys(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    arrays = read_npz(path)
    for key in arrays:
        if key not in (*CLIENT_KEYS, "x", "y"):
            raise InputError(f"{path} holds '{key}', which no client's file has.{nearest(key, CLIENT_KEYS)}")
        if f"{key}_train" in arrays:
            raise InputError(f"{path} holds both {key} and {key}_train, which mean the same. Keep one of them.")
    return arrays
