"""A folder as a federation: one .npz file, or one folder of images, per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..arguments import checked_integer
from ..errors import InputError
from ..files.paths import readable_name
from .files import read_client
from .images import client_entries, is_image_folder, read_images


def read_folder(kind: Any, folder: Path, task: str | None, drop_small: bool, image_size: int | None) -> Any:
    """Return a folder's federation; `Federation.from_folder`, whose class is `kind`, describes the folder."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder. A federation is a folder with one .npz file, or one folder of images, per "
            "client."
        )
    size = None if image_size is None else checked_integer(image_size, "image_size")
    if is_image_folder(folder):
        _refuse_others(client_entries(folder), "folder of a client's images", Path.is_dir)
        if task not in (None, "classification"):
            raise InputError(f"{folder} holds folders of classes, so the task is classification, not {task!r}.")
        recipe, x, y, owner, test = read_images(folder, size)
        classes, dataset = len(recipe.class_names), readable_name(folder.resolve().name)
        fed = kind.from_owners(x, y, owner, test, classes=classes, dataset=dataset, drop_small=drop_small)
        return replace(fed, images=recipe)
    if size is not None:
        raise InputError(f"{folder} holds no folders of images, so image_size has nothing to resize. Leave it out.")
    files = client_entries(folder)
    if not any(file.suffix == ".npz" for file in files):
        raise InputError(
            f"{folder} holds no .npz file. Put one there for each client, with x_train and y_train; or a folder of "
            "images for each, as client/class/image.png."
        )
    _refuse_others(files, ".npz file", lambda entry: entry.suffix == ".npz")
    clients = [read_client(file) for file in files]
    return kind.from_arrays(
        [(c["x_train"], c["y_train"]) for c in clients],
        [(c["x_test"], c["y_test"]) if "x_test" in c else None for c in clients],
        names=[readable_name(file.stem) for file in files],
        task=task,
        dataset=readable_name(folder.resolve().name),
        drop_small=drop_small,
    )


def _refuse_others(entries: Sequence[Path], client: str, is_client: Callable[[Path], bool]) -> None:
    """Refuse what stands beside the clients of a folder: it may be a client's data that would be left out."""
    other = next((entry for entry in entries if not is_client(entry)), None)
    if other is not None:
        raise InputError(
            f"'{other}' is no {client}, as others are here. Bring all clients into one form, and keep other files "
            "elsewhere."
        )
