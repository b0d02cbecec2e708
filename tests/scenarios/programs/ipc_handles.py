"""Two processes share memory of cuMemCreate by descriptors that go over a socket: both write it, both read it."""

import os
import socket
import subprocess
import sys

import numpy as np
from common import check, start
from cuda.bindings import driver

SIZE = 6 << 20
FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def properties(kind=FD) -> driver.CUmemAllocationProp:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = 0
    made.requestedHandleTypes = kind
    return made


def map_it(handle) -> int:
    at = check(driver.cuMemAddressReserve(SIZE, 0, 0, 0))
    check(driver.cuMemMap(at, SIZE, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = properties().location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(driver.cuMemSetAccess(at, SIZE, [access], 1))
    return int(at)


def unmap(at: int) -> None:
    check(driver.cuMemUnmap(at, SIZE))
    check(driver.cuMemAddressFree(at, SIZE))


def export(handle, kind=FD):
    return driver.cuMemExportToShareableHandle(handle, kind, 0)


def take(fd: int):
    return driver.cuMemImportFromShareableHandle(fd, FD)


def fill(at: int, offset: int, value: int) -> None:
    check(driver.cuMemsetD32(at + offset, value, 1 << 18))
    check(driver.cuCtxSynchronize())


def read(at: int) -> list[int]:
    host = np.zeros(SIZE // 4, np.uint32)
    check(driver.cuMemcpyDtoH(host.ctypes.data, at, host.nbytes))
    return np.unique(host).tolist()


def child(number: str) -> None:
    start()
    link = socket.socket(fileno=int(number))
    _, (fd,), _, _ = socket.recv_fds(link, 16, 1)
    free = check(driver.cuMemGetInfo())[0]
    handle = check(take(fd))
    at, second = map_it(handle), map_it(handle)
    found = read(at)
    fill(at, 1 << 20, 22)
    fill(second, 4 << 20, 33)
    again = check(take(fd))
    same = int(again) == int(handle), check(driver.cuMemGetInfo())[0] == free
    os.close(fd)
    forwarded = check(export(handle))  # as it came, for somebody else
    print("child", found, read(second), *same, os.fstat(forwarded).st_size, flush=True)
    link.send(b"written")
    link.recv(16)
    check(driver.cuMemRelease(again))
    check(driver.cuMemRelease(handle))
    unmap(at)
    print("kept", read(second), flush=True)
    unmap(second)
    print("gone", int(take(forwarded)[0]), flush=True)


def main() -> None:
    start()
    handle = check(driver.cuMemCreate(SIZE, properties(), 0))
    print("unmapped", int(export(handle)[0]), flush=True)
    at = map_it(handle)
    plain = check(driver.cuMemCreate(SIZE, properties(driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE), 0))
    nothing = os.memfd_create("nothing")
    os.ftruncate(nothing, 64)
    reader, _ = os.pipe()
    print("wrong", int(export(plain)[0]), *(int(take(fd)[0]) for fd in (nothing, reader, 999)), flush=True)
    for offset in range(0, SIZE, 1 << 20):
        fill(at, offset, 11)
    fd = check(export(handle))
    own = check(take(fd))
    alias = map_it(own)
    print("own", read(alias), flush=True)
    unmap(alias)
    check(driver.cuMemRelease(own))
    mine, theirs = socket.socketpair()
    other = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    socket.send_fds(mine, [b"take this"], [fd])
    assert mine.recv(16) == b"written"
    print("parent", read(at), flush=True)
    unmap(at)
    check(driver.cuMemRelease(handle))
    mine.send(b"freed")
    print("end", other.wait(), flush=True)


child(sys.argv[1]) if len(sys.argv) > 1 else main()
