"""A cache of decoded images: one uint8 .npy per folder of images, which later commands map into memory.

It lies in a folder that the caller names, or in `images/` of the cache folder, $FEDABML_CACHE or ~/.cache/fedabml. Its
name holds a digest of the images' paths, sizes and times of change, so a changed folder is decoded again and its older
file is removed. So is any file that was not opened for `UNUSED` seconds, when another one is written. A checksum stands
at a file's end. FEDABML_IMAGE_CACHE=off turns the cache off. A file holds the images themselves, so only its owner can
read it. Where a file cannot be written, a warning says why, and the caller decodes into memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..files.paths import cache_dir, explain_errors, open_regular, write_aside

log = logging.getLogger("fedabml")
FORMAT = 1  # of the cache: a file of another format has another name
CHECKSUM = 4  # bytes at a file's end: the CRC-32 of all before them
BLOCK = 1 << 20  # bytes that are checked at once
UNUSED = 30 * 86_400  # seconds after which a file that no command opened is removed
ABANDONED = 86_400  # seconds after which an unfinished file is that of a process that was killed


@dataclass(frozen=True)
class CacheFile:
    """The file that some images of a folder have, or would have, in the cache."""

    path: Path
    images: int

    @classmethod
    def of(cls, folder: Path, files: Sequence[Path], options: str, cache: Path | None = None) -> CacheFile | None:
        """Return the file of images in the order of `files`, read with `options`; None if the cache is not to be used.

        It lies in the folder `cache`, by default `images/` of the machine's cache folder. Raises InputError if an image
        cannot be found any more.
        """
        cache = cache or cache_dir() / "images"
        if os.environ.get("FEDABML_IMAGE_CACHE", "").lower() in ("off", "0", "no", "false"):
            return None
        try:
            _make_private(cache)
        except OSError as error:
            _warn(f"'{cache}' cannot be used ({error.strerror or error})")
            return None
        try:
            from PIL import __version__  # another version may decode a JPEG, or resize, with other roundings
        except ImportError:
            return None
        real = Path(os.path.realpath(folder))
        place = _digest([str(real).encode("utf-8", "surrogateescape").hex(), options])
        content: list[object] = [FORMAT, __version__]
        for file in files:
            with explain_errors(file, "read"):
                status = file.stat()
            name = os.fsencode(file.relative_to(folder)).hex()
            content.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return cls(cache / f"{place}-{_digest(content)}.npy", len(files))

    def open(self) -> np.ndarray | None:
        """Return the cached images, uint8 [n, C, H, W], as a read-only map; None if they are not there or damaged."""
        if not self.path.exists():
            return None
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                checksum, left = 0, size - CHECKSUM
                while left > 0 and (block := file.read(min(BLOCK, left))):
                    checksum, left = zlib.crc32(block, checksum), left - len(block)
                if left == 0 and file.read() == checksum.to_bytes(CHECKSUM, "little"):
                    file.seek(0)
                    np.lib.format.read_magic(file)
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                    start = file.tell()
                    if dtype == np.uint8 and len(shape) == 4 and shape[0] == self.images:
                        with suppress(OSError):
                            os.utime(self.path)  # the time of the last use
                        return np.asarray(np.memmap(file, np.uint8, "r", start, shape))
        except (InputError, OSError, ValueError) as error:
            log.debug("'%s' cannot be read: %s", self.path, error)
        log.warning("'%s' is damaged, so the images are decoded again.", self.path)
        return None

    def write(self, shape: tuple[int, ...], images: Iterator[np.ndarray]) -> np.ndarray | None:
        """Write images [C, H, W] as they come, and return them as `open` does; None, after a warning, if that fails.

        Errors of the images themselves are raised. Files of the same folder's earlier states are removed,
        and files that nothing used for long.
        """
        header, faults = io.BytesIO(), []
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
        needed = int(np.prod(shape)) + len(header.getvalue()) + CHECKSUM
        try:
            free = shutil.disk_usage(self.path.parent).free
            if free < needed:
                _warn(f"'{self.path.parent}' has {free:,} bytes free, and these images need {needed:,}")
                return None
            with write_aside(self.path, private=True) as file:
                file.write(header.getvalue())
                checksum = zlib.crc32(header.getvalue())
                try:
                    for image in images:
                        block = image.tobytes()
                        checksum = zlib.crc32(block, checksum)
                        file.write(block)
                except InputError as error:
                    faults.append(error)
                    raise
                file.write(checksum.to_bytes(CHECKSUM, "little"))
        except (InputError, OSError) as error:
            if error in faults:
                raise
            _warn(str(error).split(". ")[0].rstrip("."))
            return None
        self._remove_older()
        return self.open()

    def _remove_older(self) -> None:
        """Remove what the same folder had in the cache before, and files that are unused or were left unfinished."""
        place, now = self.path.name.partition("-")[0], time.time()
        for file in [*self.path.parent.glob("*-*.npy"), *self.path.parent.glob(".*.part")]:
            with suppress(OSError):  # another process may do the same
                age = now - file.stat().st_mtime
                replaced = file.name.startswith(f"{place}-") and file.name != self.path.name
                if replaced or age > (ABANDONED if file.suffix == ".part" else UNUSED):
                    file.unlink()


def _make_private(folder: Path) -> None:
    """Make a folder of cached images, which only its owner can open. Raises OSError if it cannot be such a one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError("it is a link, not a folder")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077 and os.name == "posix":
        folder.chmod(0o700)


def _digest(content: list[object]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _warn(reason: str) -> None:
    log.warning(
        "%s. The images are decoded into memory, now and by every later command. Make room, name another cache folder "
        "with FEDABML_CACHE (a federation's site keeps them in its own folder), or set FEDABML_IMAGE_CACHE=off.",
        reason,
    )
