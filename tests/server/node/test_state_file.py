"""One daemon of a name on a host; one that has just been killed is waited for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rgpu.server.node.state_file import hold_name
from rgpu.session.errors import AlreadyExists


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    first = hold_name(tmp_path, "node-a")
    with pytest.raises(AlreadyExists, match="a daemon of node-a runs already"):
        hold_name(tmp_path, "node-a", patience=0.2)
    os.close(first)
    os.close(hold_name(tmp_path, "node-a", patience=0.0))


def test_a_daemon_that_is_on_its_way_out_is_waited_for(tmp_path: Path) -> None:
    first = hold_name(tmp_path, "node-a")
    going = threading.Timer(0.3, os.close, (first,))
    going.start()
    began = time.monotonic()
    second = hold_name(tmp_path, "node-a", patience=30.0)
    assert time.monotonic() - began > 0.2, "it was not held: nothing was tested"
    going.join()
    os.close(second)
