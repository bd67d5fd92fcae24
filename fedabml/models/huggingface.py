"""A Hugging Face classifier from a local folder: config.json and weights in safetensors files.

Nothing is downloaded, no pickled weights (.bin) are read, and no code of the folder is run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import rng
from ..arguments import checked_integer, checks_arguments
from ..errors import InputError
from ..files.limits import parse_json
from ..files.paths import read_text
from .own import is_folder

CONFIG = "config.json"


@checks_arguments
def load_folder(
    path: str | os.PathLike[str], shape: Sequence[int], outputs: int, seed: int = 0, per_token: bool = False
) -> nn.Module:
    """Return the classifier in a folder with `outputs` outputs, for examples of a shape: [tokens], or an image.

    With `per_token` it has so many outputs for each token.
    The module returns its outputs under the name "logits". Weights that the folder lacks, as a new head's, are drawn
    from the seed; the module's `without_weights` names them, and `padding` is the token of padding, or None. Raises
    InputError for a folder without weights in safetensors files, or with code of its own.
    """
    folder, outputs = Path(path), checked_integer(outputs, "outputs")
    config = _checked_config(folder)
    transformers = _imported()
    images = len(shape) == 3
    kind = "Image" if images else "Token" if per_token else "Sequence"
    loader = getattr(transformers, f"AutoModelFor{kind}Classification")
    try:
        with _quiet(transformers):
            model, report = loader.from_pretrained(
                os.path.realpath(folder), num_labels=outputs, ignore_mismatched_sizes=True, output_loading_info=True,
                local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
                attn_implementation="eager",
            )  # fmt: skip
    except Exception as error:  # the library raises nearly every kind
        inputs = "images" if images else "tokens"
        raise InputError(
            f"The folder '{path}' cannot be read as a classifier of {inputs} ({config.get('model_type')}): "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    missing = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    names = [name for name, _ in model.named_parameters()]
    if missing >= {*names}:
        raise InputError(
            f"The folder '{path}' has no weights of a {type(model).__name__}. Give the model's own folder."
        )
    model.without_weights = tuple(name for name in names if name in missing)
    model.per_token = per_token
    model.padding = getattr(model.config, "pad_token_id", None)
    _draw(model, seed)
    return model


def _checked_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, after a check of what else is in the folder."""
    if not is_folder(folder):
        raise InputError(f"'{folder}' is no folder of a Hugging Face model: it has no {CONFIG}.")
    config = parse_json(read_text(folder / CONFIG), f"'{folder / CONFIG}'")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(f"'{folder / CONFIG}' names no model_type, so it describes no Hugging Face model.")
    if "auto_map" in config:
        raise InputError(f"The model in '{folder}' brings Python code of its own (auto_map), which is never run here.")
    if (folder / "adapter_config.json").exists():
        raise InputError(f"'{folder}' holds an adapter of the library peft. Merge it into its model and save that.")
    files = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in files):
        pickled = next((file.name for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".pt", ".pth")), None)
        hint = f"; '{pickled}' is pickled, and loading it could run code" if pickled else ""
        raise InputError(
            f"'{folder}' has no weights in safetensors files (model.safetensors){hint}. Save the model with "
            "model.save_pretrained(folder)."
        )
    return config


def _imported() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "A Hugging Face folder needs the package transformers. Install it: pip install 'fedabml[huggingface]'"
        ) from error
    return transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the library's reports and progress bars: what matters of them, `load_folder` says itself."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    """Draw the weights that a folder lacks: matrices are normal, as in the model's configuration, and biases are 0."""
    std = float(getattr(model.config, "initializer_range", 0.02) or 0.02)
    generator = torch.Generator().manual_seed(rng.number(seed, rng.INIT) & 0x7FFFFFFF)
    parameters = dict(model.named_parameters())
    for name in model.without_weights:
        if parameters[name].ndim > 1:
            parameters[name].normal_(0, std, generator=generator)
        elif name.endswith("bias"):
            parameters[name].zero_()
