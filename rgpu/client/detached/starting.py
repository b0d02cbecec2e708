"""Starting a supervisor: as a scope of the user's systemd where there is one, else in a session of its own only.

A service manager that ends all processes of a login with the login (``KillUserProcesses=yes``) does not end a scope of
the user's own manager; ``loginctl enable-linger`` decides whether that outlives the last login.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rgpu.client.detached.channels import Order, Pipe, package_path
from rgpu.link.runs.folder import LOG
from rgpu.session.errors import RgpuError, UnknownOutcome, from_dict

_COMMAND = "import sys; sys.path.append({path!r}); from rgpu.client.detached.supervisor import main; main()"
_TRY_SECONDS = 5.0
_GIVE_UP_SECONDS = 20.0
SETSID = "setsid"


def scope(name: str) -> tuple[list[str], str]:
    """Return (words to put before a command so that the user's systemd runs it in a scope of its own, description).

    There are no such words where there is no such systemd, or it makes no scope.
    """
    program = shutil.which("systemd-run")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not program or not (runtime and Path(runtime, "systemd").exists() or os.environ.get("DBUS_SESSION_BUS_ADDRESS")):
        return [], SETSID
    before = [program, "--user", "--scope", "--quiet", "--collect"]
    try:
        done = subprocess.run([*before, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return [], SETSID
    if done.returncode:
        return [], SETSID
    unit = f"rgpu-{re.sub('[^A-Za-z0-9_.-]', '-', name)}-{secrets.token_hex(2)}.scope"
    return [*before, f"--unit={unit}", f"--description=rgpu run {name}", "--"], f"systemd scope {unit}"


def start(order: Order, program: Sequence[str]) -> dict[str, Any] | int:
    """Start a detached run, and return the report of its start: {name, pid}.

    Return an exit status where no program was started and the reason is on stderr. Raises the error that the run was
    refused with, :class:`UnknownOutcome`; KeyboardInterrupt after the request was withdrawn.
    """
    before, how = scope(order.name)
    pipe = Pipe.make()
    order = msgspec.structs.replace(order, report=pipe.writer, how=how)
    with open(pipe.reader, "rb", buffering=0) as word:
        try:
            process = subprocess.Popen(
                [*before, sys.executable, "-P", "-c", _COMMAND.format(path=package_path()),
                 msgspec.json.encode(order).decode(), *program],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(pipe.writer,), start_new_session=True)
        finally:
            os.close(pipe.writer)
        try:
            return _said(order, process, word.fileno())
        except KeyboardInterrupt:
            _give_up(process)
            raise


def _said(order: Order, process: subprocess.Popen[bytes], word: int) -> dict[str, Any] | int:
    line = b""
    while not line.endswith(b"\n") and (part := os.read(word, 65536)):
        line += part
    if not line:
        status = process.wait()
        if status > 0:
            return status
        raise UnknownOutcome(f"the supervisor of {order.name} ended before it said anything; its log is "
                             f"{Path(order.root) / order.name / LOG}", run=order.name)
    said = json.loads(line)
    if "refused" in said:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GIVE_UP_SECONDS)
        error: RgpuError = from_dict(said["refused"])
        raise error
    process.returncode = 0  # the supervisor runs on without this process
    return dict(said["started"])


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor of a run that has no program yet: its request is withdrawn."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GIVE_UP_SECONDS)
