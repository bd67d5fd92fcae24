"""Whole numbers that a model looks up in an embedding reach it as they are; all other inputs are standardised."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch
from torch import nn

import fedabml
from fedabml.errors import InputError
from fedabml.vectors import Network

pytestmark = [pytest.mark.usefixtures("one_thread_here"), pytest.mark.slow]
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
    with pytest.raises(
        InputError, match=r"row 5 has the token 30, but the model's layer 'words' has entries for 0..29"
    ):
        again.predict(np.where(x == x.max(), WORDS, np.where(x == x.min(), 0, x)))
    with pytest.raises(InputError, match="fractions"):
        again.predict(x + 0.5)


@pytest.mark.parametrize("module", [Bag(cast=lambda x: x.long()), Bag(cast=lambda x: (x + 0.0).round().int())])
def test_a_module_may_turn_its_inputs_into_integers_itself(module):
    fed = fedabml.Federation.from_arrays(sentences())
    assert fedabml.prepare(fed, module, **QUICK).cohort.fed.scale == 1


def test_an_embedding_without_an_entry_for_every_token_is_refused():
    fed = fedabml.Federation.from_arrays(sentences())
    with pytest.raises(
        InputError, match=r"client 'client-0' has the token \d+, but the model's layer 'words' has entries for 0..24"
    ):
        fedabml.prepare(fed, Bag(entries=WORDS - 5), **QUICK)


class Two(nn.Module):
    """A small embedding for the first column, a large one for the second."""

    def __init__(self, turned):
        super().__init__()
        self.small, self.large, self.head = nn.Embedding(5, 2), nn.Embedding(500, 2), nn.Linear(2, 2)
        self.turned = turned

    def forward(self, x):
        return self.head(self.small(self.turned(x[:, 0])) + self.large(x[:, 1]))


@pytest.mark.parametrize(
    ("turned", "token"), [(lambda x: x, 9), (lambda x: torch.where(x == 3, 3 + 6 * (x == 3), x % 4), 3)]
)
def test_each_of_several_embeddings_must_have_an_entry(turned, token):
    x = np.stack([np.arange(200) % 3, np.arange(200)], 1)
    y = np.arange(200) % 2
    module = Two(turned)
    x[:, 1] += 100
    assert fedabml.prepare(fedabml.Federation.from_arrays([(x, y)]), module, **QUICK)
    x[77, 0] = token
    x[90, 0] = 4 if token == 3 else 0  # then token 3 is at no end of its column
    with pytest.raises(InputError, match=r"no entry|client 'client-0' has the token 9.*'small' has entries for 0..4"):
        fedabml.prepare(fedabml.Federation.from_arrays([(x, y)]), module, **QUICK)


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


MASKED = pytest.mark.skipif(
    "pad" not in inspect.signature(Network.with_tokens).parameters, reason="networks get no padding masks"
)


class Attention(nn.Module):
    """A transformer of a user's, by the convention: `attention_mask` is 1 for tokens and 0 for padding."""

    def __init__(self, steps=False):
        super().__init__()
        self.words, self.head, self.steps = nn.Embedding(WORDS, 8), nn.Linear(8, 2), steps
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, attention_mask):
        h = self.layer(self.words(x), src_key_padding_mask=attention_mask == 0)
        if self.steps:
            return self.head(h)
        weight = attention_mask.unsqueeze(-1).to(h.dtype)
        return self.head((h * weight).sum(1) / weight.sum(1))


