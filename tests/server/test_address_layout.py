"""Workers begin with fixed addresses, by one start."""

import subprocess
import sys

from rgpu.server.address_layout import ADDR_NO_RANDOMIZE, fixed_in_children

PROBE = "import ctypes; print(ctypes.CDLL(None).personality(0xFFFFFFFF))"


def persona() -> int:
    return int(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout)


def test_children_begin_without_randomisation_and_this_process_keeps_it():
    before = persona()
    with fixed_in_children():
        assert persona() & ADDR_NO_RANDOMIZE
    assert persona() == before


def test_a_process_that_was_started_otherwise_starts_itself_again(tmp_path):
    (tmp_path / "probe.py").write_text(
        "import sys\nfrom rgpu.server.address_layout import ensure_fixed\n"
        f"print(ensure_fixed('probe', ['again']), sys.argv[1:])\n{PROBE}\n")
    said = subprocess.run([sys.executable, "-m", "probe"], capture_output=True, text=True, check=True, cwd=tmp_path,
                          env={"PYTHONPATH": f"{tmp_path}:{':'.join(filter(None, sys.path))}"}).stdout.split("\n")
    assert said[0] == "True ['again']"
    assert int(said[1]) & ADDR_NO_RANDOMIZE
