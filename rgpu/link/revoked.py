"""Keys that are let in nowhere any more, kept in a node's folder: over its restarts, and over a registry's restore."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rgpu.link.private_files import private_directory, write_file
from rgpu.session.errors import Corrupt

FILE = "revoked.json"


class _File(msgspec.Struct):
    """``keys``: public key in Z85: what it was called."""

    keys: dict[str, str]
    rgpu_revoked: int = 1


class RevokedKeys:
    """The list in a folder of authorized keys. A key on it stays on it: who is let in again gets a new one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._names: dict[str, str] = {}

    def __contains__(self, public: object) -> bool:
        return public in self._names

    def names(self) -> dict[str, str]:
        """Each key, and what it was called."""
        return dict(self._names)

    def read(self) -> None:
        """Take what the file says besides what is known. Raises :class:`Corrupt`."""
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
        """Refuse these keys from here on, and write them down; whether one is new. Raises :class:`OSError`."""
        if names.keys() <= self._names.keys():
            return False
        self._names.update(names)  # it holds before it is written
        private_directory(self.path.parent)
        write_file(self.path, msgspec.json.encode(_File(keys=self._names)), mode=0o600, replace=True)
        return True
