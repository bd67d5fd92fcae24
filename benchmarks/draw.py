"""Draw the pages of results/ again from the cells beside them; nothing is trained.

    python -m benchmarks.draw [results/table1/cifar10-5 ...]

A page is the README.md of an experiment's folder. The first block of a page holds the command that drew it, so that
command is what this module runs. Everything from the line "## Notes" on is written by hand and stays. The datasets must
be in $FEDABML_DATA, because partitions are made from them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
COMMAND = re.compile(r"^```\n(fedabml reproduce [^\n]*--finished [^\n]*)\n```$", re.MULTILINE)
NOTES = "\n## Notes\n"


def folders() -> list[Path]:
    """Return the folders whose page was drawn by `fedabml reproduce`."""
    return sorted(page.parent for page in RESULTS.rglob("README.md") if COMMAND.search(page.read_text("utf-8")))


def command(folder: Path) -> list[str]:
    """Return the arguments of the command that drew the page of `folder`, without `fedabml`."""
    match = COMMAND.search((folder / "README.md").read_text("utf-8"))
    if match is None:
        raise SystemExit(
            f"{folder}/README.md names no `fedabml reproduce ... --finished FILE` command to draw it with."
        )
    return shlex.split(match[1])[1:]


def draw(arguments: list[str], out: Path) -> str:
    """Run a page's command into the folder `out` and return its table as Markdown.

    Raises SystemExit where the command fails or where cells are missing.
    """
    arguments = [str(out) if argument == "OUT" else argument for argument in arguments]
    done = subprocess.run([sys.executable, "-m", "fedabml", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    table = (out / "table.md").read_text("utf-8").replace(str(out), "OUT")
    if "Not finished" in table or "not searched" in table:
        raise SystemExit(f"Cells are missing: {' '.join(arguments)}\n{done.stderr}")
    return table


def main() -> None:
    """Draw the pages of the folders in the arguments, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders with a page; all of results/ by default")
    for folder in parser.parse_args().folders or folders():
        with tempfile.TemporaryDirectory() as temporary:
            drawn, page = Path(temporary) / "drawn", folder / "README.md"
            table = draw(command(folder), drawn)
            _, mark, notes = page.read_text("utf-8").partition(NOTES)
            page.write_text(table.rstrip() + "\n" + mark + notes, encoding="utf-8")
            shutil.rmtree(folder / "figures", ignore_errors=True)
            shutil.copytree(drawn / "figures", folder / "figures")
        print(page, flush=True)


if __name__ == "__main__":
    main()
