"""Every algorithm, and every option of FedABML, through the whole protocol: rounds, crash, engines, a new client."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

import fedabml
from fedabml import FedABML, FedAvg, Local
from fedabml.algorithms import REGISTRY, FedBABU, make, name_of
from fedabml.engine import policy
from fedabml.engine.checkpoint import Checkpoint
from fedabml.engine.client import initial_kept
from fedabml.engine.lanes import Lanes
from fedabml.engine.rounds import Simulation, run_round
from fedabml.engine.server import draw_clients
from fedabml.evaluation.scoring import TrainedRun, evaluate, evaluate_after
from fedabml.runs.folder import Folder
from fedabml.runs.prior import Prior
from tests.tiers import FAMILIES, nightly_but

SIZES = (6, 60, 13, 33, 25, 9)  # tenfold, and none a multiple of the batch but the first with its own size
BATCH, SEED, ROUNDS, SHARE = 8, 6, 3, 0.67
WAVE = {"lr": 0.1, "lam": 0.5, "nu0": -2.0}  # strong enough that every part of a step shows

OPTIONS = {  # so that these show too
    "fedpop": {"gamma": 1e-3},
    "pfedme": {"lam": 3.0},
    "perfedavg": {"alpha": 0.05},
    "fedpa": {"burn": 1, "window": 2, "samples": 2, "rho": 0.5},  # clients of 1 to 8 steps: from no sample to three
}
ALGORITHMS = {name: make(name, lr=0.1, **OPTIONS.get(name, {})) for name in REGISTRY} | {
    "fedavg momentum samples": FedAvg(lr=0.05, momentum=0.9, weights="samples", label_prior="dirichlet"),
    "fedavg averaged": FedAvg(lr=0.1, average=0.5, personal_lr=0.01, personal_epochs=1),
    "local momentum": Local(lr=0.05, momentum=0.5, personal_epochs=1),
    "natural batch learned": FedABML(prior_every="batch", prior_std="learned", rho=0.5, rho_std=0.2, k=2, **WAVE),
    "natural round learned": FedABML(prior_std="learned", rho=0.7, average=0.5, **WAVE),
    "euclidean batch implicit": FedABML(
        prior_step="euclidean", prior_every="batch", prior_std="learned", prior_lr=0.5, **WAVE
    ),
    "euclidean round explicit": FedABML(prior_step="euclidean", prior_std="learned", kl_step="explicit", **WAVE),
    "amortised exact": FedABML(prior_step="amortised", prior_every="batch", prior_std="learned", k=2, **WAVE),
    "amortised first order": FedABML(
        prior_step="amortised", prior_every="batch", curvature="first_order", momentum=0.5, k=2, **WAVE
    ),
    "amortised hessian free": FedABML(
        prior_step="amortised", prior_every="batch", curvature="hessian_free", kl_step="explicit", delta=0.1, **WAVE
    ),
    "amortised point": FedABML(prior_step="amortised", prior_every="batch", posterior="point", prior_lr=0.2, lr=0.1),
    "point momentum": FedABML(posterior="point", momentum=0.9, rho=0.5, lr=0.05),
    "moments learned": FedABML(aggregate="moments", prior_std="learned", rho=0.8, rho_std=0.5, **WAVE),
    "start and hyper-prior": FedABML(
        start_gap=-0.5, hyper_prior=0.4, aggregate="moments", prior_std="learned", rho_std=0.5, **WAVE
    ),
    "moments samples": FedABML(aggregate="moments", weights="samples", label_prior="none", **WAVE),
    "natural posterior": FedABML(posterior_std="natural", lr_std=0.1, s=1, momentum=0.5, **WAVE),
    "fixed posterior": FedABML(posterior_std="fixed", s=3, predict_samples=0, personal_lr=0.05, **WAVE),
    "scaffold momentum samples": make("scaffold", lr=0.02, momentum=0.5, server_lr=0.7, weights="samples"),
    "ditto momentum personal": make("ditto", lr=0.03, momentum=0.5, personal_epochs=1, label_prior="dirichlet"),
    "fedrep momentum personal": make("fedrep", lr=0.03, momentum=0.5, personal_epochs=1, body_epochs=2, average=0.5),
    "fedbabu named head": make("fedbabu", lr=0.03, momentum=0.5, head="3.bias"),
    "fedpop one head": make("fedpop", lr=0.03, momentum=0.5, gamma=1e-3, chain=1, burn=0),
    "pfedme inner": make("pfedme", lr=0.05, momentum=0.5, lam=3.0, inner_lr=0.02, beta=1.2, k=2),
    "pfedbayes natural": make("pfedbayes", lr=0.1, prior_step="natural", rho=0.5, k=1, beta=0.5, personal_epochs=1),
    "apfl momentum personal": make("apfl", lr=0.03, momentum=0.5, alpha=0.3, alpha_every="batch", personal_epochs=1),
    "fedpa warm momentum": make("fedpa", lr=0.03, momentum=0.5, burn=0, window=1, warm=1, rho=0.1, server_lr=0.7),
    "fola hessian": make("fola", lr=0.03, momentum=0.5, curvature="hessian", memory=0.5, lam=3.0, weights="samples"),
    "weight": FedABML(estimator="weight", s=2, **WAVE),
    "local antithetic": FedABML(estimator="local", antithetic=True, s=3, **WAVE),
    "flipout": FedABML(estimator="flipout", s=1, **WAVE),
    "drift control": FedABML(drift="control", rho=1.5, **WAVE),
    "drift control samples": FedABML(drift="control", drift_share=1.0, weights="samples", momentum=0.5, k=2, **WAVE),
    "drift server": FedABML(drift="server", average=0.5, rho=1.5, **WAVE),
    "drift server moments": FedABML(drift="server", drift_share=0.8, aggregate="moments", prior_std="learned", **WAVE),
    "sparse labels": FedABML(label_prior="sparse", label_share=0.5, label_alpha=1.0, **WAVE),
    "adam": FedABML(optimiser="adam", prior_std="learned", **{**WAVE, "lr": 0.02}),
    "adam batch": FedABML(
        optimiser="adam", prior_every="batch", prior_std="learned", rho=0.5, k=2, **{**WAVE, "lr": 0.02}
    ),
    "adam fixed": FedABML(optimiser="adam", posterior_std="fixed", kl_step="explicit", **{**WAVE, "lr": 0.02}),
    "adam natural": FedABML(optimiser="adam", posterior_std="natural", lr_std=0.1, **{**WAVE, "lr": 0.02}),
    "adam point": FedABML(optimiser="adam", posterior="point", prior_every="batch", rho=0.5, lr=0.02),
    "own rate of the deviation": FedABML(lr_std=0.5, label_alpha=1.0, predict_samples=3, **WAVE),
}
ALGORITHMS |= {
    f"{name} adam": make(name, **{**OPTIONS.get(name, {}), "lr": 0.02, "optimiser": "adam"})
    for name in REGISTRY
    if name not in ("scaffold", "scaffold-ft", "fedpa", "fedabml", "fedabml-plain")  # refused, or above
}


# Every algorithm, all but the slowest, or one of each family in `make test`; all variants in `make nightly`.
EVERY = pytest.mark.parametrize("algorithm", nightly_but(REGISTRY, ALGORITHMS))
LIGHT = pytest.mark.parametrize("algorithm", nightly_but(REGISTRY.keys() - {"pfedbayes", "fedpop"}, ALGORITHMS))
FAMILY = pytest.mark.parametrize("algorithm", nightly_but(FAMILIES, ALGORITHMS))
KEEPERS = {name: a for name, a in ALGORITHMS.items() if a.keeps}


def client(n, seed):
    g = np.random.default_rng([n, seed])
    classes = g.permutation(3)[:2]
    return (g.normal(size=(n, 5)) + seed / 4).astype(np.float32), g.choice(classes, n)


@pytest.fixture(scope="module")
def fed():
    pairs = [client(n, i) for i, n in enumerate(SIZES)]
    return fedabml.Federation.from_arrays(pairs, [client(7, i) for i in range(len(SIZES))], classes=3)


def prepare(fed, algorithm, **options):
    words = {
        "rounds": ROUNDS, "participation": SHARE, "epochs": 1, "batch_size": BATCH, "seed": SEED,
        "device": "cpu", "dtype": "float64", "backend": "vmap", "chunk": 6, "model_options": {"hidden": (4,)},
    }  # fmt: skip
    return fedabml.prepare(fed, "mlp", algorithm, **(words | options))


def simulate(fed, algorithm, rounds=ROUNDS, state=None, folder=None, **options):
    setup = prepare(fed, algorithm, **options)
    sim = Simulation(setup.cohort, state=state)
    sim.run(rounds, save=folder.write_round if folder else None)
    return sim, setup


@functools.cache
def usual(fed, algorithm):
    """The run that several checks compare with others; none of them changes it."""
    return simulate(fed, algorithm)


def everything(sim):
    kept = {f"{client}.{name}": t for client, own in sim.kept.states.items() for name, t in own.items()}
    return sim.shared | {f"average.{k}": v for k, v in sim.server.average.items()} | kept


def assert_states_close(a, b, atol):
    assert a and a.keys() == b.keys()  # nothing at all would be close, too
    for name in a:
        assert torch.isfinite(a[name]).all()
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def test_the_variants_cover_every_choice():
    for field in dataclasses.fields(FedABML):
        if field.name == "augment":  # which is the engine's and for images: tests/engine/test_augment.py
            continue
        seen = {getattr(a, field.name) for a in ALGORITHMS.values() if isinstance(a, FedABML)}
        assert set(field.metadata["choices"]) <= seen, field.name
    assert {type(a) for a in ALGORITHMS.values()} == {entry.kind for entry in REGISTRY.values()}


@pytest.mark.parametrize("name", REGISTRY)
def test_names_are_found_again(name):
    algorithm = make(name)
    assert name_of(algorithm) == name and make(name_of(algorithm), **algorithm.values()) == algorithm


def test_unknown_names_are_refused():
    with pytest.raises(fedabml.InputError, match="Did you mean 'fedabml'"):
        make("fedabl")
    with pytest.raises(fedabml.InputError, match="Did you mean 'momentum'"):
        make("fedavg", momentun=0.1)


@EVERY
def test_rounds_move_what_is_shared_and_leave_the_start_alone(fed, algorithm):
    sim, setup = usual(fed, algorithm)
    begun = algorithm.init(setup.cohort.network.initial, setup.cohort.network.layout)
    assert sim.shared.keys() == begun.keys()
    fresh = prepare(fed, algorithm).cohort.network.initial
    assert torch.equal(setup.cohort.network.initial, fresh)
    fixed = {"logstd"} if getattr(algorithm, "prior_std", "learned") == "fixed" else set()
    for name in begun:
        assert torch.equal(sim.shared[name], begun[name]) == (name in fixed), name


@pytest.mark.slow
@LIGHT
def test_loop_equals_vmap_and_chunks_do_not_matter(fed, algorithm):
    together = everything(usual(fed, algorithm)[0])
    for options in ({"backend": "loop", "chunk": 3}, {"chunk": 1}, {"chunk": 3}):
        assert_states_close(everything(simulate(fed, algorithm, **options)[0]), together, 1e-9)


@pytest.mark.slow
@FAMILY
def test_traced_steps_have_the_bits_of_those_that_are_not(fed, algorithm, monkeypatch):
    """So it does not matter when, in a run or in the rest of one that was stopped, a step is traced."""
    options = {"dtype": "float32", "epochs": 2}
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(record_after=10**9))
    plain, _ = simulate(fed, algorithm, **options)
    monkeypatch.setattr(policy, "DEFAULT", policy.Policy(record_after=0))
    traced, setup = simulate(fed, algorithm, **options)
    traces = setup.cohort.executor.recordings
    assert traces and all(traces.values())
    a, b = everything(plain), everything(traced)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", nightly_but(FAMILIES, KEEPERS))
def test_what_clients_keep_is_their_own(fed, algorithm):
    """The sampled clients and no others; nothing in the memory of another client, of θ or of the initial weights."""
    sim, setup = usual(fed, algorithm)
    drawn = {c for t in range(1, ROUNDS + 1) for c in draw_clients(len(SIZES), SHARE, SEED, t)}
    assert set(sim.kept.states) == (set() if isinstance(algorithm, FedBABU) else drawn)  # its head is rebuilt
    place = lambda t: t.untyped_storage().data_ptr()
    kept = [place(t) for own in sim.kept.states.values() for t in own.values()]
    others = {place(t) for t in (*sim.shared.values(), *sim.server.average.values(), setup.cohort.network.initial)}
    assert len(set(kept)) == len(kept) and not others & set(kept)
    begun = algorithm.init(setup.cohort.network.initial, setup.cohort.network.layout)
    never = (set(range(len(SIZES))) - drawn).pop()
    start, now = (initial_kept(Lanes.after_round(setup.cohort, shared, [never])) for shared in (begun, sim.theta))
    moves = getattr(algorithm, "newcomer", "initial") == "server"
    for name, value in sim.kept_for([never]).items():  # one never drawn begins at the server's state, or as all began
        assert torch.equal(value, now[name])
        assert torch.equal(now[name], start[name]) != (moves and name != "alpha")  # APFL's α begins at its own value


@FAMILY
@pytest.mark.slow
def test_one_step_in_float32(fed, algorithm):
    """One step each: a batch of everything and a single epoch."""
    one = {"rounds": 1, "dtype": "float32", "batch_size": 64, "epochs": 1, "participation": 1}
    a, b = (everything(simulate(fed, algorithm, backend=kind, **one)[0]) for kind in ("vmap", "loop"))
    assert all(t.dtype == torch.float32 for t in a.values())
    assert_states_close(a, b, 1e-5)


def other(algorithm, factor):
    """The same discrete choices, all continuous hyperparameters a little different."""
    return dataclasses.replace(algorithm, **{k: factor * v for k, v in algorithm.continuous().items()})


@pytest.mark.slow
@FAMILY
def test_a_sweep_as_lanes_equals_separate_runs(fed, algorithm):
    """Two runs side by side, of other seeds and hyperparameters, in chunks that cut through them."""
    runs = [(algorithm, {}), (other(algorithm, 0.9), {"seed": SEED + 1})]
    alone = [usual(fed, algorithm)[0], *(simulate(fed, a, **options)[0] for a, options in runs[1:])]
    setups = [prepare(fed, a, chunk=5, **options) for a, options in runs]
    sims = [Simulation(s.cohort) for s in setups]
    for _ in range(ROUNDS):
        lines = run_round(sims)
    for one, many, line in zip(alone, sims, lines, strict=True):
        assert_states_close(everything(many), everything(one), 1e-9)
        assert line["round"] == ROUNDS and line["clients"] == draw_clients(len(SIZES), SHARE, many.cohort.seed, ROUNDS)
    first, second = (everything(sim) for sim in alone)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    epochs = sims[0].cohort.algorithm.personal_epochs
    (together,) = evaluate_after((epochs,), [TrainedRun(s.cohort, s.theta, s.kept_for) for s in sims], prior=epochs)
    for found, sim in zip(together, alone, strict=True):
        expected = evaluate(sim.cohort, sim.theta, sim.kept_for)
        for name in ("nll", "brier", "entropy", "prior_nll"):
            np.testing.assert_allclose(found.clients.get(name, 0), expected.clients.get(name, 0), atol=1e-8)


@pytest.mark.slow
@FAMILY
def test_resuming_gives_the_same_bits(fed, algorithm, tmp_path):
    whole, _ = usual(fed, algorithm)
    folder = Folder(tmp_path)
    folder.create({})
    simulate(fed, algorithm, rounds=2, folder=folder)
    again = Folder(tmp_path)
    state = again.reopen({}, set())
    assert isinstance(state, Checkpoint) and state.round == 2
    resumed, _ = simulate(fed, algorithm, state=state, folder=again)
    one, other = everything(whole), everything(resumed)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    last = Folder(tmp_path).load_latest()
    assert last.round == 3 and all(torch.equal(v, whole.shared[k]) for k, v in last.shared.items())
    assert [line["round"] for line in again.history] == [1, 2, 3]


@pytest.mark.slow
@FAMILY
def test_evaluation_of_all_clients_even_one_never_drawn(fed, algorithm):
    sim, setup = usual(fed, algorithm)
    drawn = {c for t in range(1, ROUNDS + 1) for c in draw_clients(len(SIZES), SHARE, SEED, t)}
    assert 0 < len(drawn) < len(SIZES)
    scores = evaluate(setup.cohort, sim.theta, sim.kept_for)
    assert scores.clients["accuracy"].shape == (len(SIZES),)
    # A client has no recall of a class that it lacks.
    assert all(np.isfinite(v).all() for name, v in scores.clients.items() if not name.endswith("]"))
    loop, looped = simulate(fed, algorithm, backend="loop", chunk=2)
    others = evaluate(looped.cohort, loop.theta, loop.kept_for)
    for name in ("nll", "brier", "entropy", "mutual_information"):
        np.testing.assert_allclose(others.clients[name], scores.clients[name], atol=1e-8)


@EVERY
@pytest.mark.slow
def test_a_new_client_is_personalised_predicts_and_is_saved(fed, algorithm, tmp_path):
    sim, setup = simulate(fed, algorithm, rounds=1, dtype="float32")
    prior = Prior(algorithm, sim.theta, setup.input_spec, BATCH)
    x, y = client(21, 50)
    posterior = prior.personalize(x, y, seed=1, device="cpu")
    p = posterior.predict(x[:4], device="cpu")
    np.testing.assert_allclose(p.probs.sum(1), 1, atol=1e-6)
    assert (p.mutual_information >= 0).all() and p.entropy.shape == (4,)

    prior.save(tmp_path / "prior.safetensors")
    loaded = fedabml.load_prior(tmp_path / "prior.safetensors")
    assert loaded.algorithm == algorithm and loaded.batch_size == BATCH
    again = loaded.personalize(x, y, seed=1, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(again.q, posterior.q, strict=True))

    posterior.save(tmp_path / "posterior.safetensors")
    for other in (again, fedabml.load_posterior(tmp_path / "posterior.safetensors")):
        assert np.array_equal(other.predict(x[:4], device="cpu").probs, p.probs)


@pytest.mark.slow
@FAMILY
def test_more_personal_epochs_fit_the_training_data_better(fed, algorithm):
    """Personalising must move the client's own model towards its data, whatever the algorithm."""
    sim, setup = simulate(fed, algorithm, rounds=1, dtype="float32")
    prior = Prior(algorithm, sim.theta, setup.input_spec, BATCH)
    x, y = client(40, 51)
    nll = [
        -np.log(
            prior.personalize(x, y, epochs=e, lr=0.02, device="cpu").predict(x, 0, device="cpu").probs[range(40), y]
        )
        for e in (0, 30)
    ]
    assert nll[1].mean() < nll[0].mean()
