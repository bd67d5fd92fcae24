"""Hugging Face folders: a small transformer built on the spot is trained, personalised, saved and used."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

import fedabml
from fedabml.errors import InputError
from fedabml.experiments import runner
from fedabml.models.huggingface import load_folder
from fedabml.vectors import Network
from tests.cli import command

QUICK = {"rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu", "backend": "loop", "evaluate": False}
READY = {name: value for name, value in QUICK.items() if name != "evaluate"}
TOKENS = 6


def save_bert(folder, seed=0, pooler=True):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=8, num_labels=2)
    model = transformers.BertForSequenceClassification(config)
    state = {name: value for name, value in model.state_dict().items() if pooler or "pooler" not in name}
    model.save_pretrained(folder, state_dict=state)
    return str(folder)


def federation(tests=False):
    g = np.random.default_rng(0)

    def client():
        x = g.integers(1, 12, (10, TOKENS))
        x[::2, 4:] = 0  # padding
        return x, np.arange(10) % 2

    return fedabml.Federation.from_arrays([client() for _ in range(2)], [client() for _ in range(2)] if tests else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.mark.slow
@pytest.mark.parametrize("train", ["head", "lora", "all"])
def test_a_folder_is_trained_personalised_saved_and_loaded(folder, train, tmp_path):
    fed = federation()
    run = fedabml.train(fed, folder, train=train, lora_rank=1, **QUICK)
    network = run.prior.input_spec.network
    whole = sum(p.numel() for p in load_folder(folder, [TOKENS], 2).parameters())
    assert network.tokens and network.pad == 0
    assert network.layout.size == whole if train == "all" else network.layout.size < whole
    assert network.layout.size == 8 * 2 + 2 or train != "head"
    path = run.prior.save(tmp_path / "prior.safetensors")
    with safe_open(path, "pt") as file:
        held = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert train == "all" or not any(name.startswith("constant.") for name in held)
    assert held["shared.mean"] == [network.layout.size]
    prior = fedabml.load_prior(path, model=folder)
    posterior = prior.personalize(fed.x[:8], fed.y[:8], epochs=1, device="cpu")
    again = fedabml.load_posterior(posterior.save(tmp_path / "posterior.safetensors"), model=folder)
    probs = posterior.predict(fed.x, device="cpu").probs
    assert np.array_equal(again.predict(fed.x, device="cpu").probs, probs)


@pytest.mark.slow
def test_another_body_is_refused_by_name(folder, tmp_path):
    run = fedabml.train(federation(), folder, train="head", **QUICK)
    path = run.prior.save(tmp_path / "prior.safetensors")
    other = save_bert(tmp_path / "other-bert", seed=1)
    with pytest.raises(InputError, match=r"frozen body of 'tiny-bert'.*'other-bert' has another"):
        fedabml.load_prior(path, model=other)
    with pytest.raises(InputError, match=r"'tiny-bert'.*--model FOLDER"):
        fedabml.load_prior(path)


@pytest.mark.slow
def test_frozen_weights_that_a_folder_lacks_are_drawn_from_the_seed_again(tmp_path):
    folder = save_bert(tmp_path / "no-pooler", pooler=False)
    options = {"model_options": {"head": "classifier"}, "train": "head", "seed": 3}
    run = fedabml.train(federation(), folder, **options, **QUICK)
    prior = fedabml.load_prior(run.prior.save(tmp_path / "prior.safetensors"), model=folder)
    drawn, again = (each.input_spec.network.constants["bert.pooler.dense.weight"] for each in (run.prior, prior))
    assert drawn.any() and torch.equal(drawn, again)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["head", pytest.param("lora", marks=pytest.mark.nightly)])
def test_a_folder_goes_from_files_of_tokens_to_predictions_on_the_command_line(folder, train, tmp_path):
    fed = federation()
    clients, run_folder, posterior = tmp_path / "clients", tmp_path / "run", tmp_path / "posterior.safetensors"
    clients.mkdir()
    for client in range(2):
        np.savez(clients / f"{client}.npz", x=fed.x[fed.train[client]], y=fed.y[fed.train[client]])
    np.savez(tmp_path / "new.npz", x=fed.x[:7])
    settings = ["--rounds", 1, "--epochs", 1, "--device", "cpu", "--backend", "loop", "--no-evaluate"]
    command.run("train", "--data", clients, "--model", folder, "--train", train, *settings, "--out", run_folder)
    personal = ["--data", clients / "0.npz", "--epochs", 1, "--device", "cpu", "--out", posterior]
    command.run("personalize", run_folder, "--model", folder, *personal)
    out = tmp_path / "predictions.csv"
    command.run("predict", posterior, "--model", folder, "--data", tmp_path / "new.npz", "--out", out)
    assert len(pd.read_csv(out)) == 7
    other = save_bert(tmp_path / "other-bert", seed=1)
    refused = command.run("personalize", run_folder, "--model", other, *personal, "--force", code=2)
    assert "'other-bert' has another" in " ".join(refused.stderr.split())


def save_clients(fed, folder):
    """Write every client's rows to a file of its own."""
    folder.mkdir()
    for client in range(fed.clients):
        rows = fed.train[client]
        np.savez(
            folder / f"{client}.npz", x_train=fed.x[rows], y_train=fed.y[rows], x_test=fed.x[rows], y_test=fed.y[rows]
        )
    return folder


