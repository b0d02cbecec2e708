"""Arrays, textures, surfaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import Answers
from rgpu.session.journal.record import Record
from rgpu.session.objects.arrays import ArrayShape, Box


class TextureCalls:
    """Calls about arrays and texture and surface objects."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers
        self.replayed: Callable[[int], bool] = lambda seq: False  #: whether an earlier owner may have applied that call
        self.epoch: Callable[[], int] = lambda: 0
        self.recovering = False  #: a replay may follow the rebuild under way
        self.rebuilding = False  #: a call of the live objects is being applied

    def array_create(self, record: Record, args: Any) -> None:
        """Make an array of memory that was allocated for it."""
        self._reserve_handles(record, args)
        self._device.create_array(args.array, args.context, args.address, ArrayShape(
            args.width, args.height, args.depth, args.format, args.channels, args.flags, args.levels))
        self._answers.reply(record, "array_create")

    def array_destroy(self, record: Record, args: Any) -> None:
        """Destroy an array."""
        self._device.destroy_array(args.array)

    def array_to_memory(self, record: Record, args: Any) -> None:
        """Copy a box of an array to the array's memory."""
        self._device.array_to_memory(record.seq, args.stream, args.array, _box(args))

    def memory_to_array(self, record: Record, args: Any) -> None:
        """Copy a box of an array's memory to the array."""
        self._device.memory_to_array(record.seq, args.stream, args.array, _box(args))

    def texture_create(self, record: Record, args: Any) -> None:
        """Make a texture or surface object and answer with its handle."""
        self._reserve_handles(record, args)
        handle = self._device.create_texture(args.texture, args.context, bool(args.surface), bytes(args.resource),
                                             bytes(args.sampling), bytes(args.view))
        self._answers.reply(record, "texture_create", handle=handle)

    def _reserve_handles(self, record: Record, args: Any) -> None:
        moved = self.rebuilding and not self.recovering
        self._device.reserve_handles(args.context, None if moved else self.rebuilding or self.replayed(record.seq),
                                     self.epoch())

    def texture_place(self, record: Record, args: Any) -> None:
        """Ensure that an object has the handle that the program was given."""
        self._device.place_texture(args.texture, args.handle)

    def texture_destroy(self, record: Record, args: Any) -> None:
        """Destroy a texture or surface object."""
        self._device.destroy_texture(args.texture)


def _box(args: Any) -> Box:
    return Box(args.level, args.x, args.y, args.z, args.width, args.height, args.depth)
