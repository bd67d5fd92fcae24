"""The description of a service by OpenAPI 3.1, made from a posterior's own inputs, and a page to try it.

The example is a row of usual values, so it works as it stands: medians and known words of a table's columns, or the
mean input. The page loads nothing from elsewhere, so it also works without the internet.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ..data import TableRecipe
from ..data.dates import part_names
from ..runs.input_spec import InputSpec
from ..runs.posterior import Posterior
from ..runs.tokens import padding_of
from ..version import __version__
from .batching import Columns

SIGNIFICANT = 6  # digits of an example's numbers
RELOADED = "The reply names the posterior in use and tells whether it replaced another."


def example_row(spec: InputSpec) -> Any:
    """Return a usual row: an object with the table's columns, or nested lists of the inputs' shape."""
    if spec.recipe is not None:
        return {name: _example_cell(spec.recipe, name) for name in spec.recipe.table_columns}
    if spec.network.tokens:
        return np.full(spec.shape, int(padding_of(spec.network) == 0)).tolist()  # a token that is not padding
    usual = np.broadcast_to(np.asarray(spec.shift, np.float64), spec.shape)
    if spec.dtype == "uint8":
        return np.clip(np.rint(usual), 0, 255).astype(int).tolist()
    return np.vectorize(lambda value: _rounded(float(value)), otypes=[float])(usual).tolist()


def example_body(spec: InputSpec) -> bytes:
    """Return the example as the JSON body of a request."""
    return json.dumps({"rows": [example_row(spec)]}).encode()


def description(posterior: Posterior, answer: Columns, max_rows: int) -> dict[str, Any]:
    """Return the OpenAPI description; `answer` is the posterior's prediction of the example."""
    spec = posterior.input_spec
    row = {name: json_value(values[0]) for name, values in answer.items()}
    replies = {
        "401": "The token is missing or wrong.",
        "408": "The body did not arrive in time.",
        "413": "The body has too many bytes or rows.",
        "415": "The body is neither JSON nor CSV.",
        "422": "The rows do not fit; the sentence says which and why.",
        "429": "Too many requests at once.",
        "503": "The prediction took too long, or there are too many connections.",
    }
    predictions = {"type": "array", "items": {"$ref": "#/components/schemas/Prediction"}}
    reply = {"type": "object", "properties": {"posterior": {"type": "string"}, "predictions": predictions}}
    reply["properties"] |= {"ignored": {"type": "array", "items": {"type": "string"}}}  # type: ignore[operator]
    content: dict[str, Any] = {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["rows"],
                "additionalProperties": False,
                "properties": {"rows": {"type": "array", "minItems": 1, "maxItems": max_rows, "items": _row(spec)}},
            },
            "example": {"rows": [example_row(spec)]},
        }
    }
    if spec.recipe is not None or len(spec.shape) == 1:
        content["text/csv"] = {"schema": {"type": "string"}, "example": _example_csv(spec)}
    predict = {
        "summary": "Predict rows, with uncertainty",
        "operationId": "predict",
        "security": [{"token": []}, {}],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "A prediction for each row, in their order. Accept: text/csv gives a CSV.",
                "content": {"application/json": {"schema": reply, "example": {"predictions": [row]}}},
            },
            **{status: _error(text) for status, text in replies.items()},
        },
    }
    other = {
        "/reload": {"post": _operation("Use the newer posterior in the file", "reload", RELOADED, "401", "403", "409")},
        "/health": {"get": _operation("Whether the process answers", "health", "The process answers.")},
        "/ready": {"get": _operation("Whether predictions are answered", "ready", "Predictions are answered.")},
        "/metrics": {"get": _operation("Counters for Prometheus", "metrics", "The counters follow as text.", "401")},
    }
    other["/ready"]["get"]["responses"]["503"] = {"description": "Predictions are not answered yet, or no longer."}
    properties = {name: {"type": _json_type(value), "example": value} for name, value in row.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "fedabml", "version": __version__, "description": spec.description},
        "paths": {"/predict": {"post": predict}, **other},
        "components": {
            "schemas": {"Prediction": {"type": "object", "properties": properties}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def json_value(value: Any) -> Any:
    """Return a value for JSON, which has no infinite number: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")


def _example_cell(recipe: TableRecipe, name: str) -> Any:
    if name in recipe.numeric:
        return _rounded(recipe.numeric[name].median)
    if name in recipe.dates:
        year = int(recipe.numeric[part_names(name, recipe.dates[name])[0]].median)
        return f"{year:04d}-07-01T12:00" if recipe.dates[name] else f"{year:04d}-07-01"
    return next(iter(recipe.categories[name]), None)


def _example_csv(spec: InputSpec) -> str:
    row = example_row(spec)
    if isinstance(row, dict):
        return "\n".join(",".join(_quoted(cell) for cell in line) for line in (row.keys(), row.values())) + "\n"
    return ",".join(map(str, row)) + "\n"


def _quoted(cell: Any) -> str:
    text = "" if cell is None else str(cell)
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n\r') else text


def _row(spec: InputSpec) -> dict[str, Any]:
    """Return the schema of one row."""
    recipe = spec.recipe
    if recipe is None:
        whole = spec.dtype == "uint8" or spec.network.tokens
        schema: dict[str, Any] = {"type": "integer" if whole else "number"}
        schema |= {"minimum": 0, "maximum": 255} if spec.dtype == "uint8" else {}
        for length in reversed(spec.shape):
            least = length if padding_of(spec.network) is None else 1  # short sequences of tokens are padded
            schema = {"type": "array", "minItems": least, "maxItems": length, "items": schema}
        return schema
    kinds = {name: {"type": ["number", "null"]} for name in recipe.numeric}
    words = {name: {"enum": [*known, None]} for name, known in recipe.categories.items()}
    dates = {n: {"type": ["string", "null"], "format": "date-time" if t else "date"} for n, t in recipe.dates.items()}
    every: dict[str, Any] = kinds | words | dates
    names = recipe.table_columns
    return {"type": "object", "required": list(names), "properties": {name: every[name] for name in names}}


def _operation(summary: str, name: str, success: str, *errors: str) -> dict[str, Any]:
    replies = {"200": {"description": success}} | {status: _error("A sentence says why.") for status in errors}
    return {"summary": summary, "operationId": name, "responses": replies}


def _error(text: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"detail": {"type": "string"}}}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _json_type(value: Any) -> Any:
    kinds = {bool: "boolean", str: "string", list: "array"}
    return kinds.get(type(value), ["number", "null"])
