"""The tables and pictures of results/, drawn anew from the cells there; nothing is trained.

    python -m benchmarks.draw [NAME ...] [--out results]

A line of benchmarks/lists/draw.txt is `FOLDER/NAME DATASETS: reproduce ... --so-far --out OUT`. Its table becomes
FOLDER/NAME.md, its pictures FOLDER/figures/NAME/. The data must be there ($FEDABML_DATA), for partitions are made of
them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .queue import Chain, chains

ROOT = Path(__file__).parents[1]
LIST = ROOT / "benchmarks" / "lists" / "draw.txt"


def lines() -> dict[str, Chain]:
    """What there is to draw, by name."""
    return {chain.name: chain for chain in chains(LIST.read_text(encoding="utf-8"))}


def draw(chain: Chain, folder: Path) -> str:
    """Draws a line into a folder, and returns its table as Markdown; cells that are missing are an error."""
    words = [str(folder) if word == "OUT" else word for word in chain.commands[0]]
    done = subprocess.run(
        [sys.executable, "-m", "fedabml", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{chain.name}: {done.stderr}")
    table = (folder / "table.md").read_text(encoding="utf-8").replace(str(folder), "OUT")
    if "Not finished" in table or "not searched" in table:
        raise SystemExit(f"{chain.name}: cells are missing. {done.stderr}")
    return table


def main() -> None:
    """Draws what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = lines()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in known]:
        raise SystemExit(f"There is no {unknown[0]}; there are {', '.join(known)}.")
    for name in asked.names or known:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "drawn"
            table = draw(known[name], made)
            target = asked.out / f"{name}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            pictures = target.parent / "figures" / target.stem
            target.write_text(table.replace("(figures/", f"(figures/{target.stem}/"), encoding="utf-8")
            shutil.rmtree(pictures, ignore_errors=True)
            shutil.copytree(made / "figures", pictures)
        print(target)


if __name__ == "__main__":
    main()
