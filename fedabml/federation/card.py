"""A card holds everything that the server and its sites must agree on before the first round.

    card = make_card(identifier, inputs, algorithm=algorithm, model="mlp", batch_size=50, epochs=5, seed=0)
    cohort = Cohort(card.setting(federation_of_one_site, number), card.place())

It holds the input specification (network, likelihood, normalisation, the recipe of a table or of images), the initial
weights themselves, the algorithm, and the numbers that training depends on. Server and sites rebuild the same card bit
for bit, even if another host drew the weights. Its `digest` covers all tensors and facts and goes with every message.
A card comes from the network, so `Card.of` and `Card.load` check it as a prior's file is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import algorithms, likelihoods
from ..algorithms.base import Algorithm, State
from ..arguments import checked_integer
from ..data import Federation
from ..engine.autotune import set_precision
from ..engine.setting import Place, Setting
from ..errors import InputError, quoted
from ..files.paths import Name
from ..files.sealed import read_tensors, tensor_bytes, write_tensors
from ..likelihoods import Categorical, GaussianNoise
from ..runs.input_spec import InputSpec
from ..runs.modules import check_fit, make_network
from ..runs.prior import FLOATS, Prior
from ..runs.tokens import take_tokens
from .settings import check_model_and_algorithm

KIND, VERSION = "card", 1
DTYPES = ("float32", "float64")
MOST_BATCH, MOST_EPOCHS, MOST_SEED = 1 << 20, 100_000, 2**63 - 1
MOST_SIZE = 1 << 28  # numbers in one sample, or outputs of a network
_CARD_KEYS = {"kind", "version", "federation", "algorithm", "batch_size", "epochs", "seed", "numbers", "schema"}
_HEX = set("0123456789abcdef")


def is_identifier(text: object) -> bool:
    """Return whether a text is the identifier of a federation: 32 hexadecimal digits in lower case."""
    return isinstance(text, str) and len(text) == 32 and set(text) <= _HEX


@dataclass(frozen=True, eq=False)
class Card:
    """A card states what is trained, on which inputs and from which initial weights; server and sites have the same."""

    federation: str  # the federation's identifier, 32 hexadecimal digits
    input_spec: InputSpec  # its network holds the initial weights, float32
    algorithm: Algorithm
    batch_size: int
    epochs: int = 1  # of a site in a round
    seed: int = 0
    dtype: str = "float32"  # of all vectors: float32 or float64
    schema: Mapping[str, Any] = field(default_factory=dict)  # the operator's schema, as JSON facts
    unwritten: frozenset[str] = frozenset()  # neutral hyperparameters that its maker's version did not have

    def __post_init__(self) -> None:
        if not is_identifier(self.federation):
            raise InputError("The identifier of a federation has 32 hexadecimal digits.")
        for name, most in (("batch_size", MOST_BATCH), ("epochs", MOST_EPOCHS), ("seed", MOST_SEED)):
            value = checked_integer(getattr(self, name), f"The card's {name}", 0 if name == "seed" else 1)
            if value > most:
                raise InputError(f"The card's {name} is {value:,}; at most {most:,} is accepted.")
        if self.dtype not in DTYPES:
            raise InputError(f"The card's dtype is {quoted(self.dtype)}; a federation uses float32 or float64.")
        if self.input_spec.model is None or self.input_spec.origin.source:
            raise InputError(
                "A federation runs the networks of fedabml by name: a site never runs code or folders that others name."
            )
        check_model_and_algorithm(str(self.input_spec.model.get("name")), algorithms.name_of(self.algorithm))

    def __repr__(self) -> str:
        name, what = algorithms.name_of(self.algorithm), self.input_spec.description
        return f"Card({name}; {what}; digest {self.digest[:16]})"

    @property
    def initial(self) -> Tensor:
        """The initial weights, float32 [weights]."""
        return self.input_spec.network.initial

    @property
    def torch_dtype(self) -> torch.dtype:
        """The floating-point type of all vectors of the federation."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def place(self) -> Place:
        """Return where a round is computed: on the CPU, client by client, in one thread of clients.

        Everything that a machine might choose by its speed is fixed, so that every site computes the same bits.
        """
        cpu = torch.device("cpu")
        arithmetic = set_precision(self.dtype, cpu)
        return Place(cpu, arithmetic.vectors, arithmetic.network, "loop", chunk=1, workers=1)

    def setting(self, fed: Federation, number: int) -> Setting:
        """Return the engine's setting for one site's data; its random keys are those of client `number`."""
        spec = self.input_spec
        if fed.clients != 1 or tuple(fed.x.shape[1:]) != spec.shape:
            raise InputError(f"A site's data are one client with inputs of shape {spec.shape}.")
        arguments = (self.algorithm, spec.network, spec.likelihood, fed, self.batch_size, self.seed, self.epochs)
        return Setting(*arguments, identities=(checked_integer(number, "A site's number", 0),))

    def initial_shared(self) -> State:
        """Return the shared state before the first round, in the card's dtype on the CPU."""
        network = self.input_spec.network.to("cpu", self.torch_dtype)
        return self.algorithm.init(network.initial, network.layout)

    def prior(self, theta: State) -> Prior:
        """Return the prior of a shared state, as `fedabml train` would save it."""
        return Prior(self.algorithm, dict(theta), self.input_spec, self.batch_size)

    # -- messages and files -------------------------------------------------------------------------------------------
    def tensors_and_facts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the card as tensors and JSON facts, for a message or a file."""
        tensors, facts = self.input_spec.pack()
        hyper, neutral = self.algorithm.values(), self.algorithm.neutral_values()
        hyper = {k: v for k, v in hyper.items() if k not in self.unwritten or v != neutral[k]}
        facts |= {
            "kind": KIND,
            "version": VERSION,
            "federation": self.federation,
            "algorithm": {"name": algorithms.name_of(self.algorithm), "hyper": hyper},
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "seed": self.seed,
            "numbers": self.dtype,
            "schema": dict(self.schema),
        }
        return tensors | {"initial": self.initial}, json.loads(json.dumps(facts))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 digest over all tensors and facts: 64 hexadecimal digits."""
        return _digest(*self.tensors_and_facts())

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Card:
        """Rebuild a card from what `tensors_and_facts` returned; everything is checked before it is used.

        Raises InputError for anything that a card of this version would not hold, down to the last fact. Only
        hyperparameters with a neutral value may be missing, because earlier versions did not have them.
        """
        try:
            tensors, facts = dict(tensors), dict(facts)
            _check_raw(tensors, facts)
            spec = InputSpec.unpack(tensors, {k: v for k, v in facts.items() if k not in _CARD_KEYS}, None)
            name, hyper = facts["algorithm"]["name"], facts["algorithm"]["hyper"]
            algorithm = algorithms.remake(name, hyper)
            algorithm.init(spec.network.initial, spec.network.layout)
            size, epochs, seed, dtype, schema = (
                facts[n] for n in ("batch_size", "epochs", "seed", "numbers", "schema")
            )
            unwritten = frozenset(algorithm.neutral_values().keys() - hyper)
            card = cls(facts["federation"], spec, algorithm, size, epochs, seed, dtype, schema, unwritten)
            rebuilt, content = card.tensors_and_facts()
            check_fit("content", tensors, {name: tuple(value.shape) for name, value in rebuilt.items()})
            if _digest(rebuilt, content) != _digest(tensors, facts):
                raise InputError("It holds facts or types that do not belong to a card of this version of fedabml.")
        except InputError as error:
            raise error if str(error).startswith("The card") else InputError(f"The card is refused: {error}") from error
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError) as error:
            raise InputError(f"The card is refused: it is damaged ({type(error).__name__}).") from error
        return card

    def save(self, path: Name) -> Path:
        """Write the card to one safetensors file that carries its own digest."""
        return write_tensors(path, *self.tensors_and_facts())

    @classmethod
    def load(cls, path: Name) -> Card:
        """Read a card. Raises InputError for a file that is damaged or of another kind."""
        tensors, facts = read_tensors(path)
        try:
            return cls.of(tensors, facts)
        except InputError as error:
            raise InputError(f"'{path}': {error}") from error


