"""The page link between two workers in a move: pages, pulled pages, and the replay that may follow."""

from __future__ import annotations

from rgpu.link.protocols.data import DATA
from rgpu.link.protocols.table import Constant, Form, Protocol, Way, keyed, message, record

TO, BACK, MAP, VALUE = Way.TO, Way.BACK, Form.MAP, Form.VALUE

_INTRO = """The worker that a session leaves (the *source*) connects to the data port of its *destination* with a
ticket of purpose `pages`; the frames are those of the data link ([data.md](data.md)), the version is that link's.
PAGES may also be sent over further connections, each of which begins with LANE. Long messages are cut into pieces of
1 MiB, each of them u8 `last` and bytes. Messages 38, 39 and 45 to 47 are only sent where BEGIN requested that pages be
pulled and READY agreed; OBJECTS only where READY has `objects`; 48 to 58 only in a move by replay, after the first
DONE.
"""

PAGES = Protocol(
    name="pages", title="The page link", ends=("source", "destination"), version=DATA.version, intro=_INTRO,
    messages=(
        message(32, "BEGIN", TO, "The first message of a move.", "str session", "str move",
                "bytes hash_key: of page hashes",
                "int lanes = 0: connections that follow", "Ask | None peer = None: how pages could be pulled", form=MAP,
                struct="Begin"),
        message(33, "LAYOUT", TO, "The session's regions; answered by READY when the memory is mapped.",
                "list[tuple[int, int, str, int]] regions: address, size, kind, owner", form=MAP, struct="Layout"),
        message(34, "PAGES", TO, "Pages, on any connection; answered by a credit.", "u32 count: 1 to 4096",
                "PageEntry(count) entries", "bytes(*) stored: in the order of the entries"),
        message(35, "ROUND", TO,
                "Ends a round; answered by ACK when all before it was processed. Round 0: before lanes are opened.",
                "int round = 0",
                "list[tuple[int, int, bytes, bytes]] known = []: address, size, page numbers (u32 each) and their "
                "hashes (16 bytes each) of regions whose other hashes the destination reported",
                form=MAP, struct="Round"),
        message(36, "STATE", TO, "A piece of the encoded SessionState.", "u8 last", "bytes(*) piece"),
        message(37, "LANE", TO, "The first message of a further connection; answered by READY.", "str move",
                "int number",
                form=MAP, struct="Lane"),
        message(38, "GRANT",
                TO, "Regions whose descriptors are sent over the Unix socket, in this order; answered by GRANTED.",
                "list[tuple[int, int, int]] regions: address, size, serial", form=MAP, struct="Grant"),
        message(39, "PULL", TO, "Runs of pages to be copied; answered by HASHES and PULLED.",
                "u8 tell: 1 when the hashes are requested", "Run(*) runs"),
        message(40, "ACK", BACK, "Everything up to a ROUND was processed."),
        message(41, "DONE", BACK, "Every page was verified.", "int pages", "dict phases_ms: what the phases took",
                form=MAP),
        message(42, "FAILED", BACK, "The move ends here.", "str error: code", "str message", "dict detail?", form=MAP),
        message(43, "READY", BACK, "Answers LAYOUT and LANE.", "int objects?: 1 if OBJECTS is supported",
                "Answer peer?: whether pages will be pulled", form=MAP),
        message(44, "CREDIT", BACK, "So many PAGES of this connection are verified and written.", "*Credit"),
        message(45, "PULLED", BACK, "The runs of a PULL are copied, or not.", "str why = \"\": empty, or why it failed",
                "float pull_ms = 0.0", "float hash_ms = 0.0", form=MAP, struct="Pulled"),
        message(46, "HASHES", BACK, "Hashes of the pages of a PULL, as the destination has them.", "u8 last",
                "PageHash(*) hashes: in order"),
        message(47, "GRANTED", BACK, "Answers GRANT.", "str why = \"\": empty, or why it failed",
                "float import_ms = 0.0",
                form=MAP, struct="Granted"),
        message(48, "REPLAY", TO, "The calls since the first snapshot follow.", "int position: of the snapshot",
                form=MAP,
                struct="Replay"),
        message(49, "CALLS", TO, "Bytes of the stream of records.",
                "u8 fresh: 1 when a stream begins, with a whole record",
                "bytes(*) records"),
        message(50, "PING", TO, "Requests the replay's position.", "*Ping"),
        message(51, "LAST", TO, "A piece of the SessionState of the last pause.", "u8 last", "bytes(*) piece"),
        message(52, "PROBE", TO, "A sample of pages, at the place among the calls where they were hashed.",
                "*ProbeHead",
                "ProbeEntry(*) pages: 16384 at most"),
        message(56, "PONG", BACK, "Answers PING.", "*Pong"),
        message(57, "WANT", BACK, "Pages that differ at the last pause.",
                "list[tuple[int, list[int]]] rows: address of a region, its pages", form=VALUE),
        message(58, "PROBED", BACK, "Answers PROBE, in the order of the probes.", "*Probed"),
        message(60, "OBJECTS", TO, "A piece of the objects to be made in advance; answered by MADE.", "u8 last",
                "bytes(*) piece"),
        message(61, "MADE", BACK, "These objects are made.", "float ms: that it took", form=MAP),
    ),
    records=(
        keyed("Ask", "How the source's memory could be pulled.", "str boot: id of the kernel's boot",
              "str kind: of the device",
              "str near: the connection's end here, as the source sees it", "str far: its other end"),
        keyed("Answer", "Whether the destination pulls.", "str why = \"\": why not",
              "str path = \"\": of the Unix socket for descriptors", "bytes token = b\"\": to be sent there first"),
        record("PageEntry", "A page of PAGES.", "u64 address", "u32 size: bytes", "u32 stored: bytes stored for it",
               "u8 codec: RAW, LZ4 or ZERO", "u64x2 hash: of its bytes", array=True),
        record("PageHash", "A hash of a page, keyed for the session.", "u64x2 hash", python=False),
        record("Run", "Adjacent pages.", "u64 address", "u64 bytes: of whole pages", array=True),
        record("Credit", "Body of CREDIT.", "u32 messages"),
        record("PageCount", "Begins PAGES.", "u32 count"),
        record("Ping", "Body of PING.", "u64 number"),
        record("Pong", "Body of PONG.", "u64 number", "u64 applied: every call up to it was applied"),
        record("ProbeHead", "Begins PROBE.", "u64 number", "u64 position: of the source when it hashed"),
        record("ProbeEntry", "A page of a sample.", "u64 address", "u32 size: bytes", "u64x2 hash: at the source",
               array=True),
        record("Probed", "Body of PROBED.", "u64 number", "u32 compared: pages", "u32 differing: of them"),
    ),
    constants=(
        Constant("RAW", 0, "codec: the page as it is", ""),
        Constant("LZ4", 1, "codec: an lz4 block", ""),
        Constant("ZERO", 2, "codec: a page of zeros, nothing is stored", ""),
    ))
