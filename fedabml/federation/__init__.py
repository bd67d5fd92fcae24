"""Run a federation between machines that do not trust the network: Flower carries the messages, this package the rest.

`init` makes an operator's folder and an archive for each site, `coordinator` leads the rounds, `site` answers orders
with the engine's own functions, and `flower` connects both to Flower. Only `flower` imports flwr.
"""
