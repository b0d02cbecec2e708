"""Stands in for commands of a host that a namespace is not: systemctl without systemd, useradd, runuser and apt-get.

``systemctl`` reads the very unit files (ExecStart, Environment, EnvironmentFile, %l, %H, %p) and starts and stops what
they say, as root, and ``useradd`` makes another name of root: no other user could read the environment of the tests.
``runuser`` runs the command. ``apt-get`` does nothing: what it would bring is there.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = (Path("/etc/systemd/system"), Path("/lib/systemd/system"))
STATE = Path("/run/stand-in")
STOP_SECONDS = 60.0


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit's file, by name."""
    for folder in UNITS:
        path = folder / f"{name}.service"
        if path.exists():
            break
    else:
        sys.exit(f"Failed to start {name}.service: Unit {name}.service not found.")
    host = os.uname().nodename
    settings: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and not key.startswith(("#", "[")):
            for specifier, meaning in (("%l", host.partition(".")[0]), ("%H", host), ("%p", name)):
                value = value.replace(specifier, meaning)
            settings.setdefault(key, []).append(value)
    return settings


def start(name: str) -> None:
    """Start it, unless it runs."""
    if pid(name):
        return
    settings = unit(name)
    environment = dict(pair.partition("=")[::2] for pair in settings.get("Environment", []))
    for file in settings.get("EnvironmentFile", []):
        path = Path(file.removeprefix("-"))
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
            environment |= dict(line.partition("=")[::2] for line in lines)
    command = []
    for word in shlex.split(settings["ExecStart"][-1]):
        value = environment.get(word[1:], "") if word.startswith("$") else word
        command += value.split() if word.startswith("$") else [value]
    STATE.mkdir(exist_ok=True)
    with open(STATE / f"{name}.log", "ab") as log:
        process = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": "/nonexistent",
                                                 **carried(), **environment},
                                   cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (STATE / f"{name}.pid").write_text(str(process.pid))


def carried() -> dict[str, str]:
    """What a test sets for the processes that it starts, whatever starts them."""
    return {key: value for key, value in os.environ.items() if key in ("RGPU_SPARES", "RGPU_PAGE_LANES", "PYTHONPATH")}


def pid(name: str) -> int:
    """Of the running unit; 0."""
    try:
        number = int((STATE / f"{name}.pid").read_text())
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return 0
    return 0 if state == "Z" else number


def stop(name: str) -> None:
    """SIGTERM to its main process, and wait."""
    number, deadline = pid(name), time.monotonic() + STOP_SECONDS
    if number:
        os.kill(number, signal.SIGTERM)
    while pid(name):
        if time.monotonic() > deadline:
            os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


def systemctl(words: list[str]) -> int:
    """``systemctl WORDS``."""
    names = [word for word in words[1:] if not word.startswith("-")]
    verb = words[0]
    for name in names:
        if verb == "start" or verb == "enable" and "--now" in words:
            start(name)
        elif verb == "stop" or verb == "disable" and "--now" in words:
            stop(name)
        elif verb == "restart":
            stop(name)
            start(name)
        elif verb == "is-active":
            print("active" if pid(name) else "inactive")
            return 0 if pid(name) else 3
    return 0


def main() -> int:
    """As the command by whose name it was called."""
    name, words = Path(sys.argv[1]).name, sys.argv[2:]
    if name == "systemctl":
        return systemctl(words)
    if name == "useradd":
        for path, line in ((Path("/etc/passwd"), f"{words[-1]}:x:0:0::/:/bin/false"),
                           (Path("/etc/group"), f"{words[-1]}:x:0:")):
            with open(path, "a") as file:
                file.write(line + "\n")
    if name == "runuser":
        rest = words[words.index("--") + 1:]
        os.execvp(rest[0], rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
