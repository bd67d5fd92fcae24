"""Decisions of least expected cost: as computed by hand, and from files that are what they should be."""

import numpy as np
import pytest

import fedabml
from fedabml.errors import InputError
from fedabml.evaluation.decision_costs import DecisionCosts, short_aim
from fedabml.evaluation.predictions import Prediction
from tests.cli.command import run

NAMES = ("healthy", "ill", "critical")
TEXT = "true,healthy,ill,critical\nhealthy,0,1,2\nill,10,0,1\ncritical,100,20,0\n"


def written(folder, text=TEXT):
    (folder / "costs.csv").write_text(text, encoding="utf-8")
    return folder / "costs.csv"


def test_decisions_are_those_computed_by_hand(tmp_path):
    costs = DecisionCosts.read(written(tmp_path), NAMES)
    probs = np.array([[0.95, 0.05, 0.0], [0.80, 0.20, 0.0], [0.90, 0.09, 0.01], [0.97, 0.02, 0.01], [0.999, 0.001, 0]])
    # expected costs of healthy, ill, critical:
    #   .05·10 = .50            .95 = .95                .95·2 + .05·1 = 1.95          healthy
    #   .20·10 = 2              .80                      1.60 + .20 = 1.80             ill
    #   .90 + 1 = 1.9           .90 + .01·20 = 1.10      1.80 + .09 = 1.89             ill
    #   .2 + 1 = 1.2            .97 + .2 = 1.17          1.94 + .02 = 1.96             ill
    #   .01                     .999                     1.999                         healthy
    assert costs.decide(probs).tolist() == [0, 1, 1, 1, 0]
    p = Prediction(probs, np.zeros(5), costs=costs)
    assert p.label.tolist() == [0, 1, 1, 1, 0] and p.probs.argmax(1).tolist() == [0] * 5


def test_a_rare_class_is_decided_where_a_miss_costs_most(tmp_path):
    costs = DecisionCosts.read(written(tmp_path), NAMES)
    # healthy: .5 + 15 = 15.5; ill: .8 + 3 = 3.8; critical: 1.6 + .05 = 1.65
    assert costs.decide(np.array([[0.8, 0.05, 0.15]])).tolist() == [2]


def test_rows_and_columns_may_have_any_order(tmp_path):
    shuffled = "x,critical,healthy,ill\nill,1,10,0\n\ncritical, 0 ,100,20\nhealthy,2,0,1\n"
    assert DecisionCosts.read(written(tmp_path, shuffled), NAMES) == DecisionCosts.read(written(tmp_path), NAMES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("ill,10,0,1\n", ""), "first column: the class 'ill' is missing"),
        ((",critical\n", "\n"), "header: the class 'critical' is missing"),
        (("ill,10", "il,10"), "first column: 'il' is no class of the posterior. Did you mean 'ill'"),
        (("ill,10,0,1\n", "ill,10,0,1\nill,10,0,1\n"), "first column: the class 'ill' occurs more than once"),
        (("ill,10,0,1", "ill,10,0"), "row 'ill' has 3 cells, but the header has 4"),
        (("ill,10,0,1", "ill,10,0,1,5"), "row 'ill' has 5 cells, but the header has 4"),
        (("10", "-10"), "row 'ill', column 'healthy': '-10' is no cost"),
        (("10", "inf"), "row 'ill', column 'healthy': 'inf' is no cost"),
        (("10", "nan"), "'nan' is no cost"),
        (("10", "ten"), "'ten' is no cost"),
        (("10", ""), "row 'ill', column 'healthy': '' is no cost"),
        ((TEXT, TEXT.replace(",", ";")), "is missing"),
        ((TEXT, ""), "is missing"),
        ((TEXT, "x,healthy,ill,critical\nhealthy,1,1,1\nill,2,2,2\ncritical,0,0,0\n"), "every decision costs the same"),
    ],
)
def test_a_file_that_is_no_such_matrix_is_refused(tmp_path, change, says):
    path = written(tmp_path, TEXT.replace(*change))
    with pytest.raises(InputError) as error:
        DecisionCosts.read(path, NAMES)
    assert says in str(error.value) and "costs.csv" in str(error.value)


def test_only_an_aim_with_a_file_has_costs(tmp_path):
    written(tmp_path)
    for aim in ("", "f1", "recall>=0.8", "cost:10,1", "cost:10"):
        assert DecisionCosts.of_aim(aim, NAMES) is None
    assert DecisionCosts.of_aim(f"cost: {tmp_path / 'costs.csv'}", NAMES).names == NAMES
    with pytest.raises(InputError, match="There is no file"):
        DecisionCosts.of_aim(f"cost:{tmp_path / 'none.csv'}", NAMES)
    with pytest.raises(InputError, match="no single label"):
        DecisionCosts.of_aim("cost:costs.csv", ())
    assert short_aim("cost: a/b/costs.csv") == "cost:costs.csv"


