"""The configuration of a run: defaults, a TOML file, flags and `--set`, where each layer overrides the one before.

    dataset = "digits"            # top-level keys are the fields of `RunConfig`, named like the flags
    clients = 20
    algorithm = "fedabml"

    [fedabml]                     # hyperparameters: one table per algorithm; a run reads that of its own algorithm
    lam = 0.1

    [model_options]
    hidden = [64]

    [personalize]                 # flags of another command: one file may serve all of them
    epochs = 10

This module imports neither torch nor an algorithm before a federation or an algorithm is made.
"""

from __future__ import annotations

import logging
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..algorithms import REGISTRY, make
from ..arguments import MAX_INTEGER, split_words
from ..data.catalogue import SOURCES
from ..engine import backends
from ..errors import InputError, nearest, quoted, shortened
from ..files.limits import MAX_TOML, parse_toml
from ..files.paths import read_text
from ..files.sealed import read_json, warn_if_changed
from ..files.user_code import is_user_code
from ..models import NETWORK_NAMES, TRAINED, USER_NETWORKS, is_folder
from . import request

if TYPE_CHECKING:
    from ..algorithms import Algorithm
    from ..data import Dataset, Federation
    from ..data.download import Progress
    from ..data.recipe import TableRecipe

JsonDict = dict[str, Any]
log = logging.getLogger("fedabml")

PARTITIONS = ("auto", "classes", "dirichlet", "dirichlet-classes", "dirichlet-clients", "iid", "natural")
TASKS = ("classification", "regression", "multilabel", "sequence")
TARGET_TRANSFORMS = ("log", "boxcox")
DTYPES, BACKENDS = ("float32", "tf32", "bf16", "float64"), ("auto", *backends.BACKENDS)
TABLES = (".csv", ".parquet", ".pq", ".xlsx", ".xls", ".xlsm", ".xlsb", ".ods")  # the last four are refused by name
# Keys for tables only.
TABLE_KEYS = (
    *("client_column", "target_column", "drop_columns", "id_column", "date_columns", "split_by", "test_share"),
    "positive_class",
)
# The commands that may have a table of their own in a TOML file.
COMMANDS = ("train", "compare", "tune", "evaluate", "personalize", "predict", "serve", "inspect", "get")

# Keys that apply only to a dataset by name, and keys that apply only to the user's own data.
_DATASET_KEYS = ("dataset", "clients", "classes_per_client", "distinct", "dirichlet_alpha", "data_dir")
_TARGET_KEYS = ("target_transform", "positive_target")
_USER_DATA_KEYS = ("data", "task", "image_size", *TABLE_KEYS, *_TARGET_KEYS)
DATA_KEYS = (*_DATASET_KEYS, *_USER_DATA_KEYS, "partition", "partition_seed", "drop_small")  # which data, and whose
_TRAIN_KEYS = (
    *("rounds", "participation", "epochs", "batch_size", "seed", "device", "dtype", "backend", "chunk", "compile"),
    *("model_options", "pretrained", "class_weights", "train", "lora_rank", "specificity"),
)  # the keywords of `train`


