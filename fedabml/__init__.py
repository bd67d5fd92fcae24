"""fedabml: personalised federated learning by amortised Bayesian meta-learning.

fed = fedabml.Federation.from_arrays(train=[(x, y), ...], test=[(x, y), ...])
run = fedabml.train(fed, model, fedabml.FedABML(), rounds=50)
posterior = run.prior.personalize(x_new_client, y_new_client)
p = posterior.predict(x)        # p.probs, p.entropy, p.mutual_information
"""

from typing import TYPE_CHECKING

from .accel import import_on_use
from .version import __version__

if TYPE_CHECKING:
    from .algorithms import Algorithm, FedABML, FedAvg, Local
    from .data import Federation, federate, load, read_table
    from .errors import InputError, TrainingError
    from .evaluation.inspection import Inspection, inspect_table
    from .evaluation.predictions import Prediction, Regression
    from .evaluation.structured import MultiPrediction
    from .experiments.functions import compare, reproduce, tune
    from .likelihoods import Bernoulli, Categorical, GaussianNoise, StepCategorical
    from .runs.compare_at_site import SiteReport, compare_at_site
    from .runs.posterior import Posterior, TablePrediction
    from .runs.prepare import prepare
    from .runs.prior import Prior, load_posterior, load_prior
    from .runs.train import Run, train
    from .vectors import replace_batchnorm

_HOMES = {
    "algorithms": ("Algorithm", "FedABML", "FedAvg", "Local"),
    "data": ("Federation", "federate", "load", "read_table"),
    "errors": ("InputError", "TrainingError"),
    "evaluation.inspection": ("Inspection", "inspect_table"),
    "evaluation.predictions": ("Prediction", "Regression"),
    "evaluation.structured": ("MultiPrediction",),
    "experiments.functions": ("compare", "reproduce", "tune"),
    "likelihoods": ("Bernoulli", "Categorical", "GaussianNoise", "StepCategorical"),
    "runs.prepare": ("prepare",),
    "runs.posterior": ("Posterior", "TablePrediction"),
    "runs.prior": ("Prior", "load_posterior", "load_prior"),
    "runs.compare_at_site": ("SiteReport", "compare_at_site"),
    "runs.train": ("Run", "train"),
    "vectors": ("replace_batchnorm",),
}
_MODULES = ("algorithms", "data", "errors", "likelihoods", "models", "report", "vectors")

__all__ = [
    "Algorithm", "Bernoulli", "Categorical", "FedABML", "FedAvg", "Federation", "GaussianNoise", "InputError",
    "Inspection", "Local", "MultiPrediction", "Posterior", "Prediction", "Prior", "Regression", "Run", "SiteReport",
    "StepCategorical", "TablePrediction", "TrainingError", "__version__",
    "compare", "compare_at_site", "federate", "inspect_table", "load", "load_posterior", "load_prior", "prepare",
    "read_table", "replace_batchnorm", "reproduce", "train", "tune",
]  # fmt: skip
__getattr__ = import_on_use(__name__, {m: (m, *_HOMES.get(m, ())) for m in (*_HOMES, *_MODULES)})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
