"""A real service on loopback: answers as `predict` gives them, sentences for what is wrong, and nothing else."""

import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from drills.serve_requests import BAD_TABLES, CSV, JSON, MAX_BYTES, MAX_ROWS, ROW, table_case
from fedabml import InputError, load_posterior
from fedabml.serve import ServeOptions, create_app
from tests.cli.command import run
from tests.serve.running import BEARER, TOKEN, array_posterior, patients, running, table_posterior

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("posteriors")
    return {
        "table": table_posterior().save(folder / "table.safetensors"),
        "array": array_posterior().save(folder / "array.safetensors"),
        "regression": array_posterior("regression").save(folder / "regression.safetensors"),
    }


@pytest.fixture(scope="module")
def table(files):
    with (
        running(files["table"], max_rows=MAX_ROWS, max_bytes=MAX_BYTES) as (url, _),
        httpx.Client(base_url=url) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def array(files):
    with running(files["array"], max_rows=50) as (url, _), httpx.Client(base_url=url) as client:
        yield client


def rows_of(frame):
    return [{k: None if v != v else v for k, v in row.items()} for row in frame.to_dict("records")]


# -- answers --------------------------------------------------------------------------------------------------
def test_a_table_is_answered_as_predict_does(files, table):
    frame, posterior = patients(20, 9), load_posterior(files["table"])
    p = posterior.predict(frame, device="cpu")
    reply = table.post("/predict", json={"rows": rows_of(frame)})
    assert reply.status_code == 200
    rows = reply.json()["predictions"]
    assert [row["label"] for row in rows] == p.decode()
    assert np.allclose([[row["p_no"], row["p_yes"]] for row in rows], p.probs, atol=1e-12)
    assert np.allclose([row["mutual_information"] for row in rows], p.mutual_information, atol=1e-12)
    assert np.allclose([row["distance"] for row in rows], p.checks.distance)
    assert np.allclose([row["score"] for row in rows], p.checks.score)
    assert [row["alarm"] for row in rows] == p.checks.alarm.tolist() and [
        row["flags"] for row in rows
    ] == p.checks.flags
    assert [set(row["set"]) for row in rows] == [{("no", "yes")[c] for c in s.nonzero()[0]} for s in p.checks.sets]
    assert reply.json()["ignored"] == ["ill", "site"] and reply.headers["x-posterior"] == reply.json()["posterior"]


@pytest.mark.parametrize("query", ["unknown=other", "quantiles=0.1,0.9", "%0A="])
def test_parameters_in_the_address_are_refused(table, query):
    reply = table.post(f"/predict?{query}", json={"rows": rows_of(patients(2, 9))})
    assert reply.status_code == 422 and "/predict takes no parameters in its address" in reply.json()["detail"]


def test_csv_goes_in_and_comes_out(table):
    frame = patients(5, 9)
    as_json = table.post("/predict", json={"rows": rows_of(frame)}).json()
    text = frame.to_csv(index=False)
    assert table.post("/predict", content=text, headers=CSV).json() == as_json
    answer = table.post("/predict", content=text, headers=CSV | {"accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    lines = answer.text.splitlines()
    assert len(lines) == 6 and lines[0].startswith("row,label,p_no,p_yes,entropy")
    assert lines[1].split(",")[1] == as_json["predictions"][0]["label"]


def test_arrays_and_regressions(files, array):
    x = np.random.default_rng(1).normal(size=(4, 3))
    probs = load_posterior(files["array"]).predict(x, device="cpu").probs
    reply = array.post("/predict", json={"rows": x.tolist()}).json()["predictions"]
    assert np.allclose([[row["p_0"], row["p_1"]] for row in reply], probs, atol=1e-12)
    text = "\n".join(",".join(map(repr, map(float, row))) for row in x)
    assert array.post("/predict", content=text, headers=CSV).json()["predictions"] == reply
    with running(files["regression"], quantiles=[0.1, 0.9]) as (url, _):
        rows = httpx.post(f"{url}/predict", json={"rows": x.tolist()}).json()["predictions"]
    p = load_posterior(files["regression"]).predict(x, device="cpu")
    parts = {"q_0.1": p.quantile(0.1), "q_0.9": p.quantile(0.9)}
    for name, part in {**parts, "mean": p.mean, "std": p.std, "low": p.checks.low, "high": p.checks.high}.items():
        assert np.allclose([row[name] for row in rows], part[:, 0])


@pytest.mark.parametrize("name", ["table", "array", "regression"])
def test_the_example_of_its_own_description_works(files, name):
    with running(files[name]) as (url, _):
        content = httpx.get(f"{url}/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]["content"]
        answers = [httpx.post(f"{url}/predict", json=content["application/json"]["example"])]
        answers.append(httpx.post(f"{url}/predict", content=content["text/csv"]["example"], headers=CSV))
        assert [answer.status_code for answer in answers] == [200, 200]
        page = httpx.get(f"{url}/", follow_redirects=True)
        assert page.status_code == 200 and "/predict" in page.text and "http" not in page.text.replace("http-", "")


# -- refusals -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", BAD_TABLES)
def test_what_is_wrong_with_a_table_is_said(table, case):
    body, headers, status, words = BAD_TABLES[case]
    reply = table.post("/predict", content=body, headers=headers)
    assert (reply.status_code, words in reply.json()["detail"]) == (status, True), reply.text
    assert reply.json()["detail"].endswith((".", "?")) and len(reply.text) < 700


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 2]], "shape"),
        ([[1, 2, 3], [1, 2]], "shape"),
        ([[1, 2, None]], "numbers"),
        ([[1, 2, "3"]], "numbers"),
        ([[1, True, 2]], "true"),
        ([[1, 1e39, 2]], "row 0"),
        ([{"a": 1}], "numbers"),
        ([1, 2, 3], "shape"),
        ([[[1], [2], [3]]], "shape"),
    ],
)
def test_what_is_wrong_with_an_array_is_said(array, rows, words):
    reply = array.post("/predict", json={"rows": rows})
    assert reply.status_code == 422 and words in reply.json()["detail"], reply.text


