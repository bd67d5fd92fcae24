"""Many clients at once: answers as alone, no cross-talk, a hot swap without a lost request, and random bodies."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from drills.serve_requests import CSV, fuzz
from fedabml import load_posterior
from fedabml.runs.prediction_columns import output_columns
from tests.serve.running import BEARER, TOKEN, array_posterior, patients, running, table_posterior

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two posteriors of one prior: their files' bytes, and themselves."""
    folder = tmp_path_factory.mktemp("posteriors")
    paths = [table_posterior(seed).save(folder / f"{seed}.safetensors") for seed in (0, 1)]
    return [(path.read_bytes(), load_posterior(path)) for path in paths]


def body_of(frame):
    rows = frame.drop(columns=["site", "ill"]).to_dict("records")
    return {"rows": [{k: None if v != v else v for k, v in row.items()} for row in rows]}


def expected(posterior, frame):
    columns = output_columns(posterior.predict(frame, device="cpu"), posterior.input_spec)
    return {name: columns[name] for name in ("label", "p_yes", "entropy", "mutual_information", "alarm", "flags")}


def agrees(reply, wanted):
    """Whether an answer is what `predict` gives for these rows alone."""
    rows = reply.json()["predictions"]
    exact = all([row[name] for row in rows] == wanted[name] for name in ("label", "alarm", "flags"))
    numbers = ("p_yes", "entropy", "mutual_information")
    return exact and all(np.allclose([row[n] for row in rows], wanted[n], rtol=0, atol=1e-6) for n in numbers)


def test_concurrent_requests_share_batches_and_get_their_own_rows(saved, tmp_path):
    """Fifty clients ask for different rows, some of them wrong; every answer is that of its own rows alone."""
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(saved[0][0])
    frames = [patients(1 + i % 4, 50 + i) for i in range(50)]
    wanted = [expected(saved[0][1], frame) for frame in frames]
    with running(path, batch_wait=0.05) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
        together = threading.Barrier(50)

        def ask(i):
            together.wait()
            if i % 10 == 3:
                return client.post("/predict", json={"rows": [{"age": 1, "bmi": 2, "sex": f"word {i}"}]})
            if i % 2:
                return client.post("/predict", content=frames[i].to_csv(index=False), headers=CSV)
            return client.post("/predict", json=body_of(frames[i]))

        with ThreadPoolExecutor(50) as pool:
            replies = list(pool.map(ask, range(50)))
        batches = service.metrics.text()
    for i, reply in enumerate(replies):
        if i % 10 == 3:
            assert reply.status_code == 422 and f"word {i}" in reply.json()["detail"] and "row 1" in reply.text
        else:
            assert reply.status_code == 200 and agrees(reply, wanted[i])
    count = int(next(line.split()[1] for line in batches.splitlines() if line.startswith("fedabml_batch_rows_count")))
    assert 1 <= count < 45  # fewer batches than requests


def test_a_hot_swap_under_load_loses_no_request(saved, tmp_path):
    """Eight clients ask without pause while the posterior is replaced; each answer is one posterior's, whole."""
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(saved[0][0])
    frame = patients(3, 77)
    with running(path, TOKEN) as (url, service):
        digests, stop, replies = [service.served.digest[:16]], threading.Event(), []

        def ask():
            with httpx.Client(base_url=url, headers=BEARER, timeout=60) as client:
                while not stop.is_set():
                    replies.append(client.post("/predict", json=body_of(frame)))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for content, _ in (saved[1], saved[0], saved[1]):
            seen = len(replies)
            aside = path.with_suffix(".part")
            aside.write_bytes(content)
            aside.replace(path)
            assert httpx.post(f"{url}/reload", headers=BEARER, timeout=60).json()["replaced"] is True
            digests.append(service.served.digest[:16])
            while len(replies) < seen + 24:
                stop.wait(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert service.in_flight == 0
    assert digests[0] == digests[2] != digests[1] == digests[3]
    by_digest = {digests[0]: expected(saved[0][1], frame), digests[1]: expected(saved[1][1], frame)}
    assert {reply.json()["posterior"] for reply in replies} == set(by_digest)
    assert all(reply.status_code == 200 and agrees(reply, by_digest[reply.json()["posterior"]]) for reply in replies)


# -- random requests, made from the service's own description ------------------------
@pytest.mark.parametrize("requests", [60, pytest.param(3000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("kind", "token"), [("table", TOKEN), ("array", None)])
def test_random_requests_end_in_an_answer_or_a_sentence(saved, tmp_path, kind, token, requests):
    path = tmp_path / "posterior.safetensors"
    if kind == "table":
        path.write_bytes(saved[0][0])
    else:
        array_posterior().save(path)
    with running(path, token) as (url, _):
        seen = fuzz(url, requests, token=token)
    statuses = seen.statuses["/predict"]
    assert seen.wrong == [] and min(statuses[200], statuses[422]) >= requests / 16
    pages = {"/reload", "/health", "/ready", "/metrics", "/openapi.json", "/docs", "/", "no page", "/predict"}
    assert seen.statuses.keys() == pages or requests < 1000
