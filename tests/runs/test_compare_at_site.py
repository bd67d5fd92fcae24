"""Which model serves a site best: the posterior that is written is the one that is scored, with intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest

import fedabml
from fedabml.errors import InputError
from fedabml.evaluation import calibration
from fedabml.evaluation.decisions import auroc
from fedabml.runs import compare_at_site
from tests.cli.command import run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def little_training(monkeypatch):
    monkeypatch.setattr(compare_at_site, "ALONE_EPOCHS", (1, 3))


def prior_of(y, x, **options):
    parts = [(x[i::3], y[i::3]) for i in range(3)]
    fed = fedabml.Federation.from_arrays(parts, **options)
    return fedabml.train(fed, "mlr", fedabml.FedABML(), rounds=2, participation=1.0, evaluate=False, device="cpu").prior


@pytest.fixture(scope="module")
def two_classes():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=300) > 0.8).astype(int)
    return prior_of(y, x), x[:150], y[:150]


def test_the_posterior_that_is_written_is_the_one_that_is_scored(two_classes):
    prior, x, y = two_classes
    for kind in ("temperature", "none"):
        written = prior.personalize(x, y, epochs=7, seed=3, validation=0.4, calibration=kind, device="cpu")
        report = fedabml.compare_at_site(prior, x, y, 0.4, 3, "cpu", posterior=written)
        assert report.nll["posterior"] == pytest.approx(written.trust.nll_after, rel=1e-9)
        assert report.calibration == kind and report.rows == written.trust.rows == 60
    made_here = fedabml.compare_at_site(prior, x, y, 0.4, 3, "cpu", epochs=7)
    again = prior.personalize(x, y, epochs=7, seed=3, validation=0.4, device="cpu")
    assert made_here.nll["posterior"] == pytest.approx(again.trust.nll_after, rel=1e-6)


def test_two_classes_have_auroc_and_recall_with_intervals(two_classes):
    prior, x, y = two_classes
    written = prior.personalize(x, y, validation=0.4, calibration="none", device="cpu")
    report = fedabml.compare_at_site(prior, x, y, 0.4, device="cpu", posterior=written)
    _, (rows, truth) = prior.hold_out(x, y, 0.4)
    p = written.predict(rows, device="cpu").probs
    scores = report.scores["posterior"]
    assert list(scores) == ["NLL", "AUROC", "recall"]
    assert scores["AUROC"].value == pytest.approx(auroc(p[:, 1], truth == 1))
    assert scores["recall"].value == pytest.approx((p[truth == 1, 1] > 0.5).mean())
    for measures in report.scores.values():
        assert measures["NLL"].low >= 0
        for score in measures.values():
            assert score.low <= score.value <= score.high and score.low < score.high
    (_, learned), _ = prior.hold_out(x, y, 0.4)
    share = (learned.sum() + 1) / (len(learned) + 2)
    nll = -np.log(np.where(truth == 1, share, 1 - share)).mean()
    head, rows = report.table()
    assert head[-1] == "recall of class 1" and rows[-1] == ["the base rate", f"{nll:.3f}", "0.500", "0.000"]
    assert f"AUROC {report.scores[report.best]['AUROC']}" in report.sentence and report.sentence.count(".\n") == 0
    below, above = (replace(report, base={"NLL": report.nll[report.best] + by}) for by in (-0.1, 0.1))
    assert f" The base rate is better still: NLL {below.base['NLL']:.3f}." in below.sentence
    assert "base rate" not in above.sentence


def test_recall_follows_an_aim_whose_threshold_is_chosen_on_other_rows(two_classes):
    prior, x, y = two_classes
    written = prior.personalize(x, y, validation=0.4, aim="recall>=0.95", calibration="none", device="cpu")
    report = fedabml.compare_at_site(prior, x, y, 0.4, device="cpu", posterior=written)
    plain = fedabml.compare_at_site(
        prior, x, y, 0.4, device="cpu",
        posterior=prior.personalize(x, y, validation=0.4, calibration="none", device="cpu"),
    )  # fmt: skip
    assert report.scores["posterior"]["recall"].value > plain.scores["posterior"]["recall"].value + 0.1
    assert report.nll == plain.nll
    _, (rows, truth) = prior.hold_out(x, y, 0.4)
    score, fold = written.predict(rows, device="cpu").probs[:, 1], calibration.folds(truth)
    aim, label = calibration.Aim.parse("recall>=0.95"), np.zeros(len(truth), int)
    for k in range(calibration.FOLDS):
        label[fold == k] = score[fold == k] >= calibration.choose_threshold(score[fold != k], truth[fold != k], aim)
    assert report.scores["posterior"]["recall"].value == pytest.approx(label[truth == 1].mean())


def test_more_classes_have_accuracy_and_a_regression_has_rmse():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(180, 3)).astype(np.float32)
    prior = prior_of(rng.integers(0, 3, 180), x)
    report = fedabml.compare_at_site(prior, x[:60], rng.integers(0, 3, 60), 0.5, device="cpu")
    assert list(report.scores["alone"]) == ["NLL", "accuracy"]
    score = report.scores["alone"]["accuracy"]
    assert score.value * report.rows == pytest.approx(round(score.value * report.rows)) and score.low < score.value
    prior = prior_of((x[:, :1] * 3).astype(np.float32), x)
    y = (x[:60, :1] * 3).astype(np.float32)
    written = prior.personalize(x[:60], y, validation=0.5, device="cpu")
    report = fedabml.compare_at_site(prior, x[:60], y, 0.5, device="cpu", posterior=written)
    _, (rows, truth) = prior.hold_out(x[:60], y, 0.5)
    error = written.predict(rows, device="cpu").mean - truth
    score = report.scores["posterior"]["RMSE"]
    assert score.value == pytest.approx(math.sqrt((error**2).mean())) and score.low < score.value < score.high
    assert report.calibration == "none"


def test_a_posterior_of_other_rows_is_refused(two_classes):
    prior, x, y = two_classes
    plain = prior.personalize(x, y, epochs=1, device="cpu")
    fewer = prior.personalize(x[:90], y[:90], epochs=1, validation=0.4, device="cpu")
    drawn = prior.personalize(x, y, epochs=1, seed=7, validation=0.4, device="cpu")
    changed = prior.personalize(x + 1, y, epochs=1, validation=0.4, device="cpu")
    for posterior in (fewer, drawn, changed):
        with pytest.raises(InputError, match="made with other rows held out"):
            fedabml.compare_at_site(prior, x, y, 0.4, device="cpu", posterior=posterior)
    earlier = replace(drawn, trust=replace(drawn.trust, held_out=None))
    for posterior in (plain, earlier):
        with pytest.raises(InputError, match="does not tell which rows it did not learn from"):
            fedabml.compare_at_site(prior, x, y, 0.4, 7, "cpu", posterior=posterior)


def test_a_posterior_from_a_file_is_compared_on_its_own_rows(two_classes, tmp_path):
    prior, x, y = two_classes
    made = prior.personalize(x, y, epochs=1, seed=7, validation=0.4, device="cpu")
    loaded = fedabml.load_posterior(made.save(tmp_path / "posterior.safetensors"))
    report = fedabml.compare_at_site(prior, x, y, 0.4, 7, "cpu", posterior=loaded)
    assert report.nll["posterior"] == pytest.approx(made.trust.nll_after, rel=1e-6)


def test_an_interval_of_few_rows_ends_at_zero_and_a_rank_of_one_row_is_marked():
    probs, y = np.full((18, 2), [0.97, 0.03]), (np.arange(18) == 0).astype(int)
    per_row, scores = compare_at_site._judged(fedabml.Prediction(probs, np.zeros(18)), y, None)
    assert per_row.mean() - compare_at_site._half(per_row) < 0 == scores["NLL"].low
    assert str(scores["AUROC"]).endswith(" °") and math.isnan(scores["AUROC"].low)
    report = compare_at_site.SiteReport(18, {"prior": 0.2}, {}, {"prior": scores})
    assert "° With fewer than 5 rows of a class" in report.sentence


@pytest.mark.parametrize("held", [1, 4])
def test_few_rows_have_no_interval(two_classes, held):
    prior, x, y = two_classes
    report = fedabml.compare_at_site(prior, x[:10], y[:10], held / 10, device="cpu", epochs=1)
    assert report.rows == held and all(math.isnan(half) for _, half in report.worse.values())
    assert all(math.isnan(measures["NLL"].low) for measures in report.scores.values())
    said = report.sentence
    assert f"on {'1 row' if held == 1 else '4 rows'} held out" in said
    assert "±" not in said and "inf" not in said and "nan" not in said and "may be chance" in said


def test_few_rows_of_a_regression_or_of_several_labels_have_no_interval():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    for y, options, measure in (
        (x[:, :1] * 3, {}, "RMSE"),
        (rng.integers(0, 2, (60, 4)), {"task": "multilabel"}, "accuracy"),
    ):
        prior = prior_of(y, x, **options)
        for rows, defined in ((8, False), (20, True)):
            report = fedabml.compare_at_site(prior, x[:rows], y[:rows], 0.5, device="cpu")
            score = report.scores["prior"][measure]
            assert math.isfinite(score.value) and math.isfinite(score.low) == math.isfinite(score.high) == defined


def test_training_alone_that_diverges_is_named(two_classes, monkeypatch):
    prior, x, y = two_classes
    usual = fedabml.Prior.personalize

    def diverges(self, *args, **options):
        if isinstance(self.algorithm, fedabml.Local):
            raise InputError("The posterior is not finite.")
        return usual(self, *args, **options)

    monkeypatch.setattr(fedabml.Prior, "personalize", diverges)
    report = fedabml.compare_at_site(prior, x, y, 0.4, device="cpu", epochs=1)
    assert "training alone diverges." in report.sentence and "alone" in report.nll
    assert [row[0] for row in report.table()[1]] == ["its posterior", "the prior", "the base rate"]


def test_a_small_site_is_told_without_being_asked(two_classes, tmp_path, monkeypatch):
    prior, x, y = two_classes
    monkeypatch.chdir(tmp_path)
    prior.save("prior.safetensors")
    np.savez("c.npz", x=x, y=y)
    words = ("personalize", "prior.safetensors", "--data", "c.npz", "--device", "cpu", "--force")
    held = (*words, "--validation", 0.4)
    said = run(*held).stdout
    assert "serves this site best: NLL" in said and "calibrated (temperature) on the other rows" in " ".join(
        said.split()
    )
    assert all(word in said for word in ("AUROC", "recall", "training alone"))
    for silent in (words, (*held, "--no-compare")):
        assert "best" not in run(*silent).stdout
    monkeypatch.setattr(compare_at_site, "QUICK_STEPS", 1)
    said = run(*held).stdout
    assert "next        --compare tells" in said and "serves this site" not in said
    assert "serves this site best" in run(*held, "--compare").stdout
    assert "give --validation" in run(*words, "--compare", code=2).stderr


def test_few_rows_are_compared_if_asked_for_alone(two_classes, tmp_path, monkeypatch):
    prior, x, y = two_classes
    monkeypatch.chdir(tmp_path)
    prior.save("prior.safetensors")
    np.savez("c.npz", x=x[:10], y=y[:10])
    words = ("personalize", "prior.safetensors", "--data", "c.npz", "--device", "cpu", "--force", "--validation", 0.1)
    said = " ".join(run(*words).stdout.split())
    assert "With 1 row held out, no comparison is shown unless --compare" in said and "serves this site" not in said
    assert "validation 1 row, held out" in said and "1 validation row is too few" in said
    said = " ".join(run(*words, "--compare").stdout.split())
    assert "serves this site best" in said and "1 row held out, calibrated" in said and "inf" not in said
    assert "1 rows" not in said


def test_a_report_and_predictions_show_what_they_are(two_classes):
    prior, x, y = two_classes
    report = fedabml.compare_at_site(prior, x, y, 0.4, device="cpu", epochs=1)
    assert repr(report) == report.sentence
    page = report._repr_html_()
    assert "its posterior" in page and "<th>NLL</th>" in page
    p = prior.personalize(x, y, epochs=1, device="cpu").predict(x[:3], device="cpu")
    table = p.frame()
    uncertain, checked = ["entropy", "mutual_information", "surprise"], ["alarm", "score", "flags"]
    assert list(table) == ["label", "p_0", "p_1", *uncertain, *checked]
    assert np.allclose(table[["p_0", "p_1"]], p.probs) and len(table) == 3
    with pytest.raises(InputError, match="Only predictions of a posterior"):
        replace(p, named=None).frame()


def test_a_label_level_that_somebody_chose_and_that_is_off_is_a_note():
    g = np.random.default_rng(0)
    fed = fedabml.Federation.from_arrays([(g.normal(size=(20, 6)), g.integers(0, 2, (20, 3)))] * 2, task="multilabel")
    words = {"rounds": 1, "participation": 1.0, "device": "cpu"}
    chosen = fedabml.FedABML(label_prior="sparse")
    (note,) = (n for n in fedabml.prepare(fed, "mlr", chosen, **words).notes if "label level" in n)
    assert note == "The label level is off: it is for one class per sample, and the task is multilabel."
    for usual in (fedabml.FedABML(), fedabml.FedAvg()):
        assert not any("label level" in n for n in fedabml.prepare(fed, "mlr", usual, **words).notes)