def make_card(
    federation: str,
    inputs: Federation,
    *,
    algorithm: Algorithm,
    model: str = "mlp",
    model_options: Mapping[str, Any] | None = None,
    batch_size: int = 50,
    epochs: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    class_weights: Sequence[float] = (),
    schema: Mapping[str, Any] | None = None,
) -> Card:
    """Return the card of a new federation; the network and its initial weights are those that `train` would make.

    `inputs` has the shape, type, normalisation, recipe and task of the data; its samples are not used.
    `class_weights` are used unchanged, because the counts of classes stay at the sites.
    """
    check_model_and_algorithm(model, algorithms.name_of(algorithm))
    if inputs.task != "classification" and algorithm.label_prior != "none":
        algorithm = dataclasses.replace(algorithm, label_prior="none")
    targets = 0 if inputs.task == "classification" else inputs.y.shape[1]
    likelihood = likelihoods.default(inputs.task, inputs.classes, targets)
    if class_weights:
        if not isinstance(likelihood, Categorical):
            raise InputError("Class weights are for rows with one class each, which these data do not have.")
        likelihood = Categorical(likelihood.classes, tuple(float(weight) for weight in class_weights))
    made = make_network(model, inputs, likelihood, seed, model_options)
    inputs, network, _ = take_tokens(inputs, made.network)
    spec = InputSpec.of(inputs, network, likelihood, made.spec, made.origin)
    likelihood.check(spec.network.probe(torch.zeros(2, *spec.shape)))
    algorithm.init(spec.network.initial, spec.network.layout)
    card = Card(federation, spec, algorithm, batch_size, epochs, seed, dtype, schema or {})
    return Card.of(*card.tensors_and_facts())  # as every site will read it


