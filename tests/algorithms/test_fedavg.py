"""FedAvg against plain SGD: by torch.optim, and by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedabml
from fedabml import rng
from fedabml.algorithms import make
from fedabml.vectors import Network
from tests.engine.plans import plan_of


def clients(sizes, classes=3, features=4, seed=0):
    g = np.random.default_rng(seed)
    return [(g.normal(size=(n, features)).astype(np.float32), g.integers(0, classes, n)) for n in sizes]


@pytest.mark.parametrize(
    ("words", "optimiser"),
    [
        pytest.param({"lr": 0.1}, torch.optim.SGD, id="sgd"),
        pytest.param({"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, id="momentum"),
        pytest.param({"lr": 0.01, "optimiser": "adam"}, torch.optim.Adam, id="adam"),
    ],
)
def test_one_client_is_torchs_optimiser(words, optimiser):
    fed = fedabml.Federation.from_arrays(clients([23]), classes=3, normalize="none")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    run = fedabml.train(
        fed, module, fedabml.FedAvg(**words), rounds=2, participation=1, epochs=3, batch_size=5,
        seed=7, dtype="float64", device="cpu", evaluate=False,
    )  # fmt: skip

    mine = copy.deepcopy(module).double()
    losses = []
    for number in (1, 2):
        hand = optimiser(mine.parameters(), **{k: v for k, v in words.items() if k != "optimiser"})  # anew every round
        plan = plan_of([fed.train[0]], [0], 3, 5, 1, (7, rng.NOISE, number, 0))
        losses.append([])
        for rows in plan.rows[:, 0, 0]:
            rows = rows[rows >= 0]
            hand.zero_grad()
            loss = cross_entropy(mine(torch.as_tensor(fed.x[rows]).double()), torch.as_tensor(fed.y[rows]))
            loss.backward()
            hand.step()
            losses[-1].append(loss.item())
    assert len(losses[0]) == 15  # three epochs of four batches of five and one of three
    expected = nn.utils.parameters_to_vector(mine.parameters())
    torch.testing.assert_close(run.prior.shared["mean"], expected, rtol=0, atol=1e-12)
    assert [line["loss"] for line in run.history] == pytest.approx([np.mean(v) for v in losses], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        ("fedavg", {"momentum": 0.5}, "FedAvg: optimiser adam has its own momentum. Set momentum 0"),
        ("scaffold", {}, "hold for steps along the gradient. Set optimiser sgd"),
        ("fedpa", {}, "hold for steps along the gradient. Set optimiser sgd"),
        ("fedabml", {"drift": "server"}, "set optimiser sgd"),
        ("fedabml", {"prior_step": "amortised", "prior_every": "batch"}, "set optimiser sgd"),
    ],
)
def test_adam_is_refused_where_formulas_hold_for_sgd(name, words, remedy):
    with pytest.raises(fedabml.InputError, match=remedy):
        make(name, optimiser="adam", **words)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_two_clients_one_round_by_hand(weights):
    """y = w·x + b with noise 1, full batches: the gradient of the mean −log likelihood is mean((wx + b − y)(x, 1))."""
    data = [
        (np.array([[1.0], [2.0]], np.float32), np.array([3.0, 5.0], np.float32)),
        (np.array([[0.0], [1.0], [-1.0], [2.0]], np.float32), np.array([1.0, 1.0, 1.0, 1.0], np.float32)),
    ]
    fed = fedabml.Federation.from_arrays(data, task="regression", normalize="none")
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
    run = fedabml.train(
        fed, module, fedabml.FedAvg(lr=0.5, weights=weights), rounds=1, participation=1, epochs=1, dtype="float64",
        device="cpu", evaluate=False, likelihood=fedabml.GaussianNoise(1, 1.0, learn=False),
    )  # fmt: skip
    # Client 1: ∂w = −(3·1 + 5·2)/2 = −6.5 and ∂b = −4, so it ends at (3.25, 2).
    # Client 2: ∂w = −(0 + 1 − 1 + 2)/4 = −.5 and ∂b = −1, so it ends at (.25, .5).
    first, second = (1 / 2, 1 / 2) if weights == "uniform" else (2 / 6, 4 / 6)
    expected = [3.25 * first + 0.25 * second, 2 * first + 0.5 * second]
    assert run.prior.shared["mean"].tolist() == pytest.approx(expected, abs=1e-12)


def test_fine_tuning_is_the_same_sgd_from_the_shared_weights():
    """A new client's fine-tuning: its minibatches are those of the key (seed, PERSONAL, 0, 0)."""
    fed = fedabml.Federation.from_arrays(clients([20, 20]), classes=3, normalize="none")
    algorithm = fedabml.FedAvg(lr=0.1, personal_lr=0.05, personal_epochs=2)
    module = nn.Linear(4, 3)
    run = fedabml.train(fed, module, algorithm, rounds=1, participation=1, epochs=1, device="cpu", evaluate=False)
    x, y = clients([13], seed=5)[0]
    posterior = run.prior.personalize(x, y, seed=3, batch_size=4, device="cpu")
    mine = Network(module).to_module(run.prior.shared["mean"])
    optimiser = torch.optim.SGD(mine.parameters(), lr=0.05)
    for rows in plan_of([np.arange(13)], [0], 2, 4, 1, (3, rng.PERSONAL, 0, 0)).rows[:, 0, 0]:
        rows = rows[rows >= 0]
        optimiser.zero_grad()
        cross_entropy(mine(torch.as_tensor(x[rows])), torch.as_tensor(y[rows])).backward()
        optimiser.step()
    torch.testing.assert_close(posterior.q.mean, nn.utils.parameters_to_vector(mine.parameters()).detach())
    assert not torch.equal(posterior.q.mean, run.prior.shared["mean"])


