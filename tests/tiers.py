"""Which of a test's cases `make test` runs; `make nightly` runs the others."""

import pytest

# A plain mean, Gaussians, control variates, a head of one's own, a second model, precisions: one algorithm of each.
FAMILIES = ("fedavg-ft", "fedabml", "scaffold", "fedrep", "ditto", "fola")


def nightly_but(kept, cases):
    """Return the cases as parameters, and leave those that are not `kept` to `make nightly`.

    A dictionary gives its keys as the names of the parameters and its values as the parameters.
    """
    named = cases.items() if isinstance(cases, dict) else [(str(case), case) for case in cases]
    return [pytest.param(case, id=name, marks=() if name in kept else pytest.mark.nightly) for name, case in named]
