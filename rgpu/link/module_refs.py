"""Images named by hash on the data link: the messages' bytes (docs/architecture.md, "The data link")."""

from __future__ import annotations

import struct

CALLS_REF, HAVE = 6, 7  #: agent → worker
PRESENT, NEED = 21, 22  #: worker → agent

SMALLEST = 16 * 1024  #: payloads of fewer bytes are always sent
DIGEST = 32  #: bytes of a BLAKE3 hash
ASK_AT_ONCE = 4096  #: hashes in one HAVE

#: CALLS_REF: stream offset, length in bytes, hash
REFERENCE = struct.Struct(f"<QQ{DIGEST}s")
#: NEED: stream offset, whether the node keeps images at all (0: name no more on this connection)
NEEDED = struct.Struct("<QB")
