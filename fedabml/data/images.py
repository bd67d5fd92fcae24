"""Folders of images as data: `client/class/*.png`, or `client/train/class/*.png` and `client/test/class/*.png`.

The headers of all files are checked first, without decoding a pixel. Then each file is decoded once, into one array of
uint8 [n, C, H, W]: a file of the cache (`image_cache`) that later commands map into memory, or memory where there is no
cache. The `ImageRecipe` keeps what later images must agree with; it travels with the prior.
"""

from __future__ import annotations

import os
import struct
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, nearest
from ..files.limits import host_memory
from ..files.paths import explain_errors, open_regular, readable_name
from .image_cache import CacheFile

SUFFIXES = (".png", ".jpg", ".jpeg")
SPLIT_FOLDERS = ("train", "test")
MOST_PIXELS = 50_000_000  # of one image; a file of a few kilobytes can claim far more
LARGEST_SIZE = 4096  # pixels that --image-size may ask for
_MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGBA"}  # Pillow's modes, and what each is read as
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
_MODE_OF = {channels: mode for mode, channels in _CHANNELS.items()}
_UPRIGHT, _ORIENTATION = 5, 274  # EXIF: the tag of the orientation; from this value on, width and height are swapped
_IGNORED = ("thumbs.db", "desktop.ini")  # what file managers leave behind, beside hidden files
_BESIDE = ("manifest.json", "partition.svg", "readme", "readme.txt", "license", "license.txt")  # no client's data
# What Pillow raises for damaged bytes.
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, MemoryError, Warning),
    *(zlib.error, struct.error),
)


class Labelled(NamedTuple):
    """An image file, the name of its class, and whether it is for testing."""

    file: Path
    label: str
    test: bool


