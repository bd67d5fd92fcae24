"""`fedabml data`: list datasets, download them, and inspect how data are divided among clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError, nearest
from ..runs.config import RunConfig, names, saved_config
from .console import downloads, print_line, table
from .options import DATA, Config, command, file_keys, run_flags

if TYPE_CHECKING:
    from ..data import Federation

app = typer.Typer(
    no_args_is_help=True, help="List datasets, download them, and inspect how data are divided among clients."
)
FOLDER = {DATA: ("data_dir",)}
DIVISION = {
    DATA: (
        *("client_column", "target_column", "task", "test_share", "partition", "clients", "classes_per_client"),
        *("distinct", "dirichlet_alpha", "seed", "validation", "drop_small", "data_dir"),
    )
}


@app.command("list")
@command(FOLDER)
def list_datasets(ctx: typer.Context) -> None:
    """List the datasets, and show which of them are on this machine.

    Your own data need not be listed: use `fedabml train --data FOLDER_OR_TABLE`.
    """
    from ..data import datasets

    rows = [
        (d["name"], d["classes"], f"{d['train']:,}", f"{d['test']:,}", "×".join(map(str, d["shape"])), _place(d))
        for d in datasets(run_flags(ctx).get("data_dir"))
    ]
    table(("name", "classes", "training", "test", "image", "where"), rows)


def _place(d: dict[str, object]) -> str:
    from ..data.catalogue import EMBEDDED

    if d["name"] in EMBEDDED:
        return "comes with fedabml"
    return str(d["path"]) if d["present"] else f"not here: fedabml data get {d['name']}"


@app.command()
@command(FOLDER, name=names("dataset"))
def get(ctx: typer.Context, name: list[str] | None = None, *, config: Config = None) -> None:
    """Download datasets from their official sources, and verify their checksums. A broken download is resumed.

    With --config and without NAME, the command downloads the dataset of that configuration.

    Example: `fedabml data get fashionmnist cifar10 --data-dir data`

    Flags:
        name (NAME): Names of datasets.
    """
    from ..data import load
    from ..data.sources import location

    configured = file_keys(ctx).get("dataset")
    wanted = name or ([str(configured)] if configured else [])
    if not wanted:
        raise InputError(
            f"Name a dataset to download, or give a --config that names one.{nearest('', names('dataset'))}"
        )
    data_dir = run_flags(ctx).get("data_dir")
    for each in wanted:
        with downloads(each) as on_download:
            load(each, data_dir, progress=on_download)
        print_line(f"{each}: {location(each, data_dir)}")


@app.command()
@command(DIVISION)
def inspect(
    ctx: typer.Context,
    what: str | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    show: Annotated[int, typer.Option(help="Number of clients to list.", min=0)] = 10,
    config: Config = None,
) -> None:
    """Show how data are divided among clients, and check them as training would.

    With --config and without WHAT, the command inspects the data of that configuration.

    Examples:

    - `fedabml data inspect digits-few --clients 40 --classes-per-client 5`

    - `fedabml data inspect patients.csv --client-column hospital --target-column outcome --out picture`

    - `fedabml data inspect runs/digits-few-fedabml-0`

    Flags:
        what (WHAT): A dataset's name, a folder of .npz files, a table, or a run's folder.
        out: Write manifest.json and partition.svg (a heat map) into this folder.
    """
    from ..data import save_manifest
    from ..files.paths import check_new, folder_lock
    from ..report import save_heat_map

    if out:
        check_new(out / "manifest.json", out / "partition.svg", force=force)
    flags, keys = run_flags(ctx), file_keys(ctx)
    others = {name: value for name, value in keys.items() if name not in ("dataset", "data")}
    if what is None:
        if not (keys.get("dataset") or keys.get("data")):
            raise InputError(
                "Name what to inspect: a dataset, a folder, a table or a run; or give a --config that names data."
            )
        plan = RunConfig.of(keys, flags)
    elif (Path(what) / "config.json").is_file():
        plan = RunConfig.of(saved_config(Path(what))[0].to_dict(everything=True), others, flags)
    else:
        named = what in names("dataset") or not (Path(what).suffix or "/" in what or Path(what).exists())
        plan = RunConfig.of(others, {"dataset" if named else "data": what}, flags)
    with downloads(what or plan.dataset or "") as on_download:
        fed = plan.federation(on_download)
    overview(fed, show)
    if out:
        with folder_lock(out):
            save_manifest(fed, out / "manifest.json")
            save_heat_map(fed, out / "partition.svg")
        print_line(f"manifest  {out / 'manifest.json'}")
        print_line(f"heat map  {out / 'partition.svg'}")


def overview(fed: Federation, show: int) -> None:
    """Print a federation as two tables."""
    facts = fed.describe()
    low, middle, high = facts["training_samples_per_client"]
    rows = [
        ("task", fed.task + (f", {fed.classes} classes" if fed.classes else f", {fed.y.shape[1]} target(s)")),
        ("clients", f"{fed.clients}, with {low} to {high} training samples (median {middle:g})"),
        ("samples", ", ".join(f"{count:,} {split}" for split, count in facts["samples"].items())),
        ("one sample", f"{facts['dtype']} of shape {tuple(facts['sample_shape'])}"),
    ]
    if fed.classes:
        rows.append(("classes per client", f"{facts['classes_per_client']:.2f} on average"))
    table(("", ""), rows, title=fed.dataset)
    counts = fed.label_counts("train")
    words = [" ".join(f"{c}:{n}" for c, n in enumerate(row) if n) for row in counts[:show]]
    head = ("client", "train", "val", "test", *(("training samples by class",) if fed.classes else ()))
    sizes = [
        [int(fed.rows(split).counts[i]) for split in ("train", "val", "test")] for i in range(min(show, fed.clients))
    ]
    table(head, [(fed.names[i], *own, *((words[i],) if fed.classes else ())) for i, own in enumerate(sizes)])
    if fed.clients > show:
        print_line(f"and {fed.clients - show} more clients (--show)")