def _check_raw(tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Check the kind, the types and the sizes of a card's parts before anything is built from them."""
    if facts.get("kind") != KIND or facts.get("version") != VERSION:
        raise InputError(f"It is a {quoted(facts.get('kind'))} of version {quoted(facts.get('version'))}, not a card.")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InputError("It holds something that is no tensor.")
        if tensor.dtype not in FLOATS and not name.startswith("constant."):
            raise InputError(f"It holds {tensor.dtype} in {quoted(name)}, where numbers must be float32 or float64.")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"It holds values in {quoted(name)} that are not finite.")
    if tensors["initial"].dtype != torch.float32:
        raise InputError("Its initial weights are not float32.")
    model, algorithm, shape = facts["model"], facts["algorithm"], facts["shape"]
    if not isinstance(model, dict) or not isinstance(algorithm, dict) or "source" in facts:
        raise InputError("Its network or its algorithm has no name.")
    check_model_and_algorithm(str(model["name"]), str(algorithm["name"]))
    sizes = [checked_integer(size, "A size of a sample") for size in shape]
    if not 0 < len(sizes) <= 4 or math.prod(sizes) > MOST_SIZE:
        raise InputError(f"Its samples have the shape {quoted(shape)}, which is too large.")
    likelihood = likelihoods.from_json(facts["likelihood"])
    outputs = likelihood.targets if isinstance(likelihood, GaussianNoise) else likelihood.outputs
    if not 0 < outputs <= MOST_SIZE or model["outputs"] != likelihood.outputs or list(model["shape"]) != sizes:
        raise InputError("The sizes of its network are not those of its samples and outputs.")
    if not isinstance(facts["schema"], dict):
        raise InputError("Its schema is no table of facts.")


def _digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of facts, in the order of their names, and of tensors: name, type, shape and bytes."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{json.dumps(name)} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
