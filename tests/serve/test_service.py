"""Parts of the service without a socket: who is let in, how a file is watched, and which posteriors take the same."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fedabml.serve import ServeOptions, app
from fedabml.serve.service import _difference
from tests.serve.running import TOKEN
from tests.serve.test_openapi import table


def test_the_token_is_asked_for_by_the_path_that_is_routed():
    """Older versions of starlette build `url` with the Host header, so a host "a/docs?" made every path open."""
    request = SimpleNamespace(scope={"path": "/predict"}, url=SimpleNamespace(path="/docs"), headers={})
    with pytest.raises(app.RequestRefused, match="token"):
        app._check_caller(request, TOKEN)
    request.scope["path"], request.url.path = "/docs", "/predict"
    app._check_caller(request, TOKEN)


def test_watching_survives_any_error(caplog):
    errors = [OSError("gone"), RuntimeError("out of memory"), None]

    def reload():
        error = errors.pop(0)
        if error is not None:
            raise error
        seen.set()

    service = SimpleNamespace(options=ServeOptions(watch=0.001), changed=lambda: bool(errors), reload=reload)

    async def watch():
        watching = asyncio.create_task(app._watch(service))
        while not seen.is_set() and not watching.done():
            await asyncio.sleep(0.001)
        ended = watching.done()
        watching.cancel()
        return ended

    seen = asyncio.Event()
    with caplog.at_level(logging.WARNING, "fedabml"):
        assert not asyncio.run(watch())
    assert "out of memory" in caplog.text and "tries again" in caplog.text


def test_a_column_of_dates_is_not_one_of_words():
    spec = table().input_spec
    dates = spec.recipe.dates
    words = replace(spec.recipe, dates={}, columns=("dose, mg", "word", *dates))
    words = replace(words, categories=spec.recipe.categories | {"day": ("2024-01-15",)})
    assert set(words.table_columns) == set(spec.recipe.table_columns)
    assert _difference(spec, spec) == ""
    assert _difference(spec, replace(spec, recipe=words)) == _difference(replace(spec, recipe=words), spec) == "inputs"
    times = replace(spec.recipe, dates=dict.fromkeys(dates, True))
    assert _difference(spec, replace(spec, recipe=times)) == "inputs"
