"""`fedabml data`: list datasets, download them, and inspect how data are divided among clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..arguments import checked_integer
from ..errors import InputError, nearest
from ..runs.config import RunConfig, is_table, names, saved_config
from .console import downloads, print_line, print_paragraph, table
from .doctor import client_sizes
from .options import DATA, Command, Config, Group, command, file_keys, run_flags

if TYPE_CHECKING:
    from ..data import Federation

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="List datasets, download them, and inspect how data are divided among clients.",
)
COLUMNS = 4  # of a table, side by side for the first clients
FOLDER = {DATA: ("data_dir",)}
DIVISION = {
    DATA: (
        *("client_column", "target_column", "drop_columns", "id_column", "date_columns", "split_by"),
        *("positive_class", "task", "test_share", "image_size", "partition", "clients", "classes_per_client"),
        *("distinct", "dirichlet_alpha", "seed", "validation", "drop_small", "data_dir"),
    )
}
# What describes one site.
SCHEMA = ("target_column", "drop_columns", "id_column", "date_columns", "task", "image_size", "positive_class")
NO_SITE = (*(key for key in DIVISION[DATA] if key not in (*SCHEMA, "seed", "data_dir")), "out")


@app.command("list", cls=Command)
@command(FOLDER)
def list_datasets(ctx: typer.Context) -> None:
    """List the datasets, and show which of them are on this machine.

    Your own data need not be listed: use `fedabml train --data FOLDER_OR_TABLE`.
    """
    from ..data import datasets
    from ..data.catalogue import EMBEDDED

    rows = []
    for d in datasets(ctx.params["data_dir"]):
        location = str(d["path"]) if d["present"] else f"not here: fedabml data get {d['name']}"
        location = "comes with fedabml" if d["name"] in EMBEDDED else location
        shape = "×".join(map(str, d["shape"]))
        rows.append((d["name"], d["classes"], f"{d['train']:,}", f"{d['test']:,}", shape, location))
    table(("name", "classes", "training", "test", "image", "where"), rows)


@app.command(cls=Command)
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
    data_dir = ctx.params["data_dir"]
    for dataset in wanted:
        with downloads(dataset) as on_download:
            load(dataset, data_dir, progress=on_download)
        print_line(f"{dataset}: {location(dataset, data_dir)}")


@app.command(cls=Command)
@command(DIVISION)
def inspect(
    ctx: typer.Context,
    what: str | None = None,
    *,
    data: str | None = None,
    schema: Path | None = None,
    out: Path | None = None,
    force: bool = False,
    show: int = 10,
    config: Config = None,
) -> None:
    """Show how data are divided among clients, and check them as training would.

    For a table, the command first shows its columns, their values at every client, and warnings: a column that tells
    the target by itself, clients that share rows or IDs, and a client whose numbers seem to have another unit. For
    folders of images and .npz files it warns of samples that clients share, that are in the training and the test data,
    or that have several labels.

    With --config and without WHAT, the command inspects the data of that configuration.

    With --schema, the command describes the data of one site for `fedabml federation init --schema`. The file holds no
    row: it lists columns, classes, words that at least five rows share, and rounded means and deviations. Read it, and
    hand it to the operator in place of data.

    Examples:
    - `fedabml data inspect digits-few --clients 40 --classes-per-client 5`
    - `fedabml data inspect patients.csv --client-column hospital --target-column outcome --out picture`
    - `fedabml data inspect runs/digits-few-fedabml-0`
    - `fedabml data inspect --data one-site.csv --target-column outcome --schema schema.toml`

    Flags:
        what (WHAT): A dataset's name, a folder of .npz files or images, a table, or a run's folder.
        data (PATH): The same as WHAT, but never a dataset's name.
        schema (FILE): Write only the schema of these data, which are those of one site, for a federation's operator.
        out: Write manifest.json, partition.svg (a heat map) and, for a table, inspection.json and inspection.html.
        show: Number of clients to list.
    """
    from ..data import save_manifest
    from ..files.paths import check_new, folder_lock
    from ..report import save_heat_map

    checked_integer(show, "--show", 0)
    keys, base = file_keys(ctx), {}
    if what is not None and data is not None:
        raise InputError(f"'{what}' and --data '{data}' both name data. Give one of them.")
    if data is not None:
        keys.pop("dataset", None)
    elif what is None and not (keys.get("dataset") or keys.get("data")):
        raise InputError(
            "Name what to inspect: a dataset, a folder, a table or a run; or give a --config that names data."
        )
    if what is not None:
        keys = {name: value for name, value in keys.items() if name not in ("dataset", "data")}
        if (Path(what) / "config.json").is_file():
            base = saved_config(Path(what))[0].to_dict(everything=True)
        else:
            named = what in names("dataset") or not (Path(what).suffix or "/" in what or Path(what).exists())
            base = {"dataset" if named else "data": what}
    plan = RunConfig.of(base, keys, run_flags(ctx))
    if schema is not None:
        _save_schema(ctx, plan, schema, force)
        return
    looked = is_table(plan.data)
    names_out = ["manifest.json", "partition.svg", *(["inspection.json", "inspection.html"] if looked else [])]
    files = [out / name for name in names_out] if out else []
    check_new(*files, force=force)
    if looked:
        _inspect_table(plan, files[2:], show)
    with downloads(what or plan.dataset or "") as on_download:
        fed = plan.federation(on_download)
    overview(fed, show)
    if plan.data and not looked:
        from ..evaluation.duplicates import duplicate_warnings

        print_warnings(duplicate_warnings(fed))
    if out:
        with folder_lock(out):
            save_manifest(fed, files[0])
            save_heat_map(fed, files[1])
        print_line(f"manifest  {files[0]}")
        print_line(f"heat map  {files[1]}")


def _save_schema(ctx: typer.Context, plan: RunConfig, path: Path, force: bool) -> None:
    """Draft the schema of one site's data and write it."""
    from ..federation import schema
    from ..files.paths import check_new

    if foreign := [key for key in NO_SITE if ctx.params.get(key) is not None]:
        flag = foreign[0].replace("_", "-")
        raise InputError(f"--schema describes the data of one site and divides nothing. Leave out --{flag}.")
    if plan.data is None:
        raise InputError("--schema describes your own data. Name a table, an .npz file or a folder of images.")
    check_new(path, force=force)
    options = {key: value for key in SCHEMA if (value := getattr(plan, key)) is not None}
    drafted = schema.draft(plan.data, **options)
    drafted.save(path)
    print_line(f"schema    {path} (read it: the operator and every site receive it)")