@pytest.mark.parametrize(
    "content",
    [
        {"names": ["a", "b"], "matrix": [[0, 1]]},
        {"names": ["a", "b"], "matrix": [[0, 1], [1, "0"]]},
        {"names": ["a", "b"], "matrix": [[0, 1], [1, True]]},
        {"names": ["a", "b"], "matrix": [[0, -1], [1, 0]]},
        {"names": ["a", "b"], "matrix": [[0, float("inf")], [1, 0]]},
        {"names": ["a", "b"], "matrix": [[0, 1], [1]]},
        {"names": ["a", "b"]},
        [],
    ],
)
def test_a_damaged_matrix_of_a_posterior_is_refused(content):
    with pytest.raises((ValueError, TypeError, KeyError)):
        DecisionCosts.from_json(content)


@pytest.fixture(scope="module")
def site():
    """A prior for the iris-like table of three classes that overlap, and a site's rows."""
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    state = rng.integers(0, 3, 240)
    frame = pd.DataFrame({"site": rng.integers(0, 3, 240), "state": np.array(NAMES)[state]})
    frame["score"] = state + rng.normal(size=240)
    fed = fedabml.read_table(frame, client="site", target="state")
    run = fedabml.train(fed, "mlr", fedabml.FedABML(), rounds=3, participation=1.0, evaluate=False, device="cpu")
    return run.prior, frame[frame.site == 0].drop(columns="site").reset_index(drop=True)


@pytest.mark.slow
def test_a_posterior_keeps_its_costs_and_decides_by_them(site, tmp_path, monkeypatch):
    prior, frame = site
    names = prior.input_spec.class_names
    assert names == ("critical", "healthy", "ill")  # the file's order is another
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    posterior = prior.personalize(frame, validation=0.4, aim="cost:costs.csv", device="cpu")
    plain = prior.personalize(frame, validation=0.4, device="cpu")
    p, q = posterior.predict(frame), plain.predict(frame)
    costs = np.array([[0, 100, 20], [2, 0, 1], [1, 10, 0]], float)  # in the order of the names
    assert np.array_equal(p.probs, q.probs) and p.decode() == [names[i] for i in (p.probs @ costs).argmin(1)]
    assert (p.label == 0).sum() > (q.label == 0).sum() and posterior.trust.aim == "cost:costs.csv"
    posterior.save("p.safetensors")
    (tmp_path / "costs.csv").unlink()
    loaded = fedabml.load_posterior("p.safetensors")
    assert loaded.trust.costs == posterior.trust.costs and np.array_equal(loaded.predict(frame).label, p.label)
    plain.save("plain.safetensors")
    from fedabml.files.sealed import read_tensors

    formats = [read_tensors(f"{name}.safetensors")[1]["format"] for name in ("p", "plain")]
    assert formats == [3, 1] and "costs" not in read_tensors("plain.safetensors")[1]["trust"]
    frame.to_csv("rows.csv", index=False)
    run("predict", "p.safetensors", "--data", "rows.csv", "--out", "out.csv")
    rows = [line.split(",")[1] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]]
    assert rows == p.decode()
    testclient = pytest.importorskip("fastapi.testclient")
    from fedabml.serve import create_app

    with testclient.TestClient(create_app("p.safetensors"), base_url="http://localhost") as client:
        reply = client.post(
            "/predict", content=(tmp_path / "rows.csv").read_bytes(), headers={"content-type": "text/csv"}
        )
    assert [row["label"] for row in reply.json()["predictions"]] == p.decode()


@pytest.mark.slow
def test_the_refusal_of_an_aim_names_the_way_out(site, tmp_path, monkeypatch):
    prior, frame = site
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"belongs to two classes; here are 3. Give the costs .* cost:costs.csv"):
        prior.personalize(frame, validation=0.4, aim="f1")
    prior.save("prior.safetensors")
    frame.to_csv("rows.csv", index=False)
    words = ("personalize", "prior.safetensors", "--data", "rows.csv", "--validation", 0.4, "--aim", "cost:costs.csv")
    assert "There is no file 'costs.csv'" in run(*words, code=2).stderr
    written(tmp_path)
    assert "decision    of least expected cost, for cost:costs.csv" in run(*words).stdout
