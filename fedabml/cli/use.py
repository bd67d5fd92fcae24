"""`fedabml evaluate`, `personalize` and `predict`: the use of a trained prior."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import split_words
from ..errors import InputError, shortened
from ..models import is_folder
from ..runs.config import is_table, read_config, saved_config
from ..runs.request import resume_command
from .console import downloads, note, number, print_line
from .options import Config, command, import_code
from .posterior_flags import check_comparison, posterior_flags, print_comparison

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from ..data import Federation
    from ..data.images import ImageRecipe
    from ..evaluation.predictions import Checks, Prediction, Regression
    from ..evaluation.scoring import Evaluation
    from ..evaluation.structured import MultiPrediction
    from ..runs.config import RunConfig
    from ..runs.input_spec import InputSpec
    from ..runs.posterior import Posterior
    from ..runs.prepare import Setup
    from ..runs.trust import Trust

HARM = 1.05  # how many times the NLL before it that after a calibration is, from which a line warns
MOST_CAUSES = 6  # of alarms that a line names
MOST_NAMED = 10  # columns that a note names


@command()
def evaluate(
    run: Path,
    *,
    split: str = "auto",
    epochs: int | None = None,
    device: str | None = None,
    data_dir: str | None = None,
    out: Path | None = None,
    algorithm: str | None = None,
    model: str | None = None,
    force: bool = False,
    config: Config = None,
) -> None:
    """Personalise every client of a finished run again, and score it.

    The command rebuilds the data from the run's configuration and checks that they are the same. If the run held out
    validation data, the clients are scored on those. Once all choices are made, `--split test` scores test data.

    Example: `fedabml evaluate runs/digits-few-fedabml-0 --epochs 10`

    Flags:
        run (RUN): Folder of a run.
        split (auto|val|test): Samples to score on; auto: those of the run.
        epochs: Epochs of personalisation. [default: the algorithm's]
        device: auto, cpu or cuda. [default: the run's]
        data_dir: Folder of datasets. [default: the run's]
        out: Folder for evaluation.json and evaluation.csv. [default: RUN]
    """
    from ..files.paths import check_new, folder_lock, write
    from ..files.sealed import digests, write_json
    from ..runs.prepare import prepare, resolve_split
    from ..runs.prior import load_prior
    from ..runs.summary import clients_csv
    from .train import print_scores

    import_code(algorithm, model)
    plan, saved = saved_config(run)
    out = out or run
    files = out / "evaluation.json", out / "evaluation.csv"
    if os.path.realpath(out) != os.path.realpath(run):
        check_new(*files, force=force)
    if not (run / "shared.safetensors").exists():
        again = resume_command("train", run)
        raise InputError(f"The run in '{run}' is not finished: it has no shared.safetensors. Go on with it: {again}")
    changes = {name: saved.get(name, getattr(plan, name)) for name in ("backend", "chunk")}
    plan = plan.with_changes(**changes, data_dir=data_dir or plan.data_dir, device=device or plan.device)
    fed = _data_of(run, plan, saved)
    prior = load_prior(run / "shared.safetensors", _folder_of(run))
    trained = prior.algorithm if epochs is None else dataclasses.replace(prior.algorithm, personal_epochs=epochs)
    setup = prepare(fed, plan.model, trained, **plan.train_options(fed))
    split = resolve_split(fed, saved.get("split", "auto") if split == "auto" else split)
    with folder_lock(out):
        evaluation = _score(run, setup, prior.shared, split, plan.rounds)
        write(files[1], clients_csv(fed, evaluation, split))
        context = {"split": split, "personal_epochs": trained.personal_epochs, "clients": fed.clients}
        context |= {"prior_digest": prior.digest, "files": digests(out, [files[1].name])}
        write_json(files[0], context | evaluation.summary | evaluation.details)
    title = f"{fed.clients} clients, {trained.personal_epochs} epoch(s) of personalisation, {split} data"
    print_scores(evaluation.summary | evaluation.details, title)
    print_line(f"scores       {files[0]}")
    print_line(f"per client   {files[1]}")


def _data_of(run: Path, plan: RunConfig, saved: Mapping[str, Any]) -> Federation:
    """Rebuild the federation of a run. Raises InputError if its data have changed."""
    from ..runs.prior import load_prior

    with downloads(plan.dataset or "") as on_download:
        fed = plan.federation(on_download)
    recipe = load_prior(run / "shared.safetensors", _folder_of(run)).input_spec.recipe if fed.recipe else None
    trained = plan.as_trained(fed, saved.get("partition_hash"), recipe)
    if trained is None:
        raise InputError(
            f"The data of the run in '{run}' have changed: their hash differs. Restore them, or train again. "
            f"`fedabml personalize {shlex.quote(str(run))} --data FILE` needs the client's own rows alone."
        )
    return trained


def _folder_of(run: Path) -> str | None:
    """Return the Hugging Face folder that the run in a folder was trained with; None if there is none."""
    content = read_config(run).get("run") if (run / "config.json").is_file() else None
    model = content.get("model") if isinstance(content, dict) else None
    return model if isinstance(model, str) and is_folder(model) else None


def _score(run: Path, setup: Setup, shared: dict[str, Any], split: str, round: int) -> Evaluation:
    """Score the server's result; the kept states of clients come from the run's last checkpoint."""
    from ..engine.rounds import Simulation
    from ..evaluation.scoring import evaluate as score
    from ..runs.folder import Folder

    cohort = setup.cohort
    last = Folder(run).load_latest() if cohort.algorithm.keeps else None
    if cohort.algorithm.keeps and (last is None or last.round != round):
        raise InputError(
            f"The clients of the run in '{run}' keep a state of their own, but that of round {round} is missing or "
            f"damaged. Finish the run first: {resume_command('train', run)}"
        )
    kept = Simulation(cohort, state=last).kept
    theta = {name: value.to(cohort.device, cohort.dtype) for name, value in shared.items()}
    return score(cohort, theta, lambda clients: kept.get(theta, clients), split, round)


@command(also=posterior_flags)
def personalize(
    prior: Path,
    *,
    data: Path | None = None,
    client: str | None = None,
    out: Path = Path("posterior.safetensors"),
    id_column: str | None = None,
    compare: bool | None = None,
    seed: int = 0,
    device: str = "auto",
    algorithm: str | None = None,
    model: str | None = None,
    force: bool = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Make a client's posterior from a prior and the client's data. The data stay where they are.

    The client may be new. If its .npz also has x_test and y_test, the posterior is scored on them. The posterior
    reveals facts about the client's data, so keep it at the client.

    With --validation, the command holds out a share of the client's rows. On these rows it calibrates the posterior,
    chooses the threshold for --aim, and sets the limits of prediction sets (or intervals) and of alarms. With --client
    it holds out the validation rows of the run in place of the share, if the run has any.

    Example: `fedabml personalize runs/digits-few-fedabml-0 --data client.npz --out posterior.safetensors`

    Flags:
        prior (PRIOR): A run's folder, or its shared.safetensors.
        data: The client's .npz (x_train, y_train; or x, y), or its table, or its folder of images (CLASS/*.png), if the
            prior was trained on such.
        client (NAME): In place of --data: a client of the run whose folder is given, by name.
        out: File for the client's posterior.
        id_column (NAME): Table column of identifiers, which predictions carry. [default: as in training]
        compare: Say whether the prior, the posterior or training alone serves the client best on the rows held out.
            [default: with --validation, if at least 10 rows are held out and the comparison is quick]
        seed: Seed of shuffles and weight samples.
        device: auto, cpu or cuda.
    """
    from ..files.paths import check_new
    from ..runs.prior import load_prior
    from ..runs.train import ClientRows, client_rows

    check_comparison(compare, flags)
    if (data is None) == (client is None):
        raise InputError("Give the client's data with --data, or a client of the run with --client: one of the two.")
    source = prior / "shared.safetensors" if prior.is_dir() else prior
    _check_apart(out, source, *([data] if data else []))
    check_new(out, force=force)
    import_code(algorithm, model)
    loaded = load_prior(source, model or _folder_of(source.parent))
    if data is not None:
        x, y, test, encoded = *_client_data(data, loaded.input_spec.with_id(id_column)), False
        rows = ClientRows(x, y, encoded, flags["validation"], False)
    else:
        plan, saved = saved_config(prior)
        rows, test = client_rows(_data_of(prior, plan, saved), loaded, str(client), flags["validation"]), None
        x, y, encoded = rows.x, rows.y, rows.encoded
    flags["validation"] = rows.validation
    options: dict[str, Any] = {"seed": seed, "device": device, "encoded": encoded}
    posterior = loaded.personalize(x, y, id=id_column, trained_on=rows.trained_on, **options, **flags)
    scores = _scores(posterior.predict(test[0], seed=seed, device=device), test[1]) if test else {}
    posterior.save(out)
    print_line(f"samples     {len(x)}")
    for name, value in scores.items():
        print_line(f"{name:<11} {number(value)} on {len(test[1]) if test else 0} test samples")
    for line in posterior_lines(posterior):
        print_line(line)
    print_comparison(compare, loaded, (x, y), posterior, flags, **options)
    print_line(f"prior       {loaded.digest[:16]} (digest)")
    print_line(f"posterior   {out}")
    spec = loaded.input_spec
    inputs = "ROWS.csv" if spec.recipe else "IMAGES" if spec.images else "INPUTS.npz"
    words = [str(out), "--data", inputs, "--out", "predictions.csv", "--report", "predictions.html"]
    print_line(f"next        fedabml predict {shlex.join(words)} (the page shows rows with alarms)")


def _client_data(data: Path, spec: InputSpec) -> tuple[Any, Any, tuple[np.ndarray, np.ndarray] | None]:
    """Read one client's x, y (None: in the table) and test samples (None without any) from a table, .npz or folder."""
    from ..data import read_client

    if images := _image_recipe(data, spec):
        splits = images.site(data)
        return *splits["train"], splits.get("test")
    frame = _read_table(data, spec)
    if frame is None:
        arrays, test = read_client(data), None
        if "x_test" in arrays and (arrays["x_test"].size or arrays["y_test"].size):
            test = spec.samples(arrays["x_test"], arrays["y_test"], end="_test")
        return arrays["x_train"], arrays["y_train"], test
    return frame, None, None


def posterior_lines(posterior: Posterior) -> list[str]:
    """Return what was found on the validation rows, and what alarms look at, a line each."""
    from ..data.arrays import STRUCTURED
    from ..evaluation.measures import positive_class
    from ..runs.prediction_columns import class_names
    from ..runs.trust import TRAINED_ON

    spec = posterior.input_spec
    positive = positive_class({"class_names": class_names(spec)})
    caution = [f"caution     {TRAINED_ON}"] if posterior.trust and posterior.trust.trained_on else []
    return [*trust_lines(posterior.trust, spec.task in STRUCTURED, positive), *caution, *alarm_lines(posterior)]


def trust_lines(trust: Trust | None, several: bool, positive: str = "") -> list[str]:
    """Return what was found on the validation rows, a line each; predictions may have `several` answers per input.

    `positive` is the name of the positive class of two, in quotes.
    """
    if trust is None:
        return []
    plural = trust.rows != 1
    lines = [f"validation  {trust.rows} row{'s' * plural}, held out"]
    if trust.nll_before is not None:
        how = f"temperature {trust.temperature:.3g}" if trust.kind == "temperature" else trust.kind
        pairs = [("NLL", trust.nll_before, trust.nll_after), ("ECE", trust.ece_before, trust.ece_after)]
        # Rounding may leave the NLL of certain predictions just below 0.
        shown = [(name, number(max(0.0, a or 0.0)), number(max(0.0, b))) for name, a, b in pairs if b is not None]
        effect = ", ".join(f"{name} {a} → {b}" for name, a, b in shown)
        # Where calibration changes nothing, chance alone makes the NLL rise a little in about half of all cases.
        harm = trust.nll_after is not None and trust.nll_after > HARM * trust.nll_before and shown[0][1] != shown[0][2]
        worse = "; the NLL rises, and --calibration none leaves the probabilities as they are" * harm
        lines.append(f"calibration {how}" + ("" if trust.kind == "none" else f": {effect} (cross-validated){worse}"))
    if trust.threshold is not None:
        few = "; so few make it uncertain" if (trust.positives or 0) < 10 else ""
        of = f" of {positive or 'the positive class'}"
        rows = f"{trust.positives} row{'s' * (trust.positives != 1)}"
        lines.append(f"threshold   {trust.threshold:.3g}, for {trust.aim}{of}, chosen on {rows}{of}{few}")
    if trust.costs is not None:
        lines.append(f"decision    of least expected cost, for {trust.aim}")
    enough = trust.quantile < float("inf")
    what = "sets" if trust.nll_before is not None else "intervals"
    needed = f": {trust.rows} validation row{'s are' if plural else ' is'} too few, so they hold everything"
    fair = ", on average over new rows like those held out"
    needed = needed if not enough else "; new rows may be covered less often" if trust.trained_on else fair
    several_answers = "no sets: they are made for one label per input, and here are several"
    lines.append("coverage    " + (several_answers if several else f"{trust.coverage:.0%} {what}{needed}"))
    return lines


def alarm_lines(posterior: Posterior) -> list[str]:
    """Return what the alarms of the posterior's predictions look at and, where they miss something, why."""
    import numpy as np

    from ..runs.posterior import MOST_FEATURES
    from ..runs.prior import FALSE_ALARMS, LEAST_DENSITY, LEAST_OWN

    trust, spec = posterior.trust, posterior.input_spec
    recipe = spec.recipe
    of_all = recipe is not None and recipe.ranges is not None
    checked = ["values"] if of_all or posterior.ranges or (trust and trust.ranges) else []
    if trust is None:
        if not checked:
            has_values = recipe is not None or spec.columns(None, np.empty((0, *spec.shape))) is not None
            few = f" by fewer than {LEAST_OWN} rows, too few to tell usual values" if has_values else ""
            return [f"alarms      none: made without --validation{few}"]
        whose = "those of all sites" if of_all else "by the client's own rows"
        rest = [f"limits      {whose}: made without --validation"]
    elif trust.density is None:
        layer = f"the network has no last linear layer of at most {MOST_FEATURES:,} inputs"
        reason = f"fewer than {LEAST_DENSITY} rows to train on" if posterior.has_features else layer
        rest = [f"distances   not judged: {reason}"]
    elif trust.density_limit == float("inf"):
        rows, enough = trust.rows, trust.rows_for_distances
        rest = [f"distances   not judged: {rows} validation rows are too few, {enough} suffice"]
    else:
        checked += ["distances", *(["strangeness"] if trust.strangeness else [])]
        rest = []
    if not checked:
        return ["alarms      none", *rest]
    rate = FALSE_ALARMS if trust is None else trust.false_alarms
    return [f"alarms      by {' and '.join(checked)}, for at most about {100 * rate:g}% of usual rows", *rest]


def _check_apart(out: Path, *others: Path, flag: str = "--out") -> None:
    """Refuse an output file that the command also reads, or writes under another flag."""
    if os.path.realpath(out) in map(os.path.realpath, others):
        raise InputError(
            f"'{out}' is another file of this command and would be overwritten. Give another path with {flag}."
        )


def _read_table(path: Path, input_spec: InputSpec) -> Any:
    """Return the DataFrame of a table, or None for an .npz. Raises InputError if the prior needs the other kind."""
    from ..data.frames import read_frame
    from ..runs.input_spec import TABLE_WANTED

    table = is_table(path)
    if table and input_spec.recipe is None:
        raise InputError(
            f"'{path}' is a table, but the prior was not trained on one. Give the inputs as an .npz with x."
        )
    if input_spec.recipe and not table:
        raise InputError(f"'{path}' is not a table. {TABLE_WANTED}")
    recipe = input_spec.recipe
    if recipe is None:
        return None
    frame = read_frame(path, recipe.text_columns)
    if unread := recipe.surplus(map(str, frame.columns)):
        names = ", ".join(f"'{shortened(name, 60)}'" for name in unread[:MOST_NAMED])
        more = f" and {len(unread) - MOST_NAMED} more" if len(unread) > MOST_NAMED else ""
        note(f"'{path}' has columns that the prior was not trained on, so they are not read: {names}{more}.")
    return frame


def _image_recipe(path: Path, input_spec: InputSpec) -> ImageRecipe | None:
    """Return how to read a folder of images; None for anything else. Raises InputError if the prior needs the other."""
    if path.is_dir() and input_spec.images is None:
        raise InputError(f"'{path}' is a folder, but the prior was not trained on a folder of images. Give a file.")
    if input_spec.images and not path.is_dir() and path.suffix.lower() != ".npz":
        raise InputError(f"'{path}' is no folder. The prior was trained on a folder of images, so give one.")
    return input_spec.images if path.is_dir() else None


def _scores(p: Prediction | Regression | MultiPrediction, y: np.ndarray) -> dict[str, float]:
    import numpy as np

    from ..evaluation.predictions import Prediction
    from ..evaluation.structured import MultiPrediction

    if isinstance(p, Prediction):
        true = p.probs[np.arange(len(y)), y]
        return {"accuracy": float((p.label == y).mean()), "NLL": float(-np.log(np.clip(true, 1e-30, None)).mean())}
    if isinstance(p, MultiPrediction):
        flat, answers, _ = p.flat(y, np.arange(len(y)))
        return {"accuracy": float((flat.label == answers).mean()), "NLL": float(p.nll(y).mean())}
    return {"RMSE": float(np.sqrt(((p.mean - y) ** 2).mean())), "NLL": float(p.nll(y).mean())}


@command()
def predict(
    posterior: Path,
    *,
    data: Path,
    out: Path = Path("predictions.csv"),
    report: Path | None = None,
    id_column: str | None = None,
    samples: int | None = None,
    quantiles: str = "",
    seed: int = 0,
    device: str = "auto",
    model: str | None = None,
    force: bool = False,
    config: Config = None,
) -> None:
    """Predict with a client's posterior, and report the uncertainty of each prediction.

    The CSV has a row per input, with these columns:
    - label, and p_CLASS for each class: the predicted class, and the probabilities
    - entropy: uncertainty in nats
    - mutual_information: the part of the entropy that is due to the weights; often high for inputs unlike the client's
    - surprise, with the label level: above 0, the input resembles other clients' data more than this client's
    - mean, std, model_std and, for a transformed target, median: for a regression, in the target's own unit
    - q_0.9 and so on: for a regression, the levels of --quantiles

    A value far outside its range can still look certain. So there are checks: for tables, and for vectors of at most 64
    numbers (from 25 rows on, if the client alone decides what is usual); for other inputs with `personalize
    --validation`:
    - alarm: yes if the input is unlike usual data
    - score: how unusual the input is; above 1 is an alarm
    - flags: the columns with unusual values
    - set (regression: low, high): with --validation; contains the truth with the stated coverage
    - distance: with --validation; how far the input lies from the client's training data in the last hidden layer
    - strangeness: for images and other inputs without columns; usual inputs have about 1

    --report shows the rows with an alarm on a page. See docs/guide.md, "Trust at a site".

    A class name that a spreadsheet would run as a formula begins with an apostrophe.

    Example: `fedabml predict posterior.safetensors --data inputs.npz --out predictions.csv --samples 20`

    Flags:
        posterior (POSTERIOR): A file that `fedabml personalize` wrote.
        data: Inputs: an .npz with x; a table or a folder of images if the prior was trained on such.
        out: CSV file to write, with one row per input.
        report (HTML): Page to write, with the rows that have an alarm, and what raised it.
        id_column (NAME): Table column of identifiers to carry into the CSV. [default: as in training]
        samples (N): Number of weight samples to average (0: the mean weights). [default: as in training]
        quantiles (0.1,0.5,0.9): Regression: levels of the predictive distribution to report.
        seed: Seed of the weight samples.
        device: auto, cpu or cuda.
    """
    from ..data.files import read_npz
    from ..files.paths import check_new, write
    from ..files.sheets import csv_text
    from ..report import save
    from ..report.predictions_page import render_predictions
    from ..runs.prediction_columns import as_text, output_columns, with_ids
    from ..runs.prior import load_posterior
    from ..runs.progress import Notes

    _check_apart(out, data, posterior)
    if report:
        _check_apart(report, data, posterior, out, flag="--report")
    check_new(out, *([report] if report else []), force=force)
    levels = quantile_levels(quantiles)
    import_code(model=model)
    loaded = load_posterior(posterior, model)
    if levels and loaded.input_spec.task != "regression":
        raise InputError("--quantiles are for a regression, but this posterior predicts classes. Leave them out.")
    images, spec = _image_recipe(data, loaded.input_spec), loaded.input_spec.with_id(id_column)
    x, files = images.inputs(data) if images else (_read_table(data, spec), [])
    if x is None:
        arrays = read_npz(data)
        name = next((name for name in ("x", "x_test", "x_train") if name in arrays), None)
        if name is None:
            raise InputError(f"'{data}' has no array x; it holds {', '.join(arrays) or 'nothing'}.")
        if name != "x":
            note(f"'{data}' has no array x, so the command predicts {name}.")
        x = arrays[name]
    with Notes():
        p = loaded.predict(x, samples=samples, seed=seed, device=device, id=id_column)
    predicted = output_columns(dataclasses.replace(p, ids=None), spec, levels)
    columns: dict[str, Any] = ({"file": files} if files else {}) | with_ids(predicted, p.ids, spec)
    rows = enumerate(zip(*columns.values(), strict=True))
    texts = ([i, *map(as_text, columns, row)] for i, row in rows)
    write(out, csv_text(["row", *columns], texts))
    print_line(f"inputs        {len(x)}")
    print_line(f"alarms        {alarm_counts(p.checks)}")
    if loaded.prior:
        print_line(f"prior         {loaded.prior[:16]} (digest)")
    print_line(f"predictions   {out}")
    if report:
        lines = (line.split(maxsplit=1) for line in alarm_lines(loaded))
        limits = " ".join(f"{subject.capitalize()} {text}." for subject, text in lines)
        names = {name: values for name, values in columns.items() if name not in predicted}
        save(render_predictions(p, names, predicted, f"Predictions for {data.name}", limits), report)
        print_line(f"report        {report}")


def alarm_counts(checks: Checks | None) -> str:
    """Return how many rows have an alarm, and the columns that raised most of them."""
    if checks is None:
        return "none: the posterior was made without --validation, so nothing was checked"
    counts = [f"{name} {count}" for name, count in checks.counts.items()]
    named = ", ".join(counts[:MOST_CAUSES]) + ", …" * (len(counts) > MOST_CAUSES)
    return f"{checks.alarm.sum()} of {len(checks.alarm)} rows" + (f": {named}" if named else "")


def quantile_levels(text: str) -> list[float]:
    """Return the levels of quantiles, such as 0.1,0.5,0.9."""
    try:
        levels = [float(word) for word in split_words(text)]
    except ValueError:
        levels = []
    if text and not (levels and all(0 < level < 1 for level in levels)):
        raise InputError(f"--quantiles needs numbers between 0 and 1, such as 0.1,0.5,0.9; it is '{text}'.")
    return levels
