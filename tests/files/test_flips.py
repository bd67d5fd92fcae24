"""No flipped bit of any file is accepted silently, and a damaged checkpoint costs a round, no more (see flips.py)."""

import random
import shutil
from collections import Counter

import pytest

from fedabml import FedAvg, InputError
from fedabml.algorithms import Ditto, Scaffold
from tests.files.flips import campaign
from tests.runs.test_folder import run

ROUNDS, FLIPS = 4, 12


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread_here")
def test_no_flipped_bit_of_any_file_is_accepted_silently(tmp_path):
    found = campaign(tmp_path, 420, seed=1)
    assert all(sum(outcomes.values()) == 20 for outcomes in found.values())
    total = sum(found.values(), Counter())
    assert not total["silent"] and not total["crash"], found


def flipped(path, chance):
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        pytest.param(FedAvg(), "round", id="fedavg-round"),
        pytest.param(Scaffold(), "kept", id="scaffold-kept"),
        pytest.param(Scaffold(), "round", id="scaffold-round", marks=pytest.mark.nightly),
        pytest.param(Ditto(), "round", id="ditto-round", marks=pytest.mark.nightly),
        pytest.param(Ditto(), "kept", id="ditto-kept", marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumed_from_the_checkpoint_before_ends_with_the_same_bits(tmp_path, caplog, algorithm, kind):
    whole, chance = tmp_path / "whole", random.Random(kind)
    run(whole, ROUNDS, algorithm)
    for number in range(FLIPS):
        cut = tmp_path / str(number)
        shutil.copytree(whole, cut)
        flipped(sorted((cut / "checkpoints").glob(f"{kind}-*"))[-1], chance)
        for name in ("shared.safetensors", "clients.csv", "summary.json", "report.html"):
            (cut / name).unlink()
        caplog.clear()
        run(cut, ROUNDS, algorithm, resume=True)
        assert f"The run resumes from round {ROUNDS - 1} instead" in caplog.text
        for name in ("shared.safetensors", "clients.csv"):
            assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_whose_checkpoints_are_both_damaged_is_refused(tmp_path):
    run(tmp_path, ROUNDS, Ditto())
    chance = random.Random(0)
    for path in (tmp_path / "checkpoints").glob("round-*"):
        flipped(path, chance)
    with pytest.raises(InputError, match=r"No checkpoint in .* can be read"):
        run(tmp_path, ROUNDS, Ditto(), resume=True)
