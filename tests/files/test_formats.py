"""Sizes and times as text."""

from fedabml.files.formats import clock, duration, size


def test_sizes_and_durations_have_the_unit_that_fits() -> None:
    assert [size(v) for v in (0, 999, 2048, 3 << 20, 5 << 30)] == ["0 B", "999 B", "2 KiB", "3 MiB", "5.0 GiB"]
    assert [duration(v) for v in (4.25, 200, 7500)] == ["4.25 s", "3 min 20 s", "2 h 5 min"]
    assert [clock(v) for v in (0.4, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]