ADAPTED = 2 * (4 * (8 + 8) + (8 + 16) + (16 + 8)) + (8 + 8) + 8 * 2 + 2  # two layers, the pooler, and the head
SCORED = {"train": "lora", "lora_rank": 1, "rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu"}


@pytest.mark.slow
def test_algorithms_are_compared_and_tuned_on_low_rank_changes_of_a_folder(folder, monkeypatch):
    """All runs that are prepared at once hold one body."""
    fed, together, bodies = federation(tests=True), runner._run_batch, []

    def watched(cells, setups, on_round):
        bodies.extend(setup.cohort.network.constants["bert.pooler.dense.base.weight"].data_ptr() for setup in setups)
        return together(cells, setups, on_round)

    monkeypatch.setattr(runner, "_run_batch", watched)
    made = fedabml.compare(fed, folder, ["fedabml", "fedavg"], seeds=[0, 1], backend="loop", **SCORED)
    assert {row.label for row in made.rows} == {"fedabml", "fedavg"} and made.best is not None
    assert {result.facts["parameters"] for result in made.results.values()} == {ADAPTED}
    assert len(bodies) == 4 and bodies[0] == bodies[1] and bodies[2] == bodies[3]  # two seeds of each algorithm
    tuned = fedabml.tune(fed.hold_out(0.4, 0), folder, ["fedavg"], trials=2, backend="loop", **SCORED)
    assert len(tuned.trials["fedavg"]) == 2 and tuned.best("fedavg")
    assert len(bodies) > 4 and len({*bodies[4:6]}) == 1


@pytest.mark.slow
def test_so_they_are_on_the_command_line(folder, tmp_path):
    words = ["--data", save_clients(federation(), tmp_path / "clients"), "--model", folder]
    words += [word for name, value in SCORED.items() for word in (f"--{name.replace('_', '-')}", value)]
    command.run("compare", "--algorithms", "fedabml,fedavg", *words, "--seeds", 1, "--out", tmp_path / "compared")
    command.run("tune", "--algorithms", "fedavg", *words, "--trials", 2, "--out", tmp_path / "tuned")
    for name, labels in (("compared", {"fedabml", "fedavg"}), ("tuned", {"fedavg"})):
        cells = [json.loads(line) for line in (tmp_path / name / "cells.jsonl").read_text().splitlines()]
        assert {cell["label"] for cell in cells} == labels and not any(cell["error"] for cell in cells)
        assert all(cell["facts"]["parameters"] == ADAPTED for cell in cells)


@pytest.mark.slow
def test_a_posterior_of_a_folder_is_served(folder, tmp_path, monkeypatch):
    """`serve --model FOLDER` predicts as Python does, also sequences that are shorter than those of training."""
    pytest.importorskip("fastapi")
    uvicorn = pytest.importorskip("uvicorn")
    from fastapi.testclient import TestClient

    fed = federation()
    posterior = fedabml.train(fed, folder, train="head", **QUICK).prior.personalize(fed.x[:8], fed.y[:8], device="cpu")
    path, served = posterior.save(tmp_path / "posterior.safetensors"), []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: served.append(server.config.app))
    command.run("serve", path, "--model", folder, "--port", 0, "--device", "cpu")
    with TestClient(served[0], base_url="http://localhost") as client:
        reply = client.post("/predict", json={"rows": [[3, 4], [1, 2, 3, 4, 5, 6]]}).json()
    expected = posterior.predict([[3, 4], [1, 2, 3, 4, 5, 6]], device="cpu").probs
    assert np.allclose([[row["p_0"], row["p_1"]] for row in reply["predictions"]], expected, atol=1e-6)


