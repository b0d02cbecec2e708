"""Bytes of the links' messages as the product writes them: the golden file is this, of before the tables were made.

    python -m tests.link.protocols.recorded      writes golden.json anew: only for a change of bytes that is meant

Every message is brought about by the code that sends it in a session, with values that do not change from run to run;
what does (clocks, names of sockets) is put in by :func:`tests.link.protocols.recording.book.settled`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.link.protocols.recording import control_link, data_link, local_links, page_link

GOLDEN = Path(__file__).parent / "golden.json"


def record() -> dict[str, Any]:
    """All of it, as golden.json has it below ``bodies``."""
    to, ring = local_links.to_shim()
    return {"to_shim": to, "ring": ring, "from_shim": local_links.from_shim(), "memory": local_links.memory(),
            "to_worker": data_link.to_worker(), "to_agent": data_link.to_agent(), "opening": data_link.opening(),
            "pages": page_link.pages(), "replayed": page_link.replayed(), "control": control_link.control()}


def main() -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    golden["bodies"] = record()
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
