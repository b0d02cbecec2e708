"""Check that this is still the registry that was seen before (OWNERSHIP 10).

A registry that was restored from a backup, wiped, or exchanged for another one
contains stale records: epochs below those that agents have seen, sessions
that ended, no record of a session that runs. A node that acted on it would start a session twice,
or forget one that runs. A node therefore records, in a file of its own, the data's
identity and the highest revision that it has read. When the identity changes or the revision goes back,
the registry is treated as one that does not answer (:class:`PoolUnavailable` with
``reason`` "went back"): running sessions continue with their attached agents, and
nothing is placed, moved, published, cut or forgotten until a person decides.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import structlog

from rgpu.migrate.records.ownership import went_back
from rgpu.session.errors import Corrupt, PoolUnavailable

log = structlog.get_logger(__name__)

SAVE_SECONDS = 1.0  #: between two saves; a step back of less than is lost in a crash is not noticed


class Guard:
    """Record of the registry as seen. ``file``: where it survives restarts; None: for the life of this object only."""

    def __init__(self, file: Path | None = None) -> None:
        """Load the file. Raises :class:`Corrupt` for one with other contents."""
        self._file = file
        self.cluster, self.revision = _load(file) if file is not None and file.exists() else ("", 0)
        self.reason = ""  #: why the registry is not trusted; "" while it is
        self._doubt = ""  #: reason of :meth:`distrust`, which answers of the registry do not remove
        self._saved = 0.0

    def check(self, cluster: str, revision: int, floor: int | None = None) -> None:
        """Compare an answer with the recorded revision and identity, and record it.

        ``floor``: the highest revision known when the request was *sent* (an answer may be older than
        another one that overtook it); None: the highest known now. Raises :class:`PoolUnavailable`.
        """
        reason = went_back(seen_cluster=self.cluster or cluster, cluster=cluster,
                           seen_revision=self.revision if floor is None else floor, revision=revision) or \
            self._doubt or None
        if reason is not None:
            if reason != self.reason:
                log.error("the registry went back: nothing is decided by it", reason=reason)
            self.reason = reason
            raise PoolUnavailable(f"{reason}: restored from a backup, or exchanged? Sessions go on and nothing new is "
                                  "decided; if its data are the ones to go on with, `rgpu pool adopt` brings them up "
                                  "to date", reason="went back")
        self.reason = ""
        fresh = not self.cluster
        self.cluster, self.revision = cluster, max(self.revision, revision)
        if self._file is not None and (fresh or time.monotonic() - self._saved > SAVE_SECONDS):
            self.save()

    def believe(self, cluster: str, revision: int) -> None:
        """Accept these data, from this revision on, as the pool's: an operator decided so (`rgpu pool adopt`)."""
        log.warning("the registry is believed from here on", cluster=cluster, revision=revision, before=self.cluster,
                    before_revision=self.revision)
        self.cluster, self.revision, self.reason, self._doubt = cluster, revision, "", ""
        self.save()

    def distrust(self, reason: str) -> None:
        """Trust the registry no longer, until :meth:`believe`: an epoch above its own was seen, so it went back."""
        log.error("the registry is not believed any more", reason=reason)
        self.reason = self._doubt = reason

    def save(self) -> None:
        """Write cluster id and revision seen to the guard's file; a full disk is no error."""
        if self._file is None or not self.cluster:
            return
        self._saved = time.monotonic()
        scratch = self._file.with_name(self._file.name + ".new")
        try:
            scratch.write_text(json.dumps({"v": 1, "cluster": self.cluster, "revision": self.revision}) + "\n")
            os.replace(scratch, self._file)
        except OSError as error:  # a full disk must not stop running sessions
            log.warning("cannot remember the registry's revision", path=str(self._file), reason=str(error))


def _load(file: Path) -> tuple[str, int]:
    try:
        content = json.loads(file.read_bytes())
        cluster, revision = content["cluster"], content["revision"]
        if content["v"] != 1 or not isinstance(cluster, str) or type(revision) is not int or revision < 0:
            raise ValueError("unknown content")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Corrupt(f"{file} cannot be read ({error}): remove it if the registry's data are right",
                      path=str(file)) from error
    return cluster, revision
