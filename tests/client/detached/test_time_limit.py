"""The signals of a time limit, and to whom they go."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rgpu.cli.runs.limits import read
from rgpu.client.detached.time_limit import Timekeeper, TimeLimit, clock, duration
from rgpu.link.local.processes import alive, family, read_signal, signal_program
from rgpu.session.errors import UsageError
from tests.support.eventually import eventually


def test_the_steps_are_in_order() -> None:
    steps = read("2h", "10s", "USR1@5m").steps()
    assert [(step.at, step.number) for step in steps] == [
        (6900, signal.SIGUSR1), (7200, signal.SIGTERM), (7210, signal.SIGKILL)]
    assert steps[0].ends == "" and steps[1].ends == "its time limit of 2 h was reached: SIGTERM"
    assert steps[2].ends.endswith("SIGTERM, and SIGKILL 10 s later")
    assert TimeLimit().steps() == [] and read(None, None, None) == TimeLimit()


@pytest.mark.parametrize("given", [
    ("0", None, None), ("soon", None, None), (None, "5s", None), (None, None, "USR1@5m"), ("1m", None, "USR1"),
    ("1m", None, "USR1@2m"), ("1m", None, "USR1@1m"), ("1m", None, "NONE@5s"), ("1m", "long", None)])
def test_limits_that_make_no_sense_are_refused(given: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(UsageError):
        read(*given)


@pytest.mark.parametrize(("seconds", "text"), [(7200, "2 h"), (90, "90 s"), (0.5, "0.5 s"), (86400, "1 d"),
                                               (900, "15 min"), (5400, "90 min")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_signals_by_name_and_number() -> None:
    assert {read_signal(text) for text in ("term", "SIGTERM", "15", " TERM ")} == {signal.SIGTERM}
    with pytest.raises(UsageError, match="did you mean 'USR1'"):
        read_signal("USR11")
    for text in ("", "0", "99", "-9", "KILLALL"):
        with pytest.raises(UsageError):
            read_signal(text)


@pytest.mark.parametrize("leads", [True, False])
def test_a_signal_reaches_what_the_program_started(leads: bool) -> None:
    """A shell alone would wait for its child before it heeds the signal."""
    process = subprocess.Popen(["sh", "-c", "sleep 60; echo never"], stdout=subprocess.PIPE,
                               process_group=0 if leads else None)
    time.sleep(0.2)
    signal_program(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == b""
    with pytest.raises(ProcessLookupError):
        signal_program(process.pid, signal.SIGTERM)


def test_what_a_shell_left_behind_may_finish_and_is_killed_when_due(tmp_path: Path) -> None:
    """The shell ends by SIGTERM at once; one child of it writes its checkpoint, another one never ends."""
    writes = ("import signal, sys, time; "
              "signal.signal(15, lambda *_: (time.sleep(0.3), open(sys.argv[1], 'w'), exit()));")
    never = "import signal, time; signal.signal(15, signal.SIG_IGN);"
    wait = "open(sys.argv[1] + '.ready', 'w'); time.sleep(60)"
    saved, stuck = str(tmp_path / "saved"), str(tmp_path / "stuck")
    process = subprocess.Popen(["sh", "-c", '"$0" -c "$1" "$3" & "$0" -c "$2" "$4" & wait', sys.executable,
                                writes + wait, "import sys; " + never + wait, saved, stuck])
    eventually(lambda: all(Path(f"{path}.ready").exists() for path in (saved, stuck)))
    children = family(process.pid)
    keeper = Timekeeper(TimeLimit(0.1, 3.0), process.pid, clock(), lambda reason: None)
    keeper.start()
    assert process.wait(20) == -signal.SIGTERM
    keeper.stop()
    keeper.await_rest()
    assert Path(saved).exists()
    eventually(lambda: not any(alive(*child) for child in children))


def test_a_program_that_ignores_sigterm_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    told: list[str] = []
    keeper = Timekeeper(TimeLimit(0.2, 0.3), process.pid, clock(), told.append)
    keeper.start()
    assert process.wait(20) == -signal.SIGKILL
    keeper.stop()
    process.stdout.close()
    assert [text.split(": ")[1] for text in told] == ["SIGTERM", "SIGTERM, and SIGKILL 0.3 s later"]
