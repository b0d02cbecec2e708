"""Arrays, texture objects and surface objects of the ``cuda`` device.

The driver's array is opaque: its texels reach checkpoints and moves through the memory that the session has for each
array (docs/developers/objects/arrays.md). :meth:`Arrays.gather` and :meth:`Arrays.spread` copy all of them, with the
device drained.

The driver chooses a texture object's handle, and kernels hold it: a rebuild has to obtain the same one
(:mod:`.handles`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.handles import End, Handles, end_surface, end_texture
from rgpu.session.errors import DeviceError
from rgpu.session.objects.arrays import ARRAY, LINEAR, MIPMAPPED, ArrayShape, Box, Level, Resource, Sampling, View

CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_HANDLE = 1, 2, 400

_ARRAY_MEMORY, _DEVICE_MEMORY = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY, driver.CUmemorytype.CU_MEMORYTYPE_DEVICE


@dataclass(slots=True)
class _Array:
    context: int
    address: int
    shape: ArrayShape
    handle: Any  #: of an array, or of a mipmapped one
    levels: list[tuple[Any, Level]]


@dataclass(slots=True)
class _Texture:
    context: int
    handle: int
    make: Callable[[], int]
    end: End
    made: bool  #: False: while handles are reserved, it is made only when its handle is known


class Arrays:
    """See the module docstring.

    ``use``: makes the GPU of one of the program's contexts current. ``handles``: returns the handles of that GPU.
    """

    def __init__(self, use: Callable[[int], Any], handles: Callable[[int], Handles]) -> None:
        self._use, self._handles = use, handles
        self._arrays: dict[int, _Array] = {}
        self.total = 0  #: bytes that they may take together; 0: no limit
        self._textures: dict[int, _Texture] = {}

    # -- arrays -------------------------------------------------------------------
    def create(self, array: int, context: int, address: int, shape: ArrayShape) -> None:
        """Make an array. Raises :class:`DeviceError` with the driver's result."""
        shape.check()
        if array in self._arrays:
            raise DeviceError(f"array {array} exists", CUDA_ERROR_INVALID_HANDLE)
        used = sum(found.shape.size for found in self._arrays.values()) if self.total else 0
        if self.total and used + shape.size > self.total:  # each takes as much of the session's memory besides
            raise DeviceError(f"an array of {shape.size} bytes beside {used} of others: the session may have "
                              f"{self.total}", CUDA_ERROR_OUT_OF_MEMORY)
        self._use(context)
        wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
        wanted.Width, wanted.Height, wanted.Depth = shape.width, shape.height, shape.depth
        wanted.Format, wanted.NumChannels = driver.CUarray_format(shape.format), shape.channels
        wanted.Flags = shape.flags
        layout = shape.layout()
        if not shape.levels:
            handle = check(driver.cuArray3DCreate(wanted), "cuArray3DCreate")
            levels = [(handle, layout[0])]
        else:
            handle = check(driver.cuMipmappedArrayCreate(wanted, shape.levels), "cuMipmappedArrayCreate")
            levels = [(check(driver.cuMipmappedArrayGetLevel(handle, number), "cuMipmappedArrayGetLevel"), level)
                      for number, level in enumerate(layout)]
        self._arrays[array] = _Array(context, address, shape, handle, levels)

    def destroy(self, array: int) -> None:
        """Destroy an array. Raises :class:`DeviceError`."""
        found = self._find(array)
        self._use(found.context)
        del self._arrays[array]
        destroy = driver.cuMipmappedArrayDestroy if found.shape.levels else driver.cuArrayDestroy
        check(destroy(found.handle), "cuArrayDestroy")

    def _find(self, array: int) -> _Array:
        found = self._arrays.get(array)
        if found is None:
            raise DeviceError(f"no array {array}", CUDA_ERROR_INVALID_HANDLE)
        return found

    def copy(self, array: int, box: Box, stream: Any, to_array: bool) -> tuple[Any, ...]:
        """Copy a box between an array and its memory, in stream order; returns the driver's result."""
        found = self._find(array)
        box.check(found.shape)
        return tuple(driver.cuMemcpy3DAsync(_copy_of(found, box, to_array), stream))

    def gather(self) -> None:
        """Copy every array to its memory. Raises :class:`DeviceError`."""
        self._every(False)

    def spread(self) -> None:
        """Copy the memory of every array to the array. Raises :class:`DeviceError`."""
        self._every(True)

    def _every(self, to_array: bool) -> None:
        stream = driver.CUstream(driver.CU_STREAM_LEGACY)
        for found in list(self._arrays.values()):
            self._use(found.context)
            for number, (_, level) in enumerate(found.levels):
                whole = Box(number, 0, 0, 0, level.width, level.rows, level.slices)
                check(driver.cuMemcpy3DAsync(_copy_of(found, whole, to_array), stream), "copy of an array")
            check(driver.cuStreamSynchronize(stream), "copy of an array")

    # -- objects ----------------------------------------------------------------------
    def create_texture(self, texture: int, context: int, surface: bool, resource: bytes, sampling: bytes,
                       view: bytes) -> int:
        """Make a texture or surface object; returns its handle. Raises :class:`DeviceError`."""
        if texture in self._textures:
            raise DeviceError(f"texture {texture} exists", CUDA_ERROR_INVALID_HANDLE)
        what = self._resource(Resource.decode(resource))
        if surface:
            def make() -> int:
                return int(check(driver.cuSurfObjectCreate(what), "cuSurfObjectCreate"))
        else:
            Sampling.decode(sampling)
            how = ctypes.create_string_buffer(sampling, len(sampling))
            seen = ctypes.create_string_buffer(view, len(view)) if view else None
            if seen is not None:
                View.decode(view)

            def make() -> int:
                return int(check(driver.cuTexObjectCreate(
                    what, driver.CUDA_TEXTURE_DESC(ctypes.addressof(how)),
                    None if seen is None else driver.CUDA_RESOURCE_VIEW_DESC(ctypes.addressof(seen))),
                    "cuTexObjectCreate"))
        self._use(context)
        promised = self._handles(context).promise()
        handle = make() if promised is None else promised
        self._textures[texture] = _Texture(context, handle, make, end_surface if surface else end_texture,
                                           promised is None)
        return handle

    def place(self, texture: int, handle: int) -> None:
        """Make sure that the object has this handle. Raises :class:`DeviceError` where the driver does not give it; the
        object then has another one, or does not exist.
        """
        found = self._textures.get(texture)
        if found is None:
            raise DeviceError(f"no texture {texture}", CUDA_ERROR_INVALID_HANDLE)
        if found.made and found.handle == handle:
            return
        self._use(found.context)
        handles = self._handles(found.context)
        handles.make_as(handle, found.make, found.end)
        if found.made:
            found.end(found.handle)
        else:
            handles.withdraw(found.handle)
        found.handle, found.made = handle, True

    def reserve_handles(self, context: int, reserved: bool | None, owner: int) -> None:
        """Reserve the handles of a GPU whose arrays and textures are made again, or release them."""
        self._use(context)
        handles = self._handles(context)
        handles.owner = owner
        if reserved:
            handles.reserve()
        elif reserved is False:
            handles.release()

    def destroy_texture(self, texture: int) -> None:
        """Destroy a texture or surface object. Raises :class:`DeviceError`."""
        found = self._textures.pop(texture, None)
        if found is None:
            raise DeviceError(f"no texture {texture}", CUDA_ERROR_INVALID_HANDLE)
        self._use(found.context)
        if found.made:
            self._handles(found.context).destroy(found.handle, found.end)
        else:
            self._handles(found.context).withdraw(found.handle)

    def destroy_context(self, context: int) -> None:
        """Destroy the objects and arrays that a context still has."""
        for number in [number for number, found in self._textures.items() if found.context == context]:
            self.destroy_texture(number)
        for number in [number for number, found in self._arrays.items() if found.context == context]:
            self.destroy(number)

    def _resource(self, resource: Resource) -> Any:
        """Return the driver's description of a resource. Raises :class:`DeviceError` for an unknown array."""
        described = driver.CUDA_RESOURCE_DESC()
        kinds = driver.CUresourcetype
        if resource.type < LINEAR:
            found = self._find(resource.array)
            if bool(found.shape.levels) < (resource.type == MIPMAPPED) or resource.level >= len(found.levels):
                raise DeviceError(f"array {resource.array} has no such level", CUDA_ERROR_INVALID_VALUE)
            if resource.type == ARRAY:
                described.resType = kinds.CU_RESOURCE_TYPE_ARRAY
                described.res.array.hArray = found.levels[resource.level][0]
            else:
                described.resType = kinds.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
                described.res.mipmap.hMipmappedArray = found.handle
            return described
        linear = resource.type == LINEAR
        described.resType = kinds.CU_RESOURCE_TYPE_LINEAR if linear else kinds.CU_RESOURCE_TYPE_PITCH2D
        part = described.res.linear if linear else described.res.pitch2D
        part.devPtr = driver.CUdeviceptr(resource.address)
        part.format = driver.CUarray_format(resource.format)
        part.numChannels = resource.channels
        if linear:
            part.sizeInBytes = resource.width
        else:
            part.width, part.height, part.pitchInBytes = resource.width, resource.height, resource.pitch
        return described


def _copy_of(array: _Array, box: Box, to_array: bool) -> Any:
    """Return the driver's parameters for copying a box between an array and its memory."""
    handle, level = array.levels[box.level]
    address = array.address + level.offset + box.z * level.plane + box.y * level.pitch + box.x
    copy = driver.CUDA_MEMCPY3D()
    if to_array:
        copy.srcMemoryType, copy.srcDevice = _DEVICE_MEMORY, driver.CUdeviceptr(address)
        copy.srcPitch, copy.srcHeight = level.pitch, level.rows
        copy.dstMemoryType, copy.dstArray = _ARRAY_MEMORY, handle
        copy.dstXInBytes, copy.dstY, copy.dstZ = box.x, box.y, box.z
    else:
        copy.srcMemoryType, copy.srcArray = _ARRAY_MEMORY, handle
        copy.srcXInBytes, copy.srcY, copy.srcZ = box.x, box.y, box.z
        copy.dstMemoryType, copy.dstDevice = _DEVICE_MEMORY, driver.CUdeviceptr(address)
        copy.dstPitch, copy.dstHeight = level.pitch, level.rows
    copy.WidthInBytes, copy.Height, copy.Depth = box.width, box.height, box.depth
    return copy
