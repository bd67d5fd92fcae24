"""Several labels and labelled steps: losses and measures equal those of torch and scikit-learn; -1 counts nowhere."""

import numpy as np
import pytest
import torch
from sklearn import metrics
from typer.testing import CliRunner

import fedabml
from fedabml.cli import app
from fedabml.errors import InputError
from fedabml.evaluation.structured import MultiPrediction
from fedabml.likelihoods import Bernoulli, StepCategorical, from_json, to_json

TASKS = ("multilabel", "sequence")
WEIGHTS = np.random.default_rng(9).normal(size=(5, 3))


def pair(seed, n=40, hidden=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    y = (x @ WEIGHTS + rng.normal(size=(n, 3)) > 0).astype(np.int64)
    if hidden:
        y[np.arange(n), rng.integers(0, 3, n)] = -1
    return x, y


def federation(task, clients=3, hidden=False):
    parts = [[pair(10 * i + j, hidden=hidden) for i in range(clients)] for j in range(2)]
    return fedabml.Federation.from_arrays(*parts, task=task)


def test_the_loss_of_labels_is_that_of_torch_and_an_unknown_label_has_no_part():
    outputs = torch.randn(7, 4, dtype=torch.float64) * 30
    y = torch.randint(0, 2, (7, 4))
    tail, likelihood = torch.empty(0), Bernoulli(4)
    each = torch.nn.functional.binary_cross_entropy_with_logits(outputs, y.double(), reduction="none")
    assert torch.allclose(likelihood.nll(outputs, y, tail, None), each.sum(1), atol=1e-12)
    y[0, 1] = -1
    assert torch.allclose(likelihood.nll(outputs, y, tail, None)[0], each[0, [0, 2, 3]].sum(), atol=1e-12)
    p = likelihood.predict(outputs, tail, None)
    assert torch.allclose(p[..., 1], torch.sigmoid(outputs)) and torch.allclose(p.sum(-1), torch.ones_like(outputs))
    by_hand = Bernoulli(2).nll(torch.zeros(1, 2), torch.tensor([[0, 1]]), tail, None)
    assert by_hand.item() == pytest.approx(2 * np.log(2))


def test_the_loss_of_steps_is_that_of_torch_and_a_masked_step_has_no_part():
    outputs, y = torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(-1, 3, (6, 5))
    likelihood, tail = StepCategorical(3, 5), torch.empty(0)
    expected = torch.nn.functional.cross_entropy(outputs.transpose(1, 2), y, ignore_index=-1, reduction="none").sum(1)
    assert torch.allclose(likelihood.nll(outputs, y, tail, None), expected)
    assert torch.allclose(likelihood.nll(outputs.flatten(1), y, tail, None), expected)
    assert torch.allclose(likelihood.predict(outputs, tail, None), outputs.softmax(-1))
    outputs.requires_grad_()
    likelihood.nll(outputs, y, tail, None).sum().backward()
    assert (outputs.grad[y < 0] == 0).all() and (outputs.grad[y >= 0] != 0).all()


@pytest.mark.parametrize("likelihood", [Bernoulli(4), StepCategorical(3, 5)])
def test_likelihoods_are_read_back_and_refuse_other_outputs(likelihood):
    assert from_json(to_json(likelihood)) == likelihood
    likelihood.check(torch.zeros(2, likelihood.outputs))
    with pytest.raises(InputError, match=r"The model's output has shape \(7,\) per example"):
        likelihood.check(torch.zeros(2, 7))


@pytest.mark.parametrize("task", TASKS)
def test_loop_and_vmap_agree(task):
    fed = federation(task, hidden=True)
    words = {"rounds": 2, "participation": 1.0, "dtype": "float64", "device": "cpu", "epochs": 2}
    runs = [fedabml.train(fed, "mlr", backend=backend, **words) for backend in ("loop", "vmap")]
    for name in ("loss", "accuracy", "exact_match", "nll", "brier", "ece", "auroc"):
        assert runs[0].summary[name] == pytest.approx(runs[1].summary[name], abs=1e-9)
    assert runs[0].summary["nll"] < runs[0].summary["base_nll"]


def test_measures_of_labels_are_those_of_scikit_learn():
    fed = federation("multilabel", clients=2)
    run = fedabml.train(fed, "mlr", rounds=1, participation=1.0, device="cpu", backend="loop")
    posterior = [run.prior.personalize(*pair(10 * i)) for i in range(2)]
    measured = {"auroc": [], "f1": [], "average_precision": [], "exact_match": [], "accuracy": []}
    for i, each in enumerate(posterior):
        x, y = pair(10 * i + 1)
        p = each.predict(x)
        assert p.label.shape == y.shape and np.array_equal(p.label, (p.positive > 0.5))
        measured["auroc"].append(metrics.roc_auc_score(y, p.positive, average="macro"))
        measured["average_precision"].append(metrics.average_precision_score(y, p.positive, average="macro"))
        measured["f1"].append(metrics.f1_score(y, p.label, average="macro"))
        measured["exact_match"].append(metrics.accuracy_score(y, p.label))
        measured["accuracy"].append(1 - metrics.hamming_loss(y, p.label))
        assert p.nll(y).mean() == pytest.approx(3 * metrics.log_loss(y.reshape(-1), p.positive.reshape(-1)))
    scores = check_scores(fed, run, posterior)
    for name, values in measured.items():
        assert np.allclose(scores[name], values), name


def check_scores(fed, run, posteriors):
    """Score predictions of the posteriors with the functions that `evaluate` uses."""
    from fedabml.evaluation import structured
    from fedabml.evaluation.client_scores import structured_scores

    rows = fed.test
    p = MultiPrediction.concatenate([q.predict(fed.x[rows[i]]) for i, q in enumerate(posteriors)])
    y, owner, clients = fed.y[rows.index], rows.owner, np.arange(fed.clients)
    decided, pooled, details = structured.decide(p, y, owner, fed, clients)
    first = details["labels"][0]
    assert first["auroc_pooled"] == pytest.approx(metrics.roc_auc_score(y[:, 0], p.positive[:, 0]))
    assert first["positives"] == y[:, 0].sum() and first["samples"] == len(y)
    assert pooled["auroc_pooled"] == pytest.approx(metrics.roc_auc_score(y, p.positive, average="macro"))
    again = MultiPrediction.from_columns(p.columns(), y.shape[1])
    assert np.array_equal(again.probs, p.probs) and np.array_equal(again.mutual_information, p.mutual_information)
    return structured_scores(p, y, owner, fed.clients)[0] | decided


@pytest.mark.parametrize("task", TASKS)
def test_an_unknown_answer_changes_no_score(task):
    from fedabml.evaluation.client_scores import structured_scores

    y, owner = np.array([[0, 1, -1], [1, 1, 0], [0, -1, -1]]), np.array([0, 0, 1])
    probs = np.random.default_rng(0).dirichlet(np.ones(2), (3, 3))
    other = probs.copy()
    other[y < 0] = [0.5, 0.5]
    (a, pooled, _), (b, _, _) = (
        structured_scores(MultiPrediction(q, np.zeros((3, 3))), y, owner, 2) for q in (probs, other)
    )
    assert all(np.array_equal(a[name], b[name]) for name in a)
    right = (probs.argmax(-1) == y)[y >= 0]
    assert pooled["accuracy_pooled"] == pytest.approx(right.mean())
    assert pooled["nll_pooled"] == pytest.approx(
        -np.log(np.take_along_axis(probs, np.maximum(y, 0)[..., None], -1)[..., 0][y >= 0]).mean()
    )
    assert a["exact_match"][1] == float(probs[2, 0].argmax() == 0)


@pytest.mark.parametrize(
    ("task", "y", "says"),
    [
        ("multilabel", [0, 1, 0], r"needs \[n, labels\] of 0 and 1"),
        (
            "multilabel",
            [[0, 2], [1, 0], [0, 0]],
            "sample 0, has the label 2; the labels of the task multilabel are 0 and 1",
        ),
        ("multilabel", [[0.5, 0], [1, 0], [0, 0]], "classes are whole numbers"),
        ("sequence", [[0, -2], [1, 0], [0, 0]], "has the label -2"),
        ("sequence", [[0, 1], [-1, -1], [0, 0]], "sample 1, has no label: all of them are -1"),
        ("sequence", [[[0]], [[1]], [[0]]], r"needs \[n, steps\]"),
        (None, [[0, 1], [1, 0], [0, 0]], "--task multilabel"),
    ],
)
def test_other_targets_are_refused_by_name(task, y, says):
    with pytest.raises(InputError, match=says):
        fedabml.Federation.from_arrays([(np.zeros((3, 2)), np.array(y))], task=task)


def test_what_does_not_apply_is_refused_or_left_out():
    fed = federation("multilabel", clients=2)
    run = fedabml.train(fed, "mlr", rounds=1, participation=1.0, device="cpu", backend="loop", evaluate=False)
    assert run.summary["exact_match"] is None
    x, y = pair(0)
    with pytest.raises(InputError, match="this posterior predicts numbers, or several labels"):
        run.prior.personalize(x, y, validation=0.3, aim="f1")
    with pytest.raises(InputError, match="y has 2 columns; the prior has 3 labels"):
        run.prior.personalize(x, y[:, :2])
    p = run.prior.personalize(x, y, validation=0.3).predict(x)
    assert p.checks.sets is None and len(p.checks.alarm) == len(x)
    assert fedabml.compare_at_site(run.prior, x, y).rows == 12
    with pytest.raises(InputError, match="does not fit this data: a multilabel with 3 labels"):
        fedabml.train(fed, "mlr", likelihood=fedabml.Categorical(3))
    with pytest.raises(InputError, match=r"steps of 2 classes need \(3, 2\)"):
        fedabml.train(federation("sequence", 2), torch.nn.Linear(5, 4))
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"who": [*"aabb"], "x": [1.0, 2.5, 3.0, 4.0], "y": [0, 1, 0, 1]})
    with pytest.raises(InputError, match="a table has one target column"):
        fedabml.read_table(frame, client="who", target="y", task="multilabel")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_from_arrays_to_predictions_on_the_command_line(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    for i in range(3):
        (x, y), (more, others) = pair(2 * i), pair(2 * i + 1)
        np.savez(tmp_path / "sites" / f"{i}.npz", x_train=x, y_train=y, x_test=more, y_test=others)

    def run(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.output

    quick = (
        "--data",
        "sites",
        "--task",
        task,
        "--model",
        "mlr",
        "--rounds",
        1,
        "--participation",
        1,
        "--device",
        "cpu",
    )
    assert f"{task}, " in run("data", "inspect", "sites", "--task", task)
    assert "every answer right" in run("train", *quick, "--out", "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert ("Table of 3 labels" in page) == (task == "multilabel") and "Exact match" in page
    assert "no sets" in run("personalize", "run", "--data", "sites/0.npz", "--validation", 0.3)
    run("predict", "posterior.safetensors", "--data", "sites/1.npz")
    head = (tmp_path / "predictions.csv").read_text().splitlines()[0]
    assert head.startswith("row,labels,p_0,p_1,p_2," if task == "multilabel" else "row,label_0,label_1,label_2,p_0")
    run("evaluate", "run")
    run("compare", *quick, "--algorithms", "fedavg,fedabml", "--seeds", 1, "--out", "compared", "-q")
