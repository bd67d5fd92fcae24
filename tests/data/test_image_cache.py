"""The cache of decoded images: decoded once, private, rebuilt when damaged, and done without where it cannot be."""

import contextlib
import logging
import os
import resource

import numpy as np
import pytest
import torch

import fedabml
from fedabml.data import image_cache, images
from fedabml.data.images import ImageRecipe
from fedabml.errors import InputError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two sites with two classes and test images; the cache is empty."""
    monkeypatch.setenv("FEDABML_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        for split in ("train", "test"):
            for label in ("cat", "dog"):
                (tmp_path / "sites" / site / split / label).mkdir(parents=True)
                for i in range(3):
                    pixels = rng.integers(0, 256, (6, 5, 3)).astype(np.uint8)
                    Image.fromarray(pixels).save(tmp_path / "sites" / site / split / label / f"{i}.png")
    return tmp_path / "sites"


@pytest.fixture
def in_memory(folder, monkeypatch):
    """The federation as it is read without a cache."""
    with monkeypatch.context() as patch:
        patch.setenv("FEDABML_IMAGE_CACHE", "off")
        return fedabml.Federation.from_folder(folder)


@contextlib.contextmanager
def nothing_decoded(monkeypatch):
    def refuse(*_):
        raise AssertionError("an image was opened")

    with monkeypatch.context() as patch:
        patch.setattr(ImageRecipe, "_pixels", refuse)
        patch.setattr(images, "_opened", refuse)
        yield


def cached_files(folder):
    return sorted((folder.parent / "cache" / "images").iterdir())


def test_a_second_reading_opens_the_map_and_decodes_nothing(folder, in_memory, monkeypatch):
    assert not (folder.parent / "cache").exists()  # off is off
    first = fedabml.Federation.from_folder(folder)
    with nothing_decoded(monkeypatch):
        second = fedabml.Federation.from_folder(folder)
        assert second.images == first.images == in_memory.images
    assert first.hash == second.hash == in_memory.hash and second.x.dtype == np.uint8
    assert isinstance(second.x.base, np.memmap) and not second.x.flags.writeable
    (file,) = cached_files(folder)
    assert np.array_equal(np.load(file, allow_pickle=False), in_memory.x)


def test_the_cache_is_private(folder):
    (folder.parent / "cache" / "images").mkdir(parents=True, mode=0o755)
    fedabml.Federation.from_folder(folder)
    (file,) = cached_files(folder)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_folder_is_not_followed(folder, in_memory, caplog):
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "cache").mkdir()
    (folder.parent / "cache" / "images").symlink_to(folder.parent / "elsewhere")
    assert fedabml.Federation.from_folder(folder).hash == in_memory.hash
    assert "it is a link, not a folder" in caplog.text and not [*(folder.parent / "elsewhere").iterdir()]


def test_threads_keep_the_order(folder, in_memory):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert fedabml.Federation.from_folder(folder).hash == in_memory.hash
    finally:
        torch.set_num_threads(before)


def test_a_changed_image_or_size_is_decoded_and_replaces_only_its_own(folder):
    fedabml.Federation.from_folder(folder)
    small = fedabml.Federation.from_folder(folder, image_size=4)
    kept = {file.name for file in cached_files(folder)}
    assert len(kept) == 2 and small.x.shape[2:] == (4, 4)
    Image.fromarray(np.zeros((6, 5, 3), np.uint8)).save(folder / "a" / "train" / "cat" / "0.png")
    changed = fedabml.Federation.from_folder(folder)
    assert not changed.x[changed.train[0][0]].any()
    assert len(cached_files(folder)) == 2 and len(kept & {file.name for file in cached_files(folder)}) == 1
    (folder / "b" / "test" / "dog" / "2.png").unlink()
    assert fedabml.Federation.from_folder(folder).x.shape[0] == 23


@pytest.mark.parametrize("damage", ["short", "bit", "empty", "longer", "other"])
def test_a_damaged_file_is_made_again(folder, in_memory, damage, caplog, monkeypatch):
    fedabml.Federation.from_folder(folder)
    (file,) = cached_files(folder)
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[500] ^= 1
    file.write_bytes(
        {"short": content[:-9], "empty": b"", "longer": content + b"x", "other": b"PK"}.get(damage, content)
    )
    assert fedabml.Federation.from_folder(folder).hash == in_memory.hash
    assert "is damaged, so the images are decoded again" in caplog.text
    with nothing_decoded(monkeypatch):
        assert fedabml.Federation.from_folder(folder).hash == in_memory.hash


def test_a_full_disk_is_a_note(folder, in_memory, caplog, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # no file may grow beyond 200 bytes
    try:
        fed = fedabml.Federation.from_folder(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fed.hash == in_memory.hash and fed.x.flags.writeable
    assert "cannot be written: File too large. The images are decoded into memory" in caplog.text
    assert cached_files(folder) == []  # no unfinished file stays
    caplog.clear()
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    assert fedabml.Federation.from_folder(folder).hash == in_memory.hash
    assert "has 10 bytes free, and these images need" in caplog.text and "FEDABML_IMAGE_CACHE=off" in caplog.text


def test_a_place_that_cannot_be_used_is_a_note(folder, in_memory, caplog):
    (folder.parent / "cache").write_text("no folder")
    assert fedabml.Federation.from_folder(folder).hash == in_memory.hash
    assert "cannot be used (Not a directory)" in caplog.text or "cannot be used (File exists)" in caplog.text


def test_only_what_is_held_in_memory_is_bounded_by_it(folder, monkeypatch):
    monkeypatch.setattr(images, "host_memory", lambda: (1000, 1000))
    assert fedabml.Federation.from_folder(folder).x.shape == (24, 3, 6, 5)
    monkeypatch.setenv("FEDABML_IMAGE_CACHE", "off")
    with pytest.raises(InputError, match="24 images of 5×6 pixels need 2,160 bytes of memory"):
        fedabml.Federation.from_folder(folder)


def test_an_image_that_cannot_be_decoded_is_named_and_leaves_no_file(folder, caplog):
    file = folder / "b" / "test" / "dog" / "1.png"
    content = bytearray(file.read_bytes())
    content[60] ^= 255  # in the pixels: the header stays whole
    file.write_bytes(content)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(InputError, match=r"1.png' is no PNG or JPEG image, or is dam"),
    ):
        fedabml.Federation.from_folder(folder)
    assert cached_files(folder) == [] and not caplog.records


def test_a_site_is_cached_and_its_rows_are_not_copied(folder, monkeypatch):
    recipe = fedabml.Federation.from_folder(folder).images
    first = recipe.site(folder / "a")
    with nothing_decoded(monkeypatch):
        again = recipe.site(folder / "a")
    for split in ("train", "test"):
        assert np.array_equal(first[split][0], again[split][0]) and first[split][1].tolist() == [0, 0, 0, 1, 1, 1]
        paths = sorted((folder / "a" / split).glob("*/*.png"))
        pixels = np.stack([np.asarray(Image.open(path)) for path in paths]).transpose(0, 3, 1, 2)
        assert np.array_equal(again[split][0], pixels)
    fed = fedabml.Federation.from_arrays([again["train"]])
    assert np.shares_memory(fed.x, again["train"][0])


def test_unfinished_files_of_killed_processes_are_removed_after_a_day(folder, monkeypatch):
    (folder.parent / "cache" / "images").mkdir(parents=True)
    for name, age in ((".old.npy.part", 2 * image_cache.ABANDONED), (".new.npy.part", 10)):
        left = folder.parent / "cache" / "images" / name
        left.write_bytes(b"x")
        os.utime(left, (left.stat().st_mtime - age,) * 2)
    fedabml.Federation.from_folder(folder)
    unfinished, cached = cached_files(folder)
    assert unfinished.name == ".new.npy.part" and cached.suffix == ".npy"


def test_a_file_that_nothing_opened_for_a_month_is_removed_when_another_is_written(folder):
    fedabml.Federation.from_folder(folder)
    fedabml.Federation.from_folder(folder, image_size=4)
    used, unused = sorted(cached_files(folder), key=lambda file: -file.stat().st_size)
    for file in (used, unused):
        os.utime(file, (file.stat().st_mtime - image_cache.UNUSED - 60,) * 2)
    fedabml.Federation.from_folder(folder)  # a use of the larger file
    assert cached_files(folder) == sorted([used, unused])  # nothing was written, so nothing is removed
    fedabml.Federation.from_folder(folder, image_size=3)
    assert used.exists() and not unused.exists() and len(cached_files(folder)) == 2


def test_another_place_for_the_cache_is_used_alone(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("FEDABML_IMAGE_CACHE", "off")
        recipe = fedabml.Federation.from_folder(folder).images
    recipe.site(folder / "a", tmp_path / "place" / "images")
    (file,) = (tmp_path / "place" / "images").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "cache").exists()
    with nothing_decoded(monkeypatch):
        recipe.site(folder / "a", tmp_path / "place" / "images")
