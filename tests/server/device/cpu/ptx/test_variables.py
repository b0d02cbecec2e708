"""Attributes of module variables."""

from __future__ import annotations

import pytest

from rgpu.server.device.cpu.ptx import PtxError, parse_module
from tests.support.cpu.ptx import HEADER

KERNEL = ".visible .entry k() {\nret;\n}\n"


def test_managed_variables_are_known_from_others() -> None:
    module = parse_module(HEADER + """
.visible .global .attribute(.managed) .align 4 .b8 many[12] = {5, 0, 0, 0};
.global .attribute(.managed, .unified(7, 8)) .align 8 .u64 both;
.global .attribute(.unified(7, 8)) .u32 one;
.global .align 4 .u32 plain = 3;
""" + KERNEL)
    assert {name: (info.managed, info.size) for name, info in module.globals.items()} == {
        "many": (True, 12), "both": (True, 8), "one": (False, 4), "plain": (False, 4)}


def test_an_attribute_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(PtxError) as caught:
        parse_module(HEADER + ".global .attribute(.bogus) .u32 v;\n" + KERNEL)
    assert "unsupported .bogus in .attribute" in str(caught.value)