def key(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    """Declare a key of the configuration: its default, its meaning, its choices."""
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run. Every field is a key of the TOML file, and most are flags of `fedabml train`."""

    dataset: str | None = key(None, "dataset by name, see `fedabml data list` [default: digits]")
    data: str | None = key(
        None,
        "your own data: a folder with one .npz file or one folder of images per client, or a .csv, .parquet or .xlsx "
        "table",
    )
    client_column: str | None = key(None, "table column that names the client of each row")
    target_column: str | None = key(None, "table column to predict")
    drop_columns: str | None = key(None, "table columns to leave out, such as patient,date")
    id_column: str | None = key(None, "table column of identifiers: never a feature, carried into predictions")
    date_columns: str | None = key(None, "table columns of ISO dates to learn from: year, month, weekday, hour")
    split_by: str | None = key(None, "table column of dates or numbers: each client's newest rows are its test rows")
    positive_class: str | None = key(
        None, "two classes: the one that recall, precision and thresholds are about [default: the second by name]"
    )
    task: str | None = key(
        None,
        "classification, regression, multilabel (y of 0 and 1 per label) or sequence (a class per step) [default: "
        "classification or regression, derived from the targets]",
        TASKS,
    )
    target_transform: str | None = key(
        None, "regression: learn a positive target's log, or its Box-Cox transform (boxcox)", TARGET_TRANSFORMS
    )
    positive_target: bool = key(False, "regression: neither the target nor an interval is ever below 0")
    test_share: float = key(0.2, "share of each client's table rows kept for testing")
    image_size: int | None = key(None, "resize a folder's images to N×N pixels [default: all must have one size]")
    partition: str = key(
        "auto",
        "how a dataset is divided among clients: classes, dirichlet (drawn per class), dirichlet-clients (drawn per "
        "client, nearly equal sizes) or iid; your own data are natural",
        PARTITIONS,
    )
    clients: int = key(100, "number of clients that share a dataset")
    classes_per_client: int = key(2, "partition classes: largest number of classes per client")
    distinct: bool = key(False, "partition classes: no client draws the same class twice")
    dirichlet_alpha: float = key(0.5, "partition dirichlet: a small value gives each client few classes")
    partition_seed: int | None = key(None, "seed of the partition [default: seed]")
    validation: float = key(0.0, "share of each client's training data held out, to be scored instead of test data")
    split: str = key(
        "auto",
        "rows to score on: val (those held out), test, or auto (val if any are held out, else test). With test, each "
        "client also calibrates its probabilities on its rows held out",
        ("auto", "val", "test"),
    )
    drop_small: bool = key(False, "leave out clients with fewer than two training samples")
    algorithm: str = key("fedabml", "algorithm by name, see `fedabml algorithms`, or your own class: mine.py:FedDyn")
    hyper: JsonDict = field(
        default_factory=dict, metadata={"doc": "hyperparameters of the algorithm, in its own table"}
    )
    model: str = key(
        "mlp",
        "network by name: mlr, mlp, cnn, cnn100, resnet18, text; your own class: mine.py:Net; or a Hugging Face folder",
    )
    model_options: JsonDict = field(default_factory=dict, metadata={"doc": "network options, such as hidden = [64]"})
    pretrained: str | None = key(None, "a .safetensors file with the network's initial weights")
    train: str | None = key(
        None,
        "weights to train: all, head (the last layer; the others stay as they are) or lora (the head, and low-rank "
        "changes of the other linear layers) [default: all]",
        TRAINED,
    )
    lora_rank: int | None = key(None, "train lora: rank r of a layer's change, W + (α/r) B A [default: 8]")
    rounds: int = key(50, "T: rounds of communication")
    participation: float = key(0.1, "τ: share of the clients that take part in a round")
    epochs: int = key(5, "R: passes over a client's data in a round")
    batch_size: int = key(50, "samples in a minibatch")
    lr: float | None = key(None, "η: step size, short for the hyperparameter lr (personalisation uses personal_lr)")
    noise: float = key(0.5, "regression: initial standard deviation of the noise, for a standardised target")
    learn_noise: bool = key(True, "learn the noise of a regression")
    noise_by_input: bool = key(False, "regression: the network also predicts the noise of each input")
    class_weights: str | None = key(
        None, "how much rows of each class count in training: balanced, or numbers such as 1,5 [default: all alike]"
    )
    seed: int = key(0, "seed of every random number")
    device: str = key("auto", "auto, cpu or cuda")
    dtype: str = key(
        "float32", "float32, tf32 (a GPU rounds products to 10 bits), bf16 (network in bfloat16) or float64", DTYPES
    )
    backend: str = key("auto", "vmap (clients as one batched program), loop (one by one) or auto", BACKENDS)
    chunk: int | None = key(
        None, "clients that run at once [default: as many as fit in memory; $FEDABML_PROCESSES processes share a GPU]"
    )
    compile: bool | None = key(None, "use torch.compile [default: on a GPU, once the first rounds show that it pays]")
    evaluate: bool = key(True, "personalise and score every client at the end")
    eval_every: int = key(0, "also score the clients every N rounds (0: only at the end)")
    eval_clients: int | None = key(None, "number of clients scored every eval_every rounds [default: all, up to 10000]")
    eval_all: bool = key(True, "score the clients outside eval_clients at the end, too")
    specificity: float | None = key(
        None,
        "two classes: sensitivity is scored with false alarms for at most 1 − X of the negative rows [default: 0.9]",
    )
    data_dir: str | None = key(None, "folder of datasets [default: $FEDABML_DATA, or ~/.cache/fedabml/data]")

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, str(f.type), getattr(self, f.name), f.metadata))
        if self.partition == "dirichlet":
            object.__setattr__(self, "partition", "dirichlet-classes")  # the name that files hold: see `upgrade_config`
        for registry in ("dataset", "algorithm", "model"):
            name = getattr(self, registry)
            if registry == "model" and is_folder(name):
                continue
            if registry == "model" and os.sep in name and not is_user_code(name):
                raise InputError(f"There is no Hugging Face model in '{name}': no such folder has a config.json.")
            if name is not None and name not in names(registry):
                raise InputError(f"There is no {registry} '{name}'.{_way(registry, name)}")
        if self.dataset and self.data:
            raise InputError(f"Both dataset '{self.dataset}' and data '{self.data}' are given. Leave one of them out.")
        if self.data and self.partition not in ("auto", "natural"):
            raise InputError(
                f"partition {self.partition} divides a dataset, but your own data are divided already. Leave it out."
            )
        if not self.data and self.partition == "natural":
            raise InputError("partition natural is for your own data (--data). Choose another for a dataset.")
        data = f"the data are {self.data or self.dataset or 'digits'}"
        stray = next((name for name in TABLE_KEYS if getattr(self, name) != getattr(type(self), name)), None)
        if stray and not is_table(self.data):
            if self.data and Path(self.data).is_file():
                raise InputError(
                    f"'{self.data}' is a file, but no table that fedabml reads: save it as .csv, .parquet or .xlsx."
                )
            raise InputError(
                f"{stray} is for a table (--data with a .csv, .parquet or .xlsx file), but {data}. Leave "
                f"--{stray.replace('_', '-')} out."
            )
        if self.image_size is not None and (is_table(self.data) or not self.data):
            raise InputError(f"image_size is for a folder of images (--data), but {data}. Leave --image-size out.")
        if self.image_size is not None and self.image_size < 1:
            raise InputError("image_size must be 1 or more.")
        wanted = {f"task {self.task}": self.task not in (None, "classification")}
        wanted |= {name: bool(getattr(self, name)) for name in _TARGET_KEYS}
        stray = next((name for name, value in wanted.items() if value), None)
        if not self.data and stray:
            raise InputError(f"{stray} is for your own data (--data), but {data}, which has classes.")
        if is_table(self.data) and self.task in ("multilabel", "sequence"):
            raise InputError(
                f"task {self.task} needs several targets per row, but a table has one target column. Give a folder "
                "with one .npz file per client, whose y has a column per label or step."
            )
        if self.lora_rank is not None and (self.lora_rank < 1 or self.train != "lora"):
            raise InputError("lora_rank is the rank of --train lora, 1 or more. Give --train lora, or leave it out.")
        if min(self.seed, self.partition_seed or 0) < 0:
            raise InputError("seed and partition_seed must be 0 or more.")

    def __repr__(self) -> str:
        """Show the keys that differ from the defaults."""
        return shortened(f"RunConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})")

    @classmethod
    def of(cls, *layers: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Self:
        """Build a configuration from layers of nested keys; a later layer overrides an earlier one.

        A layer's `lr` goes to the chosen algorithm, unless the same layer has an lr in the algorithm's own table. A
        layer may have tables of other algorithms. The last layer, `overrides` (--set), may not: that is a mistake.
        """
        overrides = overrides or {}
        layers = (*layers, overrides)
        chosen = next((layer["algorithm"] for layer in reversed(layers) if "algorithm" in layer), cls.algorithm)
        field_names, algorithms = {f.name for f in fields(cls)} - {"hyper"}, names("algorithm")
        if isinstance(chosen, str) and chosen not in algorithms:
            raise InputError(f"There is no algorithm '{chosen}'.{_way('algorithm', chosen)}")
        stray = next((name for name in overrides if name in algorithms and name != chosen), None)
        if stray is not None:
            raise InputError(
                f"--set {stray}.… is for the algorithm {stray}, but the run's is {chosen}. Write {chosen}.…, or choose "
                f"the other algorithm with --algorithm {stray}."
            )
        merged: JsonDict = {}
        for layer in layers:
            for name, value in layer.items():
                if name in algorithms or name == "model_options":
                    if not isinstance(value, Mapping):
                        raise InputError(f"'{name}' must be a table of options, such as [{name}]; it is {value!r}.")
                    if name in algorithms and name != chosen:
                        _check_hyper(name, value)
                    merged[name] = {**merged.get(name, {}), **value}
                elif name not in field_names:
                    if name in _hyperparameters(chosen):
                        way = f"Write {chosen}.{name}, or put it under [{chosen}]."
                        raise InputError(f"'{name}' is a hyperparameter of {chosen}. {way}")
                    close = nearest(name, {*field_names, *algorithms})
                    raise InputError(f"There is no key or algorithm '{name}' in a configuration.{close}")
                elif name != "lr":
                    merged[name] = value
            if layer.get("lr") is not None:
                merged[chosen] = {**merged.get(chosen, {}), **{"lr": layer["lr"], **layer.get(chosen, {})}}
        keys = {name: value for name, value in merged.items() if name not in algorithms}
        return cls(**keys, hyper=merged.get(chosen, {}))

    def to_dict(self, everything: bool = False) -> JsonDict:
        """Return nested keys that `of` reads back: those that differ from the defaults, or `everything`."""
        flat = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("hyper", "model_options") and (everything or getattr(self, f.name) != f.default)
        }
        tables = {"model_options": dict(self.model_options), self.algorithm: dict(self.hyper)}
        return flat | {name: table for name, table in tables.items() if table}

    def relevant(self) -> JsonDict:
        """Return the keys that have a value and apply to this run's data.

        For example, the keys that divide a dataset do not apply to the user's own data, which are divided already.
        """
        idle = _DATASET_KEYS if self.data else _USER_DATA_KEYS
        return {k: v for k, v in self.to_dict(everything=True).items() if v is not None and k not in idle}

    def command(self, out: str | Path | None = None) -> str:
        """Return the shell command that starts this run."""
        return request.command("train", request.flags(self.options()), out)

    @property
    def code_flags(self) -> list[str]:
        """The flags that name the user's own code, which a command that goes on with this run needs again."""
        return request.flags({k: v for k, v in self.options().items() if is_user_code(v)})

    def options(self) -> JsonDict:
        """Return the keys that differ from the defaults, as flags take them."""
        options = self.to_dict()
        return options | {name: command_line_name(options[name]) for name in ("algorithm", "model") if name in options}

    def differences(self, other: RunConfig) -> request.Changes:
        """Return the keys in which two configurations differ, with both values."""
        return request.differences(self.to_dict(everything=True), other.to_dict(everything=True))

    @property
    def name(self) -> str:
        """The default name of a run with this configuration."""
        return f"{Path(self.data).stem if self.data else self.dataset or 'digits'}-{self.algorithm}-{self.seed}"

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with changes."""
        return replace(self, **changes)

    def federation(self, progress: Progress | None = None, dataset: Dataset | None = None) -> Federation:
        """Return the data, divided among clients.

        `progress(done, total)` is called during downloads; `dataset` is used instead of loading one.
        """
        from .. import data
        from ..data.once import once

        seed = self.seed if self.partition_seed is None else self.partition_seed
        if not self.data:
            return data.federate(
                dataset or data.load(self.dataset or "digits", self.data_dir, progress=progress),
                partition="classes" if self.partition == "auto" else self.partition, clients=self.clients,
                classes_per_client=self.classes_per_client, alpha=self.dirichlet_alpha, distinct=self.distinct,
                drop_small=self.drop_small, seed=seed,
            ).hold_out(self.validation, seed)  # fmt: skip
        path = self.data
        common: JsonDict = {"task": self.task, "drop_small": self.drop_small}

        def read() -> Federation:
            if not is_table(path):  # the same federation for every seed
                folder: JsonDict = {**common, "image_size": self.image_size}
                return once(path, ("folder", *folder.values()), lambda: data.Federation.from_folder(path, **folder))
            options: JsonDict = {"test_share": self.test_share, "positive_class": self.positive_class, "seed": seed}
            return data.read_table(**self.table_columns(), **options, **common)

        def transformed(fed: Federation) -> Federation:
            positive = self.target_transform or self.positive_target
            return fed.with_positive_target(self.target_transform) if positive else fed

        options = (*(getattr(self, name) for name in (*TABLE_KEYS, *_TARGET_KEYS)), *common.values(), self.image_size)
        options += (self.validation, seed)
        return once(path, options, lambda: transformed(read()).hold_out(self.validation, seed))

    def as_trained(self, fed: Federation, digest: object, recipe: TableRecipe | None) -> Federation | None:
        """Return the federation of this configuration whose hash is `digest`; None if the data have changed.

        Earlier versions learned another recipe from the same table: words of fewer than `LEAST` rows had features of
        their own. If that is the whole difference, the `recipe` of the run's prior encodes the table, and a note says
        so.
        """
        from ..data.frames import read_frame
        from ..data.ranges import LEAST

        if fed.hash == digest:
            return fed
        if recipe is None or not is_table(self.data):
            return None
        try:
            x = recipe.apply(read_frame(str(self.data), () if self.id_column is None else (self.id_column,)))
        except InputError:  # the table lacks a column of the recipe, or holds other kinds of values
            return None
        trained = replace(fed, x=x, recipe=recipe)
        if trained.hash != digest:
            return None
        log.warning(
            "The run was made by an earlier version of fedabml, so the table is encoded by the recipe in its prior. "
            "This version counts words of fewer than %d rows as 'other' and rounds medians. The prior may hold such "
            "words and medians of single rows: train again before you hand it to others.",
            LEAST,
        )
        return trained

    def table_columns(self) -> JsonDict:
        """Return the path of the run's table and what its columns are for: keywords of `fedabml.read_table`."""
        if not (self.client_column and self.target_column):
            raise InputError(
                f"'{self.data}' is a table. Name the column of clients with --client-column and the column to predict "
                "with --target-column."
            )
        columns: JsonDict = {"path": self.data, "client": self.client_column, "target": self.target_column}
        columns |= {"drop": split_words(self.drop_columns), "dates": split_words(self.date_columns)}
        return columns | {"id": self.id_column, "split_by": self.split_by}

    def algorithm_object(self) -> Algorithm:
        """Make the algorithm with its hyperparameters; the word none stands for a missing value."""
        hyper = self.hyper if self.lr is None else {"lr": self.lr, **self.hyper}
        optional = {f.name for f in fields(REGISTRY[self.algorithm].kind) if "None" in str(f.type)}
        values = {name: None if name in optional and value == "none" else value for name, value in hyper.items()}
        return make(self.algorithm, **values)

    def train_options(self, fed: Federation) -> JsonDict:
        """Return the keywords of `fedabml.prepare` and `fedabml.train` for this configuration and its federation."""
        from ..likelihoods import GaussianNoise

        likelihood = None
        if fed.task == "regression":
            likelihood = GaussianNoise(fed.y.shape[1], self.noise, self.learn_noise, self.noise_by_input)
        elif self.noise_by_input:
            raise InputError("noise_by_input is for a regression, but the targets are classes. Leave it out.")
        values = {name: getattr(self, name) for name in _TRAIN_KEYS}
        defaults = [name for name in ("train", "lora_rank", "specificity") if values[name] is None]
        return {name: v for name, v in values.items() if name not in defaults} | {"likelihood": likelihood}


def upgrade_config(content: Mapping[str, Any]) -> JsonDict:
    """Translate the configuration in a file that an earlier version may have written.

    In such files `dirichlet` means the draw per client, because early versions had no other; this version never stores
    the word. So old runs, comparisons and cells keep their data. Keys of tables, which had no effect on other data, get
    their defaults.
    """
    idle = () if is_table(content.get("data")) else TABLE_KEYS
    changes = {k: getattr(RunConfig, k) for k in idle if k in content}
    changes |= {"partition": "dirichlet-clients"} if content.get("partition") == "dirichlet" else {}
    return {**content, **changes}


def read_config(run: Path) -> dict[str, Any]:
    """Return the content of a run's config.json. Raises InputError if there is none."""
    if not (run / "config.json").is_file():
        raise InputError(f"There is no run in '{run}': it has no config.json.")
    content = read_json(run / "config.json")
    if not isinstance(content, dict):
        raise InputError(f"'{run / 'config.json'}' is not a run's configuration. Give another folder.")
    return content


def saved_config(run: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of a run that `fedabml train` made, and the content of its config.json.

    Hyperparameters that the run's version had by default, and this one has otherwise, are part of the configuration.
    """
    content = read_config(run)
    if not isinstance(content.get("run"), dict):
        raise InputError(
            f"'{run / 'config.json'}' does not describe its data. Only runs of `fedabml train` can be resumed and "
            "evaluated here. In Python, use fedabml.train(..., resume=True)."
        )
    saved, likelihood, algorithm = upgrade_config(content["run"]), content.get("likelihood"), content.get("algorithm")
    if saved.get("data") and not saved.get("task"):
        # Early versions took float targets of a few whole numbers for a regression.
        name = likelihood.get("kind") if isinstance(likelihood, dict) else None
        saved["task"] = {"Categorical": "classification", "GaussianNoise": "regression"}.get(str(name))
    config = RunConfig.of(saved)
    hyper = algorithm.get("hyper") if isinstance(algorithm, dict) else None
    if not isinstance(hyper, dict):
        return config, content
    current = config.algorithm_object()
    was = current.neutral_values() | hyper
    other = {k: was[k] for k, v in current.values().items() if k in was and k not in config.hyper and was[k] != v}
    return config.with_changes(hyper=config.hyper | other), content


def is_table(path: Any) -> bool:
    """Return whether data are a table, by the ending of their name."""
    return str(path or "").lower().endswith(TABLES)


def read_toml(path: str | Path) -> JsonDict:
    """Read a TOML file. Raises InputError with file and line if it is not valid."""
    text = read_text(path, MAX_TOML)
    warn_if_changed(text, path)
    try:
        content = parse_toml(text, f"'{path}'")
        return upgrade_config(content) if text.startswith("# Made by: fedabml tune") else content
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise InputError(f"'{path}' is not valid TOML, or is cut short: {reason}.") from error


def to_toml(content: Mapping[str, Any]) -> str:
    """Return nested keys as TOML. A top-level key without a value is left out; in a table it is the word none."""
    import tomli_w

    tables = {
        key: {name: "none" if value is None else value for name, value in table.items()}
        for key, table in content.items()
        if isinstance(table, Mapping)
    }
    return tomli_w.dumps({k: v for k, v in content.items() if v is not None and k not in tables} | tables)


def without_commands(content: Mapping[str, Any]) -> JsonDict:
    """Return the content of a TOML file without the tables of commands, such as [personalize]."""
    return {name: v for name, v in content.items() if not (name in COMMANDS and isinstance(v, Mapping))}


def parse_set(assignments: Sequence[str]) -> JsonDict:
    """Parse `fedabml.lam=0.1`, `rounds=20`, ... into nested keys. A value that is not TOML is taken as a word."""
    result: JsonDict = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) > 2 or not all(parts):
            example = "such as fedabml.lam=0.1"
            raise InputError(f"--set needs NAME=VALUE or TABLE.NAME=VALUE, {example}; it is '{assignment}'.")
        try:
            parsed = parse_toml(f"value = {text}", f"--set {name}")
        except tomllib.TOMLDecodeError:
            parsed = {}
        table = result.setdefault(parts[0], {}) if len(parts) == 2 else result
        if not isinstance(table, dict):
            raise InputError(f"--set {assignment}: '{parts[0]}' already has a value, so it is not a table.")
        table[parts[-1]] = parsed["value"] if parsed.keys() == {"value"} else text.strip()
    return result


def names(registry: str) -> tuple[str, ...]:
    """Return the names in a registry: algorithm, model or dataset."""
    return tuple({"algorithm": REGISTRY, "model": (*NETWORK_NAMES, *USER_NETWORKS), "dataset": SOURCES}[registry])


def command_line_name(name: str) -> str:
    """Return the name of an algorithm or network as the command line takes it: that of a user's own has its file."""
    entry = REGISTRY.get(name)
    code = entry.code if entry else USER_NETWORKS.get(name)
    return code.typed if code else name


def _way(registry: str, name: str) -> str:
    """Return the end of the message that refuses a name: how to name code of one's own, or the nearest known name."""
    if registry == "dataset" or not (is_user_code(name) or name[:1].isupper()):
        return nearest(name, names(registry))
    file = name if is_user_code(name) else f"FILE.py:{name}"
    several = " (of compare and tune: --algorithms)" if registry == "algorithm" else ""
    return f" Code in your own file runs only if a flag of this command names it: --{registry} {file}{several}."


def _hyperparameters(algorithm: str) -> set[str]:
    """Return the names of an algorithm's hyperparameters; none for an unknown algorithm."""
    return {f.name for f in fields(REGISTRY[algorithm].kind)} if algorithm in REGISTRY else set()


def _check_hyper(algorithm: str, table: Mapping[str, Any]) -> None:
    """Refuse names that are no hyperparameters of an algorithm."""
    hyperparameters = _hyperparameters(algorithm)
    for name in table:
        if name not in hyperparameters:
            raise InputError(f"Algorithm '{algorithm}' has no hyperparameter '{name}'.{nearest(name, hyperparameters)}")


_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a word or text"),
    "JsonDict": (Mapping, "a table"),
}


def _checked(name: str, hint: str, value: Any, meta: Mapping[str, Any]) -> Any:
    """Return the value in the key's type. Raises InputError for a value of another type or range."""
    base = hint.removesuffix(" | None")
    if base != hint and (value in (None, "none") or (base == "bool" and value == "auto")):
        return None
    types, description = _TYPES[base]
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise InputError(f"'{name}' ({meta['doc']}) is beyond {MAX_INTEGER}, the largest number that fedabml accepts.")
    fits = isinstance(value, types) and (base == "bool" or not isinstance(value, bool))
    if not fits or (base == "float" and not math.isfinite(value)) or (base == "str" and "\0" in value):
        raise InputError(f"'{name}' ({meta['doc']}) must be {description}; it is {quoted(value)}.")
    if meta.get("choices") and value not in meta["choices"]:
        raise InputError(f"'{name}' is '{value}'.{nearest(value, meta['choices'])}")
    return float(value) if base == "float" else value
