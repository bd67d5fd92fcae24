"""Drills: real federations on this machine in which processes are killed and strangers knock."""
