"""Modules: loads, kernels and their launches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from rgpu.checkpoint.device import Device, Launch
from rgpu.server.device.loads import LoadFigures, LoadNotes, kind_of
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers
from rgpu.session.calls import decoders
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects import module_table
from rgpu.session.objects.module_table import GlobalVariable

log = structlog.get_logger(__name__)


class ModuleCalls:
    """Calls about modules and kernels. ``device_of``: context → its device."""

    def __init__(self, device: Device, answers: Answers, device_of: Callable[[int], int]) -> None:
        self._device, self._answers, self._device_of = device, answers, device_of
        self.loaded: Callable[[bytes], None] = lambda binary: None  #: called with every module binary that was loaded
        self.figures = LoadFigures()
        self.travelled: Callable[[], float] = lambda: 0.0  #: s that the binary of the load under way took to arrive
        self.digest: Callable[[int], bytes] = lambda seq: b""  #: of the binary of the load at a position, where known
        #: addresses that modules' variables must have, by the position of a load that is still to be applied again
        self.places: dict[int, tuple[GlobalVariable, ...]] = {}
        self.misplaced: Callable[[str], None] = lambda why: None  #: called where addresses differ after such a load

    def module_load(self, record: Record, args: Any) -> None:
        """Load a module and answer with its table and the compiler's log."""
        binary = bytes(record.payload)  # the buffer that holds it may be used again
        notes, kind, library = getattr(self._device, "notes", None) or LoadNotes(), kind_of(binary), bool(args.library)
        notes.begin(self.digest(record.seq))
        notes.seconds["travel"] = self.travelled()
        wanted = self.places.pop(record.seq, ())
        try:
            table, text = self._device.load(args.module, binary, bytes(args.options), library,
                                            self._device_of(args.context), wanted)
        except DeviceError as error:
            self.figures.add(record.seq, kind, len(binary), 0, library, notes, failed=True)
            log.warning("a module binary does not load", seq=record.seq, bytes=len(record.payload), result=error.result,
                        reason=error.message[:400])
            reply = decoders.encode_reply("module_load", table=b"", log=error.message.encode())
            self._answers.answer(record.seq, error.result, reply, None)
            return
        self.figures.add(record.seq, kind, len(binary), len(table.functions), library, notes)
        if elsewhere := standing_elsewhere(table.globals, wanted):
            self.misplaced(f"module_load at position {record.seq}: {elsewhere}")
        self.loaded(binary)
        self._answers.reply(record, "module_load", table=module_table.encode(table), log=text.encode())

    def module_unload(self, record: Record, args: Any) -> None:
        """Unload a module."""
        self._device.unload(args.module)

    def function_attribute(self, record: Record, args: Any) -> None:
        """Set an attribute of a kernel."""
        self._device.set_function_attribute(args.module, args.function, args.attribute, args.value)

    def function_load(self, record: Record, args: Any) -> None:
        """Answer with a kernel's attributes, loading it if it is not yet."""
        attributes = self._device.function_attributes(args.module, args.function)
        self._answers.reply(record, "function_load", attributes=struct.pack(f"<{len(attributes)}i", *attributes))

    def link(self, record: Record, args: Any) -> None:
        """Link module binaries and answer with the result and the log."""
        try:
            binary, text = self._device.link(parse_link_inputs(record.payload), bytes(args.options))
        except DeviceError as error:
            reply = decoders.encode_reply("link", image=b"", log=error.message.encode())
            self._answers.answer(record.seq, error.result, reply, None)
            return
        self._answers.reply(record, "link", image=binary, log=text.encode())

    def cluster_occupancy(self, record: Record, args: Any) -> None:
        """Answer with a kernel's occupancy in clusters."""
        value = self._device.cluster_occupancy(
            args.module, args.function, args.form, (args.grid_x, args.grid_y, args.grid_z),
            (args.block_x, args.block_y, args.block_z), args.shared, (args.cluster_x, args.cluster_y, args.cluster_z))
        self._answers.reply(record, "cluster_occupancy", value=value)

    def launch(self, record: Record, args: Any) -> None:
        """Launch a kernel."""
        self._device.launch(record.seq, Launch(
            module=args.module, function=args.function, grid=(args.grid_x, args.grid_y, args.grid_z),
            block=(args.block_x, args.block_y, args.block_z), shared=args.shared, stream=args.stream,
            parameters=bytes(args.parameters), cooperative=bool(args.flags & 1), attributes=bytes(args.attributes)))

    def tensor_map(self, record: Record, args: Any) -> None:
        """Encode a tensor map and answer with it."""
        self._answers.reply(record, "tensor_map", map=self._device.tensor_map(args.form, bytes(args.arguments)))


def standing_elsewhere(present: Sequence[GlobalVariable], wanted: Sequence[GlobalVariable]) -> str:
    """Return which variable is not at the address that the program has; empty: all are. Several may have one name."""
    here = {(variable.name, variable.address) for variable in present}
    for variable in wanted:
        if (variable.name, variable.address) not in here:
            found = ", ".join(f"{address:#x}" for name, address in sorted(here) if name == variable.name) or "nowhere"
            return f"variable {variable.name!r} is at {found}, and the program knows it at {variable.address:#x}"
    return ""


def parse_link_inputs(payload: Any) -> list[tuple[int, str, bytes]]:
    """Parse the payload of ``link``: (u32 type, u32 name length, name, u64 length, data) …, bounds checked.

    Return (type, name, data) of each input. Raises :class:`DeviceError`.
    """
    data = memoryview(payload)
    inputs: list[tuple[int, str, bytes]] = []
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            raise DeviceError(f"link input at offset {at} is cut short", CUDA_ERROR_INVALID_VALUE)
        kind, name_length = struct.unpack_from("<II", data, at)
        at += 8
        if at + name_length + 8 > len(data):
            raise DeviceError(f"link input at offset {at} is cut short", CUDA_ERROR_INVALID_VALUE)
        name = bytes(data[at:at + name_length]).decode(errors="replace")
        at += name_length
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
        if length > len(data) - at:
            raise DeviceError(f"link input {name!r} at offset {at} is cut short", CUDA_ERROR_INVALID_VALUE)
        inputs.append((kind, name, bytes(data[at:at + length])))
        at += length
    return inputs
