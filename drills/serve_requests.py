"""Wrong and random requests to a service: tests try them in one process, and `drills.serve` at a separate one.

`BAD_TABLES` maps what is wrong with a request to its body, its headers, the status of the answer, and words of the
sentence in it. The service predicts a table with the columns age, bmi and sex, and accepts `MAX_ROWS` rows and
`MAX_BYTES` bytes. `fuzz` makes random requests to every page of any service from its own description (OpenAPI).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

JSON, CSV = {"content-type": "application/json"}, {"content-type": "text/csv"}
ROW = {"age": 60, "bmi": None, "sex": "f"}
MAX_ROWS, MAX_BYTES = 50, 20_000


def table_case(**changes: Any) -> str:
    """Return the JSON of one good row with other values in some columns."""
    return json.dumps({"rows": [ROW | changes]})


BAD_TABLES: dict[str, tuple[bytes | str, dict[str, str], int, str]] = {
    "empty": (b"", JSON, 422, "empty"),
    "no type": (b"{}", {}, 415, "content-type"),
    "other type": (table_case(), {"content-type": "text/plain"}, 415, "text/plain"),
    "truncated": (b'{"rows": [', JSON, 422, "JSON"),
    "not UTF-8": (b'{"rows": ["\xff"]}', JSON, 422, "UTF-8"),
    "a number": (b"1", JSON, 422, "rows"),
    "a list": (b"[]", JSON, 422, "rows"),
    "another key": (b'{"rows": [], "x": 1}', JSON, 422, "'x'"),
    "no rows": (b'{"rows": []}', JSON, 422, "no rows"),
    "rows are a word": (b'{"rows": "x"}', JSON, 422, "list"),
    "a row is a list": (b'{"rows": [[1, 2, 3]]}', JSON, 422, "Row 1"),
    "a missing column": (b'{"rows": [{"age": 1, "bmi": 2}]}', JSON, 422, "'sex'"),
    "a misspelt column": (b'{"rows": [{"age": 1, "bmi": 2, "sexx": "f"}]}', JSON, 422, "'sexx'"),
    "a word for a number": (table_case(age="old"), JSON, 422, "'age'"),
    "a number as a word": (table_case(age="60"), JSON, 422, "'age'"),
    "true for a number": (table_case(age=True), JSON, 422, "'age'"),
    "NaN": (b'{"rows": [{"age": NaN, "bmi": 1, "sex": "f"}]}', JSON, 422, "NaN"),
    "infinity": (b'{"rows": [{"age": 1e999, "bmi": 1, "sex": "f"}]}', JSON, 422, "'age'"),
    "too large a number": (table_case(age=1e39), JSON, 422, "'age'"),
    "huge integer": (b'{"rows": [{"age": ' + b"9" * 5000 + b', "bmi": 1, "sex": "f"}]}', JSON, 422, ""),
    "an unknown word": (table_case(sex="x"), JSON, 422, "known value: f, m"),
    "a surrogate": (b'{"rows": [{"age": 1, "bmi": 1, "sex": "\\ud800"}]}', JSON, 422, "'sex'"),
    "a list in a cell": (table_case(sex=["f"]), JSON, 422, "'sex'"),
    "deep": (b'{"rows": ' + b"[" * 9000, JSON, 422, ""),
    "deep and closed": (b'{"rows": ' + b"[" * 500 + b"]" * 500 + b"}", JSON, 422, "deep"),
    "too many rows": (json.dumps({"rows": [ROW] * 51}), JSON, 413, "50 rows"),
    "too many bytes": (b" " * 30_000, JSON, 413, "20,000 bytes"),
    "CSV: blank": (b" \n \n", CSV, 422, "empty"),
    "CSV: only a header": (b"age,bmi,sex\n", CSV, 422, "no rows"),
    "CSV: missing column": (b"age,bmi\n1,2\n", CSV, 422, "'sex'"),
    "CSV: semicolons": (b"age;bmi;sex\n1;2;f\n", CSV, 422, "'age'"),
    "CSV: twice": (b"age,age,bmi,sex\n1,1,2,f\n", CSV, 422, "'age' twice"),
    "twice": (b'{"rows": [{"age": 1, "age": 2, "bmi": 1, "sex": "f"}]}', JSON, 422, "'age' twice"),
    "CSV: ragged": (b"age,bmi,sex\n1,2,f\n1,2,f,4,5,6\n", CSV, 422, "CSV"),
    "CSV: longer rows": (b"age,bmi,sex\n7,1,2,f\n", CSV, 422, "more cells"),
    "CSV: a word": (b"age,bmi,sex\nold,2,f\n", CSV, 422, "'age'"),
    "CSV: an unknown word": (b"age,bmi,sex\n1,2,x\n", CSV, 422, "'sex'"),
    "CSV: binary": (bytes(range(128)), CSV, 422, ""),
    "CSV: too many rows": (b"age,bmi,sex\n" + b"1,2,f\n" * 51, CSV, 413, "50 rows"),
}


# -- random requests --------------------------------------------------------------------------------------------------
ODD = [None, True, -1, 0, 1e308, -1e-320, 2**63, "", "x" * 300, "\ud800", "\x00", "=1+1", [], {}, [[]], "NaN", "null"]
UNLISTED = {"/": 307, "/docs": 200, "/openapi.json": 200}  # pages for people, and the description itself
OPEN = ("/", "/docs", "/health", "/ready")  # pages that need no token
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")


@dataclass
class Seen:
    """What the answers to random requests were: statuses by page, and the answers that should have been others."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    wrong: list[tuple[Any, ...]] = field(default_factory=list)


