"""Operate a federation: start it, join it, resume it after a stop or a crash, and end it.

An operator's folder has one supervisor for the SuperLink, the proxy, the executor of the ServerApp, the keeper of the
run and the sites on this machine. A site's folder elsewhere has one for its SuperNode and its worker. All functions
accept either kind of folder where both make sense.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from signal import SIGKILL, SIGTERM

from ..errors import InputError
from ..files.paths import folder_lock
from . import pids, rewind
from .events import read_tally
from .folders import ServerFolder, SiteFolder
from .logs import log_of, one_line, tail
from .run_keeper import REGISTERED_FILE, RUN_FILE
from .supervisor import PIDS, SUPERVISOR, Backoff, Process, Supervisor, supervisor_of

EXTRA = "A federation needs Flower and cryptography: pip install 'fedabml[flower]'."
START, END = 600.0, 180.0  # seconds for all processes to start, and for all to end
_NODE = Backoff(first=2.0, least_after_crash=65.0, most=130.0)  # the SuperLink refuses a SuperNode for 60 s
_FROZEN = 120.0  # seconds in which a process that polls several times a minute does nothing at all
_HURRIED = 4  # quick failures of one process after which the start fails
Folder = ServerFolder | SiteFolder
# The background process has no terminal, and no parent that would have to wait for it.
_DETACH = (
    "import os, sys\n"
    "pid = os.fork()\n"
    "if pid: print(pid); sys.exit(0)\n"
    "os.setsid()\n"
    "os.dup2(2, 1)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def require_extra() -> None:
    """Raise InputError unless Flower and cryptography are installed."""
    if any(importlib.util.find_spec(name) is None for name in ("flwr", "cryptography")):
        raise InputError(EXTRA)


def folder_of(path: str | os.PathLike[str]) -> Folder:
    """Return the operator's or the site's folder at a path. Raises InputError if it is neither."""
    server, site = ServerFolder(path), SiteFolder(path)
    if site.settings_file.is_file():
        return site
    if server.settings_file.is_file():
        return server
    raise InputError(
        f"'{path}' is neither a federation's folder (federation.toml) nor a site's (site.toml). Make one with "
        "`fedabml federation init` or `fedabml federation join`."
    )


# -- the processes --------------------------------------------------------------------------------------------------
def server_processes(folder: ServerFolder) -> list[Process]:
    """Return the processes of the operator's machine, in the order of their start: server first, local sites last."""
    from . import proxy
    from .flower import commands

    env, logs, settings = commands.environment(folder), folder.run, folder.settings
    keeper = [sys.executable, "-m", "fedabml.federation.run_keeper", str(folder.path)]
    started = time.time()

    def registered() -> bool:
        return (folder.run / REGISTERED_FILE).stat().st_mtime >= started

    result = [
        Process(
            *("superlink", commands.superlink_command(folder), logs / "superlink.log"),
            commands.message_environment(folder),
            health=health_check(folder, settings.superlink_port),
        ),
        Process(
            *("proxy", proxy.command(folder), logs / "proxy.log"),
            health=health_check(folder, settings.port),
            needs=("superlink",),
        ),
        Process(
            *("executor", commands.server_executor_command(folder), logs / "executor.log", env),
            needs=("superlink",),
            frozen=_FROZEN,
        ),
        # Sites wait for the keeper to register them: a SuperNode that is refused would pause for a minute.
        Process(
            *("runs", keeper, logs / "runs.log", env),
            health=registered,
            needs=("superlink", "executor"),
            frozen=_FROZEN,
        ),
    ]
    for site in local_sites(folder):
        result += site_processes(site, f"{site.path.name}-", needs=("proxy", "runs"))
    return result


def site_processes(folder: SiteFolder, prefix: str = "", needs: tuple[str, ...] = ()) -> list[Process]:
    """Return the processes of one site; `prefix` distinguishes several sites under one supervisor."""
    from .flower import commands

    env, node = commands.environment(folder), f"{prefix}supernode"
    return [
        Process(
            *(node, commands.supernode_command(folder), folder.run / "supernode.log"),
            *(commands.message_environment(folder), _NODE),
            needs=needs,
            frozen=_FROZEN,
        ),
        Process(
            *(f"{prefix}worker", commands.worker_command(folder), folder.run / "worker.log", env),
            needs=(node,),
            frozen=_FROZEN,
            grace=5.0,
        ),
    ]


def local_sites(folder: ServerFolder) -> list[SiteFolder]:
    """Return the sites that this machine runs itself: those under `local/`, unless they were removed."""
    members = {member.name for member in folder.members()}
    found = [SiteFolder(path) for path in sorted((folder.path / "local").glob("*")) if path.name in members]
    return [site for site in found if site.settings_file.is_file()]


def health_check(folder: ServerFolder, port: int) -> Callable[[], bool]:
    """Return a check whether a port of this machine answers GET /health over TLS with the federation's certificate.

    The proxy's refusal of this path counts as an answer; a server error (5xx) does not.
    """

    def check() -> bool:
        context = ssl.create_default_context(cafile=str(folder.ca_certificate))
        connection = HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status < 500
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    return check


