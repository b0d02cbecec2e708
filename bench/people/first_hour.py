#!/usr/bin/env python3
"""What ended a first hour, typed word for word with an earlier checkout and with this one: a transcript of both.

    python bench/people/first_hour.py BEFORE AFTER [--only 3,4] [--output docs/lab/first-hour.md]

Each checkout has been set up (`make setup`). The commands are those of bench/people/findings.sh, run by a shell in a
folder of its own, with that checkout's `rgpu` on PATH and etcd (one member) where a finding needs it. Nothing is
asserted here: the tests named in the transcript do that.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOST_LINES, MOST_COLUMNS = 12, 170
SECONDS = 240


@dataclass(frozen=True, slots=True)
class Finding:
    """``number``: of the list that was found; ``tests``: what holds it since."""

    number: str
    title: str
    tests: list[str]
    script: str


def findings(text: str) -> list[Finding]:
    """Read the blocks: a line ``## N TITLE``, lines ``# test: PATH``, and commands."""
    found = []
    for block in re.split(r"^## ", text, flags=re.M)[1:]:
        head, _, body = block.partition("\n")
        number, _, title = head.partition(" ")
        tests = re.findall(r"^# test: (\S+)$", body, flags=re.M)
        script = "\n".join(line for line in body.splitlines() if not line.startswith("#"))
        found.append(Finding(number, title, tests, script.strip() + "\n"))
    return found


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def etcd(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a member of its own; return it and its address."""
    client, peer = (f"http://127.0.0.1:{port()}" for _ in range(2))
    process = subprocess.Popen(
        ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client,
         "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, client.removeprefix("http://")


def play(finding: Finding, prelude: str, checkout: Path) -> str:
    """Return what a person would see who types the finding's commands with that checkout's rgpu."""
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.chmod(0o755)
    member, address = etcd(folder)
    environment = {"PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}", "HOME": str(folder), "COLUMNS": "80",
                   "LANG": "C.UTF-8", "ETCD": address, "XDG_RUNTIME_DIR": str(folder),
                   "TERM": "dumb"}
    script = folder / "typed.sh"
    script.write_text(prelude + finding.script)
    try:
        shell = subprocess.Popen(["bash", str(script)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                 start_new_session=True)
        try:
            printed, _ = shell.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGTERM)
            printed = shell.communicate()[0] + f"\n[not ended after {SECONDS} s]\n"
    finally:
        end_all(folder)
        member.kill()
        member.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return shorter(printed.replace(str(folder), "~").replace(str(checkout), "CHECKOUT").replace(address, "ETCD"))


def end_all(folder: Path) -> None:
    """End what the finding left running: whatever works in its folder or has it in its environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def shorter(text: str) -> str:
    """Cut what one command printed in the middle, and long lines at the end; leave the addresses' ports out."""
    text = re.sub(r"127\.0\.0\.1:(\d{4,5})", lambda found: "127.0.0.1:" + "PORT".ljust(len(found[1])), text)
    text = re.sub(r"(?m)^.*typed\.sh: line \d+.*\n", "", text)  # what the shell says of jobs
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "")
    kept = []
    for said in re.split(r"(?m)^(?=\$ )", text):
        lines = [line if len(line) <= MOST_COLUMNS else line[:MOST_COLUMNS] + " …" for line in said.splitlines()]
        if len(lines) > MOST_LINES:
            half = MOST_LINES // 2
            lines = [*lines[:half], f"[{len(lines) - 2 * half + 1} lines]", *lines[1 - half:]]
        kept += lines
    return "\n".join(line.rstrip() for line in kept).strip()


def commit(checkout: Path) -> str:
    asked = subprocess.run(["git", "log", "-1", "--format=%h, %cs"], cwd=checkout, capture_output=True, text=True)
    return asked.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default="", help="numbers of findings, by commas")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    text = (HERE / "findings.sh").read_text()
    prelude = text.partition("## ")[0]
    sides = (("Before", given.before.resolve()), ("After", given.after.resolve()))
    page = ["# A first hour, before and after", "",
            "`python bench/people/first_hour.py BEFORE AFTER`, "
            f"{'; '.join(f'{name.lower()}: {commit(checkout)}' for name, checkout in sides)}. Two processors, no GPU, "
            "etcd of one member. The same commands on both sides; `~` is the folder that they ran in.", ""]
    for finding in findings(text):
        if given.only and finding.number not in given.only.split(","):
            continue
        page += [f"## {finding.number}. {finding.title}", "",
                 "Held by " + ", ".join(f"`{test}`" for test in finding.tests) + ".", ""]
        for name, checkout in sides:
            printed = play(finding, prelude, checkout)
            print(f"== {finding.number} {name}\n{printed}\n", file=sys.stderr, flush=True)
            page += [f"{name}:", "", "```", printed, "```", ""]
    if given.output:
        given.output.write_text("\n".join(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
