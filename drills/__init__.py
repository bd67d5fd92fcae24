"""These drills run real federations on this machine, kill their processes and attack them."""
