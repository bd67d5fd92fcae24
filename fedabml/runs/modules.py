"""How a run's network is made of a name, a module or a Hugging Face folder, and made again from a file.

A file holds the trained weights. What is frozen is in the file, too, unless it belongs to a module or a folder that
the user gives anyway: of a body that --train head or lora has frozen, the file holds only the digest. A site with
another body is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import models
from ..arguments import checked_integer, is_number, is_whole
from ..data import Federation
from ..errors import InputError
from ..files.sealed import group, prefixed, tensor_bytes
from ..files.user_code import UserCode
from ..likelihoods import Likelihood, StepCategorical
from ..models.adapters import Adapter, materialised
from ..models.huggingface import load_folder
from ..vectors import LIKELIHOOD, Network

log = logging.getLogger("fedabml")

Model = nn.Module | str | os.PathLike[str]
NO_TOKEN = -1  # the number of padding where no token is padding
COMMON = {"output", "padding", "head", "lora_alpha"}  # the options of every model


@dataclass(frozen=True)
class Origin:
    """What a network was made of: which weights are trained, and the name of the user's module or folder."""

    adapter: Adapter = dataclasses.field(default_factory=Adapter)
    source: str = ""  # empty for a network by name, and for a module of which all weights are trained
    seed: int = 0  # frozen weights may be drawn from it: those of lazy layers, or those that a folder lacks

    @property
    def has_own_body(self) -> bool:
        """Whether the user has the frozen weights, so that files hold only their digest."""
        return bool(self.source) and self.adapter.train != "all"


class Made(NamedTuple):
    """A network, how to build it again by name (None if the user gives the module), its origin, and a note or ""."""

    network: Network
    spec: dict[str, Any] | None
    origin: Origin
    note: str


def make_network(
    model: nn.Module | str,
    fed: Federation,
    likelihood: Likelihood,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    pretrained: str | os.PathLike[str] | None = None,
    train: str = "all",
    lora_rank: int = 8,
) -> Made:
    """Return the network of a run. `options` are those of every model, and of a network by name its own."""
    shape, outputs = list(fed.x.shape[1:]), likelihood.outputs
    spec, source, note = None, "", ""
    output, padding, head, alpha = _common_options(options or {})
    own = {name: value for name, value in (options or {}).items() if name not in COMMON}
    adapter = Adapter(train, lora_rank, alpha, head)
    if isinstance(model, str) and models.is_folder(model):
        per_token = isinstance(likelihood, StepCategorical) and shape == [likelihood.steps]
        module, source = _from_folder(model, shape, likelihood, seed, own, per_token)
        if names := module.without_weights:
            note = f"'{source}' has no weights for {', '.join(map(str, names))}: these start at random numbers."
    elif isinstance(model, str):
        model = models.register_user_network(model)
        spec = {"name": model, "shape": shape, "outputs": outputs, "options": own}
        spec |= {"code": models.USER_NETWORKS[model].digest} if model in models.USER_NETWORKS else {}
        module = models.build(model, shape, outputs, seed, **own)
    else:
        module, source = model, "" if train == "all" else type(model).__name__
    if pretrained is not None:
        module = models.with_weights(module, pretrained)
    if padding is None:
        padding = getattr(fed, "padding", None)
    own_padding = getattr(getattr(module, "config", None), "pad_token_id", None)
    if padding is not None and own_padding not in (None, padding):
        raise InputError(
            f"The sequences are filled up with the token {padding}, but the model's configuration has another token of "
            f"padding, pad_token_id {own_padding}. Make the federation with padding={own_padding}."
        )
    network = _network(module, shape, likelihood, adapter, output, padding, seed=seed)
    if getattr(getattr(network.module, "config", None), "pad_token_id", None) == NO_TOKEN:
        whole = "The model's configuration names no token of padding, so every token counts."
        note = f"{note} {whole} If one is padding, name it: --set model_options.padding=0.".strip()
    return Made(network, spec, Origin(adapter, source, seed), note)


def _from_folder(
    path: Any, shape: list[int], likelihood: Likelihood, seed: int, options: Mapping[str, Any], per_token: bool
) -> tuple[Any, str]:
    """Return the classifier in a folder, of each token or of the whole input, and the folder's name."""
    for name in options:
        raise InputError(f"A Hugging Face folder has no option '{name}' (model_options). It has {_listed(COMMON)}.")
    outputs = likelihood.classes if per_token and isinstance(likelihood, StepCategorical) else likelihood.outputs
    return load_folder(path, shape, outputs, seed, per_token), Path(os.path.realpath(path)).name


def _network(
    module: nn.Module,
    shape: list[int],
    likelihood: Likelihood,
    adapter: Adapter,
    output: str | int | None,
    padding: int | None,
    head: list[str] | None = None,
    seed: int = 0,
) -> Network:
    """Return the network of a module: with the shapes of its lazy layers, and only the chosen weights trainable."""
    if hasattr(module, "without_weights"):  # of `load_folder`
        output = "logits" if output is None else output
        padding = module.padding if padding is None else padding  # type: ignore[assignment]
    module = adapter.apply(materialised(module, shape, seed), seed, head or ())
    network = Network(module, likelihood.entries, output, padding)
    config = getattr(network.module, "config", None)  # of this copy
    if getattr(config, "pad_token_id", 0) is None:  # a classifier of the last token must know which is padding
        config.pad_token_id = NO_TOKEN if padding is None else padding  # type: ignore[union-attr]
    return network


