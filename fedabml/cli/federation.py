"""The commands of `fedabml federation` train between parties, over Flower. This file imports neither Flower nor
cryptography."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from ..arguments import split_words
from ..errors import InputError
from ..runs.config import names, parse_set
from .console import print_line, print_paragraph
from .federation_personalize import personalize
from .options import Command, Group, command

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train between real parties, over Flower. First `init` and `up` at the operator, then `join` at every site.",
)
_BAD = ("failed", "gave up")  # states that need the operator's attention


@app.command(cls=Command)
@command(algorithm=names("algorithm"), model=names("model"))
def init(
    folder: Path,
    *,
    host: str,
    sites: str,
    data: Path | None = None,
    schema: Path | None = None,
    target_column: str = "",
    drop_columns: str = "",
    id_column: str = "",
    date_columns: str = "",
    task: str | None = None,
    image_size: int | None = None,
    positive_class: str | None = None,
    name: str | None = None,
    port: int = 8443,
    superlink_port: int = 8180,
    algorithm: str = "fedabml",
    model: str = "mlp",
    rounds: int = 50,
    set: list[str] | None = None,
) -> None:
    """Make everything that a first deployment needs, in a new folder of the operator.

    The folder gets settings (federation.toml), the inputs that every site must have (schema.toml), a certificate
    authority, the server's certificate, the proxy's configuration, and an archive per site. Hand each site its archive
    over a safe channel, because it contains the site's private key.

    The inputs are drafted from --data. Or give --schema with a file that a site has written on its own machine, by
    `fedabml data inspect --data one-site.csv --target-column outcome --schema schema.toml`.

    Read schema.toml before the first start. It lists columns, classes, frequent words, and rounded means and deviations
    of the numbers. Every site receives it.

    Examples:
    - `fedabml federation init trial --host fed.example.org --sites north,south --schema schema.toml`
    - `fedabml federation init trial --host fed.example.org --sites north,south --data one-site.csv --target-column
      outcome`

    Flags:
        folder (DIR): The operator's new folder.
        host (NAME): Name or address by which the sites reach this machine.
        sites (A,B,C): Names of the sites: letters, digits, - and _.
        data (PATH): Data of one site, as an example: a table, an .npz file or a folder. Rows are not copied.
        schema (FILE): The inputs, described by a site: in place of --data.
        target_column (NAME): Table: column to predict.
        drop_columns (A,B): Table: columns to leave out.
        id_column (NAME): Table: column of identifiers, which is never a feature.
        date_columns (A,B): Table: columns with dates.
        task (WORD): classification, regression or multilabel. [default: from the data]
        image_size (N): Images: side in pixels.
        positive_class (NAME): Table, two classes: the one that recall is about. [default: the second by name]
        name (NAME): Name of the federation. [default: the folder's]
        port (N): Port to which sites connect; no other port need be open.
        superlink_port (N): Port of Flower's SuperLink, which only programs on this machine can reach.
        algorithm (NAME): Algorithm; `fedabml algorithms` lists them.
        model (NAME): Network.
        rounds (N): Rounds of communication.
        set (KEY=VALUE): Any key of federation.toml, such as round_timeout=300 or hyper.lr=0.01. Repeatable.
    """
    options: dict[str, Any] = {
        "target_column": target_column,
        "drop_columns": tuple(split_words(drop_columns)),
        "id_column": id_column,
        "date_columns": tuple(split_words(date_columns)),
        "task": task,
        "image_size": image_size,
        "positive_class": positive_class,
    }
    if (data is None) == (schema is None):
        raise InputError("Give the inputs by one of two flags: --data PATH for an example, --schema FILE for a schema.")
    if schema is not None and (given := [name for name, value in options.items() if value]):
        raise InputError(f"--{given[0].replace('_', '-')} belongs to --data. A schema has all of it: edit '{schema}'.")
    settings: dict[str, Any] = {"port": port, "superlink_port": superlink_port, "algorithm": algorithm, "model": model}
    settings |= {"rounds": rounds} | parse_set(set or [])
    sources = {"data": data, "schema_options": options, "schema": schema}
    made = _changes().init(folder, host, split_words(sites), name=name, **sources, **settings)
    print_line(f"settings   {made.settings_file}")
    print_line(f"inputs     {made.schema_file} (read it: every site receives it)")
    for member in made.members():
        print_line(f"archive    {made.archive(member.name)}")
    print_line(f"next       fedabml federation up {folder}")
    _note_too_few_sites(folder)


@app.command(cls=Command)
@command()
def up(folder: Path, *, sites: str = "", foreground: bool = False) -> None:
    """Start a federation: the server, the proxy, a run, and the sites whose data are on this machine.

    A supervisor in the background restarts any process that ends. Sites on other machines join with their archives. The
    first round begins when all sites have joined, or some time after enough of them have (round_timeout, min_replies).

    Examples:
    - `fedabml federation up trial`
    - `fedabml federation up trial --sites north=north.csv,south=south.csv`

    Flags:
        folder (DIR): The operator's folder.
        sites (NAME=PATH,...): Sites to run on this machine, with the paths of their data. Later starts include them.
        foreground: Stay in the foreground, as systemd requires. Ctrl-C ends the federation.
    """
    from ..federation import operate

    operate.up(folder, _paths(sites), foreground=foreground)
    if not foreground:
        print_line(f"running    fedabml federation status {folder} --watch")


@app.command(cls=Command)
@command()
def join(
    archive: Path, *, data: Path, folder: Path | None = None, no_start: bool = False, foreground: bool = False
) -> None:
    """Join a federation as a site, with the archive from its operator and your own data.

    The data stay on this machine; updates of the model leave it. The file site.toml in the site's folder decides what
    else may leave: by default, nothing. The site connects to the operator's server and needs no open port.

    Example: `fedabml federation join north.tar.gz --data north.csv`

    Flags:
        archive (FILE): The archive of this site.
        data (PATH): This site's data: a table, an .npz file or a folder.
        folder (DIR): The site's folder. [default: the site's name]
        no_start: Make the folder only, for a site that systemd or a container starts with `resume`.
        foreground: Stay in the foreground, as systemd requires. Ctrl-C ends the site.
    """
    from ..federation import operate

    if no_start and foreground:
        raise InputError("--no-start starts nothing, and --foreground says how to start: give one of them.")
    site = operate.join(archive, data, folder, foreground=foreground, start_now=not no_start)
    if no_start:
        print_line(f"site       {_short(site.path)}")
        print_line(f"next       fedabml federation resume {_short(site.path)}")
    elif not foreground:
        print_line(f"running    fedabml federation status {_short(site.path)} --watch")
        print_line(f"later      fedabml federation personalize {_short(site.path)}")


@app.command(cls=Command)
@command()
def status(
    folder: Path, *, watch: bool = False, every: float = 2.0, json: bool = False, page: Path | None = None
) -> None:
    """Show the progress of a federation: rounds, sites, losses, rejected replies, traffic and the time left.

    The exit code is 1 if the federation has failed or given up. In a site's folder the command shows that site.

    Example: `fedabml federation status trial --watch`

    Flags:
        folder (DIR): The operator's folder, or a site's.
        watch: Refresh the display until the federation has finished, failed or stopped, or until Ctrl-C.
        every (SECONDS): Time between two refreshes.
        json: Print JSON, for other programs.
        page (FILE): Also write the status as an HTML page.
    """
    from ..federation.operate import folder_of
    from .federation_status import show

    if not every > 0:
        raise InputError(f"--every is {every}; it must be above 0.")
    found = folder_of(folder)
    while True:
        state = show(found, as_json=json, page=page, clear=watch)
        if not watch or state in (*_BAD, "finished", "stopped"):
            break
        time.sleep(every)
    if state in _BAD:
        raise typer.Exit(1)


@app.command(cls=Command)
@command()
def resume(folder: Path, *, from_round: int | None = None, foreground: bool = False) -> None:
    """Start a federation or a site again: after `down`, after a crash of the machine, or after it has given up.

    A federation continues with the round after the last one that it saved. With --from-round it goes back to an earlier
    state, for example because a false reply has spoilt the later ones. These are moved to state/aside-TIME.

    Examples:
    - `fedabml federation resume trial`
    - `fedabml federation resume trial --from-round 32`

    Flags:
        folder (DIR): The operator's folder, or a site's.
        from_round (N): Go back to the state after this round. If it was not kept, the error lists the rounds that were.
        foreground: Stay in the foreground, as systemd requires. Ctrl-C ends all processes.
    """
    from ..federation import operate

    operate.resume(folder, from_round=from_round, foreground=foreground)
    if not foreground:
        print_line(f"running    fedabml federation status {folder} --watch")


@app.command(cls=Command)
@command()
def down(folder: Path) -> None:
    """End all processes of a federation or a site on this machine. Training can continue with `resume`.

    Example: `fedabml federation down trial`

    Flags:
        folder (DIR): The operator's folder, or a site's.
    """
    from ..federation import operate

    operate.down(folder)
    print_line(f"stopped    to go on: fedabml federation resume {folder}")


@app.command("add-site", cls=Command)
@command()
def add_site(folder: Path, name: str) -> None:
    """Add a site to a federation and write the archive with which the site joins. The federation may be running.

    Example: `fedabml federation add-site trial west`

    Flags:
        folder (DIR): The operator's folder.
        name (NAME): The new site's name: letters, digits, - and _.
    """
    print_line(f"archive    {_changes().add_site(folder, name)}")


@app.command("remove-site", cls=Command)
@command()
def remove_site(folder: Path, name: str) -> None:
    """Remove a site from a federation, which may be running. The server then refuses the site's key.

    What the site has contributed to earlier rounds stays in the prior.

    Example: `fedabml federation remove-site trial west`

    Flags:
        folder (DIR): The operator's folder.
        name (NAME): The site's name.
    """
    _changes().remove_site(folder, name)
    print_line(f"removed    {name}")
    _note_too_few_sites(folder)
    if (folder / "local" / name).is_dir():
        print_paragraph(f"Its processes on this machine end with the next start: fedabml federation resume {folder}")


@app.command(cls=Command)
@command()
def renew(folder: Path) -> None:
    """Renew the server's certificate for the host in federation.toml. Sites need no new archives.

    Example: `fedabml federation renew trial`

    Flags:
        folder (DIR): The operator's folder.
    """
    from ..federation import operate

    made = _changes().renew(folder)
    print_line(f"certificate   {made.server_certificate}")
    if operate.is_running(made):
        print_paragraph(f"The server uses it after a restart: fedabml federation resume {folder}")


def _note_too_few_sites(folder: Path) -> None:
    from ..federation.folders import ServerFolder
    from ..federation.operate import too_few_sites

    if note := too_few_sites(ServerFolder(folder)):
        print_paragraph(f"Note: {note}")


def _changes() -> ModuleType:
    """Return the functions that make and change an operator's folder. Raises InputError unless Flower is installed."""
    from ..federation import operate

    operate.require_extra()
    from ..federation import init as changes

    return changes


def _paths(words: str) -> dict[str, Path]:
    """Return the paths by site name from a text such as `a=PATH,b=PATH`."""
    result: dict[str, Path] = {}
    for word in split_words(words):
        name, equals, path = (part.strip() for part in word.partition("="))
        if not (name and equals and path) or name in result:
            raise InputError(f"--sites needs NAME=PATH for every site, once, separated by commas; it has '{word}'.")
        result[name] = Path(path)
    return result


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


app.command(cls=Command)(personalize)
