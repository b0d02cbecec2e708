"""``quotas/USER``: a user's limits as an operator set them; ``quotas/@default``: the limits of all users.

Pure. How use is counted and requests are refused: :mod:`rgpu.migrate.records.quota_decision`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from rgpu.migrate.records.schema import SCHEMA, U63, Record, Seconds, decode
from rgpu.session.errors import Corrupt, UsageError

QUOTAS = "quotas/"
EVERYBODY = "@default"  #: in place of a user's name; no user may have such a name
MOST = 2**63 - 1  #: largest value of any limit

_USER = r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,62}|@default)\Z"

LimitName = Annotated[str, Meta(pattern=r"\A[a-z][a-z_]{0,31}\Z")]


class QuotaRecord(Record, frozen=True, kw_only=True):
    """Limits of ``user``, by name; None: no limit; a missing name: as for all users.

    Names that this version does not have are kept as they are, and limit nothing.
    """

    v: int = SCHEMA
    user: Annotated[str, Meta(pattern=_USER)]
    limits: Annotated[dict[LimitName, U63 | None], Meta(max_length=16)] = {}
    changed: Seconds = 0.0

    def changed_by(self, limits: Mapping[str, int | None], inherit: frozenset[str], now: float) -> QuotaRecord:
        """Return the record with other ``limits``, and without those named in ``inherit``."""
        kept = {name: limit for name, limit in self.limits.items() if name not in inherit}
        return self.replace(limits={**kept, **limits}, changed=now)


def quota_key(user: str) -> str:
    """Key of the limits of a user, or of all users."""
    return QUOTAS + user


def read_quota(value: bytes, key: str) -> QuotaRecord:
    """Return the checked record. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    record = decode(value, QuotaRecord, key)
    if quota_key(record.user) != key:
        raise Corrupt(f"{key} holds the quota of {record.user}", offset=0, reason="name", key=key)
    return record


def check_quota_user(user: str) -> str:
    """Return the name, if it is valid for a user. Raises :class:`UsageError`."""
    if user == EVERYBODY or not re.search(_USER, user):
        raise UsageError(f"a user cannot be called {user[:80]!r}: use 1 to 63 letters, digits, '.', '_' and '-', first "
                         "a letter or digit", user=user[:80])
    return user