@dataclass(frozen=True)
class ImageRecipe:
    """What the images of a federation have in common: their classes, mode (L, RGB or RGBA) and size in pixels."""

    class_names: tuple[str, ...]
    mode: str
    height: int
    width: int
    resized: bool = False  # whether images of other sizes are resized, as --image-size asked for

    @classmethod
    def fit(cls, files: Sequence[Labelled], size: int | None = None) -> ImageRecipe:
        """Return the recipe of training images. Raises InputError for images of different modes or sizes."""
        names, (mode, height, width) = _class_names(files), _header(files[0].file)
        recipe = cls(names, mode, size or height, size or width, size is not None)
        recipe.check(image.file for image in files)
        return recipe

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image, (C, H, W)."""
        return _CHANNELS[self.mode], self.height, self.width

    def check(self, files: Iterator[Path] | Sequence[Path]) -> None:
        """Refuse files that are no images, or not of this mode and size; only their headers are read."""
        for file in files:
            mode, height, width = _header(file)
            if mode != self.mode:
                raise InputError(
                    f"'{file}' is of mode {mode}, but other images are {self.mode}. Convert all images to one mode, "
                    "as Pillow's image.convert('RGB') does."
                )
            if not self.resized and (height, width) != (self.height, self.width):
                raise InputError(
                    f"'{file}' has {width}×{height} pixels, but other images have {self.width}×{self.height}. Train "
                    "with images resized to one size: --image-size 64 (image_size=64)."
                )

    def read(self, files: Sequence[Path]) -> np.ndarray:
        """Check files and decode them into memory, uint8 [n, C, H, W]."""
        self.check(files)
        return self._in_memory(files)

    def read_once(self, files: Sequence[Path], cached: CacheFile | None) -> np.ndarray:
        """Decode files, which were checked, into the cache; into memory where there is none or it cannot be written."""
        images = cached.write((len(files), *self.shape), self._decoded(files)) if cached else None
        return self._in_memory(files) if images is None else images

    def _in_memory(self, files: Sequence[Path]) -> np.ndarray:
        needed, free = len(files) * int(np.prod(self.shape)), host_memory()[1]
        if 0 < free < needed:
            raise InputError(
                f"{len(files):,} images of {self.width}×{self.height} pixels need {needed:,} bytes of memory, and "
                f"{free:,} are free. Train with smaller images: --image-size 64 (image_size=64)."
            )
        images = np.empty((len(files), *self.shape), np.uint8)
        for image, pixels in zip(images, self._decoded(files), strict=True):
            image[...] = pixels
        return images

    def _decoded(self, files: Sequence[Path]) -> Iterator[np.ndarray]:
        """Yield the pixels of files in their order; each thread decodes a few ahead."""
        threads = min(_allowed_threads(), len(files))
        if threads < 2:
            yield from map(self._pixels, files)
            return
        ahead: deque[Future[np.ndarray]] = deque()
        with ThreadPoolExecutor(threads, "fedabml-images") as pool:
            for file in files:
                ahead.append(pool.submit(self._pixels, file))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _pixels(self, file: Path) -> np.ndarray:
        from PIL import Image, ImageOps

        with _opened(file) as opened:
            image = ImageOps.exif_transpose(opened).convert(self.mode)
            if image.size != (self.width, self.height):
                image = image.resize((self.width, self.height), Image.Resampling.BILINEAR)
            return image_pixels(image, str(file))

    def inputs(self, folder: str | os.PathLike[str]) -> tuple[np.ndarray, list[str]]:
        """Return all images in a folder and its subfolders, uint8 [n, C, H, W], and their names, in sorted order."""
        files = _images(Path(folder), deep=True)
        if not files:
            raise InputError(f"'{folder}' holds no image. Put .png or .jpg files there.")
        return self.read(files), [readable_name(str(file.relative_to(folder))) for file in files]

    def site(
        self, folder: str | os.PathLike[str], cache: Path | None = None
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return one client's images and class numbers by split: "train" and, if it has such a folder, "test".

        Decoded images are kept in the folder `cache`, by default in that of this machine.
        """
        files = site_files(Path(folder))
        number = {name: i for i, name in enumerate(self.class_names)}
        unknown = next((image for image in files if image.label not in number), None)
        if unknown is not None:
            raise InputError(
                f"'{folder}' has a folder of the class '{unknown.label}', which the prior does not know."
                f"{nearest(unknown.label, number)}"
            )
        files.sort(key=lambda image: image.test)  # stable: training images come first, in their order
        trained = sum(not image.test for image in files)
        if not trained:
            raise InputError(f"'{folder}' has test images only. Put images to train on into {folder}/train/CLASS/.")
        paths = [image.file for image in files]
        cached = CacheFile.of(Path(folder), paths, f"{self.mode} {self.height} {self.width} {self.resized}", cache)
        x = cached.open() if cached else None
        if x is None:
            self.check(paths)
            x = self.read_once(paths, cached)
        y = np.array([number[image.label] for image in files])
        splits = {"train": slice(trained), "test": slice(trained, None)}
        return {split: (x[rows], y[rows]) for split, rows in splits.items() if len(y[rows])}

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain data, for files."""
        return {**vars(self), "class_names": list(self.class_names)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ImageRecipe:
        """Return the recipe that `to_json` wrote; raises InputError for anything else."""
        match content:
            case {"class_names": list(names), "mode": str(mode), "height": int(h), "width": int(w), "resized": bool(r)}:
                if mode in _CHANNELS and h > 0 and w > 0 and all(isinstance(name, str) for name in names):
                    return cls(tuple(names), mode, h, w, r)
        raise InputError("Its recipe for images is damaged.")


def image_pixels(image: Any, subject: str) -> np.ndarray:
    """Return a Pillow image as uint8 [C, H, W]; modes that would lose values are refused."""
    mode = _MODES.get(image.mode)
    if mode is None:
        raise InputError(f"{subject} is an image of mode {image.mode}. Convert it to 8-bit grey or RGB first.")
    pixels = np.asarray(image.convert(mode))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_images(
    folder: Path, size: int | None = None
) -> tuple[ImageRecipe, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read a federation of images, one folder per client: the recipe, x, y, the owner's name and test mark of each."""
    if size is not None and size > LARGEST_SIZE:
        raise InputError(f"image_size is {size}; at most {LARGEST_SIZE} pixels are read.")
    clients = {readable_name(entry.name): site_files(entry) for entry in client_entries(folder)}
    files = [image for images in clients.values() for image in images]
    labels = {image.label for image in files}
    class_folders = (part for entry in client_entries(folder) for part in _class_folders(entry))
    empty = next((part for part in class_folders if readable_name(part.name) not in labels), None)
    if empty is not None:
        raise InputError(
            f"'{empty}' holds no image, and no client has one of the class '{readable_name(empty.name)}'. Put images "
            f"there, or remove the folder.{nearest(readable_name(empty.name), labels)}"
        )
    paths = [image.file for image in files]
    cached = CacheFile.of(folder, paths, f"image_size {size}")
    x = cached.open() if cached else None
    if x is None:
        recipe = ImageRecipe.fit(files, size)
        x = recipe.read_once(paths, cached)
    else:
        recipe = ImageRecipe(_class_names(files), _MODE_OF[x.shape[1]], x.shape[2], x.shape[3], size is not None)
    number = {name: i for i, name in enumerate(recipe.class_names)}
    owner = np.repeat([*clients], [len(images) for images in clients.values()])
    y, test = np.array([number[image.label] for image in files]), np.array([image.test for image in files])
    return recipe, x, y, owner, test


def _class_names(files: Sequence[Labelled]) -> tuple[str, ...]:
    """Return the names of all classes, sorted. Raises InputError for a single one, and for one of test images alone."""
    names, trained = tuple(sorted({image.label for image in files})), {i.label for i in files if not i.test}
    untrained = next((image for image in files if image.label not in trained), None)
    if untrained is not None and trained:
        raise InputError(
            f"'{untrained.file}' is a test image of the class '{untrained.label}', of which no client has an image to "
            f"train on. Add some, or leave the class out.{nearest(untrained.label, trained)}"
        )
    if len(names) < 2:
        raise InputError(
            f"All images are of the class '{names[0]}'. A federation needs two or more folders of classes, as "
            "client/class/image.png."
        )
    return names


