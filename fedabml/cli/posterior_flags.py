"""Flags of the commands that make a posterior: how it learns, and how far it may be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .console import print_line, print_paragraph, table

if TYPE_CHECKING:
    from ..runs.posterior import Posterior
    from ..runs.prior import Prior

_LEARNING = ("epochs", "lr", "batch_size", "class_weights")


def posterior_flags(
    *,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    class_weights: str | None = None,
    validation: float = 0.0,
    aim: str = "",
    coverage: float = 0.9,
    false_alarms: float = 0.05,
    calibration: str = "temperature",
) -> None:
    """Declare flags for `command(also=posterior_flags)`.

    Flags:
        epochs: Epochs on the client's data. [default: the algorithm's]
        lr: Step size. [default: the algorithm's]
        batch_size: Samples in a minibatch. [default: as in training]
        class_weights (WEIGHTS): How much rows of each class count: balanced (by the client's rows), none, or numbers
            such as 1,5. [default: as in training]
        validation: Share of the rows held out to calibrate and check the posterior.
        aim (AIM): Goal of the threshold between two classes: f1, recall>=0.8, precision>=0.8 or cost:MISS,ALARM. For
            any number of classes cost:FILE.csv, with a row of costs per true class and a column per decision.
        coverage: Probability with which a prediction set or interval contains the truth.
        false_alarms: Share of usual inputs that may be flagged as unusual. Like the aim, the coverage and the
            calibration, it needs --validation.
        calibration (WORD): How probabilities are calibrated on the rows held out: temperature, isotonic (100 rows or
            more) or none. Its effect is shown by cross-validation on these rows.
    """


def check_comparison(compare: bool | None, flags: dict[str, Any]) -> None:
    """Refuse a comparison without rows held out."""
    if compare and not flags["validation"]:
        raise InputError("--compare needs rows held out: give --validation 0.3, or another share.")


def print_comparison(
    compare: bool | None, prior: Prior, data: tuple[Any, Any], posterior: Posterior, flags: dict[str, Any], **more: Any
) -> None:
    """Print which model serves a site best, if `compare` asks for it.

    If it is None, enough rows must be held out, and the comparison must take seconds.
    """
    from ..runs.compare_at_site import LEAST_ROWS_TO_COMPARE, compare_at_site, held_out_rows, is_quick

    if compare is False or posterior.trust is None:
        return
    if compare is None and (rows := posterior.trust.rows) < LEAST_ROWS_TO_COMPARE:
        print_paragraph(
            f"With {held_out_rows(rows)}, no comparison is shown unless --compare asks for it: with fewer than "
            f"{LEAST_ROWS_TO_COMPARE} it tells little."
        )
        return
    if compare is None and not is_quick(prior, len(data[0]), flags["validation"], flags["batch_size"]):
        print_line("next        --compare tells whether the prior, the posterior or training alone is best here")
        return
    options = {name: flags[name] for name in _LEARNING}
    x, y = data
    report = compare_at_site(prior, x, y, flags["validation"], posterior=posterior, **options, **more)
    print_paragraph(report.sentence)
    calibrated = "" if report.calibration == "none" else f", calibrated ({report.calibration}) on the other rows"
    table(*report.table(), title=f"{held_out_rows(report.rows)}{calibrated}; 95% intervals")
