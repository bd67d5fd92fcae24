"""Metrics in Prometheus' text format, against numbers counted by hand."""

from concurrent.futures import ThreadPoolExecutor

from fedabml.serve.metrics import METRICS, Metrics


def test_counters_gauges_and_labels():
    metrics = Metrics()
    for status in ("200", "200", "422"):
        metrics.count("requests_total", path="/predict", status=status)
    metrics.count("rows_total", 10**7 + 1)
    metrics.replace("posterior_info", 1, digest="a")
    metrics.replace("posterior_info", 1, digest='b"\\\n')
    lines = metrics.text().splitlines()
    assert 'fedabml_requests_total{path="/predict",status="200"} 2' in lines and "fedabml_rows_total 10000001" in lines
    assert [line for line in lines if line.startswith("fedabml_posterior")] == [
        'fedabml_posterior_info{digest="b\\"\\\\\\n"} 1'
    ]
    assert metrics.value("requests_total", status="200") == 2 and metrics.value("requests_total") == 3
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == [f"fedabml_{name}" for name in METRICS]


def test_buckets_are_cumulative_and_include_their_end():
    metrics = Metrics()
    for value in (1, 2, 2, 3, 5000):
        metrics.observe("batch_rows", value)
    lines = [line.split() for line in metrics.text().splitlines() if line.startswith("fedabml_batch_rows")]
    found = {name.removeprefix("fedabml_batch_rows"): float(value) for name, value in lines}
    assert found['_bucket{le="1"}'] == 1 and found['_bucket{le="2"}'] == 3 and found['_bucket{le="4"}'] == 4
    assert found['_bucket{le="1024"}'] == 4 and found['_bucket{le="+Inf"}'] == found["_count"] == 5
    assert found["_sum"] == 5008


def test_threads_lose_no_count():
    metrics = Metrics()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: (metrics.count("rows_total"), metrics.observe("request_seconds", i)), range(2000)))
    assert metrics.value("rows_total") == 2000 and "fedabml_request_seconds_count 2000" in metrics.text()
