"""Numbers drawn by compiled C are torch's, to the bit; and where they would not be, torch draws."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedabml import rng
from fedabml.accel import c_library, mersenne
from tests.cli.command import MAX_WAIT

ROOT = Path(__file__).resolve().parents[2]

VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # elsewhere torch has other arithmetic
here = pytest.mark.skipif(
    c_library.compiler() is None or not VECTORS, reason="no C compiler here, or another processor"
)
KINDS = pytest.mark.parametrize("kind", ["normal", "uniform"])


@pytest.fixture
def eager(monkeypatch, at_once):
    """A twister that is asked for anew, and made with the first number."""
    made = mersenne.Twister()
    monkeypatch.setattr(rng, "TWISTER", made)
    monkeypatch.setattr(mersenne, "WORTH", 1)
    monkeypatch.setattr(c_library, "in_background", at_once)
    monkeypatch.setattr(c_library, "_FAILED", set())
    return made


def torchs(seeds, size, kind, dtype=torch.float32):
    rows = torch.empty(len(seeds), size, dtype=dtype)
    for row, seed in zip(rows, seeds.tolist(), strict=True):
        getattr(row, f"{kind}_")(generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))
    return rows


def draw(seeds, size, kind, dtype=torch.float32):
    return {"normal": rng.normal, "uniform": rng.uniform}[kind](seeds, (size,), dtype)


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@here
@KINDS
@pytest.mark.parametrize("usual", [torch.float32, torch.float64])
def test_the_bits_are_torchs(kind, eager, usual):
    torch.set_default_dtype(usual)
    try:
        check_bits(kind, eager)
    finally:
        torch.set_default_dtype(torch.float32)


def check_bits(kind, eager):
    seeds = rng.folds(rng.key(3, rng.NOISE), 5)
    assert seeds.min() < 0 < seeds.max()  # 64 bits with a sign, of which 32 count
    for size in (1, 15, 16, 17, 33, 608, 623, 624, 625, 639, 640, 1248, 5000):
        assert same(draw(seeds, size, kind), torchs(seeds, size, kind)), size
    assert set(eager.current) == {"normal", "uniform"}
    assert same(draw(seeds.to(torch.int32), 40, kind), torchs(seeds.to(torch.int32), 40, kind))
    assert same(draw(seeds[::2], 40, kind), torchs(seeds[::2], 40, kind))  # not one behind the other
    assert draw(seeds[:0], 40, kind).shape == (0, 40)


@here
def test_a_million_normal_numbers(eager):
    """Among them a twentieth of all radii and of all angles that there are."""
    draw(rng.key(0), 16, "normal")
    seeds = torch.tensor([0, (1 << 32) - 1])
    assert same(draw(seeds, 1 << 20, "normal"), torchs(seeds, 1 << 20, "normal"))


@here
@KINDS
def test_threads_share_rows(kind, eager, monkeypatch):
    seeds, before = rng.folds(rng.key(4), 7), torch.get_num_threads()
    draw(seeds, 16, kind)
    monkeypatch.setattr(c_library, "THREADED", 2)
    try:
        for threads in (2, 3, 9):
            torch.set_num_threads(threads)
            assert same(draw(seeds, 100, kind), torchs(seeds, 100, kind))
    finally:
        torch.set_num_threads(before)


@here
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.slow
def test_a_forked_process_draws_too():
    """Its threads stayed behind."""
    script = """
import os, torch
from fedabml import rng
from fedabml.accel import c_library, mersenne
torch.set_num_threads(2)
c_library.THREADED, mersenne.WORTH = 2, 1
c_library.in_background = lambda work: (lambda f: (f.set_result(work()), f)[1])(c_library.Future())
draw = lambda: rng.normal(rng.folds(rng.key(1), 4), (100,), torch.float32)
first = draw()
assert rng.TWISTER.current
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(draw(), first) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=MAX_WAIT, cwd=ROOT)


@here
@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.nightly
def test_a_process_may_end_at_any_moment(pause):
    script = f"""
import time, torch
from fedabml import rng
from fedabml.accel import mersenne
mersenne.WORTH = 1
for _ in range(2):
    rng.normal(rng.folds(rng.key(1), 4), (100,), torch.float32)
    time.sleep({pause})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=MAX_WAIT, cwd=ROOT)


@here
def test_it_waits_until_it_is_worth_it(eager, monkeypatch):
    monkeypatch.setattr(mersenne, "WORTH", 200)
    works = []
    monkeypatch.setattr(c_library, "in_background", lambda work: works.append(work) or c_library.Future())
    for drawn in (100, 200, 300):
        draw(rng.key(1), 100, "normal")
        assert len(works) == (drawn >= 200) and eager.current is None


@KINDS
def test_doubles_are_left_to_torch(kind, eager):
    seeds = rng.folds(rng.key(5), 3)
    assert torch.equal(draw(seeds, 50, kind, torch.float64), torchs(seeds, 50, kind, torch.float64))
    assert eager.pending is None


@here
@pytest.mark.parametrize(
    "change", [("-0.78515625f", "-0.78515f"), ("0x9908b0df", "0x9908b0de"), ("? m : 0", "? m : 1")]
)
def test_other_numbers_are_not_used(change, eager, monkeypatch, caplog):
    assert mersenne.SOURCE.count(change[0]) == 1
    monkeypatch.setattr(mersenne, "SOURCE", mersenne.SOURCE.replace(*change))
    seeds = rng.folds(rng.key(6), 3)
    with caplog.at_level(logging.DEBUG, "fedabml"):
        for _ in range(3):
            assert same(draw(seeds, 50, "normal"), torchs(seeds, 50, "normal"))
    refused = ["normal", "uniform"] if "9908" in change[0] else ["normal"]
    assert not {*refused} & {*eager.current} and caplog.text.count("ones differ") == len(refused)


@pytest.mark.parametrize("command", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_draws(command, eager, monkeypatch, caplog):
    monkeypatch.setenv("CC", command)
    c_library._library.cache_clear()  # of what another test has compiled
    seeds = rng.folds(rng.key(7), 3)
    with caplog.at_level(logging.DEBUG, "fedabml"):
        for _ in range(3):
            assert same(draw(seeds, 50, "normal"), torchs(seeds, 50, "normal"))
    assert eager.current == {} and caplog.text.count("drawn by torch") == 1
