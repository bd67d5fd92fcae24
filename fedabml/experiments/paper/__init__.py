"""The experiments of the paper by name: each declares its cells, one runner executes them."""

from __future__ import annotations

from pathlib import Path

from ...errors import InputError
from ..runner import Callbacks
from . import reproduce
from .bound import Bound
from .clients import Clients
from .experiment import PROTOCOLS, Experiment, Request
from .fewdata import FewData
from .findings import Findings
from .remarks import Remarks
from .reproduce import run, run_part
from .sensitivity import Sensitivity
from .table1 import Table1
from .table2 import Table2
from .toy import Toy
from .uncertainty import Uncertainty

EXPERIMENTS: dict[str, type[Experiment]] = {
    "toy": Toy,
    "remarks": Remarks,
    "bound": Bound,
    "table1": Table1,
    "table2": Table2,
    "uncertainty": Uncertainty,
    "sensitivity": Sensitivity,
    "fewdata": FewData,
    "clients": Clients,
}

__all__ = ["EXPERIMENTS", "PROTOCOLS", "Callbacks", "Experiment", "Findings", "Request", "page", "run", "run_part"]


def page(folder: Path, title: str | None = None) -> str:
    """Return the page of the finished reproduction in a folder, drawn anew (`reproduce.page`)."""
    request = Request.read(folder)
    if request.experiment not in EXPERIMENTS:
        raise InputError(f"'{folder}' holds the experiment '{request.experiment}', which this version does not know.")
    return reproduce.page(EXPERIMENTS[request.experiment](), request, folder, title)
