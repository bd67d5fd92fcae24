"""This ClientApp wraps `Site.handle` for stock Flower deployments, which start a process for every message.

The SuperNode names the site's folder: `--node-config 'folder="/srv/fedabml/site"'`. The worker (`start`) answers the
same orders in a resident process, and also checks the app's hash.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...errors import InputError
from ..macs import read_secret
from . import codec
from .start import start_site

LIMIT = 2 << 30  # bytes of an order

app = ClientApp()
_start = cache(start_site)
_reported: set[str] = set()  # folders whose start has been reported


@app.train()
def answer(message: Message, context: Context) -> Message:
    """Answer an order with the site whose folder the SuperNode names."""
    path = context.node_config.get("folder")
    if not isinstance(path, str) or not path:
        raise InputError("The SuperNode does not name the site's folder: start it with --node-config 'folder=\"…\"'.")
    folder, handle, started = _start(path)
    secret = read_secret(folder.secret)
    reply = handle(codec.order_of(message, secret, LIMIT))
    seconds = {"boot": 0.0, "imports": 0.0, **reply.seconds}
    if path not in _reported:
        _reported.add(path)
        seconds |= {name: seconds.get(name, 0.0) + value for name, value in started.items()}
    return Message(codec.reply_content(replace(reply, seconds=seconds), secret), reply_to=message)
