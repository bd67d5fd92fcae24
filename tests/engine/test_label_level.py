"""The label level: its evidence by hand and as a sum over all subsets, the choice of ρ and α, and where it is used."""

import itertools
import math

import numpy as np
import pytest
import torch

import fedabml
from fedabml.algorithms import make
from fedabml.algorithms.base import Site
from fedabml.engine.label_level import ALPHAS, FLOOR, SHARES, choose, label_offset, log_evidence, sparse_level
from fedabml.engine.lanes import ClientGroup, Lanes
from fedabml.errors import InputError
from fedabml.federation.card import make_card
from fedabml.runs.config import RunConfig
from fedabml.runs.prepare import prepare


def evidence(counts, share, alpha):
    return float(log_evidence(torch.tensor(counts).double(), *(torch.tensor([v]).double() for v in (share, alpha))))


def digits():
    return RunConfig(clients=6, classes_per_client=3).federation()


def dirichlet(counts, alpha):
    """Return p(labels in their order) under a symmetric Dirichlet: one label after another by the posterior mean."""
    p, seen = 1.0, np.zeros(len(counts))
    for label in np.repeat(np.arange(len(counts)), counts):
        p *= (seen[label] + alpha) / (seen.sum() + len(counts) * alpha)
        seen[label] += 1
    return p


def by_subsets(counts, share, alpha):
    """Return p(labels) under `sparse`, as a sum over all subsets of the classes that are not empty."""
    classes, total = len(counts), 0.0
    for having in itertools.product((0, 1), repeat=classes):
        if any(having) and all(own for own, n in zip(having, counts, strict=True) if n):
            p = math.prod(share if own else 1 - share for own in having)
            total += p * dirichlet([n for own, n in zip(having, counts, strict=True) if own], alpha)
    return total / (1 - (1 - share) ** classes)


def test_the_evidence_by_hand():
    # Two classes, labels (0, 0). With both classes 1/2 · (1 + α)/(1 + 2α) = 1/3 for α 1; with class 0 alone 1.
    assert math.exp(evidence([2, 0], 1.0, 1.0)) == pytest.approx(1 / 3)
    assert math.exp(evidence([2, 0], 0.5, 1.0)) == pytest.approx((0.25 / 3 + 0.25) / 0.75)


@pytest.mark.parametrize("counts", [[3, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 6, 0, 0]])
@pytest.mark.parametrize(("share", "alpha"), [(0.3, 0.7), (0.9, 20.0), (1.0, 0.1)])
def test_evidence_and_level_are_those_of_a_sum_over_all_subsets(counts, share, alpha):
    p = by_subsets(counts, share, alpha)
    assert math.exp(evidence(counts, share, alpha)) == pytest.approx(p)
    after = [by_subsets([*counts[:y], counts[y] + 1, *counts[y + 1 :]], share, alpha) / p for y in range(4)]
    level = sparse_level(torch.tensor(counts).double(), share, alpha)
    assert level.tolist() == pytest.approx([(1 - FLOOR) * next_p + FLOOR / 4 for next_p in after])
    assert float(level.sum()) == pytest.approx(1)


def test_with_all_classes_everywhere_it_is_the_dirichlet_level_but_for_the_floor():
    counts = torch.tensor([[5.0, 2, 0], [0, 0, 1]])
    site = Site(counts.sum(-1), counts)
    plain = label_offset(make("fedabml", label_alpha=0.4), site).exp()
    sparse = label_offset(make("fedabml", label_prior="sparse", label_share=1.0, label_alpha=0.4), site).exp()
    assert torch.allclose(sparse, (1 - FLOOR) * plain + FLOOR / 3, atol=1e-6) and sparse.dtype == counts.dtype


def drawn(clients, share, alpha, n, seed=0, classes=10):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(clients):
        own = np.flatnonzero(rng.random(classes) < share)
        own = own if len(own) else rng.integers(classes, size=1)
        rows.append(np.bincount(rng.choice(own, n, p=rng.dirichlet([alpha] * len(own))), minlength=classes))
    return np.array(rows)


