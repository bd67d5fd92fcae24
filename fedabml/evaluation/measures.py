"""Every measure of a run, declared once: its key in files, its names, its format, and which way is better.

Pages, tables, the terminal and comparisons take their headings and formats from `MEASURES`. To add a measure, compute
it in `evaluation.client_scores`, or in `evaluation.decisions` for ranks and thresholds, and declare it here.
The rows of the scores, in the terminal and on pages (`report.score_tables`), are those of `_OF_MODELS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import shortened
from ..files.formats import duration, size

# A client with fewer rows to be scored on is small: a single row moves its accuracy by more than ten points.
FEW_ROWS = 10
FEW_OF_CLASS = 5  # rows of a class below which chance decides a client's measures; also rows that bootstraps need
HIGHER, LOWER = float("inf"), 0.0  # targets of measures without a best value of their own


@dataclass(frozen=True)
class Measure:
    """A number that describes a run or a client.

    `key` names it in summary.json and clients.csv. `label` is a short heading, `name` a row of the terminal's table,
    and `meaning` explains it under its value. `target` is the value it should be near: `HIGHER`, `LOWER`, or a number
    such as 0.9; `None` where no direction is better. `digits` are the decimals in tables of comparisons, `column`
    the heading there if it is not the label with its unit.
    """

    key: str
    label: str
    name: str
    meaning: str
    unit: Literal["percent", "number", "bytes", "seconds"] = "number"
    target: float | None = LOWER
    digits: int = 3
    column: str = ""

    @property
    def better(self) -> int:
        """+1 where higher is better, -1 where lower is better, 0 where the target lies between."""
        return {HIGHER: 1, LOWER: -1}.get(self.target, 0) if self.target is not None else 0

    @property
    def factor(self) -> float:
        """What a value is multiplied by in a table: 100 for percentages."""
        return 100.0 if self.unit == "percent" else 1.0

    @property
    def heading(self) -> str:
        """The heading of a table's column, with the unit."""
        return self.column or (f"{self.label} %" if self.unit == "percent" else self.label)

    @property
    def title(self) -> str:
        """The label with a capital letter."""
        return self.label[0].upper() + self.label[1:]

    def cell(self, value: float) -> str:
        """Format a value for a table's cell under `heading`, without the unit."""
        return f"{self.factor * value:.{self.digits}f}"

    def format(self, value: float) -> str:
        """Format a value with its unit, for a page."""
        return _FORMATS[self.unit](value)

    def distance(self, value: float) -> float:
        """Return how far a value is from the target, up to a constant: the lowest distance is the best value.

        A likelihood of densities may be above 1, so an NLL may be below 0: lower is better there, too.
        """
        assert self.target is not None
        return -self.better * value if self.better else abs(value - self.target)


def percent(value: float) -> str:
    """Format a share as a percentage, such as 81.2%."""
    return f"{value:.1%}"


def decimals(value: float) -> str:
    """Format a number with three decimals and three significant digits, or as a power of ten if it has many zeros."""
    if value == 0 or 1 <= abs(value) < 1e5:
        return f"{value:.3f}"
    return f"{value:#.3g}" if 1e-4 <= abs(value) < 1 else f"{value:.2e}"


_FORMATS = {"percent": percent, "number": decimals, "bytes": size, "seconds": duration}


def _both(measure: Measure) -> Iterator[Measure]:
    """Yield a measure over the samples of all clients together, and the given one, its mean over clients."""
    yield replace(
        measure, key=f"{measure.key}_pooled", label=f"pooled {measure.label}",
        name=f"{measure.name.removesuffix(_MEAN)}, all samples pooled",
        meaning=f"{measure.meaning.removesuffix(_MEAN)}, over the samples of all clients together",
    )  # fmt: skip
    yield replace(measure, name=measure.name.removesuffix(_MEAN) + _MEAN)


