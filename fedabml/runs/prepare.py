"""`prepare`: everything that a run decides before its first round."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import algorithms, likelihoods
from ..accel.process import borrowed, keep_freed_memory
from ..algorithms import Algorithm, FedABML
from ..arguments import checked_integer, checks_arguments
from ..data import Federation
from ..engine.autotune import REDUCED_PRECISION, choose_backend, chunk_of, device_of, lane_bytes, set_precision
from ..engine.label_level import choose
from ..engine.server import cohort_size
from ..engine.setting import Cohort, Place, Setting
from ..errors import InputError, shortened
from ..files.sealed import tensor_bytes
from ..likelihoods import GaussianNoise, Likelihood
from ..vectors import Network
from ..version import __version__
from .input_spec import InputSpec
from .modules import make_network
from .tokens import take_tokens


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before the first round: `train` executes it, `--dry-run` prints it."""

    cohort: Cohort
    input_spec: InputSpec
    config: dict[str, Any]
    rounds: int
    participation: float
    epochs: int
    notes: list[str]
    lane_bytes: int  # approximate bytes that one client of a chunk takes

    def __repr__(self) -> str:
        name = self.config["algorithm"]["name"]
        size = f"{self.config['clients']} clients, {self.rounds} rounds of {self.epochs} epochs"
        return shortened(
            f"Setup({name}; {self.input_spec.description}; {size}; {self.config['backend']} on {self.config['device']})"
        )


