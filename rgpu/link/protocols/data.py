"""The data link between agent and worker, and the socket by which the two share memory on one host."""

from __future__ import annotations

from rgpu.link.protocols.shim import SHIM, STICKY
from rgpu.link.protocols.table import Constant, Form, Protocol, Way, message, record

TO, BACK, MAP = Way.TO, Way.BACK, Form.MAP

_INTRO = """A TCP connection to a node's data port carries a session's calls to its worker, and answers back. It
begins with the preamble in clear: `ClientHead`, the ticket and a share of 32 bytes one way, `NodeHead`, a share and
the epoch (u64) the other; a share is an X25519 public key, and a random salt where an end has an older preamble. A
status other than 0 is followed by u32 length and JSON. Then come sealed frames (docs/developers/links/sealing.md), each
of them u8 type and body. The version is the `data` number that both sides show each other; a side works with its own
and with the one before. The preamble has a number of its own, PREAMBLE. Fields of msgpack maps that are marked `?` may
be missing, and unknown keys are ignored.
"""

DATA = Protocol(
    name="data", title="The data link", ends=("agent", "worker"), version=2, intro=_INTRO,
    messages=(
        message(1, "ATTACH", TO, "The first message: the session, and what its program has received.", "str session",
                "int epoch", "int delivered: highest seq that the program's side published",
                "str client: id of the agent",
                "dict versions?: package, control, data", "int usual?: calls that the program usually is ahead",
                "int printed?: bytes of printed text that the program has; missing: it accepts none",
                "str host?: of the agent, if memory may be shared",
                "list variables?: (seq of a load, (name, address, size) of each variable) as reported to the program; "
                "of loads that may be applied again", form=MAP),
        message(2, "CALLS", TO, "The stream of records, from `next` of ATTACHED on, cut anywhere.",
                "u64 offset: in this connection's stream", "bytes(*) records"),
        message(3, "BYE", TO, "The program ended; the session ends.", "str reason", "int|None exit_code",
                "dict statistics", form=MAP),
        message(4, "PING", TO, "Requests the worker's position, and reports the program's.", "*Ping"),
        message(5, "STATS", TO, "Figures of the session's client, about once a second.", "int calls?",
                "int awaited_calls?", "int exchanged_calls?: of them, those answered in compiled code",
                "int bytes?", "int pid?", "str command?", "int journal_bytes?",
                "int managed_faults?: touches of managed memory by the CPU that needed the device",
                "int managed_waiting?: of them, those that wait now",
                "str blocked_reason?", "list unsupported_calls?: names, 256 at most",
                "dict waits?: of the eight wire calls that were awaited longest in all, by name: (times, seconds)",
                form=MAP),
        message(6, "CALLS_REF", TO, "The next bytes of the stream are those with this BLAKE3 hash.", "*Reference"),
        message(7, "HAVE", TO, "Requests which of these contents the node has.",
                "bytes32(*) digests: 1 to 4096 BLAKE3 hashes"),
        message(8, "PRINTED", TO, "Confirms printed text.", "u64 position: bytes that the program has by now"),
        message(9, "AREA_READY", TO, "The program's side has mapped the worker's area.", "*Area"),
        message(10, "CALLS_AT", TO, "The stream continues with these bytes, then with those in shared memory.",
                "*Place", "bytes(*) before"),
        message(11, "LANE", TO, "The first message of a lane.", "bytes key: of ATTACHED", "int number", form=MAP),
        message(12, "LANES", TO, "Long messages may be sent over the lanes from now on, both ways.",
                "u8 count: lanes 0 to count - 1 are open"),
        message(13, "LANED", TO, "Takes the place of the next message of a lane.", "*Mark"),
        message(14, "ISSUED", TO, "Reports when the calls that follow were published; only to a worker of protocol 2, "
                "at most once a millisecond.", "*Issued"),
        message(16, "ATTACHED", BACK, "Answers ATTACH, or refuses it.", "int epoch?", "int next?: seq wanted next",
                "str state?", "dict versions?", "str worker?: name of the process",
                "dict shared?: name, prove and proven of the memory socket, or refused with a reason",
                "dict lanes?: key, and most that may be opened", "dict refused?: an error", form=MAP),
        message(17, "ANSWER", BACK, "A piece of an answer; the first begins with AnswerHead of the shim link.",
                "u8 more: 1 when further pieces follow", "bytes(*) piece"),
        message(18, "WATERMARK", BACK, "Reports what is complete; the body is the shim link's.", "*WatermarkHead",
                "StreamMark(count) streams"),
        message(19, "NOTICE",
                BACK, "Reports on the session: `cut` (position, image), `moved`, `fenced`, `ended` (reason), "
                "`control` (address, public).", "str kind", "int epoch", "int position?", "str image?", "str reason?",
                "str address?", "str public?", form=MAP),
        message(20, "PONG", BACK, "Answers PING; a position of 0 only shows that the worker runs.", "*Pong"),
        message(21, "PRESENT", BACK, "Answers HAVE.",
                "bytes(*) present: for each hash 1 where the node has the content"),
        message(22, "NEED", BACK, "Requests bytes that a CALLS_REF named.", "*Needed"),
        message(23, "TEXT", BACK, "Text that kernels printed; only after an ATTACH with `printed`.", "u64 position",
                "bytes(*) text: 256 KiB at most"),
        message(24, "ANSWER_AT", BACK, "A piece of an answer whose last bytes are in the worker's area.", "*PieceAt",
                "bytes(*) before"),
        message(25, "LANED_BACK", BACK, "Takes the place of the next message of a lane.", "*Mark"),
    ),
    records=(
        record("ClientHead", "Begins the preamble to the node; ticket and share follow.", "bytes4 magic: MAGIC",
               "u16 version: PREAMBLE", "u16 purpose: PURPOSE_CALLS, PURPOSE_PAGES, PURPOSE_LANE or PURPOSE_RANKS",
               "u32 ticket: bytes of it"),
        record("NodeHead", "Begins the preamble of the node; share and epoch follow.", "bytes4 magic: MAGIC",
               "u16 version: PREAMBLE, or 2 to an end of an older preamble", "u16 status: 0, or PREAMBLE_REFUSED"),
        record("Ping", "Body of PING.", "u64 shipped: the last seq shipped before it", "u64 published @2: the last seq",
               "u64 usual @2: calls that the program usually is ahead, as a PONG said",
               "u64 sent @2: the agent's clock, ns",
               "u32 stood @2: 1 when the agent did not run just before"),
        record("Issued", "Body of ISSUED.", "u64 sent: the agent's clock, ns",
               "u64 since: the same when the oldest call that follows was published, as far as the agent knows",
               "u64 published: the last seq", cpp=True),
        record("Pong", "Body of PONG.", "u64 position: every call up to it was applied",
               "u64 usual @2: calls that the program usually is ahead, as seen here"),
        record("Position", "Body of PING and PONG in protocol 1, and of PRINTED.", "u64 position"),
        record("Reference", "Body of CALLS_REF.", "u64 offset: in the stream", "u64 length", "bytes32 digest"),
        record("Needed", "Body of NEED.", "u64 offset: of the CALLS_REF",
               "u8 keeps: 0 when the node keeps none at all"),
        record("Place", "Begins CALLS_AT.", "u64 stream: offset in it", "u32 memory", "u32 zero",
               "u64 offset: in the memory",
               "u64 length", cpp=True),
        record("Area", "Body of AREA_READY.", "u32 number"),
        record("Mark", "Body of LANED and LANED_BACK.", "u8 lane",
               "u32 length: of the lane's next message, type and body"),
        *map(SHIM.record, ("AnswerHead", "WatermarkHead", "StreamMark", "PieceAt")),
    ),
    constants=(
        Constant("MAGIC", b"RGPL", "begins the preamble", ""),
        Constant("PREAMBLE", 3, "the preamble's number; before 3 shares are salts", ""),
        Constant("PURPOSE_CALLS", 1, "of a connection: a session's calls", ""),
        Constant("PURPOSE_PAGES", 2, "of a connection: a move between workers (docs/protocols/pages.md)", ""),
        Constant("PURPOSE_LANE", 3, "of a connection: long messages beside another one", ""),
        Constant("PURPOSE_RANKS", 4, "of a connection: collectives between sessions (docs/protocols/ranks.md)", ""),
        Constant("PREAMBLE_REFUSED", 1, "status of the node", ""),
        Constant("TO_NODE", 0, "direction of frames, in keys and associated data", ""),
        Constant("FROM_NODE", 1, "direction of frames, in keys and associated data", ""),
        Constant("SALT", 32, "bytes of a share, or salt", ""),
        Constant("DIGEST", 32, "bytes of a BLAKE3 hash", ""),
        Constant("LANE_KEY", 16, "bytes that identify the attachment that a lane belongs to", ""),
        STICKY,
    ))

