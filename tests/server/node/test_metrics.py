"""The table of metrics: what is counted is listed, and what is listed is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rgpu.server.node.metrics import SPECS, TABLE, document, parse_address
from rgpu.server.node.metrics_docs import PATH
from rgpu.session.errors import UsageError


def test_the_page_is_the_table() -> None:
    assert PATH.read_text() == document(), "run `python -m rgpu.server.node.metrics_docs`"


def test_names_follow_the_rules() -> None:
    for spec in TABLE:
        assert re.fullmatch(r"rgpu_[a-z_]+", spec.name) and spec.kind in ("gauge", "counter", "histogram")
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.help.endswith((".", ")")) and spec.where in ("node", "leader")
    assert len(SPECS) == len(TABLE)


def test_what_the_code_counts_is_in_the_table() -> None:
    source = "".join(path.read_text() for path in (Path(__file__).parents[3] / "rgpu").rglob("*.py")
                     if path.name != "metrics.py")
    assert set(re.findall(r"\"(rgpu_[a-z_]+_(?:total|seconds|bytes))\"", source)) <= set(SPECS)


@pytest.mark.parametrize("text", ["", "9100", ":9100", "host:", "host:x", "host:70000"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)
