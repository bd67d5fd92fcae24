"""What is served: the posterior in use, how a newer one takes its place, and the options of the service."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..arguments import check_fields, checked_integer
from ..errors import InputError
from ..files.paths import open_regular
from ..files.sealed import tensors_digest
from ..runs.input_spec import Inputs, InputSpec
from ..runs.modules import Model
from ..runs.posterior import Posterior
from ..runs.prediction_columns import class_names, output_columns, with_ids
from ..runs.prior import load_posterior
from .batching import Answer, Batcher, Columns, Job
from .bodies import PARSERS, Rows, read_rows
from .metrics import Metrics
from .openapi import description, example_body

P = ParamSpec("P")
R = TypeVar("R")
UNKNOWN = ("refuse", "other")  # what to do with a word that fewer than five training rows had
ATTEMPTS = 3  # to read a file that is being replaced


@dataclass(frozen=True)
class ServeOptions:
    """Limits of requests, and how to predict. A limit protects the service; see `fedabml serve --help`."""

    max_rows: int = 1000  # of a request
    max_bytes: int = 8 << 20  # of a request's body
    max_requests: int = 100  # to /predict at once; further ones are told to come back
    timeout: float = 30.0  # seconds for a request's body to arrive, and again for its answer
    batch_wait: float = 0.002  # seconds that a request waits for others to be predicted with it
    watch: float = 0.0  # seconds between looks for a newer posterior in the file; 0: only /reload replaces it
    unknown: str = "refuse"  # or "other": a word that fewer than five training rows had counts as such, as in `predict`
    quantiles: Sequence[float] = ()  # of a regression: levels to report, such as 0.1 and 0.9
    samples: int | None = None  # weight samples; None: as in training
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_rows", "max_bytes", "max_requests"):
            checked_integer(getattr(self, name), f"ServeOptions: {name}")
        checked_integer(self.seed, "ServeOptions: seed", 0)
        for name, least, most in (("timeout", 0.01, 3600), ("batch_wait", 0, 1), ("watch", 0, 86400)):
            if not least <= getattr(self, name) <= most:
                raise InputError(f"ServeOptions: {name} is {getattr(self, name)}; give {least} to {most} seconds.")
        if not all(0 < level < 1 for level in self.quantiles):
            raise InputError("ServeOptions: quantiles must lie between 0 and 1, such as 0.1 and 0.9.")
        if self.unknown not in UNKNOWN:
            raise InputError(f"ServeOptions: unknown must be one of {', '.join(UNKNOWN)}; it is '{self.unknown}'.")


@dataclass(frozen=True)
class Served:
    """A posterior in use, its digest, and its description for clients (OpenAPI)."""

    posterior: Posterior
    digest: str
    openapi: dict[str, Any]


class Service:
    """The posterior of a file, which a newer one may replace while requests are answered.

    A request keeps the posterior that it began with, so none is lost or mixed.
    """

    def __init__(self, path: str | os.PathLike[str], options: ServeOptions, model: Model | None = None) -> None:
        self.path, self.options, self.metrics, self._model = Path(path), options, Metrics(), model
        self.in_flight = 0  # requests to /predict; the event loop alone changes it
        self._lock = threading.Lock()
        self._seen = self._signature()
        self.served = self._load()
        self.batcher: Batcher[Posterior] | None = None
        self._use(self.served)

    def start(self) -> None:
        """Start the thread that predicts."""
        self.batcher = Batcher(self._answer, self.options.batch_wait, lambda: self.in_flight)

    def stop(self) -> None:
        """Answer what waits, and end the thread."""
        if self.batcher is not None:
            self.batcher.close()

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self.batcher is not None and self.batcher.alive

    def reload(self) -> bool:
        """Take the file's posterior into use, and return whether it is another one.

        Raises InputError, and keeps the old one, if the file is damaged or its posterior takes other inputs.
        """
        with self._lock:
            try:
                seen = self._signature()
                if _digest(self.path) == self.served.digest:
                    self._seen = seen
                    return False
                newer = self._load()
                difference = _difference(self.served.posterior.input_spec, newer.posterior.input_spec)
                if difference:
                    raise InputError(
                        f"The posterior in '{self.path.name}' has other {difference} than the one in use, "
                        "so clients would have to change. Start a service of its own for it."
                    )
            except InputError:
                self._seen = seen  # a watched file is tried again when it changes
                self.metrics.count("reloads_total", result="refused")
                raise
            self._seen = seen
            self._use(newer)
            self.metrics.count("reloads_total", result="replaced")
            return True

    def changed(self) -> bool:
        """Return whether the file looks another than the one that was read last."""
        return self._signature() != self._seen

    def _use(self, served: Served) -> None:
        self.served = served
        self.metrics.replace("posterior_info", 1, digest=served.digest[:16])

    def _load(self) -> Served:
        """Read the file and predict its example, so that its weight samples are drawn before the first request."""
        for _ in range(ATTEMPTS):
            digest = _digest(self.path)
            posterior = load_posterior(self.path, self._model)
            if _digest(self.path) == digest:  # otherwise it was replaced between the two
                break
        else:
            raise InputError(f"'{self.path}' is replaced again and again while it is read.")
        spec = posterior.input_spec
        if self.options.quantiles and spec.task != "regression":
            raise InputError(f"'{self.path}' predicts classes, so it has no quantiles. Leave them out.")
        example = PARSERS["application/json"](spec, example_body(spec), 1)
        columns = self._predict(posterior, read_rows(posterior, [example], False))
        return Served(posterior, digest, description(posterior, columns, self.options.max_rows))

    def _predict(self, posterior: Posterior, inputs: Inputs) -> Columns:
        options = self.options
        p = posterior.predict_inputs(inputs, options.samples, options.seed, options.device)
        return output_columns(p, posterior.input_spec, options.quantiles)

    def _answer(self, posterior: Posterior, jobs: Sequence[Job[Posterior]]) -> list[Answer | Exception]:
        """Return the answers of a batch, whose rows are predicted together, and the errors of jobs that do not fit."""
        spec, refuse = posterior.input_spec, self.options.unknown == "refuse"
        parsed = [_attempt(PARSERS[job.kind], spec, job.body, self.options.max_rows) for job in jobs]
        good = [part for part in parsed if isinstance(part, Rows)]
        inputs = _attempt(read_rows, posterior, good, refuse) if good else None
        if isinstance(inputs, InputError):  # find out whose rows do not fit, and read the others together
            read_singly = {id(part): _attempt(read_rows, posterior, [part], refuse) for part in good}
            parsed = [e if isinstance(e := read_singly.get(id(part)), InputError) else part for part in parsed]
            good = [part for part in parsed if isinstance(part, Rows)]
            inputs = read_rows(posterior, good, refuse) if good else None
        columns = self._predict(posterior, inputs) if inputs else {}
        answers: list[Answer | Exception] = []
        start = 0
        for part in parsed:
            if isinstance(part, InputError):
                answers.append(part)
                continue
            rows = slice(start, start := start + part.size)
            part_columns = {name: values[rows] for name, values in columns.items()}
            answers.append(Answer(with_ids(part_columns, part.ids, spec), part.ignored))
        if good:
            self.metrics.observe("batch_requests", len(good))
            self.metrics.observe("batch_rows", start)
        return answers

    def _signature(self) -> tuple[int, int, int]:
        """Return what changes when a file is replaced or written to; zeros if there is none."""
        try:
            stat = self.path.stat()
        except OSError:
            return 0, 0, 0
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _attempt(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | InputError:
    """Return what a function returns, or the InputError that it raises."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        return error


def _digest(path: str | os.PathLike[str]) -> str:
    """Return the digest that a file carries; for one written before files carried one, that of its bytes."""
    if digest := tensors_digest(path):
        return str(digest)
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(old: InputSpec, new: InputSpec) -> str:
    """Return what differs in what clients send or get; an empty text if nothing does."""
    recipes = [spec.recipe for spec in (old, new)]
    columns = [sorted((n, n in r.numeric, r.dates.get(n)) for n in r.table_columns) if r else None for r in recipes]
    if columns[0] != columns[1] or ((old.shape, old.dtype) != (new.shape, new.dtype) and recipes[0] is None):
        return "inputs"
    same = old.task == new.task and old.outputs == new.outputs and class_names(old) == class_names(new)
    return "" if same else "classes or targets"
