"""What several test modules ask pytest for: a quiet place for the command line, and readable asserts in the helpers."""

import gc
import os
from concurrent.futures import Future

import pytest

# `make` sets it, too: tests run side by side, and some count threads. torch reads it when the first test imports it;
# it is not imported here, because the process that hands out the tests would wait seconds for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("tests.cli.command", "tests.algorithms.problem")


def pytest_collection_finish():
    """Leave what is imported by now out of later collections of garbage, for which tests of full memory ask."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What tests find out about this machine is not remembered beyond them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDABML_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def one_thread_here(tmp_path, monkeypatch):
    """An empty working folder and one thread, whatever the command line under test sets."""
    import torch

    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def at_once():
    """In place of the background: what is handed in is done on the spot."""

    def do(work):
        future = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    return do
