"""The program `fedabml`, also `python -m fedabml`. Ctrl-C ends it with code 130 at any time, also during imports.

Imported modules do not expect to be interrupted: a KeyboardInterrupt there may be printed and lost, or become another
error. So an interrupt during an import ends the process at once. Every finished round is on disk.
"""

import os
import signal
import sys
from types import FrameType


def stop(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: end the process during an import, and raise a KeyboardInterrupt elsewhere."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(1):
                os.write(1, b"\x1b[?25h\n")  # show the cursor, which a progress bar hides
            if os.environ.get("WORLD_SIZE", "1") == "1":  # otherwise torchrun reports it
                os.write(2, b"Stopped.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def handle_signals() -> None:
    """Let Ctrl-C and SIGTERM stop the program. If the shell ignores Ctrl-C, so does the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Run the command line."""
    handle_signals()
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:  # before a command has begun, or after it has ended
        sys.stderr.write("Stopped.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
