"""The label level: its evidence by hand and as a sum over all subsets, the choice of ρ and α, and where it is used."""

import itertools
import math

import numpy as np
import pytest
import torch

import fedabml
from fedabml.algorithms import make
from fedabml.algorithms.base import Site
from fedabml.engine.label_level import ALPHAS, FLOOR, SHARES, SPREADS, choose, label_offset, log_evidence, sparse_level
from fedabml.engine.lanes import ClientGroup, Lanes
from fedabml.errors import InputError
from fedabml.federation.card import make_card
from fedabml.runs.config import RunConfig
from fedabml.runs.prepare import prepare


def evidence(counts, share, spread, alpha):
    return float(log_evidence(torch.tensor(counts).double(), [share], [spread], [alpha]))


def digits():
    return RunConfig(clients=6, classes_per_client=3).federation()


def dirichlet(counts, alpha):
    """Return p(labels in their order) under a symmetric Dirichlet: one label after another by the posterior mean."""
    p, seen = 1.0, np.zeros(len(counts))
    for label in np.repeat(np.arange(len(counts)), counts):
        p *= (seen[label] + alpha) / (seen.sum() + len(counts) * alpha)
        seen[label] += 1
    return p


def by_subsets(counts, share, spread, alpha):
    """Return p(labels) under `sparse`, as a sum over all subsets of the classes that are not empty."""
    classes, total = len(counts), 0.0
    sizes = [math.exp(-((s - share * classes) ** 2) / (2 * spread**2)) for s in range(1, classes + 1)]
    for having in itertools.product((0, 1), repeat=classes):
        if any(having) and all(own for own, n in zip(having, counts, strict=True) if n):
            p = (1 - FLOOR) * sizes[sum(having) - 1] / sum(sizes) + FLOOR / classes
            own_counts = [n for own, n in zip(having, counts, strict=True) if own]
            total += p / math.comb(classes, sum(having)) * dirichlet(own_counts, alpha)
    return total


def test_the_evidence_by_hand():
    # Two classes, labels (0, 0). With both classes 1/2 · (1 + α)/(1 + 2α) = 1/3 for α 1; with class 0 alone 1.
    assert math.exp(evidence([2, 0], 1.0, 0.01, 1.0)) == pytest.approx((1 - FLOOR / 2) / 3 + FLOOR / 2 * 1 / 2)
    one, two = (math.exp(-((s - 1.2) ** 2) / 2) for s in (1, 2))
    half = (1 - FLOOR) * two / (one + two) + FLOOR / 2
    assert math.exp(evidence([2, 0], 0.6, 1.0, 1.0)) == pytest.approx(half / 3 + (1 - half) / 2)


@pytest.mark.parametrize("counts", [[3, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 6, 0, 0]])
@pytest.mark.parametrize("prior", [(0.3, 0.5, 0.7), (0.9, 2.0, 20.0), (1.0, 1.0, 0.1)])
def test_evidence_and_level_are_those_of_a_sum_over_all_subsets(counts, prior):
    p = by_subsets(counts, *prior)
    assert math.exp(evidence(counts, *prior)) == pytest.approx(p)
    after = [by_subsets([*counts[:y], counts[y] + 1, *counts[y + 1 :]], *prior) / p for y in range(4)]
    level = sparse_level(torch.tensor(counts).double(), *prior)
    assert level.tolist() == pytest.approx([(1 - FLOOR) * next_p + FLOOR / 4 for next_p in after])
    assert float(level.sum()) == pytest.approx(1)


def test_with_all_classes_everywhere_it_is_the_dirichlet_level_but_for_the_floor():
    counts = torch.tensor([[5.0, 2, 0], [0, 0, 1]])
    site = Site(counts.sum(-1), counts)
    plain = label_offset(make("fedabml", label_alpha=0.4), site).exp()
    words = {"label_share": 1.0, "label_spread": 0.01, "label_alpha": 0.4}
    sparse = label_offset(make("fedabml", label_prior="sparse", **words), site).exp()
    assert torch.allclose(sparse, plain, atol=2 * FLOOR) and sparse.dtype == counts.dtype


def drawn(clients, share, alpha, n, seed=0, classes=10):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(clients):
        own = np.flatnonzero(rng.random(classes) < share)
        own = own if len(own) else rng.integers(classes, size=1)
        rows.append(np.bincount(rng.choice(own, n, p=rng.dirichlet([alpha] * len(own))), minlength=classes))
    return np.array(rows)


def values(chosen):
    return tuple(chosen[f"label_{name}"] for name in ("share", "spread", "alpha"))