# -- start and end --------------------------------------------------------------------------------------------------
def up(path: str | os.PathLike[str], sites: Mapping[str, Path] | None = None, *, foreground: bool = False) -> None:
    """Start a federation: the server, the proxy, a run, and the sites whose data are on this machine.

    `sites` maps names of sites on this machine to their data; sites of an earlier call need not be given again. The
    call returns when every process is healthy, or with `foreground` only when the federation has ended.
    """
    require_extra()
    folder = ServerFolder(path).check().check_owner()
    _refuse_running(folder)
    _write_proxy(folder)
    for name, data in (sites or {}).items():
        _make_local_site(folder, name, data)
    for problem in _busy_ports(folder):
        raise InputError(problem)
    if (problem := too_few_sites(folder)) and read_tally(folder).rounds_done < folder.settings.rounds:
        raise InputError(problem)
    start(folder, foreground)


def _write_proxy(folder: ServerFolder) -> None:
    from . import proxy

    proxy.check()
    proxy.write(folder)


def _make_local_site(folder: ServerFolder, name: str, data: Path) -> None:
    """Unpack the archive of a site into `local/NAME`, or change the path of the data of an existing one."""
    members = {member.name for member in folder.members()}
    if name not in members:
        raise InputError(f"The federation has no site '{one_line(name)}'; it has {', '.join(sorted(members))}.")
    set_up_site(folder.archive(name), folder.path / "local" / name, data, folder.schema_file)


def set_up_site(archive: Path, folder: Path, data: Path, schema: Path | None = None) -> SiteFolder:
    """Make a site's folder from its archive, or keep the one that is there, and point it at the site's data.

    The data are opened first. If a schema or a card is known, they are compared with it.
    Raises InputError with the reasons.
    """
    from .archive import unpack
    from .card import Card
    from .schema import Schema
    from .site_data import load, mismatches, open_data

    if not data.exists():
        raise InputError(f"There are no data at '{data}'.")
    open_data(str(data))
    site = unpack(archive, folder, data=data)
    if schema is not None and schema.is_file() and (found := mismatches(site, Schema.load(schema))):
        raise InputError(f"The data of site {site.settings.name} do not fit '{schema}': {' '.join(found)}")
    if site.card_file.is_file():
        load(site, Card.load(site.card_file))
    return site


def join(
    archive: Path, data: Path, folder: Path | None = None, *, foreground: bool = False, start_now: bool = True
) -> SiteFolder:
    """Make a site's folder from an archive, start the site, and return the folder. Unreadable data raise InputError."""
    require_extra()
    name = archive.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".zip")
    place = folder or Path(name)
    _refuse_running(SiteFolder(place).check_owner())
    site = set_up_site(archive, place, data)
    if start_now:
        start(site, foreground)
    return site


def resume(path: str | os.PathLike[str], *, from_round: int | None = None, foreground: bool = False) -> None:
    """Start a federation or a site again after a stop, crash or failure. A federation continues with its next round.

    With `from_round` it goes back to the state after that round first, and later states are set aside. A folder whose
    processes are running is stopped first; a federation then gets a new run. Raises InputError for files that a person
    has edited wrongly, or for a round without a state, before anything is stopped. Raises it for a port that another
    program uses after the stop; the federation then stays stopped.

    Fewer sites than must reply are no error here, unlike in `up`: the federation waits for the operator to add some.
    """
    require_extra()
    folder = folder_of(path).check_owner()
    _refuse_local(folder, "resume")
    _check_files(folder)
    if from_round is not None:
        rewind.check(folder, from_round)
    if is_running(folder):
        down(path)
    _refuse_running(folder)
    for problem in _busy_ports(folder) if isinstance(folder, ServerFolder) else ():
        raise InputError(problem)
    if from_round is not None:
        rewind.go_back(rewind.check(folder, from_round), from_round)
    if isinstance(folder, ServerFolder):
        _write_proxy(folder)
    start(folder, foreground)


def start(folder: Folder, foreground: bool = False) -> None:
    """Start a folder's supervisor, in this process or in the background."""
    folder.make()
    for name in (RUN_FILE, REGISTERED_FILE, folder.stop_file.name):
        (folder.run / name).unlink(missing_ok=True)
    if foreground:
        supervise(folder)
        return
    log = folder.run / "supervisor.log"
    command = [sys.executable, "-m", "fedabml.federation.operate", str(folder.path)]
    with open(log, "wb") as output:
        launched = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd="/",
            env={**os.environ, "PYTHONPATH": _python_path()},
            check=True,
        )
    _wait_until_well(folder, pids.identity(int(launched.stdout)), log)


def _python_path() -> str:
    """Return the PYTHONPATH with which background processes find this package, even in a checkout."""
    here = str(Path(__file__).resolve().parents[2])
    installed = here in sysconfig.get_paths().values()
    return os.pathsep.join(filter(None, ("" if installed else here, os.environ.get("PYTHONPATH", ""))))