_MEAN, _LEVEL = ", mean over clients", "with the client's own label frequencies"
_OF_MODELS = (
    Measure("accuracy_pooled", "pooled accuracy", "accuracy, all samples pooled",
            "over the samples of all clients together", "percent", HIGHER, 2),
    Measure("accuracy", "accuracy", "accuracy, mean over clients",
            "mean over clients, each with its own model", "percent", HIGHER, 2),
    Measure("accuracy_worst_decile", "worst tenth", "accuracy, worst tenth of clients",
            "mean accuracy of the worst-off tenth of clients", "percent", HIGHER, 1, "worst tenth"),
    *_both(Measure("exact_match", "exact match", "inputs with every answer right, mean over clients",
                   "share of inputs whose labels, or steps, are all right", "percent", HIGHER, 1)),
    Measure("rmse_pooled", "pooled RMSE", "RMSE, all samples pooled",
            "over the samples of all clients together", digits=4),
    Measure("rmse", "RMSE", "RMSE, mean over clients",
            "root mean squared error, mean over clients, each with its own model", digits=4),
    *_both(Measure("nll", "NLL", "negative log likelihood", "negative log-likelihood; lower is better")),
    Measure("ece", "ECE", "calibration error (ECE)",
            "calibration error: the mean gap between confidence and accuracy; 0 is best"),
    Measure("nll_calibrated", "NLL calibrated", "negative log likelihood, calibrated" + _MEAN,
            "negative log-likelihood with a temperature that each client fits on its validation rows"),
    Measure("ece_calibrated", "ECE calibrated", "calibration error (ECE), calibrated",
            "calibration error with a temperature that each client fits on its validation rows"),
    Measure("classwise_ece", "class-wise ECE", "class-wise calibration error",
            "calibration error of every class's probability, averaged over classes; 0 is best"),
    *_both(Measure("brier", "Brier", "Brier score", "squared error of the probabilities; lower is better")),
    *_both(Measure("auroc", "AUROC", "AUROC", "how well samples of a class are ranked above others; 0.5 is chance",
                   target=HIGHER)),
    *_both(Measure("average_precision", "AP", "average precision", "area under the curve of precision and recall",
                   target=HIGHER)),
    *_both(Measure("balanced_accuracy", "balanced accuracy", "balanced accuracy",
                   "mean of the classes' recalls, whatever their sizes", "percent", HIGHER, 1)),
    *_both(Measure("f1", "F1", "F1", "harmonic mean of precision and recall", target=HIGHER)),
    *_both(Measure("recall", "recall", "recall of the positive class",
                   "share of the positive samples that are found", "percent", HIGHER, 1)),
    *_both(Measure("precision", "precision", "precision of the positive class",
                   "share of the samples predicted positive that are", "percent", HIGHER, 1)),
    *_both(Measure("sensitivity", "sensitivity", "sensitivity at the chosen specificity",
                   "share of the positive samples found with as few false alarms as chosen", "percent", HIGHER, 1)),
    *_both(Measure("mae", "MAE", "mean absolute error", "mean absolute error", digits=4)),
    *_both(Measure("pinball", "pinball", "pinball loss of the 90% interval",
                   "loss of the interval's ends: narrow intervals that cover are best", digits=4)),
    Measure("coverage_pooled", "coverage", "coverage of 90 % intervals, pooled",
            "share of all targets inside the 90% interval; 90% is best", "percent", 0.9, 1),
    Measure("coverage", "coverage", "coverage of 90 % intervals, mean over clients",
            "share of targets inside the 90% interval, mean over clients; 90% is best", "percent", 0.9, 1),
    *_both(Measure("interval_width", "width", "width of 90% intervals",
                   "mean width of the 90% interval; narrow is good where the coverage is right", digits=4,
                   target=None)),
)  # fmt: skip
SCORED = tuple(measure.key for measure in _OF_MODELS)  # the measures of clients' models, as tables of a run list them
MEASURES = {
    measure.key: measure
    for measure in (
        *_OF_MODELS,
        Measure("specificity", "specificity", "specificity at which sensitivity is scored",
                "least share of the negative samples without a false alarm, at which sensitivity is scored",
                "percent", None, 1),
        Measure("prior_accuracy", "prior alone", "accuracy of the prior alone",
                "accuracy before any personal training", "percent", HIGHER),
        Measure("prior_rmse", "prior alone", "RMSE of the prior alone", "RMSE before any personal training"),
        Measure("prior_level_accuracy", "prior + label level", "accuracy of the prior + label level",
                f"accuracy of the prior {_LEVEL}", "percent", HIGHER),
        Measure("accuracy_last10", "last ten", "accuracy, last ten evaluations",
                "mean accuracy of the last ten evaluations", "percent", HIGHER),
        Measure("rmse_last10", "last ten", "RMSE, last ten evaluations", "mean RMSE of the last ten evaluations"),
        Measure("temperature", "temperature", "temperature of the calibration, mean over clients",
                "above 1 where validation rows show that a model was too sure", target=None),
        Measure("entropy", "entropy", "entropy", "uncertainty of the predictions, in nats", target=None),
        Measure("mutual_information", "mutual information", "mutual information",
                "part of the entropy that is due to uncertain weights, in nats", target=None),
        Measure("traffic", "traffic", "traffic per client and round", "up and down, per client and round", "bytes"),
        Measure("seconds", "time", "seconds", "wall-clock time of the whole run", "seconds"),
        Measure("peak_memory_bytes", "memory", "peak memory", "peak memory of the process", "bytes"),
    )
}  # fmt: skip

