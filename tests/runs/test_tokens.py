"""Whole numbers that a model looks up in an embedding reach it as they are; all other inputs are standardised."""

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread_here")
QUICK = {"rounds": 8, "participation": 1.0, "epochs": 3, "batch_size": 10, "device": "cpu"}
WORDS, LENGTH = 30, 6


class Bag(nn.Module):
    """The mean of its words' vectors; `cast` says how a user's module may treat its input."""

    def __init__(self, entries=WORDS, cast=lambda x: x):
        super().__init__()
        self.words, self.head, self.cast = nn.Embedding(entries, 4), nn.Linear(4, 2), cast

    def forward(self, x):
        return self.head(self.words(self.cast(x)).mean(1))


class Positions(nn.Module):
    """An embedding that looks up positions, not inputs."""

    def __init__(self):
        super().__init__()
        self.places, self.head = nn.Embedding(LENGTH, 1), nn.Linear(LENGTH, 2)

    def forward(self, x):
        return self.head(x + self.places(torch.arange(LENGTH)).squeeze(-1))


class Mixed(nn.Module):
    """A number to look up in the first column, measurements in the others."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 2), nn.Linear(LENGTH + 1, 2)

    def forward(self, x):
        return self.head(torch.cat([self.words(x[:, 0].long()), x[:, 1:]], 1))


class Counts(nn.Linear):
    """A module without an embedding that needs its inputs as they were given."""

    def __init__(self):
        super().__init__(WORDS, 2)

    def forward(self, x):
        return super().forward(nn.functional.one_hot(x.long(), WORDS).sum(1).float())


def sentences(seed=0, clients=4, dtype=np.int64):
    """Sentences of class 1 hold words of the upper half."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(clients):
        y = np.arange(40) % 2
        found.append(((rng.integers(0, WORDS // 2, (40, LENGTH)) + y[:, None] * (WORDS // 2)).astype(dtype), y))
    return found


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize(
    "dtype", [np.int64, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (np.int32, np.float64))]
)
@pytest.mark.slow
def test_tokens_are_looked_up_as_they_are(backend, dtype):
    fed = fedabml.Federation.from_arrays(sentences(dtype=dtype), sentences(1, dtype=dtype))
    torch.manual_seed(0)
    bag = Bag()
    setup = fedabml.prepare(fed, bag, fedabml.FedABML(lr=0.3), backend=backend, **QUICK)
    assert setup.cohort.fed.shift == 0 and setup.cohort.fed.scale == 1
    assert "The inputs are not standardised: the model's layer 'words' looks them up." in setup.notes
    run = fedabml.train(fed, bag, fedabml.FedABML(lr=0.3), backend=backend, **QUICK)
    assert run.summary["accuracy"] > 0.8


def test_a_prior_of_tokens_is_saved_and_used(tmp_path):
    run = fedabml.train(
        fedabml.Federation.from_arrays(sentences()), Bag(), fedabml.FedAvg(lr=0.3), **QUICK, evaluate=False
    )
    x, y = sentences(2, 1)[0]
    run.prior.save(tmp_path / "prior.safetensors")
    posterior = fedabml.load_prior(tmp_path / "prior.safetensors", Bag()).personalize(x, y)
    posterior.save(tmp_path / "posterior.safetensors")
    again = fedabml.load_posterior(tmp_path / "posterior.safetensors", Bag())
    assert (again.predict(x).label == y).mean() > 0.8
    np.testing.assert_array_equal(again.predict(x).probs, run.prior.personalize(x, y).predict(x).probs)
    with pytest.raises(InputError, match="from 0 to 30, but the embedding has no entry"):
        again.predict(np.where(x == x.max(), WORDS, np.where(x == x.min(), 0, x)))
    with pytest.raises(InputError, match="fractions"):
        again.predict(x + 0.5)


@pytest.mark.parametrize("module", [Bag(cast=lambda x: x.long()), Bag(cast=lambda x: (x + 0.0).round().int())])
def test_a_module_may_turn_its_inputs_into_integers_itself(module):
    fed = fedabml.Federation.from_arrays(sentences())
    assert fedabml.prepare(fed, module, **QUICK).cohort.fed.scale == 1


def test_an_embedding_without_an_entry_for_every_token_is_refused():
    fed = fedabml.Federation.from_arrays(sentences())
    with pytest.raises(InputError, match="give the embedding an entry for each"):
        fedabml.prepare(fed, Bag(entries=WORDS - 5), **QUICK)


def test_an_embedding_of_positions_leaves_inputs_standardised():
    fed = fedabml.Federation.from_arrays(sentences())
    setup = fedabml.prepare(fed, Positions(), **QUICK)
    assert setup.cohort.fed is fed and not setup.input_spec.network.tokens and (fed.scale != 1).all()
    assert fedabml.prepare(fed, "mlr", **QUICK).cohort.fed is fed


def test_a_mixture_of_tokens_and_measurements_is_the_users_to_scale():
    mixed = [(np.concatenate([x[:, :1], x[:, 1:] / 7], 1), y) for x, y in sentences()]
    with pytest.raises(InputError, match=r"looks its inputs up.*normalize='none'"):
        fedabml.prepare(fedabml.Federation.from_arrays(mixed), Mixed(), **QUICK)
    setup = fedabml.prepare(fedabml.Federation.from_arrays(mixed, normalize="none"), Mixed(), **QUICK)
    assert not setup.input_spec.network.tokens


def test_a_module_that_fails_on_standardised_inputs_alone_is_refused_with_the_reason():
    with pytest.raises(InputError, match=r"fedabml standardises them, .*normalize='none'"):
        fedabml.prepare(fedabml.Federation.from_arrays(sentences()), Counts(), **QUICK)
    assert fedabml.prepare(fedabml.Federation.from_arrays(sentences(), normalize="none"), Counts(), **QUICK)
