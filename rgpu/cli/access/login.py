"""``rgpu login``: log this machine in to a pool as a user's, by an invitation."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

import click

from rgpu.api.contexts import Contexts
from rgpu.cli import common
from rgpu.link import admission, description
from rgpu.link.control.control_client import ControlClient
from rgpu.link.invitations import Token, decode
from rgpu.link.keys import KeyPair, PoolDescription, PoolFiles
from rgpu.link.private_files import private_directory
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Corrupt, RgpuError, UsageError

LET_IN_SECONDS = 10.0  #: for a node to read the key that was just recorded
CLOCK_SECONDS = 10.0  #: difference of clocks that is reported


@click.command("login")
@click.argument("token", required=False, envvar="RGPU_JOIN")
@click.option("--name", metavar="CONTEXT", help="What the pool is called here (default: the user's name and the pool's "
              "first six digits).")
@click.option("--no-use", is_flag=True, help="Do not make it the current context.")
@common.output_option
@common.verb
def command(token: str | None, name: str | None, no_use: bool, output: str) -> None:
    """Log this machine in to a pool by the invitation that `rgpu keys invite --user NAME` printed.

    A key is made here; only its public half is sent. TOKEN works once; RGPU_JOIN,
    or - for standard input, keeps it off the command line. `rgpu run` works next.
    """
    if token == "-":
        token = sys.stdin.readline()
    if not token:
        raise UsageError("which invitation? Give rgpu-join-… (an operator's `rgpu keys invite --user NAME` prints "
                         "one), or - to read it from standard input")
    found = decode(token)
    if found.role == "node":
        raise UsageError("this invitation is for a host, which uses it by `rgpu server --join`; ask for one by `rgpu "
                         "keys invite --user NAME`")
    contexts = Contexts()
    name = name or f"{found.member}-{found.pool[:6]}"
    files = contexts.files(name)
    pair = _key(files, found, name)
    try:
        answer = admission.ask(found, "pool.login", {"public": pair.public})
    except (AuthenticationFailed, AlreadyExists):
        if not files.description_path.exists():  # where an answer was lost the key is kept for another attempt
            shutil.rmtree(files.root)
        raise
    _write(files, found, pair, answer)
    if not no_use:
        contexts.use(name)
    off = _wait_let_in(files, pair)
    common.emit({"context": name, "pool": found.pool, "user": pair.name, "role": pair.role, "public": pair.public,
                 "directory": str(files.root), "current": not no_use, "clock_offset": off}, output, _show)
    if abs(off) > CLOCK_SECONDS:
        common.err.print(f"this machine's clock is {abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} the pool's; "
                         "programs run all the same, times in lists are the pool's", markup=False)
    others = [variable for variable in ("RGPU_POOL", "RGPU_CONTEXT") if os.environ.get(variable)]
    if others and not no_use:
        common.err.print(f"{others[0]} is set and goes before the current context: unset it, or name this one with "
                         f"--context {name}", markup=False)


def _key(files: PoolFiles, token: Token, name: str) -> KeyPair:
    """Return this login's key; after a login whose answer was lost, the same one again. Raises :class:`AlreadyExists`.
    """
    path = files.key_path(token.role)
    if files.description_path.exists():
        known = files.read_description().id
        if known != token.pool or not path.exists() or KeyPair.load(path).name != token.member:
            raise AlreadyExists(f"there is a context {name} already, of pool {known}: choose another name with --name, "
                                f"or remove it (`rgpu context rm {name}`)", context=name)
    if path.exists():
        pair = KeyPair.load(path)
        if pair.name == token.member:
            return pair
    private_directory(files.root.parent)
    private_directory(files.root)
    pair = KeyPair.create(token.role, token.member)
    pair.save(path, replace=True)
    return pair


def _write(files: PoolFiles, token: Token, pair: KeyPair, answer: dict[str, Any]) -> None:
    """Write the description, the last file: a folder that has one is a complete context. Raises :class:`Corrupt`."""
    if (answer.get("pool"), answer.get("name"), answer.get("role")) != (token.pool, pair.name, pair.role):
        raise Corrupt(f"the pool answered for {answer.get('role')} {answer.get('name')} of pool {answer.get('pool')}, "
                      f"the invitation is for {pair.role} {pair.name} of {token.pool}", reason="reply")
    living = description.named(answer.get("endpoints"))
    files.write_description(PoolDescription(id=token.pool, endpoints=description.merged(
        token.endpoints, living, most=description.MOST)))


def _wait_let_in(files: PoolFiles, pair: KeyPair) -> float:
    """Wait until a node accepts the key; return the seconds that the pool's clock is ahead of this one."""
    deadline = time.monotonic() + LET_IN_SECONDS
    with ControlClient(pair, files.read_description().endpoints) as client:
        while True:
            try:
                answer = client.call("pool.ping", {}, timeout=5)
                return round(float(answer.get("time") or time.time()) - time.time(), 1)
            except AuthenticationFailed:
                if time.monotonic() > deadline:
                    raise
            except RgpuError:
                return 0.0  # logged in; if the pool does not answer now, the next verb reports it
            time.sleep(0.2)


def _show(value: dict[str, Any]) -> None:
    common.out.print(f"logged in to pool {value['pool']} as {value['user']} ({value['role']}): context "
                     f"{value['context']}{', now current' if value['current'] else ''}", markup=False)
    common.out.print("`rgpu run -- PROGRAM` runs there" if value["current"] else
                     f"`rgpu run --context {value['context']} -- PROGRAM` runs there", markup=False)
