"""A posterior behind HTTP: `fedabml serve POSTERIOR`, or from Python

    from fedabml.serve import ServeOptions, create_app
    app = create_app("posterior.safetensors", ServeOptions(max_rows=100), token=token)    # an ASGI application

`bodies` reads requests, `batching` predicts those that wait as one batch, `openapi` describes the service by the
posterior's own inputs, `metrics` counts, and `app` joins them. All need the packages of `pip install fedabml[serve]`.
"""

from .app import create_app
from .service import ServeOptions

__all__ = ["ServeOptions", "create_app"]
