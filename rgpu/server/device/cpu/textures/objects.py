"""Arrays, texture objects and surface objects of the ``cpu`` device.

An array is its memory (:mod:`rgpu.session.objects.arrays`): there is no second copy to update. A texture object is a
:class:`~rgpu.server.device.cpu.textures.record.Descriptor`; its handle is a small number, so that a kernel's look-up is
an index into a table.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from rgpu.server.device.cpu.ranges import RangeTable
from rgpu.server.device.cpu.textures.record import Descriptor, LevelView, describe
from rgpu.session.errors import DeviceError
from rgpu.session.objects.arrays import (
    CUBEMAP,
    FORMATS,
    LAYERED,
    LINEAR,
    MIPMAPPED,
    SURFACE_LDST,
    ArrayShape,
    Resource,
    Sampling,
    View,
)

INVALID_VALUE, INVALID_HANDLE, NOT_SUPPORTED = 1, 400, 801
READ_AS_INTEGER, NORMALIZED_COORDINATES = 0x01, 0x02
MOST_ANISOTROPY = 16
MOST_ENDED = 1024  #: ended handles that are kept from being used again
ALIGNMENT, PITCH_ALIGNMENT, MOST_LINEAR = 512, 32, 1 << 28  #: attributes 14, 51, 69
MOST_PITCHED = (131072, 65000, 2097120)  #: width, height, pitch: attributes 70, 71, 72

#: CUresourceViewFormat 1 … 24: (CUarray_format, channels)
VIEW_FORMATS = {1 + 3 * row + column: (form, channels)
                for row, form in enumerate((0x01, 0x08, 0x02, 0x09, 0x03, 0x0A, 0x10, 0x20))
                for column, channels in enumerate((1, 2, 4))}


@dataclass(frozen=True, slots=True)
class _Array:
    shape: ArrayShape
    address: int
    context: int


@dataclass(slots=True)
class _Texture:
    context: int
    handle: int
    descriptor: Descriptor


class Textures:
    """See the module docstring. Thread-safe: one thread makes objects, the threads that run kernels make tables."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: dict[int, _Array] = {}
        self._textures: dict[int, _Texture] = {}
        self._handles: dict[int, int] = {}  #: handle → number
        #: by handle: work submitted before a destruction may still use it, as long as no other object gets the handle
        self._ended: dict[int, Descriptor] = {}
        self._table: tuple[RangeTable | None, np.ndarray[Any, Any]] = (None, np.zeros(1, np.uint64))

    # -- arrays -------------------------------------------------------------------
    def create_array(self, array: int, context: int, address: int, shape: ArrayShape) -> None:
        """Note an array whose memory is allocated. Raises :class:`DeviceError`."""
        shape.check()
        if array in self._arrays:
            raise DeviceError(f"array {array} exists", INVALID_HANDLE)
        self._arrays[array] = _Array(shape, address, context)

    def destroy_array(self, array: int) -> None:
        """Forget an array. Raises :class:`DeviceError` for an unknown one."""
        self.array(array)
        del self._arrays[array]

    def array(self, array: int) -> _Array:
        """Return an array. Raises :class:`DeviceError` for an unknown one."""
        found = self._arrays.get(array)
        if found is None:
            raise DeviceError(f"no array {array}", INVALID_HANDLE)
        return found

    def shape(self, array: int) -> ArrayShape:
        """Return the shape of an array. Raises :class:`DeviceError`."""
        return self.array(array).shape

    # -- objects --------------------------------------------------------------------
    def create(self, texture: int, context: int, surface: bool, resource: bytes, sampling: bytes, view: bytes) -> int:
        """Make a texture or surface object; returns its handle. Raises :class:`DeviceError`."""
        found = Resource.decode(resource)
        how = None if surface else Sampling.decode(sampling)
        seen = View.decode(view) if view else None
        descriptor = self._of_array(found, how, seen) if found.type < LINEAR else _of_memory(found, how, seen)
        with self._lock:
            if texture in self._textures:
                raise DeviceError(f"texture {texture} exists", INVALID_HANDLE)
            handle = self._free_handle()
            self._textures[texture] = _Texture(context, handle, descriptor)
            self._handles[handle] = texture
            self._table = (None, self._table[1])
        return handle

    def place(self, texture: int, handle: int) -> None:
        """Give an object the handle by which the program refers to it. Raises :class:`DeviceError` if it is in use."""
        with self._lock:
            found = self._find(texture)
            if self._handles.get(handle, texture) != texture or handle <= 0:
                raise DeviceError(f"handle {handle} is in use", INVALID_VALUE)
            del self._handles[found.handle]
            found.handle = handle
            self._handles[handle] = texture
            self._ended.pop(handle, None)
            self._table = (None, self._table[1])

    def destroy(self, texture: int) -> None:
        """Destroy a texture or surface object. Raises :class:`DeviceError` for an unknown one."""
        with self._lock:
            found = self._find(texture)
            del self._textures[texture], self._handles[found.handle]
            self._ended[found.handle] = found.descriptor
            self._table = (None, self._table[1])

    def destroy_context(self, context: int) -> None:
        """Destroy the objects and arrays of a context."""
        for number in [number for number, found in self._textures.items() if found.context == context]:
            self.destroy(number)
        self._arrays = {number: found for number, found in self._arrays.items() if found.context != context}

    def _free_handle(self) -> int:
        """Return an unused handle: a new one, or, once many have ended, the one that ended longest ago."""
        if len(self._ended) < MOST_ENDED:
            return max([*self._handles, *self._ended], default=0) + 1
        handle = next(iter(self._ended))
        del self._ended[handle]
        return handle

    def _find(self, texture: int) -> _Texture:
        found = self._textures.get(texture)
        if found is None:
            raise DeviceError(f"no texture {texture}", INVALID_HANDLE)
        return found

    # -- for kernels ------------------------------------------------------------------
    def table(self, valid: RangeTable) -> np.ndarray[Any, Any]:
        """Return uint64 addresses of descriptors by handle; 0 for no object and for one whose memory is not valid."""
        with self._lock:
            known, table = self._table
            if known is not valid:
                alive = {handle: self._textures[number].descriptor for handle, number in self._handles.items()}
                table = np.zeros(max([*alive, *self._ended], default=0) + 1, np.uint64)
                for handle, descriptor in (self._ended | alive).items():
                    if all(valid.contains(base, size) for base, size in descriptor.memory):
                        table[handle] = descriptor.address
                self._table = (valid, table)
            return table

    # -- what they are made of ------------------------------------------------------------
    def _of_array(self, resource: Resource, sampling: Sampling | None, view: View | None) -> Descriptor:
        array = self.array(resource.array)
        shape, layout = array.shape, array.shape.layout()
        if (resource.type == MIPMAPPED) > bool(shape.levels) or resource.level >= len(layout):
            raise DeviceError(f"array {resource.array} has no such level", INVALID_VALUE)
        if sampling is None and not shape.flags & SURFACE_LDST:
            raise DeviceError("a surface needs an array made with CUDA_ARRAY3D_SURFACE_LDST", INVALID_VALUE)
        levels = layout if resource.type == MIPMAPPED else [layout[resource.level]]
        form, channels, first, last = shape.format, shape.channels, 0, levels[0].slices - 1
        if view is not None:
            if view.format:
                form, channels = VIEW_FORMATS.get(view.format, (0, 0))
                if not form or FORMATS[form][0] * channels != shape.element:
                    raise DeviceError(f"view format {view.format} of elements of {shape.element} bytes", INVALID_VALUE)
            if resource.type == MIPMAPPED:
                levels = levels[view.first_level:view.last_level + 1]
            if shape.layers:
                first, last = view.first_layer, view.last_layer
            if not levels or not first <= last < layout[0].slices:
                raise DeviceError("a view of levels or layers that are not there", INVALID_VALUE)
        element = FORMATS[form][0] * channels
        views = [LevelView(array.address + one.offset + first * one.plane, one.width // element, one.rows,
                           last - first + 1 if shape.layers else one.slices, one.pitch, one.plane) for one in levels]
        _check_sampling(sampling, form, shape.dimensions)
        memory = [(array.address + layout[0].offset, shape.size)]
        return describe(form, channels, views, sampling, memory, layered=bool(shape.flags & (LAYERED | CUBEMAP)),
                        cube=bool(shape.flags & CUBEMAP))


