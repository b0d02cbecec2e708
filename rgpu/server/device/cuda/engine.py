"""The native engine, through ctypes: :class:`Engine` is the device's fast path and its completion.

``native/`` holds the C++ side; ``native/engine.hpp`` defines the layouts of
``Step`` and ``Out``. Every call that may wait releases the GIL (ctypes does).
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from rgpu.server.apply_path import Came, Fed
from rgpu.server.fast_path import Piece, Took
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import Corrupt, DeviceError
from rgpu.session.journal.record import Record, pack_record

LIBRARY = "librgpu_engine.so"
VERSION = 14
RING = int(os.environ.get("RGPU_ENGINE_RING", 128 << 20))  #: bytes pinned for data to the device
ARENA = int(os.environ.get("RGPU_ENGINE_ARENA", 288 << 20))  #: bytes pinned for data from it
WATERMARK_SIZE = 1 << 16
TIMES_SIZE = 1 << 14  #: bytes of answers of timed calls that are taken at once
_CORRUPT = 3
_REASONS = ("", "magic", "flags", "length", "sequence", "checksum", "payload checksum", "padding", "gap",
            "observation", "arguments")


class _Step(ctypes.Structure):
    _fields_ = [("came", c_int), ("bad", c_int), ("taken", c_uint64), ("applied", c_uint64), ("offset", c_uint64),
                ("seq", c_uint64), ("payload_len", c_uint64), ("args", c_void_p), ("payload", c_void_p),
                ("args_len", c_uint32), ("thread", c_uint32), ("call", ctypes.c_uint16), ("flags", ctypes.c_uint16),
                ("awaiting", c_uint32), ("bugs", c_uint64), ("bug_seq", c_uint64), ("bug_result", c_int),
                ("bug_call", c_uint32), ("stream", c_uint64), ("waited", c_uint64)]


class _Out(ctypes.Structure):
    _fields_ = [("took", c_int), ("result", c_int), ("seq", c_uint64), ("data", c_void_p), ("size", c_uint64),
                ("index", c_uint32), ("more", c_uint32), ("answer", c_void_p)]


def library_path() -> Path:
    """Return the engine's path: in RGPU_ENGINE_DIR, else RGPU_SHIM_DIR, else beside this module."""
    for variable in ("RGPU_ENGINE_DIR", "RGPU_SHIM_DIR"):
        if (folder := os.environ.get(variable)) and (Path(folder) / LIBRARY).is_file():
            return Path(folder) / LIBRARY
    return Path(__file__).parent / "lib" / LIBRARY


