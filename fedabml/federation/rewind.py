"""Let a federation go back to the state after an earlier round, for example because a false reply spoilt later ones.

The later states are moved aside, not deleted. Sites need no notice: every order names the version of a site's kept
state from which the round starts, and sites keep the versions that the server's states count.
"""

from __future__ import annotations

from ..errors import InputError
from ..files.paths import folder_lock
from . import server_state
from .card import Card
from .events import Events
from .folders import ServerFolder, SiteFolder


def check(folder: ServerFolder | SiteFolder, round: int) -> ServerFolder:
    """Return the operator's folder. Raises InputError unless it has an undamaged state after this round."""
    if not isinstance(folder, ServerFolder):
        raise InputError(f"'{folder.path}' is a site's folder. Only an operator's folder takes --from-round.")
    found = server_state.rounds(folder.state)
    if round not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise InputError(f"'{folder.state}' has no state after round {round}. There are states after rounds: {listed}.")
    card = Card.load(folder.card_file)
    file = server_state.path(folder.state, round)
    server_state.read(file, folder.settings.federation, card.digest, card.initial_shared())
    return folder


def go_back(folder: ServerFolder, round: int) -> None:
    """Let a federation that does not run continue from the state after a round, and record this as an event."""
    with folder_lock(folder.state, "coordinator.lock"):
        Events(folder).write("back", round=round)  # first: after a kill in between, the same call completes it
        server_state.go_back(folder.state, round)