def is_image_folder(folder: Path) -> bool:
    """Return whether a folder has subfolders and no .npz file, so that it may be a federation of images."""
    return not any(folder.glob("*.npz")) and any(entry.is_dir() for entry in visible_entries(folder))


def site_files(folder: Path) -> list[Labelled]:
    """Return the images of one client's folder, whose subfolders are classes, or train and test with classes inside."""
    folders = [entry for entry in visible_entries(folder) if entry.is_dir()]
    loose = _images(folder)
    if loose:
        raise InputError(f"'{loose[0]}' is in no folder of a class. Put each image into {folder}/CLASS/.")
    split = any(entry.name in SPLIT_FOLDERS for entry in folders)
    if split and (other := next((entry for entry in folders if entry.name not in SPLIT_FOLDERS), None)):
        raise InputError(f"'{other}' stands beside train and test. Put folders of classes into these two.")
    files = []
    for part in folders:
        for label in [entry for entry in visible_entries(part) if entry.is_dir()] if split else [part]:
            deeper = next((entry for entry in visible_entries(label) if entry.is_dir()), None)
            if deeper is not None:
                raise InputError(f"'{deeper}' is a folder inside the folder of a class. Put images there alone.")
            marks = split and part.name == "test"
            files += [Labelled(file, readable_name(label.name), marks) for file in _images(label)]
        if split and (loose := _images(part)):
            raise InputError(f"'{loose[0]}' is in no folder of a class. Put each image into {part}/CLASS/.")
    if not files:
        raise InputError(f"'{folder}' holds no image. Put .png or .jpg files into {folder}/CLASS/.")
    return files


def _class_folders(client: Path) -> Iterator[Path]:
    """Yield the folders of classes of a client's folder that `site_files` accepts."""
    for part in (entry for entry in visible_entries(client) if entry.is_dir()):
        if part.name in SPLIT_FOLDERS:
            yield from (entry for entry in visible_entries(part) if entry.is_dir())
        else:
            yield part


def visible_entries(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted by name, without hidden files."""
    with explain_errors(folder, "read"):
        entries = sorted(folder.iterdir())
    return [entry for entry in entries if not entry.name.startswith(".") and entry.name.lower() not in _IGNORED]


def client_entries(folder: Path) -> list[Path]:
    """Return what the folder of a federation holds, without documents and what `data inspect --out` writes."""
    return [e for e in visible_entries(folder) if e.is_dir() or not (e.name.lower() in _BESIDE or e.suffix == ".md")]


def _images(folder: Path, deep: bool = False) -> list[Path]:
    """Return the image files of a folder, also of its subfolders if `deep`; any other file is refused."""
    files = []
    for entry in visible_entries(folder):
        if entry.is_dir():
            files += _images(entry, deep) if deep else []
        elif entry.suffix.lower() not in SUFFIXES:
            raise InputError(f"'{entry}' is neither .png nor .jpg. Convert it, or keep other files elsewhere.")
        else:
            files.append(entry)
    return files


def _header(file: Path) -> tuple[str, int, int]:
    """Return the mode, height and width of an image. Raises InputError for one that cannot be read without a loss."""
    with warnings.catch_warnings(), _opened(file, strict=True) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) >= _UPRIGHT:
            width, height = height, width
        mode, layers = _MODES.get(image.mode), str(image.tile[0][3]) if image.tile else ""
        if mode is None or ";16" in layers:
            raise InputError(
                f"'{file}' is of mode {image.mode} with {'16' if '16' in layers + image.mode else 'other'} bits. "
                "Convert it to 8-bit grey or RGB first, so that you choose how values are scaled."
            )
        if "transparency" in image.info:
            raise InputError(f"'{file}' has a transparent colour. Convert it to RGBA, or to RGB without transparency.")
    return mode, height, width


@contextmanager
def _opened(file: Path, strict: bool = False) -> Iterator[Any]:
    """Open an image with Pillow; damage and images that claim too many pixels are InputErrors that name the file.

    If `strict`, Pillow's warning of many pixels is an error: the caller restores the filters, which all threads share.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("Folders of images need Pillow: pip install fedabml[images].") from error
    with open_regular(file) as content:
        if strict:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(content, formats=("PNG", "JPEG")) as image:
                if (pixels := image.size[0] * image.size[1]) > MOST_PIXELS:
                    raise InputError(f"'{file}' claims {pixels:,} pixels; at most {MOST_PIXELS:,} are decoded.")
                yield image
        except InputError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise InputError(f"'{file}' claims more than {MOST_PIXELS:,} pixels, which are not decoded.") from error
        except _DAMAGE as error:
            reason = str(error).split("\n")[0].split("<")[0].strip().rstrip(".")
            raise InputError(
                f"'{file}' is no PNG or JPEG image, or is damaged ({reason}). Remove or replace it."
            ) from error


def _allowed_threads() -> int:
    """Return how many threads may decode: torch's number if torch is loaded, else $OMP_NUM_THREADS or all cores."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    named = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(named)) if named.isdecimal() and int(named) else cores
