"""``pool/secrets``: the generations of the pool's secret that are valid. The registry contains no secret itself.

A secret is named by its *mark*, a hash of it, by which a node identifies a secret that it holds or was given.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rgpu.migrate.records.schema import SCHEMA, Record, Seconds, Text

SECRETS = "pool/secrets"

Generation = Annotated[int, Meta(ge=1, le=2**31)]
Mark = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Phase = Literal["settled", "spreading", "overlap"]


class Named(Record, frozen=True, kw_only=True):
    """Generation of the secret, by its number and mark."""

    number: Generation
    mark: Mark


class SecretsRecord(Record, frozen=True, kw_only=True):
    """Generations and phase of a rotation; the phases are described in :mod:`rgpu.migrate.membership.rotation`.

    ``old``: settled: the only one. ``new``: set in the other phases. ``overlap``: s for which both are valid;
    ``until``: end of the old one (Unix s), in the overlap. ``holder``: the host where the new one was made.
    """

    v: int = SCHEMA
    phase: Phase = "settled"
    old: Named
    new: Named | None = None
    overlap: Seconds = 0.0
    until: Seconds = 0.0
    since: Seconds = 0.0
    holder: Text = ""