def _common_options(options: Mapping[str, Any]) -> tuple[str | int | None, int | None, str, float]:
    """Return the options that every model has: output, padding, head, lora_alpha."""
    output, padding, head = options.get("output"), options.get("padding"), options.get("head", "auto")
    alpha = options.get("lora_alpha", Adapter.alpha)
    if output is not None and not isinstance(output, str) and not is_whole(output):
        raise InputError(f"model_options.output must be the name or number of the outputs; it is {output!r}.")
    if padding is not None and not is_whole(padding):
        raise InputError(f"model_options.padding must be the whole number of the padding token; it is {padding!r}.")
    if not isinstance(head, str) or not head:
        raise InputError(f"model_options.head must be the name that the head's parameters begin with; it is {head!r}.")
    if not is_number(alpha):
        raise InputError(f"model_options.lora_alpha must be a number; it is {alpha!r}.")
    return output, padding, head, float(alpha)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


# -- files ------------------------------------------------------------------------------------------------------------
def body_digest(network: Network) -> str:
    """Return the SHA-256 digest of what a network holds beside its trained weights, in float32."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.to("cpu", torch.float32).constants.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def pack_network(network: Network, origin: Origin) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and metadata by which `unpack_network` makes the network again, beside the trained weights."""
    metadata: dict[str, Any] = {}
    if origin.adapter.train != "all":
        body = {"body": body_digest(network), "seed": origin.seed} if origin.has_own_body else {}
        metadata["adapter"] = dataclasses.asdict(origin.adapter) | body
    named = {"tokens": network.tokens or None, "output": network.output, "padding": network.pad}
    named |= {"source": origin.source or None, "per_token": getattr(network.module, "per_token", None) or None}
    metadata |= {name: value for name, value in named.items() if value is not None}
    return {} if origin.has_own_body else prefixed("constant", network.constants), metadata


def unpack_network(
    tensors: dict[str, Tensor], metadata: Mapping[str, Any], model: Model | None, likelihood: Likelihood
) -> tuple[Network, Origin]:
    """Return the network of a file and its origin; `model` is the user's module or folder, if it was trained with one.

    Raises InputError if the model does not fit the file, or has another body.
    """
    stored = dict(metadata.get("adapter", {}))
    body, source = stored.pop("body", ""), str(metadata.get("source", ""))
    seed = checked_integer(stored.pop("seed", 0), "the seed of the file's frozen weights", 0)
    adapter, spec, shape = Adapter(**stored), metadata["model"], [int(size) for size in metadata["shape"]]
    if model is None and spec is None:
        named = f" ('{source}')" if source else ""
        raise InputError(
            f"The file was trained with your own module{named}, which a file cannot hold. Give the same module: "
            "load_prior(path, model=module), or its Hugging Face folder: --model FOLDER."
        )
    model_name = "" if model is None else type(model).__name__
    if model is None:
        most = max(1_000_000, sum(tensor.numel() for tensor in tensors.values()))
        module = models.build(spec["name"], spec["shape"], spec["outputs"], **spec["options"], most=most)
        warn_if_code_differs(spec["name"], spec.get("code"), models.USER_NETWORKS.get(spec["name"]))
    elif isinstance(model, nn.Module):
        module = model
    else:
        module, model_name = _from_folder(model, shape, likelihood, seed, {}, metadata.get("per_token") is True)
    names = [str(name) for name, _ in metadata["layout"] if name != LIKELIHOOD]
    output, padding, _, _ = _common_options(metadata)
    network = _network(module, shape, likelihood, adapter, output, padding, adapter.head_of(names), seed)
    network = network.with_tokens(metadata.get("tokens") is True)
    if layout_of(network) != metadata["layout"]:
        raise InputError("The model does not fit the file: its parameters have other names or shapes.")
    if body and body != (own_digest := body_digest(network)):
        raise InputError(
            f"The prior was trained on the frozen body of '{source}' (digest {body[:16]}), but '{model_name}' has "
            f"another one (digest {own_digest[:16]}). Give the model that the federation was trained with."
        )
    if not body:
        constants = group(tensors, "constant")
        check_fit("constants", constants, {n: tuple(t.shape) for n, t in network.constants.items()})
        for name, value in network.constants.items():
            if constants[name].dtype != value.dtype:
                raise InputError(f"Its constant '{name}' is {constants[name].dtype}, not {value.dtype}.")
        network = network.with_constants(constants)
    if "initial" in tensors:
        check_fit("initial weights", {"initial": tensors["initial"]}, {"initial": (network.layout.size,)})
        network = network.with_initial(tensors["initial"])
    return network, Origin(adapter, source, seed)


def warn_if_code_differs(name: str, digest: str | None, code: UserCode | None) -> None:
    """Warn where a user's own class has changed since a file was written."""
    if code and digest != code.digest:
        log.warning("'%s' is not the code that it was when the prior was trained: results may differ.", name)


def layout_of(network: Network) -> list[list[Any]]:
    """Return the names and shapes of a network's parameters, as they are stored."""
    return [[name, list(shape)] for name, shape in zip(network.layout.names, network.layout.shapes, strict=True)]


def check_fit(subject: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a file's tensors whose names or shapes differ from the expected ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() | expected.keys()):
        if name not in shapes:
            raise InputError(f"Its {subject} lacks '{name}'; the file is damaged.")
        if name not in expected:
            raise InputError(f"Its {subject} has '{name}', which does not belong there; the file is damaged.")
        if shapes[name] != expected[name]:
            raise InputError(
                f"'{name}' of its {subject} has the shape {shapes[name]}, but the network needs {expected[name]}; the "
                "file is damaged, or of another network."
            )
