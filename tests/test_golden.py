"""Golden runs: short trainings whose weights and scores were recorded, so that a change of structure changes no number.

`tests/golden/runs.json` holds, for every case, a SHA-256 digest of θ and of all clients' scores, and a few numbers of
them. On a machine of the kind that recorded them the digests must be equal; on any machine the numbers must agree.
After a deliberate change of results, record anew with `python -m tests.test_golden`, and say so in the commit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedabml
from fedabml.algorithms import REGISTRY, make

FILE = Path(__file__).parent / "golden" / "runs.json"
SCORES = "(prior_|prior_level_)?(accuracy|nll|brier|entropy|mutual_information|ece)"  # that the digests are of
TOLERANCE = {"float64": 1e-7, "float32": 2e-3}
VARIANTS = {  # what a registered name alone does not reach
    "server momentum and average": ("fedabml", {"server_momentum": 0.5, "average": 0.9}),
    "drift": ("fedabml", {"drift": "control"}),
    "activation noise": ("fedabml", {"estimator": "local", "s": 2}),
    "weighted mean": ("fedavg-ft", {"weights": "samples", "momentum": 0.9}),
}
CASES = [
    *((name, name, {}, "ragged", dtype, "vmap") for name in REGISTRY for dtype in TOLERANCE),
    *((name, name, {}, "ragged", "float64", "loop") for name in REGISTRY),
    *((title, *what, "ragged", dtype, "vmap") for title, what in VARIANTS.items() for dtype in TOLERANCE),
    *((f"{name} long", name, {}, "long", "float32", "vmap") for name in ("fedabml", "fedavg-ft", "ditto")),
    *((f"{name} images", name, {}, "images", "float32", "vmap") for name in ("fedabml", "scaffold")),
]  # fmt: skip


def federation(kind: str) -> fedabml.Federation:
    """Six clients with other classes each; long: of equal size, so that a step is recorded; images: for a CNN."""
    rng = np.random.default_rng(3)
    sizes = [24] * 6 if kind == "long" else [7, 12, 16, 21, 25, 30]
    shape = (1, 16, 16) if kind == "images" else (6,)

    def client(number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.concatenate([np.arange(3), rng.integers(0, 3, size - 3)])
        x = rng.normal(size=(size, *shape)) + (y + 0.3 * number).reshape(-1, *[1] * len(shape))
        return x.astype(np.float32), y

    return fedabml.Federation.from_arrays(
        train=[client(i, n) for i, n in enumerate(sizes)], test=[client(i, 9) for i in range(6)]
    )


def result(name: str, hyper: dict, kind: str, dtype: str, backend: str) -> dict:
    """A short run: its digest, and numbers that say how far another machine's is from it."""
    words = {"model": "cnn", "rounds": 1, "epochs": 1, "model_options": {"channels": [4, 4], "hidden": [8]}}
    if kind != "images":
        words = {"model": "mlp", "rounds": 12 if kind == "long" else 3, "model_options": {"hidden": [8]}}
    made = make(name, **hyper)
    if hasattr(made, "newcomer"):  # the bits are those of the published start of clients without kept state
        made = dataclasses.replace(made, newcomer="initial")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over chunks of clients depend on it
    try:
        run = fedabml.train(
            federation(kind), algorithm=made, participation=0.5, batch_size=8, seed=1, device="cpu",
            dtype=dtype, backend=backend, chunk=4, **{"epochs": 2} | words,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    state = {name: value.numpy() for name, value in sorted(run.prior.shared.items())}
    columns = run.evaluation.clients
    scores = {name: np.asarray(columns[name]) for name in sorted(columns) if re.fullmatch(SCORES, name)}
    content = hashlib.sha256()
    for array in [*state.values(), *scores.values()]:
        content.update(np.ascontiguousarray(array).tobytes())
    numbers = {key: [float(np.abs(value).sum()), float(value.sum())] for key, value in state.items()}
    return {"digest": content.hexdigest()[:24], "theta": numbers, "nll": float(np.mean(scores["nll"]))}


def machine() -> str:
    """What bits may depend on: versions, the processor's instructions, the library behind products."""
    return f"{torch.__version__} {np.__version__} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def title(case: tuple) -> str:
    return f"{case[0]}, {case[4]}, {case[5]}"


def tier(case: tuple) -> tuple:
    """`make quick` has every algorithm once."""
    return () if case[3:] == ("ragged", "float64", "vmap") else (pytest.mark.slow,)


@pytest.mark.parametrize("case", [pytest.param(case, id=title(case), marks=tier(case)) for case in CASES])
def test_a_run_gives_what_it_gave(case):
    recorded = json.loads(FILE.read_text())
    expected, found = recorded["runs"][title(case)], result(*case[1:])
    close = TOLERANCE[case[4]]
    for name, numbers in expected["theta"].items():
        np.testing.assert_allclose(found["theta"][name], numbers, rtol=close, atol=close * abs(numbers[0]))
    assert found["nll"] == pytest.approx(expected["nll"], rel=close)
    if recorded["machine"] == machine():
        assert found["digest"] == expected["digest"]


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    runs = {title(case): result(*case[1:]) for case in CASES}
    FILE.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
