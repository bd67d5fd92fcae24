"""Figures of clients' predictions for classes they never trained on, from a run folder's unseen.json.

`edges`, `own` and `unseen` are a histogram of predictive entropy over all clients: test samples of a client's own
classes, and test samples of classes it has no training sample of. `samples` are single images as one client sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from .canvas import PAGE, finite, text
from .figures import entropies
from .page import Figure
from .read import SavedRun

_CELL, _IMAGE, _LINE = 92, 64, 17  # pixels: the width of a sample, the size of its image, the height of a line


def figures(runs: Sequence[SavedRun]) -> list[Figure]:
    """Return the figures of this module; none where no run has an unseen.json. Raises `InputError` if it is damaged."""
    try:
        single = samples(runs)
        return [*densities(runs), *([single] if single else [])]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"unseen.json of {' or '.join(str(run.folder) for run in runs if run.unseen)} is damaged ({error!r}). "
            "Remove the file to make the page without it."
        ) from error


def densities(runs: Sequence[SavedRun]) -> list[Figure]:
    """Draw for each run the entropy on a client's own classes beside that on classes it never saw."""
    drawn, groups = [], {"own": "own classes", "unseen": "classes never seen"}
    for i, run in enumerate(runs):
        mean, rank = [finite(v) for v in run.unseen.get("entropy") or []], finite(run.unseen.get("auroc"))
        reading = "All clients, on test samples of classes that they trained on and of classes that they never saw."
        if len(mean) == 2 and None not in mean:
            reading += f" Mean entropy {mean[0]:.3f} and {mean[1]:.3f}."
        if rank is not None:
            reading += f" AUROC {rank:.3f}: the probability that a sample of a class never seen has the higher entropy."
        drawn.append(entropies(runs, i, run.unseen, groups, "Entropy, own classes and classes never seen", reading))
    return [figure for figure in drawn if figure]


def samples(runs: Sequence[SavedRun]) -> Figure | None:
    """Draw images of one client's own classes and of others, with every run's prediction and its entropy."""
    records = {i: run.unseen for i, run in enumerate(runs) if run.unseen.get("samples")}
    if not records:
        return None
    first = next(iter(records.values()))
    row_height, columns, parts = _IMAGE + _LINE * (2 + len(records)) + 14, 0, []
    for row, (is_own, title) in enumerate(((True, "its own classes"), (False, "classes it never saw"))):
        top = row * row_height + 13
        parts.append(f'<text x="0" y="{top}" fill="{PAGE.ink}" font-weight="600">{title}</text>')
        numbers = [n for n, sample in enumerate(first["samples"]) if bool(sample.get("own")) is is_own]
        columns = max(columns, len(numbers))
        for column, n in enumerate(numbers):
            left, below = column * _CELL, top + 8 + _IMAGE
            parts.append(_image(first["samples"][n]["pixels"], left, top + 8))
            lines = [(f"is {text(first['samples'][n].get('label'))}", PAGE.muted)]
            lines += [(_prediction(unseen["samples"][n]), PAGE.style(i).colour) for i, unseen in records.items()]
            for k, (line, colour) in enumerate(lines, 1):
                parts.append(f'<text x="{left}" y="{below + k * _LINE}" fill="{colour}">{line}</text>')
    heading = f"Predictions of {first.get('client', 'a client')} for single samples"
    svg = (
        f'<svg viewBox="0 0 {_CELL * columns} {2 * row_height}" role="img" aria-label="{text(heading)}" font-size="13" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )
    reading = (
        f"Under each image are its class and the predictions of {' and '.join(runs[i].name for i in records)}, in this "
        f"order, with the entropy in brackets. {first.get('client', 'The client')} trained on "
        f"{first.get('classes', 'some classes')} alone, so every prediction in the second row is wrong or a guess. A "
        "high entropy reveals that."
    )
    return Figure(heading, svg, reading)


def _image(rows: Sequence[Sequence[float]], left: float, top: float) -> str:
    """Draw an image of grey values from 0 to 1."""
    size = _IMAGE / max(len(rows), 1)
    return "".join(
        f'<rect x="{left + size * column:g}" y="{top + size * row:g}" width="{size:g}" height="{size:g}" '
        f'fill="{PAGE.ink}" fill-opacity="{float(value):.2g}"/>'
        for row, line in enumerate(rows)
        for column, value in enumerate(line)
        if value
    )


def _prediction(sample: Mapping[str, Any]) -> str:
    entropy = finite(sample.get("entropy"))
    return f"{text(sample.get('answer'))} ({'?' if entropy is None else f'{entropy:.2f}'})"