@checks_arguments
@borrowed()
def prepare(
    fed: Federation,
    model: nn.Module | str = "mlp",
    algorithm: Algorithm | None = None,
    *,
    rounds: int = 50,
    participation: float = 0.1,
    epochs: int = 5,
    batch_size: int = 50,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    backend: str = "auto",
    chunk: int | None = None,
    compile: bool | None = None,
    workers: int | None = None,
    channels_last: bool | None = None,
    likelihood: Likelihood | None = None,
    model_options: dict[str, Any] | None = None,
    pretrained: str | os.PathLike[str] | None = None,
    class_weights: str | Sequence[float] | None = None,
    train: str = "all",
    lora_rank: int = 8,
    specificity: float = 0.9,
) -> Setup:
    """Check everything that a run needs, and decide where and how it will run.

    The arguments are those of `train`, with two more that are otherwise measured: `workers`, the threads of a CPU that
    have clients of their own, and `channels_last`, how images lie in memory.
    """
    algorithm = FedABML() if algorithm is None else algorithm
    note_off = ""
    if fed.task != "classification" and algorithm.label_prior != "none":
        if algorithm.label_prior != {f.name: f.default for f in dataclasses.fields(algorithm)}["label_prior"]:
            note_off = f"The label level is off: it is for one class per sample, and the task is {fed.task}."
        algorithm = dataclasses.replace(algorithm, label_prior="none")  # no single label that has a prior
    if algorithm.label_prior == "sparse" and not algorithm.label_share:
        algorithm = dataclasses.replace(algorithm, **choose(fed.label_counts("train")))
    rounds, epochs = checked_integer(rounds, "rounds", 0), checked_integer(epochs, "epochs", 1)
    batch_size = checked_integer(batch_size, "batch_size", 1)
    seed, chunk = checked_integer(seed, "seed", 0), None if chunk is None else checked_integer(chunk, "chunk", 1)
    if not 0 < participation <= 1:
        raise InputError(
            f"participation is the share of clients in a round, above 0 and at most 1; it is {participation!r}."
        )
    participation = float(participation)
    if not 0 < specificity <= 1:
        raise InputError(f"specificity is a share, above 0 and at most 1, such as 0.95; it is {specificity!r}.")
    likelihood = _fitting(likelihood, fed)
    if class_weights is not None:
        likelihood = likelihoods.weighted(likelihood, class_weights, fed.label_counts("train").sum(0).tolist())
    made = make_network(model, fed, likelihood, seed, model_options, pretrained, train, lora_rank)
    target = device_of(device)
    requested, dtype = dtype, "float32" if algorithm.needs_full_precision and dtype in REDUCED_PRECISION else dtype
    arithmetic = set_precision(dtype, target)
    if target.type == "cpu":
        keep_freed_memory()
    fed, network, unscaled = take_tokens(fed, made.network)
    input_spec = InputSpec.of(fed, network, likelihood, made.spec, made.origin)
    raw = np.stack([fed.x[fed.train[0][0]]] * 2).astype(np.float32)
    probe = torch.as_tensor((raw - np.asarray(fed.shift)) / np.asarray(fed.scale)).float()
    algorithm.init(network.initial, network.layout)  # raises before anything is written
    outputs = _probed(network, probe, torch.as_tensor(raw))
    likelihood.check(outputs)
    execution, note = choose_backend(backend, network.to("cpu", torch.float32), probe, target)
    backend, workers = execution.backend, execution.workers if workers is None else workers
    channels_last = execution.channels_last if channels_last is None else channels_last
    width = min(batch_size, int(fed.train.counts.max()))
    lane = lane_bytes(network, algorithm, width, raw[0].size, arithmetic.vectors.itemsize)
    chunk = chunk_of(lane, target, fed.clients) if chunk is None else chunk
    cohort = Cohort(
        Setting(
            algorithm, network, likelihood, fed, batch_size, seed, epochs, participation, specificity=float(specificity)
        ),
        Place(
            target, arithmetic.vectors, arithmetic.network, backend, chunk, workers, compile,
            allow_tf32=dtype in REDUCED_PRECISION, channels_last=channels_last,
        ),
    )  # fmt: skip
    notes = [*algorithm.notes(), *(text for text in (note_off, note, unscaled, made.note) if text), *_notes(cohort)]
    if isinstance(likelihood, likelihoods.Categorical) and _are_probabilities(outputs):
        notes.append(
            "The model's outputs look like probabilities: they are between 0 and 1, and each row sums to 1. The loss "
            "needs logits. Remove the softmax from the model's end."
        )
    if dtype != requested:
        notes.append(f"The network runs in float32: {requested} is too coarse for differences of gradients.")
    if compile and not cohort.executor.compile:
        notes.append("Steps are not compiled: that needs the backend vmap, with samples on the device.")
    training = {
        "rounds": rounds,
        "participation": participation,
        "epochs": epochs,
        "batch_size": batch_size,
        "seed": seed,
    }
    spec = made.spec
    code = algorithms.digest_of(algorithm) | ({spec["name"]: spec["code"]} if spec and "code" in spec else {})
    machine = {"device": str(target), "dtype": dtype, "backend": backend, "chunk": chunk, "workers": workers}
    if target.type == "cpu":
        machine |= {"threads": torch.get_num_threads(), "channels_last": channels_last}
    config = {
        "fedabml": __version__,
        "algorithm": {"name": algorithms.name_of(algorithm), "hyper": algorithm.values()},
        "dataset": fed.dataset,
        "model": spec["name"] if spec else made.origin.source or type(network.module).__name__,
        "model_options": model_options or {},
        "likelihood": likelihoods.to_json(likelihood),
        "parameters": network.layout.size,
        "clients": fed.clients,
        **training,
        **machine,
        **({} if compile is False else {"compile": "auto" if compile is None else True}),
        **({"code": code} if code else {}),
        **({} if specificity == 0.9 else {"specificity": float(specificity)}),
        **({} if train == "all" else {"train": train, **({"lora_rank": lora_rank} if train == "lora" else {})}),
        "partition_hash": fed.hash,
        "weights": _weights_hash(network),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    return Setup(cohort, input_spec, config, rounds, participation, epochs, notes, lane)


def _fitting(likelihood: Likelihood | None, fed: Federation) -> Likelihood:
    """Return the likelihood, or the default of the task. Raises InputError if it does not fit the targets."""
    default = likelihoods.default(fed.task, fed.classes, 0 if fed.task == "classification" else fed.y.shape[1])
    likelihood = default if likelihood is None else likelihood
    sizes = {
        candidate.targets if isinstance(candidate, GaussianNoise) else candidate.outputs
        for candidate in (likelihood, default)
    }
    if likelihood.task != default.task or len(sizes) > 1:
        raise InputError(f"The likelihood {likelihood} does not fit this data: a {fed.task} with {fed.outcomes}.")
    return likelihood


def _notes(cohort: Cohort) -> list[str]:
    """Return what is worth knowing about the federation before a run."""
    fed = cohort.fed
    notes = list(fed.manifest.get("notes", ()))
    if fed.manifest.get("whole_numbers") and np.any(fed.scale != 1):
        notes.append(
            "The inputs are whole numbers, and they are standardised like measurements, (x - mean) / std. If they are "
            "codes of categories, encode each code as a column of 0 and 1, or give a table with words."
        )
    if fed.clients > 1 and cohort_size(fed.clients, cohort.setting.participation) == 1:
        notes.append(f"Only 1 of {fed.clients} clients takes part in a round; a larger participation learns faster.")
    small = int((fed.train.counts < cohort.batch_size).sum())
    if small:
        which = "every client" if small == fed.clients else f"{small} client(s)"
        notes.append(f"The batch of {cohort.batch_size} is larger than the data of {which}, who use smaller batches.")
    if cohort.data.hosted:
        notes.append(
            "The samples would take more than half of the device's free memory, so they stay on the host. Every round "
            "moves the samples that it needs, and steps are launched one by one."
        )
    return notes


def _probed(network: Network, x: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Run the network once. If only normalised inputs fail, the error explains that inputs are standardised."""
    try:
        return network.probe(x)
    except InputError as error:
        try:
            network.probe(raw)
        except InputError:
            raise error from None
        raise InputError(
            f"{error} The model accepts the original inputs, but fedabml standardises them, (x - mean) / std. Make the "
            "federation with normalize='none'."
        ) from error


def _are_probabilities(outputs: torch.Tensor) -> bool:
    """Return whether outputs [n, classes] are between 0 and 1 and every row sums to 1, as after a softmax."""
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        return False
    within = bool(((outputs >= 0) & (outputs <= 1)).all())
    return within and torch.allclose(outputs.sum(1), torch.ones(len(outputs), device=outputs.device), atol=1e-5)


def _weights_hash(network: Network) -> str:
    """Return a hash of where training starts: the initial weights and the constants of the module."""
    digest = hashlib.sha256()
    for name, tensor in sorted({"": network.initial, **network.constants}.items()):
        digest.update(name.encode() + tensor_bytes(tensor))
    return digest.hexdigest()


def resolve_split(fed: Federation, split: str) -> str:
    """Return the split to score on: for `auto`, the validation rows if there are any, or the test rows."""
    if split == "auto":
        return "val" if fed.val.counts.any() else "test"
    if split not in ("val", "test"):
        raise InputError(f"split must be auto, val or test; it is {split!r}.")
    return split