_MEMORY_INTRO = """Where agent and worker are on one host they share memory, which is handed over by a socket of its
own (SOCK_SEQPACKET, an abstract name that ATTACHED contains). A packet is `Packet` and bytes, with at most one
descriptor.
"""

MEMORY = Protocol(
    name="memory", title="The memory socket", ends=("agent", "worker"), version=1, intro=_MEMORY_INTRO,
    messages=(
        message(1, "PROVE", TO, "The agent's token.", "u32 number: 0", "u64 size: 0", "bytes(*) token"),
        message(2, "PROVEN", BACK, "The worker's token, and its area if it has one.",
                "u32 number: of the area",
                "u64 size: of the area", "bytes(*) token", descriptors="memfd of the area, or none"),
        message(3, "MEMORY", TO, "Hands over the memory of bulk segments, read-only.", "u32 number", "u64 size: bytes",
                "bytes(*) empty", descriptors="memfd"),
        message(4, "DROP", TO, "A memory is not used any more.", "u32 number", "u64 size: 0", "bytes(*) empty"),
        message(5, "MAPPED", BACK, "A memory is mapped.", "u32 number", "u64 size: 0", "bytes(*) empty"),
        message(6, "REFUSED", BACK, "A memory is not accepted.", "u32 number", "u64 size: 0", "bytes(*) reason"),
    ),
    records=(record("Packet", "Begins each packet.", "u32 type", "u32 number", "u64 size"),),
    constants=(Constant("TOKEN", 32, "bytes of a token", ""),))
