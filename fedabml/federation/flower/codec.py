"""Encode orders and replies as Flower messages, without pickle and without NumPy's format.

A message holds one ConfigRecord, `fields`: one JSON text of every small value, the names, types and shapes of the
tensors, and an authentication code (`macs`) that only the server and this site can compute. The tensors' bytes follow
each other as in memory (little-endian): inside that record if they are few, else as the one array of an ArrayRecord,
`tensors`.
Fewer objects are faster, because Flower moves each by six separate requests. Everything that arrives is untrusted:
every type, name, shape and length is checked, and a message that does not fit raises InputError with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ...errors import InputError
from ...files.limits import parse_json
from ...files.sealed import tensor_bytes
from ..macs import is_genuine, order_mac, reply_mac
from ..messages import ORDER_KINDS, Order, Reply, State

FORMAT = 1
INLINE = 1 << 20  # bytes of tensors that travel inside the record of fields
STYPE = "fedabml.raw"
MESSAGE_TYPE = "train"  # Flower's name for the only handler of the app; our own kinds are inside
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "uint8": torch.uint8}
MAX_JSON = 8 << 20  # characters of a message's small values
MAX_TENSORS = 10_000
MAX_NAME = 200
MAX_DIMENSIONS = 16
MAX_NUMBERS = 1 << 40  # product of a shape's sizes other than 0: torch refuses an empty tensor whose strides overflow
MAX_ERROR = 2_000
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEX = re.compile(r"[0-9a-f]*")
_FLOAT = re.compile(r"nan|-?(inf|0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4})")
_ORDER = ("kind", "federation", "card", "site", "number", "round", "attempt", "nonce", "counted", "clients", "facts")
_REPLY = ("kind", "federation", "card", "site", "round", "attempt", "nonce", "samples", "facts", "seconds", "error")


# -- encoding -------------------------------------------------------------------------------------------------------
class Packed:
    """Tensors encoded for messages. Orders of one round may share them, so that they are uploaded once."""

    def __init__(self, tensors: State) -> None:
        self.index = [[name, _dtype(name, tensor), list(tensor.shape)] for name, tensor in tensors.items()]
        self.data = b"".join(map(tensor_bytes, tensors.values()))
        self.record: ArrayRecord | None = None
        if len(self.data) > INLINE:
            array = Array(dtype="uint8", shape=(len(self.data),), stype=STYPE, data=self.data)
            self.record, self.data = ArrayRecord({"data": array}), b""


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        raise InputError(f"The tensor '{name}' has the dtype {tensor.dtype}, which a message cannot carry.")
    return _DTYPE_NAMES[tensor.dtype]


def order_content(order: Order, secret: bytes, packed: Packed | None = None) -> RecordDict:
    """Return the content of the message for an order; `packed` are its tensors, if they are encoded already."""
    fields = {name: getattr(order, name) for name in _ORDER}
    return _content(fields, order_mac(secret, order), packed or Packed(order.tensors))


def reply_content(reply: Reply, secret: bytes) -> RecordDict:
    """Return the content of the message for a reply. A loss that is NaN or infinite is sent unchanged."""
    seconds = {name: float(value) for name, value in reply.seconds.items()}
    reply = replace(reply, samples=int(reply.samples), loss=float(reply.loss), seconds=seconds)  # as it is decoded
    fields = {name: getattr(reply, name) for name in _REPLY} | {"loss": reply.loss.hex()}
    return _content(fields, reply_mac(secret, reply), Packed(reply.tensors))


def _content(fields: dict[str, Any], mac: str, packed: Packed) -> RecordDict:
    text = json.dumps(fields | {"tensors": packed.index}, allow_nan=False)
    record = ConfigRecord({"format": FORMAT, "json": text, "mac": mac, "data": packed.data})
    content = RecordDict({"fields": record})
    if packed.record is not None:
        content["tensors"] = packed.record
    return content


# -- decoding -------------------------------------------------------------------------------------------------------
def order_of(message: Message, secret: bytes, limit: int) -> Order:
    """Return the order in a message. Raises InputError unless it is complete, within `limit` bytes, and authentic."""
    fields, record, mac = _fields(message, {*_ORDER, "tensors"})
    tensors = _tensors(fields["tensors"], record, limit)
    order = Order(
        number=_whole(fields["number"], "number"),
        counted=_whole(fields["counted"], "counted"),
        clients=_whole(fields["clients"], "clients"),
        tensors=tensors,
        **_common(fields),
    )
    if not is_genuine(order_mac(secret, order), mac):
        raise InputError("The order was not written by the server: its code is wrong.")
    return order


def reply_of(message: Message, secrets: Mapping[str, bytes], limit: int) -> Reply:
    """Return the reply in a message. Raises InputError unless it is complete, within `limit` bytes, and authentic.

    `secrets` are those of the registered sites. The reply must be authenticated by the site that it names.
    """
    fields, record, mac = _fields(message, {*_REPLY, "loss", "tensors"})
    error = fields["error"]
    if not isinstance(error, str) or len(error) > MAX_ERROR:
        raise InputError(f"The message's 'error' is not a text of at most {MAX_ERROR} characters.")
    reply = Reply(
        samples=_whole(fields["samples"], "samples"),
        loss=_loss(fields["loss"]),
        tensors=_tensors(fields["tensors"], record, limit),
        seconds=_seconds(fields),
        error=error,
        **_common(fields),
    )
    secret = secrets.get(reply.site)
    if secret is None or not is_genuine(reply_mac(secret, reply), mac):
        raise InputError("The reply was not written by the site that it names: its code is wrong.")
    return reply


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked fields that orders and replies share."""
    numbers = {name: _whole(fields[name], name) for name in ("round", "attempt")}
    return {**_texts(fields), **numbers, "facts": _object(fields, "facts")}


