"""fedabml: personalised federated learning by amortised Bayesian meta-learning.

fed = fedabml.Federation.from_arrays(train=[(x, y), ...], test=[(x, y), ...])
run = fedabml.train(fed, model, fedabml.FedABML(), rounds=50)
posterior = run.prior.personalize(x_new_client, y_new_client)
p = posterior.predict(x)        # p.probs, p.entropy, p.mutual_information
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .accel import threads_sleep_while_waiting
from .version import __version__

if TYPE_CHECKING:
    from .algorithms import Algorithm, FedABML, FedAvg, Local
    from .data import Federation, federate, load, read_table
    from .errors import InputError, TrainingError
    from .evaluation.predictions import Prediction, Regression
    from .likelihoods import Categorical, GaussianNoise
    from .runs.prepare import prepare
    from .runs.prior import Posterior, Prior, TablePrediction, load_posterior, load_prior
    from .runs.train import Run, train
    from .vectors import replace_batchnorm

# A public name is imported when it is first used, so that `fedabml --help` does not wait for torch.
_HOMES = {
    "algorithms": ("Algorithm", "FedABML", "FedAvg", "Local"),
    "data": ("Federation", "federate", "load", "read_table"),
    "errors": ("InputError", "TrainingError"),
    "evaluation.predictions": ("Prediction", "Regression"),
    "likelihoods": ("Categorical", "GaussianNoise"),
    "runs.prepare": ("prepare",),
    "runs.prior": ("Posterior", "Prior", "TablePrediction", "load_posterior", "load_prior"),
    "runs.train": ("Run", "train"),
    "vectors": ("replace_batchnorm",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"algorithms", "data", "errors", "likelihoods", "models", "report", "vectors"}

__all__ = [
    "Algorithm",
    "Categorical",
    "FedABML",
    "FedAvg",
    "Federation",
    "GaussianNoise",
    "InputError",
    "Local",
    "Posterior",
    "Prediction",
    "Prior",
    "Regression",
    "Run",
    "TablePrediction",
    "TrainingError",
    "__version__",
    "federate",
    "load",
    "load_posterior",
    "load_prior",
    "prepare",
    "read_table",
    "replace_batchnorm",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with threads_sleep_while_waiting():
        value = import_module(f".{_HOME.get(name, name)}", __name__)
    value = getattr(value, name) if name in _HOME else value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