def _inspect_table(plan: RunConfig, files: list[Path], show: int) -> None:
    """Show the columns of a table and the warnings about it, also if training would refuse it; write both `files`."""
    from ..evaluation.inspection import inspect_table
    from ..files.paths import folder_lock
    from ..files.sealed import write_json
    from ..report import save
    from ..report.inspection_page import render_inspection

    inspection = inspect_table(**plan.table_columns(), task=plan.task)
    rows = [(c.name, c.use, c.kind, f"{c.total.gaps:.1%}", c.total.without_gaps.text) for c in inspection.columns]
    table(("column", "use", "kind", "gaps", "values"), rows, title=f"{inspection.dataset}: columns")
    held = [column for column in inspection.columns if column.use != "client"]
    for first in range(0, len(held), COLUMNS) if show else ():
        some = held[first : first + COLUMNS]
        cells = (column.clients[:show] for column in some)
        lines = zip(inspection.clients[:show], *([cell.text for cell in column] for column in cells), strict=True)
        table(("client", *(column.name for column in some)), lines)
    print_warnings(inspection.warnings)
    if files:
        with folder_lock(files[0].parent):
            write_json(files[0], inspection.to_json())
            save(render_inspection(inspection), files[1])
        print_line(f"columns   {files[0]}")
        print_line(f"page      {files[1]}")
    print_line()


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings about data, a paragraph each, and their number."""
    for text in warnings:
        print_paragraph(f"Warning: {text}")
    print_line(f"warnings  {len(warnings)}")


def overview(fed: Federation, show: int) -> None:
    """Print a federation as two tables; the second one has the first `show` clients."""
    description = fed.describe()
    rows = [
        ("task", f"{fed.task}, {fed.outcomes}"),
        ("clients", client_sizes(fed)),
        ("samples", ", ".join(f"{count:,} {split}" for split, count in description["samples"].items())),
        ("one sample", f"{description['dtype']} of shape {tuple(description['sample_shape'])}"),
    ]
    if fed.task == "classification":
        rows.append(("classes per client", f"{description['classes_per_client']:.2f} on average"))
    table(("", ""), rows, title=fed.dataset)
    splits = ("train", "val", "test")
    columns: list[Any] = [fed.names, *(fed.rows(split).counts for split in splits)]
    if fed.task == "classification":
        counts = fed.label_counts("train")
        columns.append([" ".join(f"{c}:{n}" for c, n in zip(fed.class_names, row, strict=True) if n) for row in counts])
    head = ("client", *splits, *(("training samples by class",) if fed.task == "classification" else ()))
    table(head, zip(*(column[:show] for column in columns), strict=True))
    if fed.clients > show:
        print_line(f"and {fed.clients - show} more clients (--show)")
