"""Two processes share memory of a pool: a descriptor goes over a socket, pointers as bytes; both write, both free."""

import os
import socket
import subprocess
import sys

import numpy as np
from common import check, start
from cuda.bindings import driver

COUNT = 1 << 18  # of numbers
FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NONE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE


def make(kind=FD):
    wanted = driver.CUmemPoolProps()
    wanted.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.handleTypes = kind
    wanted.location.type, wanted.location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    return check(driver.cuMemPoolCreate(wanted))


def code(result) -> int:
    return int(result[0])


def export(pool) -> int:
    return int(check(driver.cuMemPoolExportToShareableHandle(pool, FD, 0)))


def take(fd: int):
    return driver.cuMemPoolImportFromShareableHandle(fd, FD, 0)


def pointer(pool, data: bytes):
    made = driver.CUmemPoolPtrExportData()
    made.reserved = data
    return driver.cuMemPoolImportPointer(pool, made)


def token(memory) -> bytes:
    return bytes(check(driver.cuMemPoolExportPointer(memory)).reserved)


def fill(memory, value: int, first: int = 0, count: int = COUNT, stream=0) -> None:
    check(driver.cuMemsetD32Async(int(memory) + 4 * first, value, count, stream))


def read(memory) -> list[int]:
    host = np.zeros(COUNT, np.uint32)
    check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
    return np.unique(host).tolist()


def child(number: str) -> None:
    start()
    link = socket.socket(fileno=int(number))
    tokens, (fd,), _, _ = socket.recv_fds(link, 192, 1)
    pool = check(take(fd))
    os.close(fd)
    stream = check(driver.cuStreamCreate(1))
    first, second, third = (check(pointer(pool, tokens[at:at + 64])) for at in (0, 64, 128))
    again = check(pointer(pool, tokens[:64]))
    print("child", read(first), read(second), read(third), int(again) == int(first), flush=True)
    print("not so", code(driver.cuMemAllocFromPoolAsync(64, pool, stream)), code(driver.cuIpcCloseMemHandle(first)),
          code(driver.cuDeviceSetMemPool(0, pool)), code(pointer(pool, bytes(64))), flush=True)
    fill(first, 22, COUNT // 2, COUNT // 2, stream)
    fill(second, 33, 0, 1, stream)
    check(driver.cuMemFreeAsync(second, stream))
    check(driver.cuStreamSynchronize(stream))
    link.send(b"written")
    link.recv(16)
    check(driver.cuMemFree(first))
    print("kept", read(again), flush=True)
    check(driver.cuMemFree(again))
    print("gone", code(driver.cuMemFree(first)), code(pointer(pool, tokens[:64])), flush=True)
    check(driver.cuMemPoolDestroy(pool))
    print("third", read(third), flush=True)


def main() -> None:
    start()
    name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES
    assert check(driver.cuDeviceGetAttribute(name, 0)) & int(FD)
    pool, own, stream = make(), make(NONE), check(driver.cuStreamCreate(1))
    standard = check(driver.cuDeviceGetDefaultMemPool(0))
    first, second = (check(driver.cuMemAllocFromPoolAsync(4 * COUNT, pool, stream)) for _ in range(2))
    check(driver.cuDeviceSetMemPool(0, pool))
    third = check(driver.cuMemAllocAsync(4 * COUNT, stream))
    check(driver.cuDeviceSetMemPool(0, standard))
    private = check(driver.cuMemAllocFromPoolAsync(64, own, stream))
    nothing = os.memfd_create("nothing")
    os.ftruncate(nothing, 64)
    print("wrong", *(code(driver.cuMemPoolExportToShareableHandle(which, FD, 0)) for which in (own, standard)),
          code(driver.cuMemPoolExportPointer(private)), code(driver.cuIpcGetMemHandle(first)), code(take(nothing)),
          code(take(999)), flush=True)
    for memory, value in ((first, 11), (second, 12), (third, 13)):
        fill(memory, value, stream=stream)
    check(driver.cuStreamSynchronize(stream))
    tokens, fd = b"".join(map(token, (first, second, third))), export(pool)
    assert token(first) == tokens[:64]
    mine, theirs = socket.socketpair()
    other = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    socket.send_fds(mine, [tokens], [fd])
    assert mine.recv(16) == b"written"
    print("parent", read(first), read(second), read(third), flush=True)
    check(driver.cuMemFreeAsync(first, stream))
    check(driver.cuStreamSynchronize(stream))
    check(driver.cuMemFree(second))
    mine.send(b"freed")
    print("end", other.wait(), flush=True)


child(sys.argv[1]) if len(sys.argv) > 1 else main()
