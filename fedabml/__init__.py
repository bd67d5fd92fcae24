"""fedabml: personalised federated learning by amortised Bayesian meta-learning.

    fed = fedabml.Federation.from_arrays(train=[(x, y), ...], test=[(x, y), ...])
    run = fedabml.train(fed, model, fedabml.FedABML(), rounds=50)
    posterior = run.prior.personalize(x_new_client, y_new_client)
    p = posterior.predict(x)        # p.probs, p.entropy, p.mutual_information
"""

from .algorithms import Algorithm, FedABML, FedAvg, Local
from .data import Federation, federate, load, read_table
from .errors import InputError, TrainingError
from .evaluate import Prediction, Regression
from .likelihoods import Categorical, GaussianNoise
from .prior import Posterior, Prior, load_posterior, load_prior
from .run import Run, prepare, train
from .vectors import replace_batchnorm
from .version import __version__

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
