"""What profiles of both sides are compared by, and the picture of a trace."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.remote import profiles

NATIVE = {"gemm": [10, 100.0], "norm": [5, 20.0]}


def test_the_same_kernels_longer() -> None:
    found = profiles.differences(NATIVE, {"gemm": [10, 110.0], "norm": [5, 22.0]})
    assert (found["kernels"], found["launches"], found["differing"]) == (2, [15, 15], {})
    assert found["ratio"] == pytest.approx(1.1)


def test_counts_that_differ_are_named() -> None:
    found = profiles.differences(NATIVE, {"gemm": [9, 100.0], "copy": [1, 1.0]})
    assert found["differing"] == {"copy": [0, 1], "gemm": [10, 9], "norm": [5, 0]} and found["launches"] == [15, 10]
    assert profiles.differences({}, {})["ratio"] is None


def test_medians_of_rounds() -> None:
    runs = [{"kernels": NATIVE, "loss": "00", "step_s": {"plain": each, "profiled": 2 * each}}
            for each in (1.0, 3.0, 2.0)]
    told = profiles.summary({"native": runs, "loopback": runs})
    assert told["step_s"]["loopback"] == {"plain": 2.0, "profiled": 4.0} and len(told["rounds"]) == 3


def test_a_picture_has_each_event_in_its_row() -> None:
    events = [("GPU, stream 7", "kernel <int>", 100.0, 50.0), ("operators, thread 1", "aten::mm", 0.0, 80.0),
              ("GPU, stream 7", "last", 900.0, 100.0)]
    root = ElementTree.fromstring(profiles.picture(events, "a & b"))
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(filter(None, titles)) == ["aten::mm: 80.0 us", "kernel <int>: 50.0 us", "last: 100.0 us"]
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.find("{http://www.w3.org/2000/svg}title")
             is not None]
    right = max(float(box.get("x", "0")) + float(box.get("width", "0")) for box in boxes)
    assert right == pytest.approx(profiles.WIDTH - 10, abs=1) and len({box.get("y") for box in boxes}) == 2
    assert profiles.picture([], "nothing").startswith("<svg")


def test_narrow_boxes_are_drawn_once_a_place() -> None:
    events = [("GPU, stream 7", f"short {n}", float(n), 1.0) for n in range(10_000)]
    boxes = profiles.drawn([*events, ("GPU, stream 7", "long", 5000.5, 900.0)], 0.1)
    assert len(boxes) == 501 and ("long", 5000.5, 900.0) in boxes
