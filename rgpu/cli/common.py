"""Functions that all verbs share: output as text or JSON, errors as exit codes, the pool's client."""

from __future__ import annotations

import errno
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from rgpu.api.settings import Settings
from rgpu.cli import suggesting, tables
from rgpu.session.errors import RgpuError

if TYPE_CHECKING:
    from rich.console import Console


class _Deferred:
    """A console that is made on first use: ``rgpu run`` mostly prints nothing, and must start fast."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        from rgpu.cli.terminal import Terminal

        found = getattr(self.__dict__.setdefault("_terminal", Terminal(**self._options)), name)
        setattr(self, name, found)
        return found


out: Console = cast("Console", _Deferred(highlight=False, soft_wrap=True))
err: Console = cast("Console", _Deferred(stderr=True, highlight=False, soft_wrap=True))


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``-o json``: the documented machine-readable form on stdout; ``-o yaml``: the same data."""
    return click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text",
                        help="How to print the result.")(command)


def pool_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--pool DIR`` and ``--context NAME``, which select the pool. :func:`settings` reads the latter."""
    command = click.option("--context", metavar="NAME", expose_value=False, is_eager=True, callback=_noted(CONTEXT),
                           help="The pool of this context (default: RGPU_CONTEXT, or the current one: `rgpu context "
                                "ls`).")(command)
    return click.option("--pool", metavar="DIR", help="The pool's directory (default: RGPU_POOL, or the context's, or "
                        "the local pool's).")(command)


def local_pool_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--pool DIR`` of verbs that make or run a pool on this machine: contexts are ignored."""
    return click.option("--pool", metavar="DIR", callback=_noted(HERE), help="The pool's directory (default: "
                        "RGPU_POOL, or the local pool's).")(command)


CONTEXT, HERE = "rgpu.context", "rgpu.here"


def _noted(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """The callback of an option that stores its value for :func:`settings`."""

    def note(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        context.meta[key] = True if key == HERE else value
        return value

    return note


def operator_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--operator``: the verb uses the operator's key, which acts on all users' sessions."""
    return click.option("--operator", is_flag=True, help="Act with the operator's key: on all users' sessions.")(
        command)


def role(operator: bool) -> str:
    """Return which key of the pool's folder a verb uses."""
    return "operator" if operator else "user"


def registry_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--registry`` to a command."""
    return click.option("--registry", metavar="ADDRESS",
                        help="The pool's registry: etcd://HOST:PORT,HOST:PORT/PREFIX?ca=FILE&cert=FILE&key=FILE"
                             "&user=NAME&password-file=FILE&timeout=SECONDS, or embedded (this host only; default: "
                             "RGPU_REGISTRY, else the one that this host used before, else embedded).")(command)


def registry_address(settings: Settings) -> str:
    """Return the registry that a daemon opens, "" if embedded. Raises :class:`UsageError`, :class:`Refused`."""
    if settings.registry in ("", "embedded"):
        return ""
    from rgpu.migrate.registry.etcd.address import parse

    parse(settings.registry)  # an invalid address is refused before anything is started
    return str(settings.registry)


#: The default of ``--module-cache-size``.
MODULE_CACHE_SIZE = "4GiB"


def module_cache_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--module-cache-size`` to a command."""
    return click.option("--module-cache-size", metavar="SIZE", default=MODULE_CACHE_SIZE, show_default=True,
                        help="Disk that a node may use to keep the module binaries it was sent, so that no client "
                             "sends one twice; 0 keeps none.")(command)


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--store``, ``--store-credentials``, ``--keep-images``: where checkpoints are stored, and how many are kept."""
    for option in (
        click.option("--keep-images", metavar="N", help="Newest checkpoints of each session that stay when a new one "
                                                        "is "
                     "taken; 0: all (default 3)."),
        click.option("--store-credentials", metavar="FILE", help="Credentials of an object store (JSON, mode 0600; "
                     "default: the AWS_* variables)."),
        click.option("--store", metavar="DIR|s3://…", help="Where checkpoints are kept: a directory that every node "
                                                           "sees, "
                     "or s3://BUCKET/PREFIX?endpoint=URL (default: the pool's directory).")):
        command = option(command)
    return command


def verb(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an :class:`RgpuError` into one line on stderr (or JSON) and its class's exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (RgpuError, OSError, KeyboardInterrupt) as error:
            tell(error, pool=kwargs.get("pool"), output=str(kwargs.get("output")))

    return wrapper


def tell(error: BaseException, *, pool: str | None = None, output: str = "text") -> NoReturn:
    """Print the error of a verb and exit with its class's code; raise any other error again.

    ``pool``, ``output``: the verb's options.
    """
    if isinstance(error, RgpuError):
        fail(suggesting.with_nearest(error, lambda: settings(pool=pool)), output)
    if isinstance(error, OSError) and error.errno != errno.EPIPE:  # EPIPE: click ends this process
        fail(suggesting.of_system(error), output)
    if isinstance(error, KeyboardInterrupt):
        err.print("interrupted")
        sys.exit(130)
    raise error


def fail(error: RgpuError, output: str = "text") -> NoReturn:
    """Print the error and exit with its class's code."""
    if output == "json":
        print(json.dumps(error.as_dict(), default=str))
    elif output == "yaml":
        print(tables.as_yaml(error.as_dict()), end="")
    err.print(f"rgpu: {error.message}", markup=False)
    sys.exit(error.exit_code)


def emit(value: Any, output: str, text: Callable[[Any], None]) -> None:
    """Print ``value`` as JSON or YAML, or through ``text``."""
    if output == "json":
        print(json.dumps(value, indent=2, default=str))
    elif output == "yaml":
        print(tables.as_yaml(value), end="")
    else:
        text(value)


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], *, drop: Sequence[str] = (),
          cut: Sequence[str] = ()) -> None:
    """Print a table as wide as the terminal, if there is one. ``drop``: titles to leave out on narrow ones, in order.

    ``cut``: titles of free text, which may be shortened.
    """
    tables.show([tables.Column(title, itemgetter(index), drop=len(drop) - drop.index(title) if title in drop else 0,
                               cut=title in cut) for index, title in enumerate(titles)], [tuple(row) for row in rows])


def size(count: int | float | None) -> str:
    """Format bytes for display: ``1.5 GiB``."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(seconds: float) -> str:
    """Format seconds for display: ``4 s``, ``12 min``, ``3 h``, ``2 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(when: float) -> str:
    """Format a Unix time, s, in this host's time zone: ``11-24 20:15:03``."""
    return datetime.fromtimestamp(when).strftime("%m-%d %H:%M:%S")


def settings(**options: Any) -> Settings:
    """Return the settings of the running verb: its options, and the pool that its command line selects."""
    current = click.get_current_context(silent=True)
    said = current.meta if current is not None else {}
    return Settings({"context": said.get(CONTEXT), **options}, contexts=not said.get(HERE))