def _loss(value: Any) -> float:
    if not isinstance(value, str) or not _FLOAT.fullmatch(value):
        raise InputError("The message's 'loss' is not a number.")
    try:
        return float.fromhex(value)
    except OverflowError as error:
        raise InputError("The message's 'loss' is not a number that fits 64 bits.") from error


def _fields(message: Message, names: set[str]) -> tuple[dict[str, Any], bytes, object]:
    """Return a message's small values, the bytes of its tensors, and its authentication code."""
    if not message.has_content():
        raise InputError("The message has no content.")
    content = message.content
    if not isinstance(content, RecordDict) or not {"fields"} <= set(content) <= {"fields", "tensors"}:
        raise InputError("The message has records that are not part of the protocol.")
    record = content["fields"]
    if not isinstance(record, ConfigRecord) or set(record) != {"format", "json", "mac", "data"}:
        raise InputError("The message is not one of this program's.")
    text, data = record["json"], record["data"]
    if record["format"] != FORMAT or not isinstance(text, str) or not isinstance(data, bytes):
        raise InputError(f"The message is not in format {FORMAT} of this program's messages.")
    if len(text) > MAX_JSON:
        raise InputError(f"The message's fields have more than {MAX_JSON:,} characters.")
    fields = parse_json(text, "The message's fields", _strict)
    if not isinstance(fields, dict) or set(fields) != names:
        raise InputError("The message lacks fields, or has fields that are not part of the protocol.")
    if "tensors" in content:
        data += _array(content["tensors"])
    return fields, data, record["mac"]


def _array(record: Any) -> bytes:
    if not isinstance(record, ArrayRecord) or list(record) != ["data"] or record["data"].stype != STYPE:
        raise InputError("The message's tensors are not one array of this program's.")
    data: bytes = record["data"].data
    return data


def _strict(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Check the texts that orders and replies share: kind, digests, nonce and the site's name."""
    kind, site = fields["kind"], fields["site"]
    if kind not in ORDER_KINDS:
        raise InputError("The message is of an unknown kind.")
    if not isinstance(site, str) or not 0 < len(site) <= MAX_NAME:
        raise InputError("The message's site has no usable name.")
    result = {"kind": kind, "site": site}
    for name, lengths in (("federation", (32,)), ("card", (0, 64)), ("nonce", (32,))):
        value = fields[name]
        if not isinstance(value, str) or len(value) not in lengths or not _HEX.fullmatch(value):
            raise InputError(f"The message's '{name}' is not a number of {lengths[-1]} hexadecimal digits.")
        result[name] = value
    return result


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InputError(f"The message's '{name}' is not a whole number.")
    return value


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields[name]
    if not isinstance(value, dict):
        raise InputError(f"The message's '{name}' is not a JSON object.")
    return value


def _seconds(fields: Mapping[str, Any]) -> dict[str, float]:
    seconds = _object(fields, "seconds")
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InputError("The message's 'seconds' are not all finite and positive.")
        if len(seconds) > 20 or len(name) > 40:
            raise InputError("The message's 'seconds' have too many or too long names.")
    return {name: float(value) for name, value in seconds.items()}


def _tensors(index: Any, data: bytes, limit: int) -> State:
    """Cut the bytes into tensors according to the index. Nothing may be left over or missing."""
    if not isinstance(index, list) or len(index) > MAX_TENSORS:
        raise InputError(f"The message's tensors are not a list of at most {MAX_TENSORS:,}.")
    if len(data) > limit:
        raise InputError(f"The message's tensors have {len(data):,} bytes; at most {limit:,} are accepted.")
    tensors: State = {}
    start = 0
    for entry in index:
        name, dtype, shape = _described(entry)
        size = math.prod(shape) * dtype.itemsize
        if name in tensors or start + size > len(data):
            raise InputError(f"The tensor '{name}' is there twice, or its bytes are missing.")
        if size:
            tensors[name] = torch.frombuffer(bytearray(data[start : start + size]), dtype=dtype).reshape(shape)
        else:
            tensors[name] = torch.zeros(shape, dtype=dtype)
        start += size
    if start != len(data):
        raise InputError(f"The message has {len(data) - start:,} bytes more than its tensors need.")
    return tensors


def _described(entry: Any) -> tuple[str, torch.dtype, list[int]]:
    """Return the checked name, type and shape of one tensor."""
    if not isinstance(entry, list) or len(entry) != 3:
        raise InputError("A tensor of the message is not described by its name, type and shape.")
    name, dtype, shape = entry
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InputError(f"A tensor of the message has no printable name of at most {MAX_NAME} characters.")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"The tensor '{name}' has a type that is not accepted; accepted are {', '.join(DTYPES)}.")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise InputError(f"The tensor '{name}' has an impossible shape.")
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**31 for n in shape):
        raise InputError(f"The tensor '{name}' has an impossible shape.")
    if math.prod(max(n, 1) for n in shape) > MAX_NUMBERS:
        raise InputError(f"The tensor '{name}' has an impossible shape.")
    return name, DTYPES[dtype], shape
