"""Revoked keys, kept in a node's folder across its restarts and across a restore of the registry."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rgpu.link.private_files import private_directory, write_file
from rgpu.session.errors import Corrupt

FILE = "revoked.json"


class _File(msgspec.Struct):
    """The content of the file. ``keys``: public key in Z85 → its former name."""

    keys: dict[str, str]
    rgpu_revoked: int = 1


class RevokedKeys:
    """The list in a folder of authorized keys. A key stays on it: its holder needs another one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._names: dict[str, str] = {}

    def __contains__(self, public: object) -> bool:
        return public in self._names

    def names(self) -> dict[str, str]:
        """Return each key with its former name."""
        return dict(self._names)

    def read(self) -> None:
        """Add the file's keys to those already known. Raises :class:`Corrupt`."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_File)
        except FileNotFoundError:
            return
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            raise Corrupt(f"{self.path} cannot be read, so it is not known whom to refuse: {error}; restore it, or "
                          "remove it if the pool's record is whole", path=str(self.path), reason="format") from error
        if found.rgpu_revoked != 1:
            raise Corrupt(f"{self.path} is of another version", path=str(self.path), reason="version")
        self._names.update(found.keys)

    def add(self, names: dict[str, str]) -> bool:
        """Refuse these keys from now on, and store them; return whether one is new. Raises :class:`OSError`."""
        if names.keys() <= self._names.keys():
            return False
        self._names.update(names)  # it holds before it is written
        private_directory(self.path.parent)
        write_file(self.path, msgspec.json.encode(_File(keys=self._names)), mode=0o600, replace=True)
        return True
