"""This package connects fedabml to Flower (flwr 1.41.0, Message API). No other package imports flwr.

codec: Order and Reply as Flower messages · objects, uploads: a message's parts, in and out · runtime: calls of
the runtime API that outlive a restart of their server · transport: the coordinator's Transport · worker: a site's
resident process · server_worker: the server's · supernode: Flower's SuperNode with a shorter pause between its polls ·
clientapp, serverapp, app: a plain Flower app for other deployments · control, commands: what the supervisor starts.
"""

from . import clock as clock  # first, to measure what the other imports cost