def test_the_average_over_rounds_by_hand():
    """w̄_t = c·w̄_{t−1} + (1 − c)·w_t with c = min(decay, (t − 1)/t): a plain mean at first, then a sliding one."""
    fed = fedabml.Federation.from_arrays(clients([20, 20]), classes=3)
    options = {"participation": 1, "epochs": 1, "device": "cpu", "evaluate": False, "dtype": "float64"}
    module = nn.Linear(4, 3)
    each = [
        fedabml.train(fed, module, fedabml.FedAvg(lr=0.1), rounds=t, **options).prior.shared["mean"]
        for t in (1, 2, 3, 4)
    ]
    averaged = fedabml.train(fed, module, fedabml.FedAvg(lr=0.1, average=0.6), rounds=4, **options).prior.shared["mean"]
    expected = each[0]
    for decay, w in [(0.5, each[1]), (0.6, each[2]), (0.6, each[3])]:
        expected = decay * expected + (1 - decay) * w
    torch.testing.assert_close(averaged, expected, rtol=0, atol=1e-12)


def test_local_never_sends_and_never_mixes():
    """Local only is SGD on the client's own data: another client's data must not matter."""
    options = {"rounds": 2, "participation": 1, "epochs": 1, "device": "cpu", "dtype": "float64"}
    test = clients([6, 6], seed=9)
    module = nn.Linear(4, 3)
    pair = clients([20, 20])
    changed = [pair[0], (pair[1][0] + 1, pair[1][1])]
    runs = [
        fedabml.train(
            fedabml.Federation.from_arrays(p, test, normalize="none", classes=3), module, fedabml.Local(), **options
        )
        for p in (pair, changed)
    ]
    a, b = (run.evaluation.clients["nll"] for run in runs)
    assert a[0] == b[0] and a[1] != b[1]
    assert runs[0].summary["bytes_up"] == runs[0].summary["bytes_down"] == 0
    assert runs[0].summary["prior_accuracy"] is None
    assert runs[0].prior.shared == {}


def test_the_servers_step_goes_further_than_the_mean():
    shared, update = {"mean": torch.tensor([1.0, 2.0])}, {"mean": torch.tensor([2.0, 0.0])}
    assert fedabml.FedAvg().merge(shared, update, 1, 1) is update
    assert fedabml.FedAvg(server_lr=1.5).merge(shared, update, 1, 1)["mean"].tolist() == [2.5, -1.0]
