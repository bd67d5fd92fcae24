"""The settings of the paper's tables, and each algorithm's configuration in them under the two protocols.

`paper` has the paper's settings for every method. `tuned` gives every method the same number of trials on validation
data (`fedabml.experiments.tune`) and its best there, or takes what such a search has chosen before. With `quick` both
are the same, smaller: few rounds, and by default the embedded digits. The paper has no settings for those, so under
`paper` every method has the library's defaults there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...data.catalogue import EMBEDDED
from ...errors import InputError, nearest
from ...files.limits import MAX_TOML
from ...files.paths import read_text, write
from ...runs import presets
from ...runs.config import RunConfig, Table, names, read_toml
from ...runs.prepare import prepare
from ..compare import configs
from ..ledger import Unfinished
from ..search_space import own_grid, read_grid, searchable
from ..study import Study, dataset, federation
from ..tune import nothing_left, of_earlier_version, tune
from . import numbers
from .experiment import Desk

SHARE = 0.2  # of every client's training data that searches hold out
SETTING = ("dataset", "clients", "classes_per_client", "model", "partition")  # what makes a setting a column's


@dataclass(frozen=True)
class Column:
    """A setting: its heading, dataset, clients, classes of each, and network."""

    title: str
    dataset: str
    clients: int
    classes: int
    model: str

    def setting(self, quick: bool) -> Table:
        """The keys of a run."""
        keys = {"dataset": self.dataset, "clients": self.clients, "classes_per_client": self.classes}
        keys |= {"model": self.model, "rounds": 100, "participation": 0.1, "epochs": 5, "batch_size": 50}
        if self.dataset in EMBEDDED:
            keys |= {"participation": 0.25} | ({"rounds": 20} if quick else {})
        elif quick:
            keys |= {"rounds": 10, "epochs": 2, "participation": max(0.1, 5 / self.clients), "batch_size": 20}
        return keys


COLUMNS = {
    "cifar10-2": Column("CIFAR-10 (100,2)", "cifar10", 100, 2, "cnn"),
    "cifar10-5": Column("CIFAR-10 (100,5)", "cifar10", 100, 5, "cnn"),
    "cifar100-5": Column("CIFAR-100 (100,5), CNN", "cifar100", 100, 5, "cnn100"),
    "cifar100-20": Column("CIFAR-100 (100,20), CNN", "cifar100", 100, 20, "cnn100"),
    "emnist": Column("EMNIST (150,3)", "emnist", 150, 3, "mlp"),
    "fashionmnist": Column("FashionMNIST (200,2)", "fashionmnist", 200, 2, "mlr"),
    "cifar100-5-resnet": Column("CIFAR-100 (100,5), ResNet-18", "cifar100", 100, 5, "resnet18"),
    "cifar100-20-resnet": Column("CIFAR-100 (100,20), ResNet-18", "cifar100", 100, 20, "resnet18"),
    "mnist": Column("MNIST (200,2)", "mnist", 200, 2, "mlr"),
    "digits": Column("digits (40,5)", "digits-few", 40, 5, "mlp"),
}


@dataclass(frozen=True)
class Search:
    """What is searched in a column: on whose data, by whose scores, and a grid. Other than plain, it has a mark."""

    mark: str = ""
    study: Study | None = None
    values: Table = field(default_factory=dict)


QUICK = ("digits",)  # where a quick version is not told a column


def check(asked: Sequence[str], algorithms: Sequence[str]) -> None:
    """Refuses columns and algorithms that there are not, before anything is done."""
    systems = (*names("algorithm"), *(name + numbers.LABELS for name in ("fedavg", "fedabml")))
    for what, words, known in (("column", asked, tuple(COLUMNS)), ("algorithm", algorithms, systems)):
        for word in words:
            if word not in known:
                raise InputError(f"There is no {what} '{word}'.{nearest(word, known)}")


def check_grid(words: Sequence[str], algorithms: Sequence[str]) -> None:
    """Refuses a grid (`NAME=A,B,C`, `ALGORITHM.NAME=A,B,C`) with values that none of the algorithms would search."""
    values, plain = read_grid(words), [name for name in algorithms if not name.endswith(numbers.LABELS)]
    hyper = {each for name in plain for each in searchable(name)}
    for name, own in values.items():
        if name not in (known := plain if isinstance(own, dict) else sorted(hyper)):
            raise InputError(f"The grid has values for '{name}', which no search has.{nearest(name, known)}")
    for name in plain:
        own_grid(name, values)


def settings(chosen: Sequence[str | Path]) -> dict[str, str]:
    """By column, what files of chosen settings (a search's tuned.toml) say; all of it must be sound."""
    found: dict[str, str] = {}
    for file in chosen:
        told = read_toml(file)
        tables = [name for name, value in told.items() if isinstance(value, dict) and name != "model_options"]
        if not tables:
            raise InputError(f"'{file}' has settings of no algorithm.")
        try:
            RunConfig.of({k: v for k, v in told.items() if k not in tables})
            for each in tables:
                if each not in names("algorithm"):
                    raise InputError(f"there is no algorithm '{each}'.{nearest(each, names('algorithm'))}")
                configs([each], {each: told[each]})[each].algorithm_object()
        except InputError as error:
            raise InputError(f"'{file}': {error}") from error
        name = next((name for name, column in COLUMNS.items() if _is_of(told, column)), None)
        if name is None:
            words = ", ".join(f"{key} {told[key]}" for key in SETTING if key in told)
            raise InputError(f"'{file}' has settings of no column: {words}.")
        if name in found:
            raise InputError(f"'{file}' is the second file of settings of {name}: give one for each column.")
        found[name] = read_text(file, MAX_TOML)
    return found


def keep(chosen: Mapping[str, str], folder: Path) -> None:
    """Lays chosen settings into the folder of searches, where they are found again."""
    for name, text in chosen.items():
        kept = folder / f"{name}.toml"
        if kept.exists() and read_text(kept, MAX_TOML) != text:
            raise InputError(f"'{kept}' has other settings of {name} than those given now. Give another --out.")
        write(kept, text)


def _is_of(told: Table, column: Column) -> bool:
    own = column.setting(quick=False)
    return all(told.get(key, getattr(RunConfig, key)) == own.get(key, getattr(RunConfig, key)) for key in SETTING)


def columns(desk: Desk, usual: Sequence[str]) -> Iterator[tuple[str, Column]]:
    """The columns asked for whose data are here; of others it is noted how to get them."""
    asked, missing = tuple(dict.fromkeys(desk.ask.columns or (QUICK if desk.ask.quick else usual))), {}
    for name in asked:
        try:
            dataset(COLUMNS[name].dataset, desk.ask.machine.get("data_dir"))
        except InputError as error:
            missing[name] = f"{COLUMNS[name].title} is left out. {error}"
    if len(missing) == len(asked):
        raise InputError(missing[asked[0]])
    for name in asked:
        if name in missing:
            desk.note(missing[name])
        else:
            yield name, COLUMNS[name]


def rows(desk: Desk, column: str, algorithms: Sequence[str], search: Search | None = None) -> dict[str, RunConfig]:
    """A configuration per algorithm, in a column and under the protocol; those that cannot run there are noted.

    `search` is for an experiment that tunes for itself, not for the column's whole federation.
    """
    known, ask = COLUMNS[column], desk.ask
    wanted = [name for name in ask.algorithms or algorithms if not name.endswith(numbers.LABELS)]
    stated = ask.protocol == "paper" and known.dataset not in EMBEDDED
    if stated:
        wanted = [name for name in wanted if name != "fedabml-plain"]  # there fedabml is the paper's own
    keys = {"dtype": ask.dtype} | ask.machine | known.setting(ask.quick)
    found = configs(wanted, *([presets.layer("paper", known.dataset)] if stated else []), keys)
    fed = federation(next(iter(found.values())))
    for name, config in list(found.items()):
        try:
            prepare(fed, config.model, config.algorithm_object(), **config.train_options(fed))
        except InputError as error:
            desk.note(f"{known.title}: {name} cannot run. {error}")
            del found[name]
    return found if ask.protocol == "paper" else _tuned(desk, column, found, search or Search())


def lent(desk: Desk, found: dict[str, RunConfig], whose: Sequence[str]) -> dict[str, RunConfig]:
    """The same and, with their own settings, some of them with the label level, too: fedavg+labels for fedavg-ft.

    Where algorithms are named, so must these be, beside the ones that they are made of.
    """
    more = {}
    for name in whose:
        level = name.removesuffix("-ft") + numbers.LABELS
        has_level = name in found and found[name].algorithm_object().label_prior == "dirichlet"
        if name in found and not has_level and (not desk.ask.algorithms or level in desk.ask.algorithms):
            more[level] = found[name].with_changes(hyper=found[name].hyper | {"label_prior": "dirichlet"})
    return found | more


def _tuned(desk: Desk, column: str, plain: dict[str, RunConfig], search: Search) -> dict[str, RunConfig]:
    """The same with the best of each algorithm's trials. Every algorithm has its own search, which others may share.

    Those whose settings were chosen before (`keep`) are not searched again.
    """
    kept, found, trials = desk.tuning / f"{column}.toml", {}, desk.ask.budget
    values = read_grid(desk.ask.grid)
    chosen = read_toml(kept) if kept.exists() else {}
    if before := [name for name in plain if name in chosen]:
        desk.note(f"{COLUMNS[column].title}: settings of {', '.join(before)} were chosen before ('{kept}').")
    for name, config in plain.items():
        if name in chosen:
            found[name] = config.with_changes(hyper=configs([name], {name: chosen[name]})[name].hyper)
            continue
        folder, held_out = desk.tuning / (column + search.mark) / name, config.with_changes(validation=SHARE, hyper={})
        if of_earlier_version(folder) and (folder / "tuned.toml").is_file():  # finished, and not to be repeated
            table = read_toml(folder / "tuned.toml")
            if name in table:
                found[name] = config.with_changes(hyper=configs([name], {name: table[name]})[name].hyper)
            continue
        try:
            tuned = tune(
                held_out,
                [name],
                folder,
                trials=trials,
                seeds=(desk.ask.searched_with,),
                batch=min(8, trials),
                values={**search.values, **own_grid(name, values)},
                study=search.study,
                resume=(folder / "tune.json").exists(),
                finished=desk.finished,
                closed=desk.way != "whole",
                **desk.hear.search(held_out),
            )
        except Unfinished as error:
            if desk.way == "as it is":
                raise
            said = f"{COLUMNS[column].title}: the settings of {name} are not searched"
            if desk.way == "part":
                raise Unfinished(
                    f"{said}, and parts do not share searches. Search first (fedabml tune) and give --chosen."
                ) from error
            desk.note(f"{said} yet.")
            continue
        best = tuned.best(name)
        if best:
            found[name] = config.with_changes(hyper=best[0].hyper)
        else:
            desk.note(f"{COLUMNS[column].title}: of {name} {nothing_left(tuned.trials[name])}.")
    return found
