"""The program `fedabml`, also `python -m fedabml`: Ctrl-C ends it with code 130 from its first moment on.

The command line takes a moment to import, and what it imports does not expect to be interrupted: a KeyboardInterrupt
there may be printed and lost, or come out as another error. So an interrupt in an import ends the process at once;
every round that is finished is on disk.
"""

import os
import signal
import sys
from types import FrameType


def stop(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: in an import the process ends, elsewhere a KeyboardInterrupt is raised, as always."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(1):
                os.write(1, b"\x1b[?25h\n")  # a progress bar has hidden the cursor
            if os.environ.get("WORLD_SIZE", "1") == "1":  # else torchrun says so
                os.write(2, b"Stopped.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def handle_signals() -> None:
    """Lets Ctrl-C and SIGTERM, a scheduler's polite request, stop the program; where Ctrl-C is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Runs the command line."""
    handle_signals()
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:  # before a command has begun, or after it has ended
        sys.stderr.write("Stopped.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
