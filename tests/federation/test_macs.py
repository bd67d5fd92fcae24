"""Codes of orders and replies: every field counts, and a code of one purpose or site is none of another."""

from dataclasses import fields, replace

import pytest
import torch

from fedabml.errors import InputError
from fedabml.federation.macs import is_genuine, order_mac, read_secret, reply_mac
from fedabml.federation.messages import Order

SECRET, OTHER = bytes(range(32)), bytes(32)
ORDER = Order(
    kind="train", federation="0" * 32, card="1" * 64, site="a", number=0, round=1, attempt=0, nonce="2" * 32,
    counted=0, clients=3, tensors={"shared": torch.arange(6.0).reshape(2, 3)}, facts={"a": 1},
)  # fmt: skip
CHANGES = {
    "kind": "prior", "federation": "f" * 32, "card": "2" * 64, "site": "b", "number": 1, "round": 2, "attempt": 1,
    "nonce": "3" * 32, "counted": 1, "clients": 4, "facts": {"a": 2}, "tensors": {},
}  # fmt: skip


def test_the_code_of_an_order_depends_on_every_field():
    assert {field.name for field in fields(Order)} == set(CHANGES)
    codes = {order_mac(SECRET, replace(ORDER, **{name: value})) for name, value in CHANGES.items()}
    assert len(codes | {order_mac(SECRET, ORDER)}) == len(CHANGES) + 1
    assert order_mac(SECRET, ORDER) == order_mac(SECRET, replace(ORDER, tensors=dict(ORDER.tensors)))


@pytest.mark.parametrize(
    "tensors",
    [
        {"shared": torch.arange(6.0).reshape(3, 2)},
        {"shared": torch.arange(6.0, dtype=torch.float64).reshape(2, 3)},
        {"shared": torch.arange(6.0).reshape(2, 3).nextafter(torch.tensor(9.0))},
        {"shard": torch.arange(6.0).reshape(2, 3)},
        {"shared": torch.arange(6.0).reshape(2, 3), "more": torch.zeros(0)},
    ],
)
def test_the_code_depends_on_names_types_shapes_and_bits(tensors):
    assert order_mac(SECRET, replace(ORDER, tensors=tensors)) != order_mac(SECRET, ORDER)


def test_a_code_has_one_secret_and_one_purpose():
    assert len({order_mac(SECRET, ORDER), order_mac(OTHER, ORDER), reply_mac(SECRET, ORDER)}) == 3
    assert is_genuine(order_mac(SECRET, ORDER), order_mac(SECRET, ORDER))
    for wrong in (None, "", b"x", 5, "ä" * 64, order_mac(OTHER, ORDER)):
        assert not is_genuine(order_mac(SECRET, ORDER), wrong)


def test_the_way_a_tensor_lies_in_memory_does_not_count():
    turned = torch.arange(6.0).reshape(2, 3).t().contiguous().t()
    assert order_mac(SECRET, replace(ORDER, tensors={"shared": turned})) == order_mac(SECRET, ORDER)
    assert order_mac(SECRET, replace(ORDER, tensors={"n": torch.tensor(1.0)}))  # a tensor without axes


def test_a_secret_has_its_length(tmp_path):
    path = tmp_path / "secret"
    for content in (b"", bytes(31), bytes(33), bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(InputError):
            read_secret(path)
    path.write_bytes(SECRET)
    assert read_secret(path) == SECRET
    with pytest.raises(InputError, match="32 bytes"):
        order_mac(b"short", ORDER)
