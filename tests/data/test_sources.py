"""Datasets by name: the embedded one, the cache, the official formats (small ones made here), and damaged files."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedabml.data import datasets, decode, load, sources
from fedabml.data.download import digest
from fedabml.data.files import data_dir
from fedabml.errors import InputError

RNG = np.random.default_rng(0)


def images(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def test_digits_are_inside():
    digits = load("digits", offline=True)
    assert digits.x_train.shape == (1442, 8, 8) and digits.x_test.shape == (355, 8, 8) and digits.classes == 10
    assert digits.x_train.max() == 240
    share = np.bincount(digits.y_test) / np.bincount(np.concatenate([digits.y_train, digits.y_test]))
    assert (abs(share - 0.2) < 0.01).all()


def test_few_digits_are_the_same_images_with_half_of_the_training_ones_in_the_test_split():
    whole, part = load("digits"), load("digits-few", offline=True)
    source = sources.SOURCES["digits-few"]
    assert (len(part.y_train), len(part.y_test)) == (source.train, source.test) == (723, 1074)
    pixels = lambda *parts: sorted(image.tobytes() for x in parts for image in x)
    assert pixels(part.x_train, part.x_test) == pixels(whole.x_train, whole.x_test)
    assert set(pixels(part.x_train)) <= set(pixels(whole.x_train))
    shares = np.bincount(part.y_train) / np.bincount(whole.y_train)
    assert (abs(shares - 0.5) < 0.01).all() and part.name == "digits-few"


def test_a_nearest_centroid_reads_the_digits():
    d = load("digits")
    centres = np.stack([d.x_train[d.y_train == c].mean(0).ravel() for c in range(10)])
    near = ((d.x_test.reshape(-1, 1, 64) - centres) ** 2).sum(2).argmin(1)
    assert (near == d.y_test).mean() > 0.85


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDABML_DATA", str(tmp_path))
    assert data_dir() == tmp_path and data_dir("x") == Path("x")
    monkeypatch.delenv("FEDABML_DATA")
    assert data_dir() == Path.home() / ".cache/fedabml/data"


def test_the_list(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_test=images(1, 28, 28))
    listed = {row["name"]: row for row in datasets(tmp_path)}
    assert list(listed) == ["digits", "digits-few", "mnist", "fashionmnist", "emnist", "cifar10", "cifar100", "svhn"]
    assert [name for name, row in listed.items() if row["present"]] == ["digits", "digits-few", "mnist"]
    assert listed["emnist"]["path"] == str(tmp_path / "emnist.npz") and listed["cifar100"]["classes"] == 100


def test_unknown_names():
    with pytest.raises(InputError, match=r"no dataset called 'cifar'\. Did you mean 'cifar10"):
        load("cifar")


def test_absent_and_offline_says_what_to_do(tmp_path):
    with pytest.raises(InputError) as error:
        load("mnist", tmp_path, offline=True)
    for words in ("fedabml data get mnist", "FEDABML_DATA", str(tmp_path), "train-images-idx3-ubyte.gz"):
        assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("fedabml.data.download.TRIES", 1)
    dead = dataclasses.replace(sources.SOURCES["svhn"].files[0], bases=("http://127.0.0.1:9/",))
    source = dataclasses.replace(sources.SOURCES["svhn"], files=(dead,))
    monkeypatch.setattr(sources, "SOURCES", {"svhn": source})
    with pytest.raises(InputError, match=r"could not be downloaded.*fedabml data get svhn"):
        load("svhn", tmp_path)
    assert not (tmp_path / "svhn.npz").exists()


def cached(folder, name="mnist", **changes):
    arrays = {"x_train": images(20, 28, 28), "y_train": np.arange(20, dtype=np.uint8) % 10}
    arrays |= {"x_test": images(10, 28, 28), "y_test": np.arange(10, dtype=np.uint8)}
    np.savez(folder / f"{name}.npz", **{k: v for k, v in {**arrays, **changes}.items() if v is not None})
    return arrays


def test_the_cache_is_read(tmp_path):
    arrays = cached(tmp_path)
    np.testing.assert_array_equal(load("mnist", tmp_path).x_test, arrays["x_test"])


def test_svhn_may_have_no_training_split(tmp_path):
    np.savez(tmp_path / "svhn.npz", x_test=images(5, 32, 32, 3), y_test=np.arange(5))
    svhn = load("svhn", tmp_path)
    assert svhn.x_train.shape == (0, 32, 32, 3) and len(svhn.y_test) == 5
    from fedabml.data import federate

    with pytest.raises(InputError, match="no training samples"):
        federate(svhn)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": None}, "lacks x_train"),
        ({"x_train": images(20, 8, 8)}, "x_train is uint8 of shape"),
        ({"x_test": np.zeros((10, 28, 28))}, "x_test is float64"),
        ({"y_test": np.arange(9)}, "one class number for each image"),
        ({"y_test": np.arange(10) + 1}, "beyond the 10 classes"),
        ({"y_test": np.arange(10) / 10}, "one class number for each image"),
        ({"y_test": np.array([{}] * 10)}, "Python objects"),
    ],
)
def test_foreign_files_are_named_with_the_remedy(tmp_path, changes, words):
    cached(tmp_path, **changes)
    with pytest.raises(InputError, match=words) as error:
        load("mnist", tmp_path)
    assert "mnist.npz" in str(error.value) and "fedabml data get mnist" in str(error.value)


def test_truncated_files_are_named_with_the_remedy(tmp_path):
    cached(tmp_path)
    path = tmp_path / "mnist.npz"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(InputError, match=r"mnist\.npz.*fedabml data get mnist"):
        load("mnist", tmp_path)


def put(folder, name, monkeypatch, **files):
    """Writes official files where a person would put them, and makes their checksums the official ones."""
    raw = folder / f"{name}-files"
    raw.mkdir()
    for file, content in files.items():
        (raw / file).write_bytes(content)
    source = sources.SOURCES[name]
    remotes = tuple(dataclasses.replace(r, md5=digest(raw / r.name)) for r in source.files)
    monkeypatch.setattr(sources, "SOURCES", {name: dataclasses.replace(source, files=remotes)})


def test_mnist_from_its_official_files(tmp_path, monkeypatch):
    arrays = cached(tmp_path, "not-used")
    files = {
        f"{part}-{kind}-ubyte.gz": gzip.compress(idx(arrays[f"{letter}_{split}"]))
        for part, split in (("train", "train"), ("t10k", "test"))
        for kind, letter in (("images-idx3", "x"), ("labels-idx1", "y"))
    }
    put(tmp_path, "mnist", monkeypatch, **files)
    loaded = load("mnist", tmp_path, offline=True)
    for key, value in arrays.items():
        np.testing.assert_array_equal(getattr(loaded, key), value)
    assert (tmp_path / "mnist.npz").exists() and not (tmp_path / "mnist-files").exists()


def test_an_official_file_that_cannot_be_decoded(tmp_path, monkeypatch):
    names = [remote.name for remote in sources.SOURCES["mnist"].files]
    put(tmp_path, "mnist", monkeypatch, **dict.fromkeys(names, b"no gzip"))
    with pytest.raises(InputError, match="cannot be decoded"):
        load("mnist", tmp_path, offline=True)
    assert not (tmp_path / "mnist.npz").exists()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not an IDX"),
        (b"\0\0\x0d\x01" + bytes(8), "not an IDX"),
        (idx(images(3, 4))[:-1], "length"),
        (idx(images(3, 4)) + b"x", "length"),
        (b"\0\0\x08\x02" + b"\xff" * 8, "too large"),
    ],
)
def test_bad_idx(raw, words):
    with pytest.raises(InputError, match=words):
        decode.idx(io.BytesIO(raw), "a file")


def tar(path, **members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(("name", "labels"), [("cifar10", 1), ("cifar100", 2)])
def test_cifar_binary(tmp_path, name, labels):
    folder = "cifar-10-batches-bin" if labels == 1 else "cifar-100-binary"
    members = [f"data_batch_{i}.bin" for i in range(1, 6)] if labels == 1 else ["train.bin"]
    tables = {m: images(4, labels + 3072) for m in [*members, "test_batch.bin" if labels == 1 else "test.bin"]}
    archive = f"cifar-{name[5:]}-binary.tar.gz"
    path = tar(tmp_path / archive, **{f"{folder}/{m}": t.tobytes() for m, t in tables.items()})
    arrays = getattr(decode, name)({archive: path})
    train = np.concatenate([tables[m] for m in members])
    np.testing.assert_array_equal(arrays["y_train"], train[:, labels - 1])
    assert arrays["x_train"].shape == (len(train), 32, 32, 3)
    assert arrays["x_train"][1, 2, 3, 1] == train[1, labels + 1024 + 2 * 32 + 3]  # green plane, row 2, column 3


def test_cifar_members_are_checked(tmp_path):
    path = tar(tmp_path / "a.tar.gz", other=b"")
    with pytest.raises(InputError, match=r"has no cifar-100-binary/train\.bin"):
        decode.cifar100({"cifar-100-binary.tar.gz": path})
    path = tar(path, **{"cifar-100-binary/train.bin": b"short", "cifar-100-binary/test.bin": b"short"})
    with pytest.raises(InputError, match="whole records"):
        decode.cifar100({"cifar-100-binary.tar.gz": path})


def test_emnist_is_upright_a_tenth_and_split_six_to_one(tmp_path):
    train, test = images(1000, 28, 28), images(400, 28, 28)
    x, y = np.concatenate([train, test]), np.arange(1400, dtype=np.uint8) % 4
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for split, kind, array in (
            ("train", "images-idx3", train),
            ("test", "images-idx3", test),
            ("train", "labels-idx1", y[:1000]),
            ("test", "labels-idx1", y[1000:]),
        ):
            archive.writestr(f"gzip/emnist-byclass-{split}-{kind}-ubyte.gz", gzip.compress(idx(array)))
    arrays = decode.emnist({"gzip.zip": tmp_path / "gzip.zip"})
    assert len(arrays["y_train"]) + len(arrays["y_test"]) == 140
    assert np.bincount(arrays["y_test"]).sum() == sum(
        n // 7 for n in np.bincount(np.concatenate([arrays["y_train"], arrays["y_test"]]))
    )
    known = {image.T.tobytes(): label for image, label in zip(x, y, strict=True)}
    assert all(
        known[image.tobytes()] == label for image, label in zip(arrays["x_train"], arrays["y_train"], strict=True)
    )
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(InputError, match=r"gzip\.zip has no"):
        decode.emnist({"gzip.zip": tmp_path / "gzip.zip"})


def test_svhn_from_matlab(tmp_path):
    io_module = pytest.importorskip("scipy.io")
    x = images(32, 32, 3, 5)
    io_module.savemat(tmp_path / "test_32x32.mat", {"X": x, "y": np.array([[1], [10], [3], [4], [5]], np.uint8)})
    arrays = decode.svhn({"test_32x32.mat": tmp_path / "test_32x32.mat"})
    assert arrays["y_test"].tolist() == [1, 0, 3, 4, 5]
    np.testing.assert_array_equal(arrays["x_test"][2], x[..., 2])
    io_module.savemat(tmp_path / "test_32x32.mat", {"X": x})
    with pytest.raises(InputError, match="does not hold"):
        decode.svhn({"test_32x32.mat": tmp_path / "test_32x32.mat"})


@pytest.mark.parametrize(
    ("name", "mean"),
    [("mnist", 0.1307), ("fashionmnist", 0.2860), ("emnist", 0.1737), ("cifar10", 0.4734), ("cifar100", 0.4782)],
)
def test_real_data(name, mean):
    folder = os.environ.get("FEDABML_DATA")
    if not folder or not (Path(folder) / f"{name}.npz").exists():
        pytest.skip(f"needs {name}.npz in the folder that $FEDABML_DATA names")
    data = load(name)
    assert data.x_train.mean() / 255 == pytest.approx(mean, abs=1e-3)
    assert len(np.unique(data.y_train)) == data.classes
    assert abs(len(data.y_train) - sources.SOURCES[name].train) < 100


def test_importing_the_data_layer_is_light():
    code = "import sys, fedabml.data; print([m for m in ('pandas', 'scipy', 'rich') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
