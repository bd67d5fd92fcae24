"""`python -m fedabml`."""

from .cli import main

main()