# The measures of a comparison's table by task; the first one decides who is best.
COMPARED = {
    "classification": ("accuracy", "accuracy_worst_decile", "nll", "ece", "brier"),
    "regression": ("rmse", "nll", "coverage", "mae", "pinball", "interval_width"),
    "multilabel": ("accuracy", "exact_match", "nll", "ece", "brier"),
    "sequence": ("accuracy", "exact_match", "nll", "ece", "brier"),
}
# Measures that are scored again with calibrated probabilities, where clients have validation rows.
CALIBRATED = {"nll": "nll_calibrated", "ece": "ece_calibrated"}
WORST_TENTH = "accuracy_worst_decile"
TWO_CLASSES = ("recall", "precision", "sensitivity")  # measures of the positive class, which more classes do not have
OF_POSITIVE = ("average_precision", "f1", *TWO_CLASSES)  # measures that of two classes are those of the positive one
DECISIONS = ("auroc", "average_precision", "balanced_accuracy", "f1", *TWO_CLASSES)  # of ranks and decisions
OF_NUMBERS = ("rmse", "nll", "mae", "pinball", "coverage", "interval_width")  # of a regression
# The measures of every client that a comparison's cells hold; cells of earlier versions have the first three alone.
OF_CLIENTS = (*("accuracy", "rmse", "nll"), *DECISIONS, *OF_NUMBERS[2:])
# The columns of a comparison's table of ranks and decisions.
DECIDED = (*(key for name in DECISIONS for key in (f"{name}_pooled", name)), "classwise_ece")
# The pooled measure that stands for a mean over clients where many clients have too few rows to be judged alone.
POOLED = {key: f"{key}_pooled" for key in ("accuracy", "rmse", "coverage", "mae", "pinball", "interval_width")}


def _tuned(*keys: str) -> tuple[str, ...]:
    """Return the keys with those of the pooled measures after them."""
    return keys + tuple(key for name in keys if (key := f"{name}_pooled") in MEASURES)


