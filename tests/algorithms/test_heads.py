"""A shared body under heads: FedRep and FedBABU against plain loops, and models without a recognisable head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml import InputError, rng
from fedabml.algorithms import FedAvg, FedBABU, FedPop, FedRep
from fedabml.algorithms.base import Batch
from fedabml.algorithms.heads import head_start
from fedabml.engine.client import personalize
from fedabml.engine.lanes import Lanes
from fedabml.engine.loss import ClientLoss
from fedabml.gaussian import Branches, Samples
from fedabml.likelihoods import GaussianNoise
from fedabml.vectors import Network
from tests.algorithms.problem import (
    CLIENTS,
    MOMENTA,
    START,
    assert_apart,
    batches,
    close,
    descend,
    drawn,
    models,
    simulate,
    tuning,
)

BODY, HEAD = slice(0, 1), slice(1, 3)


@MOMENTA
@pytest.mark.parametrize("body_epochs", [1, 3])
def test_fedrep_two_rounds_by_a_plain_loop(body_epochs, momentum):
    lr = 0.1
    words = {"lr": lr, "body_epochs": body_epochs, "momentum": momentum}
    sim, lines = simulate(FedRep(personal_epochs=0, **words))
    body, heads = START[BODY], [START[HEAD]] * 4
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            w = np.concatenate([body, heads[c]])
            w = descend(w, batches(c, t, 0), lr, momentum, part=HEAD)
            w = descend(w, batches(c, t, 1, body_epochs), lr, momentum, part=BODY)
            heads[c] = w[HEAD]
            ends.append(w[BODY])
        body = np.mean(ends, 0)
    close(sim.shared["body"], body)
    assert set(sim.shared) == {"body"} and set(sim.kept.states) == {0, 1, 2}
    wholes = [np.concatenate([body, h]) for h in heads]
    close(models(sim).mean, wholes)  # (body_t, h_i) is scored, the first head for a client never drawn
    close(models(sim).mean[3][HEAD], START[HEAD], 0)
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (1 * 8, 1 * 8)
    tuned = sim.cohort.using(FedRep(personal_epochs=2, personal_lr=0.04, **words))
    with torch.no_grad():
        moved = personalize(Lanes.after_round(tuned, sim.shared, CLIENTS), sim.kept_for(CLIENTS)).mean
    for c in CLIENTS:  # further epochs move the head alone
        close(moved[c], descend(wholes[c], tuning(c, 2), 0.04, momentum, part=HEAD))


@MOMENTA
def test_fedbabu_two_rounds_by_a_plain_loop(momentum):
    lr = 0.1
    sim, lines = simulate(FedBABU(lr=lr, momentum=momentum, personal_epochs=2, personal_lr=0.04))
    w = START
    for t in (1, 2):
        w = np.mean([descend(w, batches(c, t), lr, momentum, part=BODY) for c in drawn(t)], 0)
    close(sim.shared["body"], w[BODY])
    assert set(sim.shared) == {"body"} and sim.kept.states == {}
    assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (1 * 8, 1 * 8)
    for c in CLIENTS:  # the whole network moves, from the first head
        close(models(sim).mean[c], descend(w, tuning(c, 2), 0.04, momentum))
    close(w[HEAD], START[HEAD], 0)


def test_kept_heads_are_apart():
    assert_apart(simulate(FedRep(lr=0.1))[0])


@MOMENTA
def test_fedrep_with_an_empty_head_is_fedavg(momentum):
    rep = FedRep(lr=0.1, momentum=momentum, head="", body_epochs=3)
    sim, lines = simulate(rep, batch_size=9, epochs=3)
    plain, others = simulate(FedAvg(lr=0.1, momentum=momentum), batch_size=9, epochs=3)
    close(sim.shared["body"], plain.shared["mean"])
    close(models(sim).mean, [plain.shared["mean"].numpy()] * 4)
    assert lines[0]["bytes_up"] == others[0]["bytes_up"] and lines[0]["bytes_down"] == others[0]["bytes_down"]


@MOMENTA
def test_fedbabu_with_an_empty_head_is_fedavg_with_fine_tuning(momentum):
    words = {"lr": 0.1, "momentum": momentum, "personal_epochs": 2}
    sim, plain = simulate(FedBABU(head="", **words))[0], simulate(FedAvg(**words))[0]
    close(sim.shared["body"], plain.shared["mean"])
    close(models(sim).mean, models(plain).mean)


# -- which part is the head -----------------------------------------------------------------------------------------
class Named(nn.Module):
    """A model whose parameters do not follow the order of its layers, and one with a bare parameter."""

    def __init__(self, bare=False):
        super().__init__()
        self.classifier = nn.Linear(4, 3)
        self.trunk = nn.Linear(5, 4)
        if bare:
            self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.classifier(self.trunk(x))


def layout(module):
    return Network(module).layout


DEEP = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))


@pytest.mark.parametrize(("head", "start"), [("auto", 44), ("2.1", 44), ("2", 24), ("", 59), ("2.1.bias", 56)])
def test_where_the_head_begins(head, start):
    assert head_start(layout(DEEP), head) == start


def test_the_likelihoods_own_entry_goes_with_the_head():
    network = Network(DEEP, tail=1)
    assert head_start(network.layout, "auto") == 44
    assert FedRep().init(network.initial, network.layout)["body"].shape == (44,)
    kept = FedRep().keep(network.initial, {"body": network.initial[:44]}, None, None)
    assert kept["head"].shape == (16,)


@pytest.mark.parametrize(
    ("module", "head", "words"),
    [
        (nn.Linear(5, 3), "auto", "no layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), "auto", "no body to share"),
        (DEEP, "fc", "no parameter under the name 'fc'"),
        (DEEP, "2.2", "no parameter under the name '2.2'"),
        (DEEP, "0", "does not stand at the end"),
        (DEEP, "2.1.weight", "does not stand at the end"),
        (Named(), "classifier", "does not stand at the end"),
        (nn.Sequential(nn.Sequential(*DEEP)), "0", "no body to share"),
    ],
)
@pytest.mark.parametrize("kind", [FedRep, FedBABU, FedPop])
def test_a_head_that_cannot_be_separated_is_refused(kind, module, head, words):
    network = Network(module)
    with pytest.raises(InputError, match=words) as error:
        kind(head=head).init(network.initial, network.layout)
    assert "head=" in str(error.value) and network.layout.names[0] in str(error.value)


def test_parameters_that_stand_in_no_layer_are_no_silent_empty_head():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(3))

    with pytest.raises(InputError, match="head="):
        head_start(layout(Bare()), "auto")
    assert head_start(layout(Bare()), "b") == 15
    assert head_start(layout(Named(bare=True)), "auto") == 3 + 15


def test_training_a_model_without_a_head_is_refused():
    g = np.random.default_rng(0)
    fed = fedabml.Federation.from_arrays([(g.normal(size=(9, 5)).astype(np.float32), g.integers(0, 3, 9))], classes=3)
    for kind in (FedRep, FedBABU, FedPop):
        for model in ("mlr", nn.Linear(5, 3)):
            with pytest.raises(InputError, match=r"Name the head by hand with --set .*head="):
                fedabml.train(fed, model, kind(), rounds=1, participation=1, evaluate=False, device="cpu")


def test_the_sizes_of_messages_of_a_network():
    """d_b and d_h of an MLP 5 → 4 → 3 are 24 and 15."""
    g = np.random.default_rng(0)
    pair = g.normal(size=(9, 5)).astype(np.float32), g.integers(0, 3, 9)
    fed = fedabml.Federation.from_arrays([pair] * 2, classes=3)
    options = {"rounds": 1, "participation": 1, "epochs": 1, "device": "cpu", "evaluate": False}
    for kind, numbers in [(FedRep, 24), (FedBABU, 24), (FedPop, 24 + 2 * 15)]:
        line = fedabml.train(fed, "mlp", kind(), model_options={"hidden": (4,)}, **options).history[0]
        assert (line["bytes_down"], line["bytes_up"]) == (4 * numbers, 4 * numbers)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_branches_cost_what_their_whole_vectors_do(heads, batched):
    """One body under several heads: value and derivatives, with dropout in the body and the likelihood's own entry."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 1)).double()
    network = Network(module, tail=1)
    loss = ClientLoss(network, GaussianNoise(1), None, batched=batched)
    x, y = torch.randn(7, 3).double(), torch.randn(7, 1).double()
    batch, key = Batch(x, y, torch.ones(7).double()), rng.key(5)
    body, own = network.initial[:20], network.initial[20:] + torch.randn(heads, 7).double()

    def whole(body, own):
        return loss(Samples(torch.cat([body.expand(heads, -1), own], 1)), batch, key)

    def parted(body, own):
        return loss(Branches(body, own), batch, key)

    for each in (0, 1):
        (a, at), (b, bt) = (torch.func.grad_and_value(f, each)(body, own) for f in (whole, parted))
        torch.testing.assert_close((b, bt), (a, at), rtol=1e-12, atol=1e-12)
        assert a.abs().max() > 0