def test_the_choice_finds_what_made_the_labels_and_does_not_depend_on_the_order_of_clients():
    counts = drawn(400, 0.4, 5.0, 40)
    share, spread, alpha = values(choose(counts))  # the deviation of 10 draws with probability 0.4 is 1.5
    assert share == pytest.approx(0.4, rel=0.3) and alpha == pytest.approx(5, rel=0.5) and spread in (1, 2)
    assert values(choose(counts[np.random.default_rng(1).permutation(len(counts))])) == (share, spread, alpha)
    share, _, alpha = values(choose(drawn(400, 1.0, 0.3, 40)))
    assert share > 0.75 and alpha == pytest.approx(0.3, rel=0.3)


def test_the_choice_is_the_greatest_sum_of_the_grid():
    counts = drawn(8, 0.5, 1.0, 15)
    total = {
        (s, t, a): sum(evidence(own, s, t, a) for own in counts)
        for s in SHARES[::5] for t in SPREADS[::2] for a in ALPHAS[::10]
    }  # fmt: skip
    assert sum(evidence(own, *values(choose(counts))) for own in counts) >= max(total.values())


def test_the_choice_stays_in_the_grid_for_one_client_and_for_clients_that_are_all_alike():
    assert values(choose(np.array([[7, 0, 0]])))[0] in SHARES
    share, _, alpha = values(choose(np.full((30, 4), 25)))  # equal counts: the prior is as narrow as the grid allows
    assert (share, alpha) == (1.0, ALPHAS[-1])


def test_few_random_samples_do_not_exclude_the_classes_that_are_to_be_expected():
    """Clients have half of ten classes. Three samples of one class leave room for others, and two hundred do not."""
    counts = drawn(200, 0.5, 10.0, 300)
    prior = values(choose(counts))
    few, many = (sparse_level(torch.tensor([n] + [0] * 9).double(), *prior) for n in (3, 200))
    plain = (3 + 0.1) / (3 + 1)  # of the Dirichlet level at its default α
    assert float(few[0]) < plain < 0.99 < float(many[0])


def test_training_chooses_once_and_the_prior_takes_it_to_new_clients(tmp_path):
    fed = digits()
    algorithm = make("fedabml", label_prior="sparse")
    run = fedabml.train(fed, "mlr", algorithm, rounds=1, participation=0.5, epochs=1)
    chosen = choose(fed.label_counts("train"))
    assert run.prior.algorithm.values().items() >= chosen.items()
    run.prior.save(tmp_path / "prior.safetensors")
    prior = fedabml.load_prior(tmp_path / "prior.safetensors")
    rows = fed.train[0][:4]
    posterior = prior.personalize(fed.x[rows], fed.y[rows], epochs=0)
    counts = torch.tensor(np.bincount(fed.y[rows], minlength=10)).double()
    assert torch.allclose(posterior.offset.double(), sparse_level(counts, *values(chosen)).log(), atol=1e-5)
    again = prepare(fed, "mlr", prior.algorithm).cohort.algorithm
    assert again.values().items() >= chosen.items()


def test_where_labels_stay_at_their_sites_an_unchosen_level_is_refused():
    fed = digits()
    card = make_card("0" * 32, fed, algorithm=make("fedabml", label_prior="sparse"), model="mlr")
    with pytest.raises(InputError, match="set label_share, label_spread and label_alpha"):
        card.setting(fed.select([0]), 0)
    given = make("fedabml", label_prior="sparse", label_share=0.3, label_alpha=2.0)
    assert (
        make_card("0" * 32, fed, algorithm=given, model="mlr").setting(fed.select([0]), 0).algorithm.label_share == 0.3
    )


def test_runs_side_by_side_have_levels_of_their_own():
    fed, given = digits(), ((0.3, 1.0, 2.0), (0.8, 2.0, 0.5))
    names = ("label_share", "label_spread", "label_alpha")
    made = [make("fedabml", label_prior="sparse", **dict(zip(names, each, strict=True))) for each in given]
    cohorts = [prepare(fed, "mlr", algorithm, dtype="float64").cohort for algorithm in made]
    shared = cohorts[0].algorithm.init(cohorts[0].network.initial, cohorts[0].network.layout)
    lanes = Lanes([ClientGroup(cohort, shared, [1], 0) for cohort in cohorts])
    counts = torch.tensor(fed.label_counts("train")[1]).double()
    assert torch.allclose(lanes.offset.exp(), torch.stack([sparse_level(counts, *each) for each in given]))
