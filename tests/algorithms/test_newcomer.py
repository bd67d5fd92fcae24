"""Where a client without kept state begins: at the best that the server has, or at the initial weights."""

import numpy as np
import pytest
import torch

import fedabml
from fedabml import rng
from fedabml.algorithms import make
from fedabml.algorithms.base import Site
from fedabml.files.sealed import read_tensors, write_tensors
from fedabml.runs.prior import Prior
from tests.algorithms.problem import START, batches, close, descend, drawn, models, simulate

SITE, KEY = Site(torch.tensor(5.0), torch.empty(0)), rng.key(0)
PARAMS = torch.arange(4.0)
SENT = {  # what the server sends, and what of it a new client begins with
    "ditto": ({"mean": PARAMS + 10}, {"mean": PARAMS + 10}, {"mean": PARAMS}),
    "apfl": (
        {"mean": PARAMS + 10},
        {"mean": PARAMS + 10, "alpha": torch.tensor(0.5)},
        {"mean": PARAMS, "alpha": torch.tensor(0.5)},
    ),
    "pfedbayes": (
        {"mean": PARAMS + 10, "logstd": PARAMS - 9},
        {"mean": PARAMS + 10, "logstd": PARAMS - 9},
        {"mean": PARAMS, "logstd": torch.full((4,), -4.0)},
    ),
    "fedpop": (
        {"body": PARAMS[:3], "mu": torch.tensor([7.0]), "logstd": torch.tensor([-3.0])},
        {"head": torch.tensor([7.0])},
        {"head": PARAMS[3:]},
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_a_client_without_state_begins_with(name):
    shared, server, initial = SENT[name]
    for newcomer, expected in (("server", server), ("initial", initial)):
        kept = make(name, newcomer=newcomer).keep(PARAMS, shared, SITE, KEY)
        assert kept.keys() == expected.keys() and all(torch.equal(kept[k], expected[k]) for k in kept)
    assert make(name).newcomer == "server"


@pytest.mark.parametrize("name", SENT)
def test_the_initial_start_is_that_of_versions_without_the_choice(name):
    """Finished cells and run folders of such versions are found again."""
    assert make(name).identity()["newcomer"] == "server"
    assert "newcomer" not in make(name, newcomer="initial").identity()


def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y


def test_ditto_s_newcomer_takes_fedavg_s_first_step():
    """At v = w the pull is 0, so one step on all rows is w − η∇f(w): FedAvg's fine-tuning."""
    x, y = digits()
    fed = fedabml.Federation.from_arrays([(x[:100], y[:100]), (x[100:200], y[100:200])])
    run = fedabml.train(
        fed, "mlr", fedabml.FedAvg(lr=0.3), rounds=3, participation=1.0, evaluate=False, device="cpu", seed=0
    )
    ditto = Prior(make("ditto", lam=0.7, lr=0.3), run.prior.shared, run.prior.input_spec, 100)
    one = {"epochs": 1, "lr": 0.2, "batch_size": 60, "device": "cpu"}
    tuned, plain = (prior.personalize(x[200:260], y[200:260], **one).q.mean for prior in (ditto, run.prior))
    assert torch.equal(tuned, plain) and not torch.equal(tuned, run.prior.shared["mean"])


def test_a_prior_of_an_earlier_version_keeps_its_start(tmp_path):
    x, y = digits()
    fed = fedabml.Federation.from_arrays([(x[:50], y[:50])])
    prior = fedabml.train(fed, "mlr", make("ditto"), rounds=1, participation=1.0, evaluate=False, device="cpu").prior
    tensors, facts = read_tensors(prior.save(tmp_path / "prior.safetensors"))
    assert fedabml.load_prior(tmp_path / "prior.safetensors").algorithm.newcomer == "server"
    del facts["algorithm"]["hyper"]["newcomer"]
    earlier = write_tensors(tmp_path / "earlier.safetensors", tensors, facts)
    assert fedabml.load_prior(earlier).algorithm.newcomer == "initial"


def test_two_rounds_of_ditto_whose_newcomers_begin_at_w_by_a_plain_loop():
    """Client 2 is first drawn in round 2 and begins at w_1; client 3 is never drawn and is scored at w_2."""
    lr, lam, w, own = 0.1, 0.9, START, {}
    sim, _ = simulate(make("ditto", lr=lr, lam=lam, personal_epochs=0), newcomer="server")
    for t in (1, 2):
        ends = []
        for c in drawn(t):
            ends.append(descend(w, batches(c, t, 0), lr, 0.0))
            own[c] = descend(own.get(c, w), batches(c, t, 1), lr, 0.0, lambda v, w=w: lam * (v - w))
        w = np.mean(ends, 0)
    assert sorted(own) == [0, 1, 2] and not np.allclose(w, START)
    close(sim.shared["mean"], w)
    close(models(sim).mean, [own[0], own[1], own[2], w])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_new_client_of_pfedbayes_has_what_the_federation_learned():
    """Digits, an MLP, ten clients; a new client with 100 samples, scored on what is left."""
    x, y = digits()
    fed = fedabml.Federation.from_arrays([(x[i:1000:10], y[i:1000:10]) for i in range(10)])
    algorithm = make("pfedbayes", lr=0.1, personal_lr=0.1)
    words = {"rounds": 15, "participation": 1.0, "epochs": 2, "batch_size": 20}
    run = fedabml.train(fed, "mlp", algorithm, **words, evaluate=False, device="cpu", model_options={"hidden": (32,)})
    found = {}
    for newcomer in ("server", "initial"):
        prior = Prior(make("pfedbayes", lr=0.1, personal_lr=0.1, newcomer=newcomer), run.prior.shared,
                      run.prior.input_spec, 20)  # fmt: skip
        for epochs in (0, 1, 5):
            posterior = prior.personalize(x[1000:1100], y[1000:1100], epochs=epochs, device="cpu")
            found[newcomer, epochs] = float((posterior.predict(x[1100:], device="cpu").label == y[1100:]).mean())
    assert found["initial", 0] < 0.3 < 0.7 < found["server", 0], found
    assert found["server", 1] > found["initial", 1] and found["server", 5] > found["initial", 5] - 0.02, found