def ragged(seed=0, clients=3, n=12):
    """Sentences of different lengths; those of class 1 hold words of the upper half, and 0 is no word."""
    rng = np.random.default_rng(seed)
    sites = {}
    for client in range(clients):
        labels = np.arange(n) % 2
        words = [rng.integers(1, WORDS // 2, rng.integers(1, LENGTH + 1)) + label * (WORDS // 2) for label in labels]
        sites[f"site {client}"] = [(w.tolist(), int(label)) for w, label in zip(words, labels, strict=True)]
    return sites


@MASKED
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_padding_changes_no_output(backend):
    fed = fedabml.Federation.from_datasets(ragged(), ragged(1), padding=0)
    words = {**QUICK, "rounds": 1, "epochs": 1, "dtype": "float64", "backend": backend}
    torch.manual_seed(0)
    module = Attention()
    run = fedabml.train(fed, module, fedabml.FedAvg(personal_epochs=1), **words)
    wider = {name: [*site, ([1] * 11, 0)] for name, site in ragged().items()}  # one longer sentence pads all others
    longer = fedabml.Federation.from_datasets(wider, ragged(1), padding=0)
    assert longer.x.shape[1] == 11 and fed.x.shape[1] == LENGTH
    longer = longer.select([0, 1, 2])
    keep = [rows[:-1] for rows in (longer.train[i] for i in range(3))]
    same = fedabml.Federation.from_owners(
        np.concatenate([longer.x[r] for r in keep] + [longer.x[longer.test[i]] for i in range(3)]),
        np.concatenate([longer.y[r] for r in keep] + [longer.y[longer.test[i]] for i in range(3)]),
        np.concatenate([np.repeat(np.arange(3), 12)] * 2),
        np.repeat([False, True], 36),
        normalize="none",
    )
    same = dataclasses.replace(same, padding=0)
    again = fedabml.train(same, module, fedabml.FedAvg(personal_epochs=1), **words)
    for name in ("loss", "nll", "brier", "accuracy"):
        assert again.summary[name] == pytest.approx(run.summary[name], abs=1e-9)
    assert torch.allclose(again.prior.shared["mean"], run.prior.shared["mean"], atol=1e-9)


@MASKED
def test_new_sequences_are_padded_as_the_federation_was(tmp_path):
    fed = fedabml.Federation.from_datasets(ragged(), padding=0)
    module = Attention()
    run = fedabml.train(fed, module, **{**QUICK, "rounds": 1}, evaluate=False)
    run.prior.save(tmp_path / "prior.safetensors")
    prior = fedabml.load_prior(tmp_path / "prior.safetensors", module)
    sentences, labels = zip(*ragged(2)["site 0"], strict=True)
    posterior = prior.personalize(list(sentences), list(labels))
    together = posterior.predict(list(sentences)).probs
    assert np.allclose(posterior.predict([sentences[3]]).probs, together[3], atol=1e-6)
    with pytest.raises(InputError, match="sequence 0 has 7 tokens; at most 6 are taken"):
        posterior.predict([[1] * 7])
    with pytest.raises(
        InputError, match=r"row 0 has the token 30, but the model's layer 'words' has entries for 0..29"
    ):
        posterior.predict([[1, 30]])


@MASKED
def test_labels_of_padded_steps_count_nowhere():
    def steps(seed):
        return {name: [(w, [int(v > WORDS // 2) for v in w]) for w, _ in site] for name, site in ragged(seed).items()}

    fed = fedabml.Federation.from_datasets(steps(0), steps(1), padding=0, task="sequence")
    run = fedabml.train(fed, Attention(steps=True), fedabml.FedAvg(), **QUICK)
    assert run.summary["accuracy"] > 0.9
    assert sum(run.summary["confusion"][0]) + sum(run.summary["confusion"][1]) == (fed.y[fed.test.index] >= 0).sum()
    words, labels = zip(*steps(2)["site 0"], strict=True)
    p = run.prior.personalize(list(words), list(labels)).predict(list(words))
    assert p.label.shape == (12, LENGTH)
    with pytest.raises(InputError, match=r"sequence 0 has \d tokens and 1 labels"):
        run.prior.personalize(list(words), [[0], *labels[1:]])


@MASKED
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_the_network_for_texts_leaves_padding_out(backend):
    fed = fedabml.Federation.from_datasets(ragged(), ragged(1), padding=0)
    options = {"vocabulary": [WORDS], "width": [8], "hidden": [8]}
    run = fedabml.train(fed, "text", fedabml.FedABML(), **QUICK, backend=backend, model_options=options)
    assert run.summary["accuracy"] > 0.8
    module = run.prior.input_spec.network.to_module(run.prior.shared["mean"])
    tokens, mask = torch.tensor([[3, 4, 0, 0]]), torch.tensor([[1, 1, 0, 0]])
    by_hand = module.layers((module.tokens.weight[3] + module.tokens.weight[4])[None] / 2)
    assert torch.allclose(module(tokens, mask), by_hand, atol=1e-6)
    assert torch.allclose(module(tokens[:, :2]), by_hand, atol=1e-6)
    assert not torch.allclose(module(tokens), by_hand, atol=1e-6)
    with pytest.raises(InputError, match=r"Model 'text' needs the number of different tokens.*vocabulary=\[5000\]"):
        fedabml.train(fed, "text")


def test_padding_needs_a_model_that_looks_tokens_up():
    fed = fedabml.Federation.from_datasets(ragged(), padding=0)
    with pytest.raises(InputError, match="filled up with the token 0, but the model looks no inputs up"):
        fedabml.prepare(fed, "mlp")
    assert any("takes no attention_mask" in note for note in fedabml.prepare(fed, Bag()).notes)


def test_a_mask_that_the_model_needs_is_all_ones_without_padding():
    class Masked(Bag):
        def forward(self, x, attention_mask):
            assert (attention_mask == 1).all() and attention_mask.shape == x.shape
            return super().forward(x)

    fed = fedabml.Federation.from_arrays(sentences())
    fedabml.train(fed, Masked(), fedabml.FedAvg(), **{**QUICK, "rounds": 1}, evaluate=False)
