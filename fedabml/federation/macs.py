"""Authenticate orders and replies by HMAC-SHA256 with a secret that the server shares with one site.

Flower's SuperLink stores a message that one registered site writes in another's name, and even an order that a site
writes to another in the server's name. Without a site's secret nobody can compute the code of its messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..files.paths import read_bytes
from ..files.sealed import tensor_bytes
from .keys import SECRET_BYTES

if TYPE_CHECKING:
    from torch import Tensor


def read_secret(path: Path) -> bytes:
    """Read the secret of a site, which has exactly 32 bytes."""
    secret = read_bytes(path, SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise InputError(f"'{path}' must have {SECRET_BYTES} bytes; it has {len(secret)}. Restore it from the archive.")
    return secret


def order_mac(secret: bytes, order: Any) -> str:
    """Return the authentication code of an order, 64 hexadecimal digits. It covers every field."""
    return _mac(secret, b"order", order)


def reply_mac(secret: bytes, reply: Any) -> str:
    """Return the authentication code of a reply, 64 hexadecimal digits. It covers every field."""
    return _mac(secret, b"reply", reply)


def is_genuine(computed: str, received: object) -> bool:
    """Return whether a received code equals the computed one, by a comparison in constant time."""
    return isinstance(received, str) and received.isascii() and hmac.compare_digest(computed, received)


def _mac(secret: bytes, purpose: bytes, message: Any) -> str:
    if len(secret) != SECRET_BYTES:
        raise InputError(f"A site's secret must have {SECRET_BYTES} bytes; it has {len(secret)}.")
    code = hmac.new(secret, purpose, hashlib.sha256)
    for part in _parts(message):
        code.update(len(part).to_bytes(8, "big"))  # so that no two messages give the same stream of bytes
        code.update(part)
    return code.hexdigest()


def _parts(message: Any) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a message's fields in order of their names; tensors by name, type, shape and content."""
    for name in sorted(field.name for field in dataclasses.fields(message)):
        value = getattr(message, name)
        yield name.encode()
        if name != "tensors":
            yield json.dumps(value, sort_keys=True, allow_nan=True).encode()
            continue
        yield str(len(value)).encode()
        for key in sorted(value):
            yield from _tensor_parts(key, value[key])


def _tensor_parts(name: str, tensor: Tensor) -> Iterator[bytes | memoryview]:
    yield name.encode()
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    yield tensor_bytes(tensor)