def test_padding_does_not_change_an_output(folder):
    module = load_folder(folder, [TOKENS], 2)
    network = Network(module, 0, "logits", module.padding).with_tokens(True)
    x = torch.tensor([[3, 4, 5, 0, 0, 0]])
    expected = module.eval()(x[:, :3]).logits
    torch.testing.assert_close(network(network.initial, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_folder_that_cannot_be_batched_runs_client_by_client_and_asks_for_no_other_code(folder):
    words = {"rounds": 1, "device": "cpu"}
    (note,) = (note for note in fedabml.prepare(federation(), folder, **words).notes if "batched" in note)
    assert note.startswith("This model runs client by client, because it cannot be batched over clients: ")
    assert note.endswith("This is code of the library transformers; there is nothing to change in your folder.")
    with pytest.raises(InputError, match=r"nothing to change in your folder\. Use the backend auto or loop"):
        fedabml.prepare(federation(), folder, **words, backend="vmap")


def test_pickled_weights_and_code_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"no weights in safetensors.*'pytorch_model.bin' is pickled"):
        load_folder(tmp_path, [TOKENS], 2)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "auto_map": {}}')
    with pytest.raises(InputError, match="Python code of its own"):
        load_folder(tmp_path, [TOKENS], 2)


def save_gpt2(folder, **words):
    """Save a classifier that reads the last token which is not padding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=8, num_labels=2, bos_token_id=1, eos_token_id=1,
        **words,
    )  # fmt: skip
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def padded(length=5, task=None):
    """Return a federation of sequences with 2 to `length` tokens; for the task sequence each token has a label."""
    g = np.random.default_rng(0)

    def site():
        texts = [g.integers(1, 11, 2 + i % (length - 1)) for i in range(10)]
        return [(text, text % 3 if task else i % 2) for i, text in enumerate(texts)]

    return fedabml.Federation.from_datasets({"a": site(), "b": site()}, padding=0, task=task)


def test_padding_is_that_of_the_model(tmp_path):
    fed = padded()
    with pytest.raises(InputError, match=r"the token 0, but .* pad_token_id 11. Make the federation with padding=11"):
        fedabml.prepare(fed, save_gpt2(tmp_path / "eleven", pad_token_id=11), train="head", **READY)
    network = fedabml.prepare(fed, save_gpt2(tmp_path / "none"), train="head", **READY).input_spec.network
    text = torch.tensor([[3, 4, 5, 0, 0]])
    expected = network.module.eval()(text[:, :3]).logits
    torch.testing.assert_close(network(network.initial, text), expected, rtol=1e-4, atol=1e-5)
    setup = fedabml.prepare(federation(), str(tmp_path / "none"), train="head", **READY)
    assert any("names no token of padding, so every token counts" in note for note in setup.notes)


def test_a_classifier_of_tokens_keeps_its_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=8, num_labels=3)
    model = transformers.BertForTokenClassification(config)
    model.save_pretrained(tmp_path / "tagger")
    run = fedabml.train(padded(task="sequence"), str(tmp_path / "tagger"), train="head", **QUICK)
    network = run.prior.input_spec.network
    assert torch.equal(network.initial, network.layout.flatten(dict(model.classifier.named_parameters("classifier"))))
    prior = fedabml.load_prior(run.prior.save(tmp_path / "prior.safetensors"), model=str(tmp_path / "tagger"))
    assert prior.input_spec.network.layout == network.layout


def save_roberta(folder):
    """Save a classifier that numbers positions from behind the token of padding, so that fewer of them can be used."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(**sizes, intermediate_size=16, max_position_embeddings=9, pad_token_id=0)
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("save", [save_bert, save_gpt2, save_roberta])
def test_sequences_that_are_too_long_for_the_model_are_refused(save, tmp_path):
    folder = save(tmp_path / "eight")
    way = r"at most 8 tokens, but the federation's have 11\. Cut longer sequences to 8 tokens.* more positions"
    with pytest.raises(InputError, match=way):
        fedabml.prepare(padded(12), folder, train="head", **READY)
    assert fedabml.prepare(padded(8), folder, train="head", **READY).input_spec.network.tokens
