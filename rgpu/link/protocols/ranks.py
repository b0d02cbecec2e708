"""The rank link between two workers: what ranks in several sessions contribute to their collectives."""

from __future__ import annotations

from rgpu.link.protocols.data import DATA
from rgpu.link.protocols.table import Form, Protocol, Way, message, record

TO, BACK, MAP = Way.TO, Way.BACK, Form.MAP

_INTRO = """A worker whose session shares a communicator with another one (the *asker*) is connected to the data port
of that session's owner with a ticket of purpose `ranks`, which names the asker's session and epoch. The frames are
those of the data link ([data.md](data.md)), the version is that link's. The answerer only answers. A broken connection
is opened again, and unanswered requests are sent again.
"""

RANKS = Protocol(
    name="ranks", title="The rank link", ends=("asker", "answerer"), version=DATA.version, intro=_INTRO,
    messages=(
        message(32, "ASK", TO, "Requests contributions to a collective: CONTRIBUTIONS; HOLDS where it has those of "
                "`own`; or NEVER.", "int id",
                "bytes unique: of the communicator",
                "tuple[int, int, int] key: -1, -1 and the number; of a message sender, receiver and the pair's number",
                "list[int] want: ranks whose contributions are requested", "list[int] own: the asker's ranks",
                "bool now = False: answer with what is available now",
                "bool lanes = False: the asker opens lanes that are offered, and takes LENGTH", form=MAP, struct="Ask"),
        message(33, "FLOOR", TO, "The asker requests no collective below that number again.", "bytes unique",
                "int number", form=MAP, struct="Floor"),
        message(37, "REFILL", TO, "Requests all that is kept of a communicator: the asker's own log was lost; KEPT.",
                "int id", "bytes unique", form=MAP, struct="Refill"),
        message(39, "GO_BACK", TO, "A contribution that NEVER marked `again` is needed: the answerer begins again at "
                "its checkpoint.", "bytes unique", "tuple[int, int, int] key: as in ASK",
                "str why", form=MAP, struct="GoBack"),
        message(34, "CONTRIBUTIONS", BACK, "A piece of the contributions of some wanted ranks: rows of rank, kind, "
                "type, reduction, peer, count, scalar and data, as msgpack.", "*AskId", "u8 last", "bytes(*) piece"),
        message(35, "HOLDS", BACK, "The contributions of the asker's ranks have arrived.", "*AskId"),
        message(36, "NEVER", BACK, "A requested contribution will not arrive.", "int id", "str why",
                "bool again = False: its session contributes it again when it begins again at its checkpoint", form=MAP,
                struct="Never"),
        message(40, "BORROW", TO, "Names the memory socket whose ends the daemon gave both, for long contributions.",
                "bytes number", "bool direct = False: the asker maps memory of the GPU, too", form=MAP,
                struct="Borrow"),
        message(41, "PLACED", BACK, "As CONTRIBUTIONS, for data in memory that the asker maps: each row has the "
                "segment and its bytes where CONTRIBUTIONS has data.", "*AskId", "bytes(*) rows"),
        message(42, "OFFER", BACK, "Lanes may be opened: much was sent, and more follows.", "bytes key",
                "int most: lanes", form=MAP, struct="Offer"),
        message(43, "LANE", TO, "The first message of a lane, a further connection with a ticket of purpose `ranks`.",
                "bytes key: of OFFER", "int number", form=MAP, struct="Lane"),
        message(44, "LANES", TO, "Long messages may be sent over lanes 0 to count - 1 from now on.", "u8 count"),
        message(45, "LANED", BACK, "Takes the place of the next message of a lane.", "*Mark"),
        message(46, "LENGTH", BACK, "Bytes of all pieces that CONTRIBUTIONS bring next for that request.", "*Length"),
        message(38, "KEPT", BACK, "A piece of what is kept of one collective, as CONTRIBUTIONS.", "*KeptHead",
                "u8 last", "bytes(*) piece"),
    ),
    records=(
        record("AskId", "Names the request that is answered.", "u64 id"),
        record("Length", "Body of LENGTH.", "u64 id", "u64 size: bytes",
               "u64 data: where the bytes of the first rank begin: a multiple of 64 in memory"),
        record("Mark", "Body of LANED.", "u8 lane", "u32 length: of the lane's next message, type and body"),
        record("KeptHead", "Names the REFILL and the collective.", "u64 id", "i32 sender: or -1", "i32 receiver: or -1",
               "u64 number")))

_MEMORY_INTRO = """Where one daemon runs both workers, it gives each an end of a socket (SOCK_SEQPACKET). A packet is
`Packet`, with at most one descriptor; its numbers are those of the memory socket ([data.md](data.md)). The answerer
lends memory with contributions of its ranks, which PLACED names. Lent memory is written again only when as many views
of it were released as were named. To an asker whose BORROW has `direct` it also lends its page of each communicator and
its GPU's memory for contributions ([format](../developers/objects/direct-collectives.md)), until the socket is closed.
"""

RANK_MEMORY = Protocol(
    name="rank_memory", title="The rank memory socket", ends=("answerer", "asker"), version=1, intro=_MEMORY_INTRO,
    messages=(
        message(3, "MEMORY", TO, "Lends a segment, read-only.", "u32 number", "u64 size: bytes", "bytes(*) empty",
                descriptors="memfd"),
        message(4, "DROP", TO, "The segment is not lent any more.", "u32 number", "u64 size: 0", "bytes(*) empty"),
        message(8, "PAGE", TO, "Lends the page of a communicator, to be written as well.", "u32 number: 0",
                "u64 size: bytes", "bytes(*) communicator: its digest, 16 bytes", descriptors="memfd"),
        message(9, "GPU_MEMORY", TO, "Lends memory of the GPU. Numbers ascend, from 1 on.", "u32 number",
                "u64 size: bytes", "bytes(*) empty", descriptors="of the driver's"),
        message(7, "RELEASED", BACK, "Some views of a segment are not used any more.", "u32 number",
                "u64 size: views", "bytes(*) empty"),
    ),
    records=(record("Packet", "Begins each packet.", "u32 type", "u32 number", "u64 size"),))
