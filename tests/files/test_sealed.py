"""Files are written whole, through links but over nothing else, and a file with one flipped bit is refused."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from fedabml.errors import InputError
from fedabml.files.paths import MAX_TEXT, open_regular, read_bytes, write, write_aside
from fedabml.files.sealed import (
    read_json,
    read_tensors,
    sealed_text,
    tensor_bytes,
    warn_if_changed,
    write_json,
    write_tensors,
)

FACTS = {"kind": "test", "name": "Zoë", "numbers": [1, 0.1, None]}
TENSORS = {"a": torch.arange(3.0), "b": torch.eye(2, dtype=torch.float64)}


def flipped(content):
    """Every copy of the content with one bit the other way round."""
    for place in range(len(content)):
        for bit in range(8):
            copy = bytearray(content)
            copy[place] ^= 1 << bit
            yield bytes(copy)


@pytest.mark.slow
def test_no_flipped_bit_of_a_tensor_file_is_taken(tmp_path):
    path = write_tensors(tmp_path / "x.safetensors", TENSORS, FACTS)
    tensors, facts = read_tensors(path)
    assert facts == FACTS and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    for copy in flipped(path.read_bytes()):
        path.write_bytes(copy)
        with pytest.raises(InputError):
            read_tensors(path)


@pytest.mark.slow
def test_no_flipped_bit_of_a_json_file_changes_what_is_read(tmp_path):
    path = write_json(tmp_path / "x.json", FACTS)
    assert read_json(path) == FACTS
    for copy in flipped(path.read_bytes()):
        path.write_bytes(copy)
        try:
            assert read_json(path) == FACTS  # an E in place of the e of a number
        except InputError:
            continue


def test_files_from_before_digests_are_read(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "old.safetensors", {"fedabml": json.dumps(FACTS)})
    assert read_tensors(tmp_path / "old.safetensors")[1] == FACTS
    (tmp_path / "old.json").write_text(json.dumps(FACTS))
    assert read_json(tmp_path / "old.json") == FACTS


def test_the_same_content_is_the_same_file(tmp_path):
    files = [write_tensors(tmp_path / name, TENSORS, FACTS).read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to("real")
    for text in ("first", "second"):
        write(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == text


def test_what_is_no_file_is_neither_replaced_nor_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "folder", "loop"):
        before = (tmp_path / name).lstat()
        with pytest.raises(InputError):
            write(tmp_path / name, "x")
        with pytest.raises(InputError):
            read_bytes(tmp_path / name)
        assert (tmp_path / name).lstat() == before
    for device in ("/dev/null", "/dev/zero"):
        with pytest.raises(InputError, match="a device"):
            read_bytes(device)
        with pytest.raises(InputError, match="a device"):
            write(device, "x")
        assert stat.S_ISCHR(Path(device).stat().st_mode)


def test_only_its_owner_reads_a_private_file(tmp_path):
    assert stat.S_IMODE(write(tmp_path / "own", "x", private=True).stat().st_mode) == 0o600
    write(tmp_path / "all", "x")
    (tmp_path / "all").chmod(0o644)
    assert stat.S_IMODE(write(tmp_path / "all", "x", private=True).stat().st_mode) == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    def fail():
        with write_aside(tmp_path / "x") as file:
            file.write(b"new")
            raise ZeroDivisionError

    write(tmp_path / "x", "old")
    with pytest.raises(ZeroDivisionError):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 10_000, '{"a":', "\x00", ""])
def test_strange_json_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


def test_a_file_too_large_is_refused_unread(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(MAX_TEXT + 1)
    with pytest.raises(InputError, match="at most"):
        read_bytes(tmp_path / "large")
    with open_regular(tmp_path / "large") as file:
        assert file.read(3) == bytes(3)


def test_a_changed_text_is_reported(tmp_path, caplog):
    path = write(tmp_path / "x.toml", sealed_text("# from \udcff\na = 1\n"))  # a name that is not UTF-8
    warn_if_changed(path.read_text(), path)
    warn_if_changed("a = 2\n", path)
    assert not caplog.text
    warn_if_changed(path.read_text().replace("a = 1", "a = 2"), path)
    assert "was changed since it was written" in caplog.text


def test_the_bytes_of_a_tensor_are_those_of_its_values_row_by_row():
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert bytes(tensor_bytes(table.T)) == bytes.fromhex("0000803f 00004040 00000040 00008040")
    assert bytes(tensor_bytes(torch.tensor(-2, dtype=torch.int16))) == bytes.fromhex("feff")
    assert bytes(tensor_bytes(torch.ones(1, dtype=torch.bfloat16))) == bytes.fromhex("803f")
    assert bytes(tensor_bytes(torch.zeros(0, 3))) == b""