def supervise(folder: Folder) -> None:
    """Supervise a folder's processes until SIGTERM or SIGINT. The folders of local sites are locked, too."""
    local = local_sites(folder) if isinstance(folder, ServerFolder) else []
    processes = server_processes(folder) if isinstance(folder, ServerFolder) else site_processes(folder)
    with ExitStack() as locks:
        for site in local:
            site.make()
            locks.enter_context(folder_lock(site.run, "supervisor.lock"))
        Supervisor(processes, folder.run).run()


def _wait_until_well(folder: Folder, supervisor: pids.Identity | None, log: Path) -> None:
    """Wait until all processes are healthy. If one cannot be started, end all of them and raise InputError."""
    end = time.monotonic() + START
    while True:
        found = [record for record in pids.records(folder.run / PIDS) if record.name != SUPERVISOR]
        begun = supervisor is not None and supervisor_of(folder.run) == supervisor
        if begun and found and all(record.state == "running" for record in found):
            return
        if not pids.alive(supervisor):
            raise InputError(f"The federation could not be started: {tail(log)}")
        failed = [record for record in found if begun and record.failures >= _HURRIED]
        if failed or time.monotonic() > end:
            slow = failed or [record for record in found if record.state != "running"]
            names = ", ".join(record.name for record in slow)
            down(folder.path)
            logs = log_of(folder.path, slow[0].name) if slow else log
            raise InputError(f"These processes did not start: {names}. The end of '{logs}': {tail(logs)}")
        time.sleep(0.1)


def down(path: str | os.PathLike[str]) -> None:
    """End all processes of a folder in order, and also those that a killed supervisor left behind."""
    folder = folder_of(path)
    _refuse_local(folder, "down")
    supervisor = supervisor_of(folder.run)
    if folder.run.is_dir():
        with suppress(OSError):  # on a full disk the signal must suffice
            folder.stop_file.touch()
    if supervisor is not None and pids.alive(supervisor):
        pids.send_signal(supervisor, SIGTERM)
        if not pids.wait_for_end(supervisor, END):
            pids.send_signal(supervisor, SIGKILL)
            pids.wait_for_end(supervisor, 10.0)
    pids.end_leftovers(pids.records(folder.run / PIDS))
    (folder.run / PIDS / f"{SUPERVISOR}.json").unlink(missing_ok=True)


def is_running(folder: Folder) -> bool:
    """Return whether a folder's supervisor is running."""
    return pids.alive(supervisor_of(folder.run))


# -- small checks ---------------------------------------------------------------------------------------------------
def _refuse_local(folder: Folder, command: str) -> None:
    """Raise InputError for the folder of a site that an operator's supervisor runs, together with the server."""
    operator = folder.operator if isinstance(folder, SiteFolder) else None
    if operator is not None:
        raise InputError(
            f"The site in '{folder.path}' runs together with its server. Give the operator's folder: "
            f"`fedabml federation {command} {operator.path}`."
        )


def _check_files(folder: Folder) -> None:
    """Raise InputError unless the files that people edit can be read, and a site's data can be opened."""
    from ..algorithms import make
    from .schema import Schema
    from .site_data import open_data

    if isinstance(folder, ServerFolder):
        make(folder.settings.algorithm, **folder.settings.hyper)
        if folder.schema_file.is_file():
            Schema.load(folder.schema_file)
    else:
        data = folder.settings.data
        folder.apps()
        if data and not Path(data).exists():
            raise InputError(f"There are no data at '{data}'. Correct `data` in '{folder.settings_file}'.")
        if data:
            open_data(data)


def too_few_sites(folder: ServerFolder) -> str:
    """Return why no round can have enough replies, if there are fewer sites than must reply, or an empty text."""
    count, least = len(folder.members()), folder.settings.min_replies
    if count >= least:
        return ""
    return (
        f"The federation has {count} site{'' if count == 1 else 's'}, and a round needs the replies of {least}. "
        f"Add sites with `fedabml federation add-site {folder.path} NAME`, or lower min_replies in "
        f"'{folder.settings_file}'."
    )


def _refuse_running(folder: Folder) -> None:
    if is_running(folder):
        raise InputError(
            f"'{folder.path}' is running already. Look at it with `fedabml federation status`, or end it with "
            "`fedabml federation down`."
        )
    pids.end_leftovers(pids.records(folder.run / PIDS))


def _busy_ports(folder: ServerFolder) -> list[str]:
    """Return a sentence for every port of the settings that another program uses."""
    found = []
    for key in ("port", "superlink_port"):
        number = getattr(folder.settings, key)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", number))
            except OSError as error:
                reason = error.strerror or str(error)
                found.append(f"Port {number} cannot be used: {reason}. Change {key} in '{folder.settings_file}'.")
    return found


if __name__ == "__main__":
    supervise(folder_of(sys.argv[1]))