def _of_memory(resource: Resource, sampling: Sampling | None, view: View | None) -> Descriptor:
    """Make a texture of linear memory, with a driver's checks. Raises :class:`DeviceError`."""
    if sampling is None or view is not None:
        raise DeviceError("surfaces and views are of arrays", INVALID_VALUE)
    element = FORMATS[resource.format][0] * resource.channels
    if resource.address % ALIGNMENT and resource.type == LINEAR:
        raise DeviceError(f"{resource.address:#x} is not a multiple of {ALIGNMENT}", INVALID_VALUE)
    if resource.type == LINEAR:
        width, height, pitch = resource.width // element, 1, resource.width
        if not 0 < width <= MOST_LINEAR:
            raise DeviceError(f"a linear texture of {width} elements", INVALID_VALUE)
        size = resource.width
    else:
        width, height, pitch = resource.width, resource.height, resource.pitch
        most_width, most_height, most_pitch = MOST_PITCHED
        if resource.address % PITCH_ALIGNMENT or pitch % PITCH_ALIGNMENT or not 0 < width <= most_width \
                or not 0 < height <= most_height or not width * element <= pitch <= most_pitch:
            raise DeviceError(f"pitched memory of {width} x {height}, pitch {pitch}, at {resource.address:#x}",
                              INVALID_VALUE)
        size = pitch * (height - 1) + width * element
    _check_sampling(sampling, resource.format, 1 if resource.type == LINEAR else 2)
    level = LevelView(resource.address, width, height, 1, pitch, pitch * height)
    return describe(resource.format, resource.channels, [level], sampling, [(resource.address, size)],
                    linear=resource.type == LINEAR)


def _check_sampling(sampling: Sampling | None, form: int, dimensions: int) -> None:
    """Check what the driver refuses. Raises :class:`DeviceError`."""
    if sampling is None:
        return
    if sampling.anisotropy > MOST_ANISOTROPY:
        raise DeviceError(f"anisotropy {sampling.anisotropy}", INVALID_VALUE)
    bytes_, kind = FORMATS[form]
    integers = kind != "f" and (bytes_ == 4 or bool(sampling.flags & READ_AS_INTEGER))
    if integers and sampling.filter:
        raise DeviceError("linear filtering of integers", INVALID_VALUE)