def test_the_choice_finds_what_made_the_labels_and_does_not_depend_on_the_order_of_clients():
    counts = drawn(400, 0.4, 5.0, 40)
    share, alpha = choose(counts)
    assert share == pytest.approx(0.4, rel=0.3) and alpha == pytest.approx(5, rel=0.5)
    assert choose(counts[np.random.default_rng(1).permutation(len(counts))]) == (share, alpha)
    share, alpha = choose(drawn(400, 1.0, 0.3, 40))
    assert share > 0.75 and alpha == pytest.approx(0.3, rel=0.3)


def test_the_choice_is_the_greatest_sum_of_the_grid():
    counts = drawn(12, 0.5, 1.0, 15)
    sums = {(s, a): sum(evidence(own, s, a) for own in counts) for s in SHARES for a in ALPHAS[::10]}
    chosen = choose(counts)
    assert sum(evidence(own, *chosen) for own in counts) >= max(sums.values())


def test_the_choice_stays_in_the_grid_for_one_client_and_for_clients_that_are_all_alike():
    assert choose(np.array([[7, 0, 0]]))[0] in SHARES
    share, alpha = choose(np.full((30, 4), 25))  # equal counts everywhere: the prior is as narrow as the grid allows
    assert (share, alpha) == (1.0, ALPHAS[-1])


def test_few_random_samples_do_not_exclude_the_classes_that_are_to_be_expected():
    """Clients have half of ten classes. Three samples of one class leave room for others, and two hundred do not."""
    counts = drawn(200, 0.5, 10.0, 300)
    share, alpha = choose(counts)
    few, many = (sparse_level(torch.tensor([n] + [0] * 9).double(), share, alpha) for n in (3, 200))
    plain = (3 + 0.1) / (3 + 1)  # of the Dirichlet level at its default α
    assert float(few[0]) < plain < 0.99 < float(many[0])


def test_training_chooses_once_and_the_prior_takes_it_to_new_clients(tmp_path):
    fed = digits()
    algorithm = make("fedabml", label_prior="sparse")
    run = fedabml.train(fed, "mlr", algorithm, rounds=1, participation=0.5, epochs=1)
    chosen = choose(fed.label_counts("train"))
    assert (run.prior.algorithm.label_share, run.prior.algorithm.label_alpha) == chosen
    run.prior.save(tmp_path / "prior.safetensors")
    prior = fedabml.load_prior(tmp_path / "prior.safetensors")
    rows = fed.train[0][:4]
    posterior = prior.personalize(fed.x[rows], fed.y[rows], epochs=0)
    counts = torch.tensor(np.bincount(fed.y[rows], minlength=10)).double()
    assert torch.allclose(posterior.offset.double(), sparse_level(counts, *chosen).log(), atol=1e-5)
    again = prepare(fed, "mlr", prior.algorithm).cohort.algorithm
    assert (again.label_share, again.label_alpha) == chosen


def test_where_labels_stay_at_their_sites_an_unchosen_level_is_refused():
    fed = digits()
    card = make_card("0" * 32, fed, algorithm=make("fedabml", label_prior="sparse"), model="mlr")
    with pytest.raises(InputError, match="set label_share and label_alpha"):
        card.setting(fed.select([0]), 0)
    given = make("fedabml", label_prior="sparse", label_share=0.3, label_alpha=2.0)
    assert (
        make_card("0" * 32, fed, algorithm=given, model="mlr").setting(fed.select([0]), 0).algorithm.label_share == 0.3
    )


def test_runs_side_by_side_have_levels_of_their_own():
    fed, given = digits(), ((0.3, 2.0), (0.8, 0.5))
    words = [{"label_prior": "sparse", "label_share": share, "label_alpha": alpha} for share, alpha in given]
    cohorts = [prepare(fed, "mlr", make("fedabml", **each), dtype="float64").cohort for each in words]
    shared = cohorts[0].algorithm.init(cohorts[0].network.initial, cohorts[0].network.layout)
    lanes = Lanes([ClientGroup(cohort, shared, [1], 0) for cohort in cohorts])
    counts = torch.tensor(fed.label_counts("train")[1]).double()
    assert torch.allclose(lanes.offset.exp(), torch.stack([sparse_level(counts, *each) for each in given]))