#: functions of the process, not of an engine
_ACTIVITY: dict[str, tuple[Any, ...]] = {
    "activity_open": (c_int, c_char_p, c_char_p, c_size_t), "activity_record": (c_int, c_int),
    "activity_collect": (None,), "activity_take": (c_int, c_uint32, c_uint64, POINTER(c_uint64), POINTER(c_uint64))}


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"the engine {path} cannot be loaded ({error}): build it (CMakeLists.txt, target "
                          "rgpu_engine), or set RGPU_ENGINE_DIR", 999) from None
    e, q, z, i, p = c_void_p, c_uint64, c_size_t, c_int, c_void_p
    signatures: dict[str, tuple[Any, ...]] = {
        "version": (i,), "open": (e, p, q, q, c_char_p, z), "stop": (None, e), "close": (None, e),
        "add_context": (None, e, q, p), "remove_context": (None, e, q), "mark_context": (i, e, p, q),
        "add_stream": (None, e, q, p, p), "remove_stream": (i, e, q), "add_event": (None, e, q, p),
        "remove_event": (None, e, q), "event_recorded": (q, e, q), "add_module": (None, e, q, p, p, z, i),
        "printing_launches": (q, e), "allocated": (i, e), "time": (None, e, p, p), "timed": (i, e),
        "traced": (c_uint32, e), "time_base": (None, e, p, p, q, q, i), "take_times": (z, e, p, z),
        "times_drained": (i, e, q), "answer_reply": (z, p, p), "remove_module": (None, e, q),
        "add_graph": (None, e, q, p, i),
        "remove_graph": (None, e, q), "add_range": (None, e, q, q),
        "remove_range": (i, e, q), "contains": (i, e, q, q), "feed": (None, e, p, z, POINTER(_Step)),
        "prompt": (i, e, p, z, p, z), "interrupted": (i, e), "passed": (None, e, q),
        "position": (None, e, q), "applied": (q, e), "keep_place": (None, e, p), "reset": (None, e),
        "foreign": (None, e, p, z),
        "pass_all": (None, e, i), "interrupt": (None, e, i), "order": (None, e, i), "in_order": (i, e, q, q),
        "pass_order": (None, e, q), "beside": (i, e, q), "covers": (i, e), "put_off": (i, e, q),
        "settle": (i, e, q), "usual": (None, e, c_uint32), "reached": (q, e), "ahead": (c_uint32, e),
        "may_go_on": (i, e, q), "apply": (i, e, c_uint32, q, p, z, p, z),
        "boundary": (None, e, q), "submitted": (None, e, q, q), "stops": (None, e, q, q),
        "returned": (None, e, q), "mark": (i, e, q, q, i), "is_complete": (i, e, q),
        "wait_complete": (i, e, q, q), "drain": (i, e, q), "worked": (q, e), "rest": (None, e, q, i),
        "host_functions": (None, e, i),
        "progress": (z, e, p, z, p, z, POINTER(z)),
        "launched": (i, e, q, POINTER(q), POINTER(c_uint32)),
        "watermark": (z, e, p, z, i, i), "error": (i, e), "fail": (None, e, i), "broken": (None, e, i),
        "attach": (None, e), "detach": (None, e), "take": (None, e, POINTER(_Out), q),
        "take_here": (None, e, POINTER(_Out), q, i, i), "look": (i, q, i), "take_callback": (None, e, POINTER(_Out), q),
        "release": (None, e, p), "wake": (None, e), "retained": (z, e, p, z), "retained_answer": (p, e, q),
        "answer_result": (i, p), "answer_pieces": (z, p), "answer_piece": (p, p, c_uint32, POINTER(q)),
        "area": (i, e, POINTER(p), POINTER(z)), "share_area": (None, e, i), "pin": (i, e, p, z),
        "unpin": (i, e, p),
        "take_frame": (p, e), "give_frame": (None, e, p), "frame_size": (q,)}
    signatures |= _ACTIVITY
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"rge_{name}")
        function.restype, function.argtypes = result, arguments
    if library.rge_version() != VERSION:
        raise DeviceError(f"the engine {path} has version {library.rge_version()}, this device needs {VERSION}", 999)
    return library


def _address(data: Any) -> tuple[int, int, Any]:
    """Return (address, bytes, an object that keeps it alive) of a contiguous buffer, read-only ones too."""
    array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    return array.ctypes.data, array.nbytes, array


CUDA_ERROR_INVALID_VALUE = 1
_STANDING = (Came.WAITING, Came.AHEAD)  #: a record was read but not applied, and is to be fed again
#: functions of the ABI that compiled code calls in the applying thread (``EngineCalls`` in its exchange.hpp)
EXCHANGED = ("prompt", "feed", "take_here", "watermark", "release", "error", "interrupted")
GRAPH = 2**64 - 1  #: replaces the module's number where a graph was launched


_TIMES = struct.Struct("<QiI")  #: before the reply of a timed call


