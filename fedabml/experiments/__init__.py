"""Experiments: each declares its cells, one runner executes them, and what is finished is never run twice."""
