"""The batcher without a network: batches form, errors stay with their request, and closing answers what waits."""

import threading

import pytest

from fedabml.serve.batching import MOST_BYTES, Answer, Batcher


class Echo:
    """Answers every job with its own body; `gate` holds a batch until it is set."""

    def __init__(self, broken=()):
        self.batches, self.gate, self.broken = [], threading.Event(), broken
        self.gate.set()
        self.waiting = 0

    def __call__(self, model, jobs):
        self.gate.wait()
        self.batches.append((model, [job.body for job in jobs]))
        if any(job.body in self.broken for job in jobs):
            raise RuntimeError("broken")
        return [ValueError(job.body) if job.kind == "bad" else Answer({"body": [job.body]}, []) for job in jobs]


@pytest.fixture
def echo():
    return Echo(broken=(b"broken",))


@pytest.fixture
def batcher(echo):
    batcher = Batcher(echo, 0.0, lambda: 0)
    yield batcher
    echo.gate.set()
    batcher.close()


def held(batcher, echo, *jobs):
    """Submit one job whose batch is held, then others, which so wait together; returns the answers of the others."""
    echo.gate.clear()
    first = batcher.submit("held", "json", b"first")
    while not first.running():
        pass
    answers = [batcher.submit(*job) for job in jobs]
    echo.gate.set()
    assert first.result(60).columns == {"body": [b"first"]}
    return answers


def test_jobs_that_wait_are_one_batch_and_each_gets_its_own_answer(batcher, echo):
    answers = held(batcher, echo, *(("m", "json", b"%d" % i) for i in range(10)))
    assert [answer.result(60).columns["body"] for answer in answers] == [[b"%d" % i] for i in range(10)]
    assert echo.batches[1:] == [("m", [b"%d" % i for i in range(10)])]


def test_a_batch_has_one_model_and_so_many_bytes(batcher, echo):
    large = b"x" * (MOST_BYTES // 2)
    jobs = [("a", "json", b"1"), ("b", "json", b"2"), *[("b", "json", large)] * 3, ("b", "json", large * 3)]
    for answer in held(batcher, echo, *jobs):
        answer.result(60)
    assert [(model, len(bodies)) for model, bodies in echo.batches[1:]] == [("a", 1), ("b", 2), ("b", 2), ("b", 1)]


def test_an_error_is_that_of_its_own_request(batcher, echo):
    good, bad, broken = held(
        batcher, echo, *(("m", k, b) for k, b in (("json", b"1"), ("bad", b"2"), ("json", b"broken")))
    )
    assert good.result(60).columns == {"body": [b"1"]}
    with pytest.raises(ValueError):
        bad.result(60)
    with pytest.raises(RuntimeError):
        broken.result(60)
    assert batcher.alive


def test_a_cancelled_job_is_not_computed_and_closing_answers_the_rest(batcher, echo):
    echo.gate.clear()
    first = batcher.submit("m", "json", b"first")
    while not first.running():
        pass
    gone, last = (batcher.submit("m", "json", body) for body in (b"gone", b"last"))
    assert gone.cancel()
    echo.gate.set()
    batcher.close()
    assert last.result(0).columns == {"body": [b"last"]} and echo.batches[-1] == ("m", [b"last"])
    assert not batcher.alive
    with pytest.raises(RuntimeError):
        batcher.submit("m", "json", b"late")


def test_it_waits_for_requests_in_flight_only():
    """Nobody else is on the way: a request goes at once, however long it would wait for others."""
    echo = Echo()
    batcher = Batcher(echo, 1e6, lambda: 1)
    assert batcher.submit("m", "json", b"1").result(60)
    batcher.close()
    echo, number = Echo(), [2]
    batcher = Batcher(echo, 1e6, lambda: number[0])
    answers = [batcher.submit("m", "json", body) for body in (b"1", b"2")]
    assert [answer.result(60).columns["body"] for answer in answers] == [[b"1"], [b"2"]]
    assert echo.batches == [("m", [b"1", b"2"])]
    batcher.close()
