"""Contexts: the pools that this user is logged in to, by name, and which of them is current.

A context is a client's part of a pool's directory, ``$XDG_CONFIG_HOME/rgpu/contexts/NAME`` (``~/.config``)::

    pool.json                   id, several control endpoints and their public keys; refreshed by every verb
    keys/user.key, operator.key the key that was made here; its secret half never leaves

Files have mode 0600, directories 0700. ``contexts/.current`` names the context that is used when no other is given.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rgpu.link.keys import KeyPair, PoolFiles, check_name
from rgpu.link.private_files import private_directory, write_file
from rgpu.session.errors import NotFound, RgpuError, UsageError

LOCAL = "local"  #: stands for the pool of this machine (`rgpu up`); no context has that name


class Context(msgspec.Struct, frozen=True):
    """A context as it is displayed. ``wrong``: why it cannot be used; empty: it can."""

    name: str
    current: bool
    pool: str = ""
    user: str = ""
    role: str = ""
    public: str = ""
    addresses: tuple[str, ...] = ()
    directory: str = ""
    wrong: str = ""


class Contexts:
    """The contexts of one user. ``environ``: environment variables, for tests (default: this process's)."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        base = environ.get("XDG_CONFIG_HOME")
        self.root = (Path(base) if base else Path.home() / ".config") / "rgpu" / "contexts"

    def files(self, name: str) -> PoolFiles:
        """Return the files of a context, which need not exist. Raises :class:`UsageError` for an invalid name."""
        if check_name(name, "context") == LOCAL:
            raise UsageError(f"no context can be called {LOCAL}: it stands for the pool of this machine")
        return PoolFiles(self.root / name)

    def existing(self, name: str) -> PoolFiles:
        """Return the files of an existing context. Raises :class:`NotFound`, :class:`UsageError`."""
        files = self.files(name)
        if not files.description_path.exists():
            known = ", ".join(self.names()) or "none"
            raise NotFound(f"no context is called {name} (there are: {known}); `rgpu login` makes one", context=name)
        return files

    def names(self) -> list[str]:
        """Return the names of all contexts, sorted."""
        return sorted(path.parent.name for path in self.root.glob("*/pool.json"))

    def current(self) -> str:
        """Return the context that `rgpu login` or `rgpu context use` chose; "" for none."""
        try:
            return (self.root / ".current").read_text(errors="replace").strip()[:64]
        except OSError:
            return ""

    def use(self, name: str) -> None:
        """Make a context the current one; :data:`LOCAL`: none is current. Raises :class:`NotFound`."""
        if name != LOCAL:
            self.existing(name)
        private_directory(self.root)
        if name == LOCAL:
            (self.root / ".current").unlink(missing_ok=True)
        else:
            write_file(self.root / ".current", f"{name}\n".encode(), mode=0o600, replace=True)

    def remove(self, name: str) -> None:
        """Delete a context with its key. Raises :class:`NotFound`."""
        files = self.existing(name)
        if self.current() == name:
            self.use(LOCAL)
        shutil.rmtree(files.root)

    def show(self, name: str) -> Context:
        """Return a context's description, without its secret key. Raises :class:`NotFound`."""
        files, current = self.existing(name), self.current() == name
        try:
            described, key = files.read_description(), KeyPair.load(files.key_for("user"))
        except RgpuError as error:
            return Context(name, current, directory=str(files.root), wrong=error.message)
        return Context(name, current, described.id, key.name, key.role, key.public,
                       tuple(endpoint.address for endpoint in described.endpoints), str(files.root))

    def of(self, root: Path) -> str:
        """Return the name of the context whose directory is ``root``; "" for any other directory."""
        return root.name if root.parent == self.root.resolve() else ""