def valid(schema: dict[str, Any], g: np.random.Generator) -> Any:
    """Return a random value that a schema allows."""
    if "enum" in schema:
        return schema["enum"][g.integers(len(schema["enum"]))]
    kind = schema["type"][0] if isinstance(schema["type"], list) else schema["type"]
    if kind == "object":
        return {name: valid(schema["properties"][name], g) for name in schema["required"]}
    if kind == "array":
        low, high = schema.get("minItems", 0), min(schema.get("maxItems", 3), schema.get("minItems", 0) + 3)
        return [valid(schema["items"], g) for _ in range(g.integers(low, high + 1))]
    return {"number": float(g.normal(50, 30)), "integer": int(g.integers(0, 256)), "string": "2024-01-31"}[kind]


def spoiled(value: Any, g: np.random.Generator) -> Any:
    """Return the same value with something odd at a random place."""
    if isinstance(value, list | dict) and value and g.random() < 0.85:
        keys: Any = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[g.integers(len(keys))]
        copy = value.copy()
        if g.random() < 0.1:
            del copy[key]
        else:
            copy[key] = spoiled(value[key], g)
        return copy
    return ODD[g.integers(len(ODD))]


def fuzz(url: str, requests: int, seed: int = 0, token: str | None = None) -> Seen:
    """Send random bodies to /predict, and random requests to all pages; return what was answered.

    Two of three requests go to /predict. Every answer must have a status that the description lists or, for a wrong
    method, a wrong page or a wrong token, the status of that refusal. A refusal must be a sentence.
    """
    g, seen = np.random.default_rng(seed), Seen()
    bearer = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=url, headers=bearer, timeout=60) as client:
        pages = client.get("/openapi.json").json()["paths"]
        for _ in range(requests):
            if g.random() < 2 / 3:
                _try_body(client, pages["/predict"]["post"]["requestBody"]["content"], g, seen)
            else:
                _try_page(client, pages, bool(token), g, seen)
    return seen


def _body(schema: dict[str, Any], what: int, g: np.random.Generator) -> bytes:
    """Return a random body: 0 a good one, 1 with an odd value, 2 with a flipped, missing or doubled byte."""
    content = valid(schema, g)
    body = json.dumps(spoiled(content, g) if what == 1 else content).encode()
    if what == 2:
        place = int(g.integers(len(body)))
        body = body[:place] + bytes(g.integers(0, 256, int(g.integers(0, 3)), dtype=np.uint8)) + body[place + 1 :]
    return body


def _try_body(client: httpx.Client, content: dict[str, Any], g: np.random.Generator, seen: Seen) -> None:
    what = int(g.integers(4))
    body = _body(content["application/json"]["schema"], what, g)
    reply = client.post("/predict", content=body, headers=CSV if what == 3 else JSON)
    _note(reply, "/predict", (200,) if what == 0 else (200, 413, 422), seen, body)


def _try_page(client: httpx.Client, pages: dict[str, Any], guarded: bool, g: np.random.Generator, seen: Seen) -> None:
    """Send a request to a random page: as described, with a wrong method, without a good token, or to no page."""
    path = str(g.choice([*pages, *UNLISTED]))
    methods = {name.upper(): operation for name, operation in pages.get(path, {"get": {}}).items()}
    method, what = str(g.choice(METHODS)), int(g.integers(4))
    body = g.bytes(int(g.integers(0, 2000)))
    headers = {"content-type": str(g.choice(["application/json", "text/csv", "text/plain", "", "x" * 3000]))}
    headers |= {"accept": str(g.choice(["*/*", "text/csv", "", "x" * 3000]))}
    shown = path
    if what == 0:  # a page that does not exist
        path, shown = path.rstrip("/") + str(g.choice(["/%00", "x", "/%2e%2e", "/%ff", "/" + "a" * 3000])), "no page"
        allowed: tuple[int, ...] = (401, 404) if guarded else (404,)
    elif what == 1 and guarded and path not in OPEN:
        headers["authorization"] = str(g.choice(["", "Bearer", "Bearer " + "x" * 40, "Basic eDp4", "x" * 3000]))
        allowed = (401,)
    elif method in methods:
        listed = methods[method].get("responses", {})
        allowed = tuple(int(status) for status in listed if status != "503") or (UNLISTED[path],)
    else:
        allowed = (405, UNLISTED.get(path, 200)) if method == "HEAD" and "GET" in methods else (405,)
    reply = client.request(method, path, content=body, headers=headers)
    _note(reply, shown, allowed if guarded or path != "/reload" else (403,), seen, (method, path, headers, body))


def _note(reply: httpx.Response, page: str, allowed: tuple[int, ...], seen: Seen, sent: Any) -> None:
    """Count an answer, and list it if its status is not allowed or if it refuses without a sentence."""
    seen.statuses.setdefault(page, Counter())[reply.status_code] += 1
    if reply.status_code not in allowed:
        seen.wrong.append((sent, reply.status_code, reply.text[:300]))
        return
    refusal = reply.status_code >= 400 and reply.request.method != "HEAD"
    if refusal and not reply.json()["detail"].rstrip().endswith((".", "?")):
        seen.wrong.append((sent, reply.status_code, reply.text[:300]))
