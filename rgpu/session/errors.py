"""The one tree of errors: class = exit code = entry in docs/users/errors.md.

Every class has a ``code`` (the word on the wire and in ``-o json``) and an
``exit_code`` (the CLI's exit status). Messages state what happened, where,
and what to do. Raise the most specific class; catch :class:`RgpuError`.
"""

from __future__ import annotations

from typing import Any


class RgpuError(Exception):
    """Root of everything that rgpu raises on purpose.

    ``detail`` holds machine-readable facts (offsets, names, limits).
    """

    code = "error"
    exit_code = 1

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def as_dict(self) -> dict[str, Any]:
        """Return the error as the wire and ``-o json`` carry it."""
        return {"error": self.code, "message": self.message, "detail": self.detail}


class UsageError(RgpuError):
    """The command line or the configuration is wrong."""

    code, exit_code = "usage", 2


class NotFound(RgpuError):
    """A session, host, checkpoint or file of that name does not exist."""

    code, exit_code = "not_found", 3


class AlreadyExists(RgpuError):
    """The name is in use already."""

    code, exit_code = "already_exists", 4


class Refused(RgpuError):
    """A check failed before anything was changed."""

    code, exit_code = "refused", 5


class PoolUnavailable(RgpuError):
    """No daemon of the pool answers, or the pool is not running."""

    code, exit_code = "pool_unavailable", 6


class AuthenticationFailed(RgpuError):
    """A key is missing, unknown, or has not the role that the command needs."""

    code, exit_code = "authentication_failed", 7


class NotPermitted(AuthenticationFailed):
    """The key is known, but the object of the request belongs to another user."""

    code, exit_code = "not_permitted", 34


class Corrupt(RgpuError):
    """A journal, frame, checkpoint or record does not verify. detail: offset, reason."""

    code, exit_code = "corrupt", 8


class VersionMismatch(RgpuError):
    """Two sides have incompatible versions; the message names both."""

    code, exit_code = "version_mismatch", 9


class TimedOut(RgpuError):
    """An operation did not finish within the time given."""

    code, exit_code = "timed_out", 10


class MoveFailed(RgpuError):
    """A move was aborted; the session runs where it was."""

    code, exit_code = "move_failed", 11


class RecoveryFailed(RgpuError):
    """A session could not be restored; checkpoint and journal are kept."""

    code, exit_code = "recovery_failed", 12


class LinkError(RgpuError):
    """A connection ended, or broke its protocol."""

    code, exit_code = "link", 13


class Conflict(RgpuError):
    """A compare-and-swap lost: the record changed since it was read."""

    code, exit_code = "conflict", 14


class Fenced(RgpuError):
    """The sender acts for an epoch or a leader revision that has ended."""

    code, exit_code = "fenced", 15


class StoreError(RgpuError):
    """The checkpoint store failed; the subclasses distinguish how."""

    code, exit_code = "store", 16


class StoreFull(StoreError):
    """The checkpoint store is full, or a quota is used up."""

    code, exit_code = "store_full", 30


class StoreDenied(StoreError):
    """The checkpoint store refuses the credentials, or they do not permit the operation."""

    code, exit_code = "store_denied", 31


class StoreUnreachable(StoreError):
    """The checkpoint store does not answer."""

    code, exit_code = "store_unreachable", 32


class StoreMissing(StoreError):
    """A file or object that a checkpoint names is not in the store any more."""

    code, exit_code = "store_missing", 33


class DeviceError(RgpuError):
    """The device could not execute a call. ``result``: the CUresult."""

    code, exit_code = "device", 17

    def __init__(self, message: str, result: int = 999, **detail: Any) -> None:
        super().__init__(message, result=result, **detail)
        self.result = result


class UnknownOutcome(RgpuError):
    """A write was sent and its outcome is not known: read before retrying."""

    code, exit_code = "unknown_outcome", 18


class LimitReached(RgpuError):
    """A limit or a quota of the user, the session or the node is reached; the message names it."""

    code, exit_code = "limit_reached", 35


class RanksMissing(RgpuError):
    """Not all ranks of a gang arrived within its deadline; the message names the missing ones."""

    code, exit_code = "ranks_missing", 36


def all_classes(root: type[RgpuError] = RgpuError) -> list[type[RgpuError]]:
    """List every class of the tree, root first."""
    found = [root]
    for child in root.__subclasses__():
        found.extend(all_classes(child))
    return found


def from_dict(data: dict[str, Any]) -> RgpuError:
    """Make the exception from the result of ``as_dict``; unknown codes give the root class."""
    for cls in all_classes():
        if cls.code == data.get("error"):
            detail = {k: v for k, v in dict(data.get("detail") or {}).items() if isinstance(k, str)}
            if cls is DeviceError:
                return DeviceError(str(data.get("message", "")), int(detail.pop("result", 999)), **detail)
            return cls(str(data.get("message", "")), **detail)
    return RgpuError(str(data.get("message", data)))
