"""What every verb shares: output as text or JSON, errors as exit codes, the pool's client."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from rgpu.cli.settings import Settings
from rgpu.session.errors import RgpuError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``-o json``: the documented machine-readable form on stdout."""
    return click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text",
                        help="How to print the result.")(command)


def pool_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--pool", metavar="DIR", help="The pool's directory (default: RGPU_POOL, or the local pool).")(
        command)


def registry_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--registry", metavar="ADDRESS",
                        help="Where the pool's truth is: etcd://HOST:PORT,HOST:PORT/PREFIX?ca=FILE&cert=FILE&key=FILE"
                             "&user=NAME&password-file=FILE&timeout=SECONDS, or embedded (this host only; default: "
                             "RGPU_REGISTRY, or embedded).")(command)


def registry_address(settings: Settings) -> str:
    """The registry that a daemon opens; "" for the embedded one. Raises :class:`UsageError`, :class:`Refused`."""
    if settings.registry in ("", "embedded"):
        return ""
    from rgpu.migrate.registry.etcd.address import parse

    parse(settings.registry)  # wrong ones are refused before anything is started
    return str(settings.registry)


#: The default of ``--module-cache-size``.
MODULE_CACHE_SIZE = "4GiB"


def module_cache_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--module-cache-size", metavar="SIZE", default=MODULE_CACHE_SIZE, show_default=True,
                        help="Disk that a node may use to keep the kernels' images it was sent, so that no client "
                             "sends one twice; 0 keeps none.")(command)


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--store``, ``--store-credentials``, ``--keep-images``: where images go, and how many stay."""
    for option in (
        click.option("--keep-images", metavar="N", help="Newest images of each session that stay when a new one is "
                     "taken; 0: all (default 3)."),
        click.option("--store-credentials", metavar="FILE", help="Credentials of an object store (JSON, mode 0600; "
                     "default: the AWS_* variables)."),
        click.option("--store", metavar="DIR|s3://…", help="Where images are kept: a directory that every node sees, "
                     "or s3://BUCKET/PREFIX?endpoint=URL (default: the pool's directory).")):
        command = option(command)
    return command


def verb(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an :class:`RgpuError` into one line on stderr (or JSON) and its class's exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RgpuError as error:
            fail(error, as_json=kwargs.get("output") == "json")
        except KeyboardInterrupt:
            err.print("interrupted")
            sys.exit(130)

    return wrapper


def fail(error: RgpuError, as_json: bool = False) -> None:
    """Print the error and exit with its class's code."""
    if as_json:
        print(json.dumps(error.as_dict(), default=str))
    err.print(f"rgpu: {error.message}", markup=False)
    sys.exit(error.exit_code)


def emit(value: Any, output: str, text: Callable[[Any], None]) -> None:
    """Print ``value`` as JSON, or through ``text``."""
    if output == "json":
        print(json.dumps(value, indent=2, default=str))
    else:
        text(value)


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A plain table, the width of the terminal when there is one."""
    view = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*("" if cell is None else str(cell) for cell in row))
    out.print(view)


def size(count: int | float | None) -> str:
    """Bytes for people: ``1.5 GiB``."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def settings(**options: Any) -> Settings:
    return Settings(options)