def test_a_word_that_no_training_row_had_may_count_as_other(files):
    with running(files["table"], unknown="other") as (url, _):
        reply = httpx.post(f"{url}/predict", content=table_case(sex="x"), headers=JSON)
        assert reply.status_code == 200 and "sex is 'x', seen in" in str(reply.json()["predictions"][0]["flags"])
        reply = httpx.post(f"{url}/predict", content=table_case(sex="\ud800"), headers=JSON)  # no encoding has it
        assert reply.status_code == 200
        both = JSON | {"accept": "text/csv"}
        assert httpx.post(f"{url}/predict", content=table_case(sex="\ud800"), headers=both).status_code == 200


def test_pages_and_methods_that_are_not_there(table):
    assert table.get("/nothing").status_code == 404 and table.get("/predict").status_code == 405
    assert table.post("/reload").status_code == 403 and "token" in table.post("/reload").json()["detail"]
    assert table.get("/health").json() == {"status": "alive"} and table.get("/ready").json() == {"status": "ready"}


def test_without_a_token_only_this_machine_is_answered(table):
    """A stranger's page that resolves its own name to this machine gets nothing."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert table.get("/openapi.json", headers={"host": host}).status_code in (400, 403)
    for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
        assert table.get("/openapi.json", headers={"host": host}).status_code == 200


def test_a_token_guards_everything_that_tells_of_the_posterior(files):
    with running(files["table"], TOKEN) as (url, service), httpx.Client(base_url=url) as client:
        for method, path in (("post", "/predict"), ("post", "/reload"), ("get", "/metrics"), ("get", "/openapi.json")):
            call = getattr(client, method)
            for wrong in ({}, {"authorization": "Bearer"}, {"authorization": f"Basic {TOKEN}"}, _bearer(TOKEN[:-1])):
                reply = call(path, headers=wrong)
                assert reply.status_code == 401 and TOKEN not in reply.text
                assert reply.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == client.get("/docs").status_code == 200
        assert client.post("/predict", content=table_case(), headers=JSON | BEARER).status_code == 200
        assert client.get("/openapi.json", headers=BEARER | {"host": "elsewhere"}).status_code == 200
        assert service.metrics.value("requests_total", status="401") == 16


def _bearer(token):
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("token", ["short", "a token with ünicode in it", "a token with\na line break"])
def test_weak_tokens_are_refused(files, token):
    with pytest.raises(InputError, match="token"):
        create_app(files["table"], token=token)


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantiles": [2]},
        {"max_rows": 0},
        {"timeout": 0},
        {"watch": -1},
        {"unknown": "x"},
        {"max_bytes": 1.5},
        {"batch_wait": 9},
    ],
)
def test_options_are_checked(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        ServeOptions(**wrong)


def test_without_the_packages_a_sentence_names_them(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(InputError, match=r"pip install fedabml\[serve\]"):
        create_app(files["table"])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "fedabml[serve]" in run("serve", files["table"], code=2).stderr


# -- limits ---------------------------------------------------------------------------------------------------
def test_a_slow_body_and_too_many_requests_are_told_so(files):
    with running(files["table"], timeout=1.0, max_requests=1) as (url, service):
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port)) as slow:
            slow.sendall(
                b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/csv\r\ncontent-length: 9\r\n\r\na"
            )
            while not service.in_flight:
                time.sleep(0.005)
            busy = httpx.post(f"{url}/predict", content=table_case(), headers=JSON)
            assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert service.in_flight == 0


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_a_little_too_large_is_read_before_it_is_refused(table, declared):
    """A client whose connection is closed while it sends may lose the answer; far larger bodies are not read."""
    for size, stays in ((MAX_BYTES + 1, True), (4 * MAX_BYTES + 1, False)):
        body = b" " * size
        try:
            reply = table.post("/predict", content=body if declared else iter([body]), headers=JSON)
        except httpx.TransportError:  # the answer is lost
            assert not stays
            continue
        assert reply.status_code == 413 and f"{MAX_BYTES:,} bytes" in reply.json()["detail"]
        assert (reply.headers.get("connection") != "close") == stays


def test_metrics_count_what_happened(files):
    with running(files["table"]) as (url, _):
        httpx.post(f"{url}/predict", json={"rows": [ROW, ROW | {"age": 9000}]})
        httpx.post(f"{url}/predict", content=b"", headers=JSON)
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert 'fedabml_requests_total{path="/predict",status="200"} 1' in lines
    assert 'fedabml_requests_total{path="/predict",status="422"} 1' in lines
    assert "fedabml_rows_total 2" in lines and "fedabml_alarms_total 1" in lines
    assert "fedabml_request_seconds_count 2" in lines and "fedabml_batch_rows_sum 2" in lines


# -- a newer posterior ----------------------------------------------------------------------------------------
def test_reload_takes_the_newer_posterior_and_keeps_the_old_one_if_it_cannot(files, tmp_path):
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(files["table"].read_bytes())
    with running(path, TOKEN) as (url, service), httpx.Client(base_url=url, headers=BEARER) as client:
        first = client.post("/predict", json={"rows": [ROW]}).json()
        assert client.post("/reload").json() == {"posterior": first["posterior"], "replaced": False}
        table_posterior(seed=1).save(path)
        assert client.post("/reload").json()["replaced"] is True
        second = client.post("/predict", json={"rows": [ROW]}).json()
        assert second["posterior"] != first["posterior"] and second["predictions"] != first["predictions"]
        for damage in (files["array"].read_bytes(), b"nonsense", files["table"].read_bytes()[:-4]):
            path.write_bytes(damage)
            refused = client.post("/reload")
            assert refused.status_code == 409 and refused.json()["detail"].endswith(".")
        path.unlink()
        assert client.post("/reload").status_code == 409
        assert client.post("/predict", json={"rows": [ROW]}).json()["posterior"] == second["posterior"]
        assert service.metrics.value("reloads_total", result="refused") == 4


def test_a_watched_file_is_taken_when_it_changes(files, tmp_path):
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(files["table"].read_bytes())
    with running(path, watch=0.05) as (url, service):
        before = service.served.digest
        path.write_bytes(b"nonsense")
        while not service.metrics.value("reloads_total", result="refused"):
            time.sleep(0.01)
        assert service.served.digest == before
        table_posterior(seed=1).save(path)
        while service.served.digest == before:
            time.sleep(0.01)
        assert httpx.post(f"{url}/predict", json={"rows": [ROW]}).json()["posterior"] != before[:16]


# -- the command ----------------------------------------------------------------------------------------------
def test_the_command_serves_and_ends_at_a_signal(files, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    words = [sys.executable, "-m", "fedabml", "serve", files["table"], "--port", "0", "--token-file", token]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        url = lines[2].split()[1].removesuffix("/docs")
        assert httpx.post(f"{url}/predict", json={"rows": [ROW]}, headers=BEARER).status_code == 200
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and "Stopped" in out and err == "" and TOKEN not in "".join(lines)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("words", "token", "sentence"),
    [
        (["--host", "0.0.0.0"], None, "token"),
        (["--host", "somewhere.example"], None, "token"),
        (["--port", 99999], None, "port"),
        (["--token-file", "none"], None, "none"),
        (["--token-file", "none"], TOKEN, "two tokens"),
        ([], "short", "token"),
        (["--host", "192.0.2.1"], TOKEN, "listen"),
    ],
)
def test_the_command_refuses(files, monkeypatch, words, token, sentence):
    if token:
        monkeypatch.setenv("FEDABML_TOKEN", token)
    said = run("serve", files["table"], *words, code=2)
    assert sentence in said.stderr and TOKEN not in said.output
