"""The processor has a name, whatever Linux tells of it."""

from __future__ import annotations

import platform

import torch

from fedabml.accel import machine


def test_a_processor_has_a_name(monkeypatch):
    assert machine.hardware(torch.device("cpu")) == machine._processor()
    monkeypatch.setattr(machine.Path, "read_text", lambda *args, **words: "no such line")
    assert machine._processor.__wrapped__()  # a system that says it elsewhere, or not at all


def test_a_processor_without_a_name_has_numbers(monkeypatch):
    lines = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd05\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda *args, **words: lines)
    assert machine._processor.__wrapped__() == f"{platform.machine()}, implementer 0x41, part 0xd0c"
