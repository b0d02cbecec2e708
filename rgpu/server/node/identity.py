"""Identity of this node, for as long as its daemon runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rgpu.link.keys import KeyPair


@dataclass(frozen=True)
class Identity:
    """``incarnation``: unlike that of any earlier daemon of this host; ``directory``: the node's, in the pool's."""

    host: str
    incarnation: int
    keys: KeyPair
    directory: Path
