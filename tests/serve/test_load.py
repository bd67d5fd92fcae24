"""Many clients at once: answers as alone, no cross-talk, a hot swap without a lost request, and random bodies."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from fedabml import load_posterior
from fedabml.runs.outputs import output_columns
from tests.serve.running import BEARER, TOKEN, array_posterior, patients, running, table_posterior

pytestmark = pytest.mark.slow
CSV = {"content-type": "text/csv"}


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


# -- random bodies, made from the service's own description -----------------------------------
ODD = [None, True, -1, 0, 1e308, -1e-320, 2**63, "", "x" * 300, "\ud800", "\x00", "=1+1", [], {}, [[]], "NaN", "null"]


def valid(schema, g):
    """A random value that a schema allows."""
    if "enum" in schema:
        return schema["enum"][g.integers(len(schema["enum"]))]
    kind = schema["type"][0] if isinstance(schema["type"], list) else schema["type"]
    if kind == "object":
        return {name: valid(schema["properties"][name], g) for name in schema["required"]}
    if kind == "array":
        low, high = schema.get("minItems", 0), min(schema.get("maxItems", 3), schema.get("minItems", 0) + 3)
        return [valid(schema["items"], g) for _ in range(g.integers(low, high + 1))]
    return {"number": float(g.normal(50, 30)), "integer": int(g.integers(0, 256)), "string": "2024-01-31"}[kind]


def spoiled(value, g):
    """The same value with something odd at a random place."""
    if isinstance(value, list | dict) and value and g.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[g.integers(len(keys))]
        copy = value.copy()
        if g.random() < 0.1:
            del copy[key]
        else:
            copy[key] = spoiled(value[key], g)
        return copy
    return ODD[g.integers(len(ODD))]


def fuzz(url, requests, seed=0):
    """Send random bodies; returns how many of each status, and those that were answered wrongly."""
    g, statuses, wrong = np.random.default_rng(seed), {}, []
    with httpx.Client(base_url=url, timeout=60) as client:
        schema = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]["content"]
        schema = schema["application/json"]["schema"]
        for _ in range(requests):
            content, what = valid(schema, g), g.integers(4)
            if what == 1:
                content = spoiled(content, g)
            body = json.dumps(content).encode()
            if what == 2:  # a flipped, missing or doubled byte
                place = int(g.integers(len(body)))
                body = (
                    body[:place] + bytes(g.integers(0, 256, int(g.integers(0, 3)), dtype=np.uint8)) + body[place + 1 :]
                )
            kind = ("text/csv", "application/json")[int(what != 3)]
            reply = client.post("/predict", content=body, headers={"content-type": kind})
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            if (what == 0 and reply.status_code != 200) or reply.status_code not in (200, 413, 422):
                wrong.append((body, reply.status_code, reply.text))
            elif reply.status_code != 200 and not reply.json()["detail"].rstrip().endswith((".", "?")):
                wrong.append((body, reply.text))
    return statuses, wrong


@pytest.mark.parametrize("requests", [60, pytest.param(3000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["table", "array"])
def test_random_bodies_end_in_an_answer_or_a_sentence(saved, tmp_path, kind, requests):
    path = tmp_path / "posterior.safetensors"
    if kind == "table":
        path.write_bytes(saved[0][0])
    else:
        array_posterior().save(path)
    with running(path) as (url, _):
        statuses, wrong = fuzz(url, requests)
    assert wrong == [] and min(statuses[200], statuses[422]) >= requests / 10
