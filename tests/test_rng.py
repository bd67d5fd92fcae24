"""Keys and the numbers drawn from them: both generators, the host's and the one that accelerators use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fedabml import rng

GENERATORS = {
    "normal": {"cpu": rng.normal, "hashed": rng._normal_hashed},
    "uniform": {"cpu": rng.uniform, "hashed": rng._uniform_hashed},
}
BOTH = pytest.mark.parametrize("source", ["cpu", "hashed"])
KINDS = pytest.mark.parametrize("kind", ["normal", "uniform"])


@pytest.mark.parametrize("place", range(4))
def test_a_key_depends_on_every_entry(place):
    path = [3, 1, 4, 1]
    seen = set()
    for value in [0, 1, 2, 5, 1000, -1, 2**40]:
        path[place] = value
        seen.add(rng.number(*path))
    assert len(seen) == 7


def test_a_key_depends_on_order_and_length():
    assert len({rng.number(*path) for path in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (0, 1, 0)]}) == 7


def test_small_paths_never_collide():
    paths = list(itertools.product(range(12), repeat=4))
    assert len({rng.number(*path) for path in paths}) == len(paths)


def test_keys_are_those_of_single_paths():
    many = rng.keys((7, rng.NOISE, 3), [5, 0, 11])
    assert many.dtype == torch.int64
    assert many.tolist() == [rng.key(7, rng.NOISE, 3, c).item() for c in (5, 0, 11)]


def test_splitmix_reference_values():
    """The first outputs of splitmix64 seeded with 1234567 (the generator's published test vector)."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    got = [v % 2**64 for v in rng.folds(torch.tensor(1234567), 5).tolist()]
    assert got == expected


def test_fold_agrees_with_itself_for_numbers_tensors_and_lanes():
    key = rng.key(1, 2, 3)
    values = [0, 1, 17, 2**31, 2**40, -1]
    single = [rng.fold(key, v).item() for v in values]
    assert len(set(single)) == len(values) and key.item() not in single
    assert rng.fold(key, torch.tensor(values)).tolist() == single
    assert torch.vmap(rng.fold, (None, 0))(key, torch.tensor(values)).tolist() == single
    keys = rng.keys((1,), range(4))
    assert rng.fold(keys, 5).tolist() == [rng.fold(k, 5).item() for k in keys]


def test_fold_is_the_same_mixing_on_the_host():
    z = rng.number(9, 9)
    folded = rng._mix_int((z + rng._GOLDEN * 6) & rng._MASK)
    assert rng.fold(rng.key(9, 9), 5).item() == rng._signed(folded)


@KINDS
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1,), (7,), (16,), (33, 3)])
def test_lanes_draw_what_each_would_draw_alone(kind, source, dtype, size):
    draw = GENERATORS[kind][source]
    keys = rng.keys((0, rng.NOISE), range(5))
    alone = torch.stack([draw(k, size, dtype) for k in keys])
    assert alone.shape == (5, *size) and alone.dtype == dtype
    assert torch.equal(torch.vmap(lambda k: draw(k, size, dtype))(keys), alone)
    assert torch.equal(draw(keys, size, dtype), alone)


@KINDS
@BOTH
def test_nested_lanes_draw_what_each_would_draw_alone(kind, source):
    draw = GENERATORS[kind][source]
    keys = rng.fold(rng.keys((4,), range(3)).unsqueeze(1), torch.arange(2))
    alone = torch.stack([torch.stack([draw(k, (5,), torch.float32) for k in row]) for row in keys])
    one = lambda k: draw(k, (5,), torch.float32)
    assert torch.equal(torch.vmap(torch.vmap(one))(keys), alone)
    assert torch.equal(torch.vmap(torch.vmap(one, 0), 1, 1)(keys), alone)
    inner = lambda k: torch.vmap(lambda j: one(rng.fold(k, j)))(torch.arange(2))
    assert torch.equal(torch.vmap(inner)(rng.keys((4,), range(3))), alone)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_normal(source, dtype):
    draw = GENERATORS["normal"][source]
    x = draw(rng.key(11), (200_000,), dtype).double().numpy()
    assert np.isfinite(x).all()
    n = len(x)
    # Five standard errors of the first four moments, of a fixed stream.
    assert abs(x.mean()) < 5 / n**0.5
    assert abs((x**2).mean() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / n**0.5


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform(source, dtype):
    x = GENERATORS["uniform"][source](rng.key(12), (200_000,), dtype).double().numpy()
    assert x.min() >= 0 and x.max() < 1
    assert stats.kstest(x, "uniform").pvalue > 1e-3


@BOTH
@pytest.mark.parametrize(
    "keys",
    [rng.keys((0, rng.NOISE, 1), range(400)), rng.fold(rng.key(0), torch.arange(400)), torch.arange(400)],
    ids=["clients", "steps", "raw"],
)
def test_neighbouring_keys_are_uncorrelated(source, keys):
    x = GENERATORS["normal"][source](keys, (500,), torch.float64)
    # Correlations of one key's numbers with the next key's, all at once: 199,500 products of independent normals.
    products = (x[:-1] * x[1:]).mean().item()
    shifted = (x[:-1, 1:] * x[1:, :-1]).mean().item()
    assert abs(products) < 5 / 199_500**0.5 and abs(shifted) < 5 / 199_000**0.5
    assert stats.kstest(x[:, 0].numpy(), "norm").pvalue > 1e-3  # and across keys, at one place


def test_the_same_key_gives_the_same_numbers_whatever_was_drawn_before():
    key = rng.key(5)
    first = rng.normal(key, (9,), torch.float32)
    torch.randn(3)
    rng.normal(rng.key(6), (100,), torch.float32)
    assert torch.equal(rng.normal(key, (9,), torch.float32), first)
    assert not torch.equal(rng.normal(rng.fold(key, 0), (9,), torch.float32), first)


def test_draws_leave_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    rng.normal(rng.key(1), (9,), torch.float32)
    rng.uniform(rng.key(1), (9,), torch.float32)
    rng.generator(1).permutation(5)
    assert torch.equal(torch.randn(4), expected)


@pytest.mark.parametrize("size", [5, 100])
def test_uniforms_of_a_longer_draw_begin_alike(size):
    """A client's rows come first in a padded batch, so padding must not change the noise of its own rows."""
    for draw in GENERATORS["uniform"].values():
        long = draw(rng.key(2), (128, 3), torch.float32)
        assert torch.equal(draw(rng.key(2), (size, 3), torch.float32), long[:size])


def test_host_generators_are_independent_of_each_other():
    a, b = rng.generator(1, rng.SAMPLE, 1), rng.generator(1, rng.SAMPLE, 1)
    assert a.random(4).tolist() == b.random(4).tolist()
    assert rng.generator(1, rng.SAMPLE, 2).random() != rng.generator(1, rng.SHUFFLE, 1).random()
