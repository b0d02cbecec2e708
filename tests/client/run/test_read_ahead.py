"""What is read in ahead of a session: all of it where there is time, nothing once the program has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import gc, sys, threading
from rgpu.client.run.read_ahead import MODULES, ReadAhead

reading = ReadAhead()
{before}
reading.start()
reading.start()
assert threading.active_count() <= 2
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print(sum(name in sys.modules for name in MODULES) / len(MODULES), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(("before", "told"), [
    ("", "1.0 True"), ("reading.placed()", "1.0 True"), ("reading.placed(); reading.stop()", "0.0 False")])
def test_what_is_read(before: str, told: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, told), done.stderr