class Engine:
    """See the module docstring. Implements :class:`rgpu.server.fast_path.FastPath`."""

    every_record = False

    def __init__(self, context: int, ring: int = RING, arena: int = ARENA) -> None:
        self._lib = _library()
        why = ctypes.create_string_buffer(256)
        self._engine = self._lib.rge_open(context, ring, arena, why, len(why))
        if not self._engine:
            raise DeviceError(f"the engine does not start: {why.value.decode(errors='replace')}", 999)
        self._step, self._out, self._here = _Step(), _Out(), _Out()
        self._body = ctypes.create_string_buffer(WATERMARK_SIZE)
        self._reply = ctypes.create_string_buffer(TIMES_SIZE)
        self._times = ctypes.create_string_buffer(TIMES_SIZE)
        self._frame_size = int(self._lib.rge_frame_size())

    def __getattr__(self, name: str) -> Any:
        """Return a plain function of the ABI, bound to the engine: tables, progress, start and end."""
        function = getattr(self._lib, f"rge_{name}")
        bound = function if name in _ACTIVITY else functools.partial(function, self._engine)
        setattr(self, name, bound)
        return bound

    # -- records ------------------------------------------------------------------
    @property
    def applied(self) -> int:
        return int(self._lib.rge_applied(self._engine))

    def feed(self, data: Any) -> Fed:
        """Apply records; stops before one that is not hot. Raises :class:`Corrupt`, :class:`DeviceError`."""
        address, size, keep = _address(data)
        self._lib.rge_feed(self._engine, address, size, self._step)
        del keep
        return self.fed()

    def fed(self) -> Fed:
        """Return the result of the last feed, of other code's too (:meth:`functions`). Raises as :meth:`feed` does."""
        step = self._step
        if step.came == _CORRUPT:
            reason = _REASONS[step.bad]
            raise Corrupt(f"record at offset {step.offset}, after journal position {step.applied}: {reason}",
                          offset=step.offset, applied=step.applied, reason=reason)
        record = None
        if step.came == Came.RECORD:
            args = ctypes.string_at(step.args, step.args_len) if step.args_len else b""
            payload = ctypes.string_at(step.payload, step.payload_len) if step.payload_len else b""
            record = Record(step.seq, step.call, args, payload, step.thread, step.flags)
        return Fed(Came(step.came), step.taken, record, step.awaiting, step.bugs,
                   (step.bug_call, step.bug_seq, step.bug_result),
                   (step.seq, step.call, step.stream, step.payload_len) if step.came in _STANDING else (0, 0, 0, 0),
                   step.applied)

    def given(self, records: Iterable[Record]) -> Iterable[bytes]:
        """Return the packed form of records, which :meth:`feed` takes."""
        return map(pack_record, records)

    def may_go_on(self) -> bool:
        """Wait at most 2 ms for room; returns whether :meth:`feed` may continue.

        Without an open host function the engine itself waits.
        """
        return bool(self._lib.rge_may_go_on(self._engine, 2_000_000))

    def bound(self, tries: int) -> None:
        """Do nothing: the engine bounds the work under way by the time that it takes."""

    def waited(self) -> int:
        """Time in ns that the engine has waited for work of the device."""
        return int(self._step.waited)

    def in_order(self, stream: int, seconds: float) -> int:
        """Await the turn of a stream's work. 1: it is next; 0: nothing completed for ``seconds``; -1: interrupted."""
        return int(self._lib.rge_in_order(self._engine, stream, int(seconds * 1e9)))

    def beside(self, stream: int) -> bool:
        """Whether only host functions that have not returned, and work behind them, keep the stream from its turn."""
        return bool(self._lib.rge_beside(self._engine, stream))

    def covers(self) -> bool:
        """Whether work follows all that was issued before it: observations need not be waited for."""
        return bool(self._lib.rge_covers(self._engine))

    def put_off(self, seq: int) -> bool:
        """Put the wait for an observed call off until :meth:`settle`; False: it is to be waited for now."""
        return bool(self._lib.rge_put_off(self._engine, seq))

    def settle(self, seconds: float) -> bool:
        """Wait ``seconds`` at most for the calls that were put off. Return whether they are complete."""
        return int(self._lib.rge_settle(self._engine, int(seconds * 1e9))) > 0

    def position(self, applied: int, foreign: list[int]) -> None:
        """Set the position, and the calls that another owner applied."""
        self._lib.rge_position(self._engine, applied)
        numbers = (c_uint64 * len(foreign))(*foreign)
        self._lib.rge_foreign(self._engine, numbers, len(foreign))

    def room(self, size: int) -> memoryview | None:
        """Lend a frame for ``size`` bytes to be received; None: they do not fit, or all frames are in use."""
        if size > self._frame_size:
            return None
        address = self._lib.rge_take_frame(self._engine)
        if not address:
            return None
        return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")

    def give(self, buffer: memoryview) -> None:
        """Return a frame that :meth:`room` lent."""
        self._lib.rge_give_frame(self._engine, _address(buffer)[0])

    # -- memory shared with other processes ---------------------------------------------
    def area(self) -> tuple[int, int, int] | None:
        """Return (descriptor, address, size in bytes) of the shared answer area; None without one."""
        address, size = c_void_p(), c_size_t()
        fd = int(self._lib.rge_area(self._engine, byref(address), byref(size)))
        return (fd, address.value or 0, size.value) if fd >= 0 else None

    def share_area(self, on: bool) -> None:
        """Note whether the program's side reads answers in the area, where nothing is gained by short pieces."""
        self._lib.rge_share_area(self._engine, on)

    def pin(self, address: int, size: int) -> bool | None:
        """Register memory of another process; None: refused while the device works, else whether the driver did it."""
        found = int(self._lib.rge_pin(self._engine, address, size))
        return None if found < 0 else bool(found)

    def unpin(self, address: int) -> bool:
        """Undo :meth:`pin`; False: refused while the device works."""
        return bool(self._lib.rge_unpin(self._engine, address))

    # -- one call -------------------------------------------------------------------
    def apply(self, call_id: int, seq: int, args: bytes, payload: Any = b"") -> None:
        """Apply an ordered call; its answer, if it has one, is a callback. Raises :class:`DeviceError`."""
        address, size, keep = _address(payload)
        result = self._lib.rge_apply(self._engine, call_id, seq, args, len(args), address, size)
        del keep
        if result:
            raise DeviceError(f"{BY_ID[call_id].name}: the driver answers {result}", result)

    def check_range(self, address: int, size: int) -> None:
        """Raise :class:`DeviceError` unless [address, address+size) lies in one range that copies may touch."""
        if size and not self.contains(address, size):
            raise DeviceError(f"0x{address:x} + {size} is not in one allocation", CUDA_ERROR_INVALID_VALUE)

    def load_functions(self, module: int, handles: list[int], sizes: list[int], traits: int) -> None:
        """Register the functions of a module in the order of its table, with the size of each one's parameters.

        ``traits``: of :class:`rgpu.server.device.cuda.work.binaries.Trait`; launches of those that may print are
        counted (``printing_launches``), one that may allocate is noted (``allocated``).
        """
        count = len(handles)
        self._lib.rge_add_module(self._engine, module, (c_void_p * count)(*handles), (c_uint32 * count)(*sizes), count,
                                 traits)

    # -- progress ---------------------------------------------------------------------
    def progress(self) -> tuple[set[int], dict[int, int]]:
        """Return the pending calls, and of each stream the last one that is done."""
        size, pairs = 4096, c_size_t()
        pending, streams = (c_uint64 * size)(), (c_uint64 * (2 * size))()
        count = self._lib.rge_progress(self._engine, pending, size, streams, size, byref(pairs))
        return set(pending[:count]), {streams[2 * i]: streams[2 * i + 1] for i in range(pairs.value)}

    def launched(self, seq: int) -> tuple[int, int] | None:
        """Return (module, function) of the kernel that an unfinished call launches; a graph: (GRAPH, 0); else None."""
        module, function = c_uint64(), c_uint32()
        found = self._lib.rge_launched(self._engine, seq, byref(module), byref(function))
        return (module.value, function.value) if found else None

    def watermark(self, whole: bool, broken: int) -> bytes:
        """Encode WATERMARK: all of it if ``whole``, else what is new; empty where nothing is."""
        size = self._lib.rge_watermark(self._engine, self._body, WATERMARK_SIZE, whole, broken)
        return ctypes.string_at(self._body, size) if size else b""

    # -- answers ------------------------------------------------------------------------
    def take(self, seconds: float) -> Piece | Took:
        """Take the next piece of an answer for the link, or wait ``seconds`` for one."""
        self._lib.rge_take(self._engine, self._out, int(seconds * 1e9))
        return _piece(self._out) or Took(self._out.took)

    def take_here(self, seconds: float, fd: int) -> Piece | None:
        """Take the next piece of an answer for a client on this host, or wait ``seconds``; wakes by ``fd``."""
        self._lib.rge_take_here(self._engine, self._here, int(seconds * 1e9), fd, 0)
        return _piece(self._here)

    def taken_here(self) -> Piece | None:
        """Return what was taken last by :meth:`take_here`, by other code too (:meth:`functions`)."""
        return _piece(self._here)

    def take_times(self) -> list[tuple[int, int, bytes]]:
        """Take (seq, CUresult, encoded reply) of complete timed calls, many at a time."""
        size = self._lib.rge_take_times(self._engine, self._times, TIMES_SIZE)
        data, found, at = ctypes.string_at(self._times, size), [], 0
        while at < len(data):
            seq, result, size = _TIMES.unpack_from(data, at)
            at += _TIMES.size + size
            found.append((seq, result, data[at - size:at]))
        return found

    def functions(self) -> tuple[int, ...]:
        """Return the addresses of the engine, of its functions :data:`EXCHANGED`, of the step and of the answer taken.

        For compiled code in the applying thread: its feeds and takes are like those of :meth:`feed`, :meth:`take_here`.
        """
        functions = (ctypes.cast(getattr(self._lib, f"rge_{name}"), c_void_p).value or 0 for name in EXCHANGED)
        return (self._engine, *functions, ctypes.addressof(self._step), ctypes.addressof(self._here))

    def look(self, seconds: float, fd: int) -> None:
        """Poll ``fd`` for ``seconds``, without the interpreter's lock."""
        self._lib.rge_look(int(seconds * 1e9), fd)

    def take_callback(self, seconds: float) -> Piece | Took:
        """Take the next answer of a call of :meth:`apply` or ``mark``; for the device's own thread."""
        out = _Out()
        self._lib.rge_take_callback(self._engine, out, int(seconds * 1e9))
        return _piece(out) or Took(out.took)

    def release(self, piece: Piece) -> None:
        """Free a piece's memory once it was sent."""
        self._lib.rge_release(self._engine, piece.handle)

    def plaintext(self, piece: Piece, head: bytes) -> memoryview:
        """Return a piece with ``head`` before it, in one memory. Raises ValueError for too long a head."""
        if len(head) > Piece.HEADROOM:
            raise ValueError(f"a head of {len(head)} bytes does not fit before a piece")
        if not piece.address:
            return memoryview(head)
        start = piece.address - len(head)
        ctypes.memmove(start, head, len(head))
        return memoryview((ctypes.c_ubyte * (len(head) + piece.size)).from_address(start)).cast("B")

    def payload(self, handle: int) -> bytes:
        """Return all pieces of an answer, joined."""
        size = c_uint64()
        parts = []
        for index in range(self._lib.rge_answer_pieces(handle)):
            address = self._lib.rge_answer_piece(handle, index, byref(size))
            parts.append(ctypes.string_at(address, size.value))
        return b"".join(parts)

    def retained(self) -> list[tuple[int, int, bytes, bytes]]:
        """Return (seq, result, reply, payload) of complete answers that the program has perhaps not received."""
        numbers = (c_uint64 * 65536)()
        found = []
        for seq in numbers[:self._lib.rge_retained(self._engine, numbers, len(numbers))]:
            handle = self._lib.rge_retained_answer(self._engine, seq)
            if handle:
                reply = ctypes.string_at(self._reply, self._lib.rge_answer_reply(handle, self._reply))
                found.append((seq, int(self._lib.rge_answer_result(handle)), reply, self.payload(handle)))
                self._lib.rge_release(self._engine, handle)
        return found


def _piece(out: _Out) -> Piece | None:
    if out.took != 1:
        return None
    return Piece(out.seq, out.result, out.index, bool(out.more), out.data or 0, out.size, out.answer)