# The measures that `tune` may decide by: all that a summary has and that say which of two models is better.
_OF_ANSWERS = ("nll", "ece", "classwise_ece", "brier", WORST_TENTH, *DECISIONS)
TUNED = {
    "classification": _tuned("accuracy", *_OF_ANSWERS),
    "regression": _tuned("rmse", "nll", "mae", "pinball", "coverage"),
    "multilabel": _tuned("accuracy", "exact_match", *_OF_ANSWERS),
    "sequence": _tuned("accuracy", "exact_match", *_OF_ANSWERS),
}


def main_measure(task: str) -> str:
    """Return the key of the measure by which models of a task are judged first."""
    return COMPARED[task][0]


def tuning_measures(task: str, classes: int) -> tuple[str, ...]:
    """Return the keys of the measures that `tune` may decide by; the first one is the default.

    With more than two classes there is no positive class. A task with several labels has one in every label.
    """
    several = task in ("classification", "sequence") and classes > 2
    return tuple(key for key in TUNED[task] if not (several and client_measure(key) in TWO_CLASSES))


def client_measure(key: str) -> str:
    """Return the measure of a single client that a measure of all clients is made of: `auroc` of `auroc_pooled`."""
    return key.removesuffix("_pooled").removesuffix("_worst_decile")


def positive_class(summary: Mapping[str, Any]) -> str:
    """Return the positive class of two, such as 'died' in quotes, or class 1; empty where a summary does not tell."""
    names = summary.get("class_names")
    if not isinstance(names, list | tuple) or len(names) != 2:
        return ""
    name = str(names[1])
    return f"class {name}" if name.isdecimal() else f"'{shortened(name, 40)}'"


def in_words(measure: Measure, summary: Mapping[str, Any]) -> Measure:
    """Return the measure in words that name the positive class and, for sensitivity, the level of specificity.

    Measures that have neither come back as they are.
    """
    key, name, meaning, label = client_measure(measure.key), measure.name, measure.meaning, measure.label
    level, positive = summary.get("specificity"), positive_class(summary)
    if key == "sensitivity" and isinstance(level, int | float):
        name = name.replace("the chosen specificity", f"a specificity of {100 * level:g}% or more")
        meaning = meaning.replace("as few false alarms as chosen", f"at most {100 * (1 - level):.6g}% false alarms")
    if key in OF_POSITIVE and positive:
        label, named = f"{label} of {positive}", name.replace("the positive class", positive)
        first, comma, rest = name.partition(",")
        if key == "sensitivity":
            named = name.replace("sensitivity", f"sensitivity to {positive}")
        name = named if named != name else f"{first} of {positive}{comma}{rest}"
        meaning = meaning.replace("the positive samples", f"the samples of {positive}")
        meaning = meaning.replace("predicted positive that are", f"predicted as {positive} that are right")
        meaning = meaning.replace("precision and recall", f"precision and recall of {positive}")
    if (label, name, meaning) == (measure.label, measure.name, measure.meaning):
        return measure
    return replace(measure, label=label, name=name, meaning=meaning)


def in_present_keys(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary that was read, in the keys of today.

    Of a measure without the clients of few rows, earlier versions wrote `X_large` beside `X` of all clients. Today they
    are `X` and `X_all`.
    """
    former = {key.removesuffix("_large") for key in summary if key.endswith("_large")}
    names = {f"{key}_large": key for key in former} | {key: f"{key}_all" for key in former}
    return {names.get(key, key): value for key, value in summary.items()}


def key_of_all(key: str, summary: Mapping[str, Any]) -> str:
    """Return the key of a measure in a summary over all clients, those of few rows, too."""
    return f"{key}_all" if f"{key}_all" in summary else key


def of_large(key: str, summary: Mapping[str, Any]) -> str:
    """Say which clients count in a measure of a summary: empty where all do, else such as "of 10 rows or more"."""
    if f"{key}_all" not in summary:
        return ""
    of_class = key != WORST_TENTH and "clients_few_of_class" in summary
    return f"of {FEW_OF_CLASS}+ rows per class" if of_class else f"of {FEW_ROWS} rows or more"
