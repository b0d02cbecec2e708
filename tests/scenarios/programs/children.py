"""A child forked before cuInit, one forked after it, and one that execs: who has a session of its own."""

import os
import subprocess
import sys

import numpy as np
from common import check, start
from cuda.bindings import driver

NOT_INITIALIZED = 3


def use_the_device(value: int) -> None:
    start()
    memory = check(driver.cuMemAlloc(1 << 20))
    check(driver.cuMemsetD8(memory, value, 1 << 20))
    host = np.zeros(1 << 20, np.uint8)
    check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
    assert (host == value).all()


def child(work, *arguments) -> tuple[int, int]:
    """(pid, exit code) of a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            work(*arguments)
            code = 0
        except BaseException as error:  # noqa: BLE001
            print("child:", repr(error), file=sys.stderr, flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused() -> None:
    for answer in (driver.cuInit(0), driver.cuMemAlloc(4096), driver.cuCtxSynchronize(), driver.cuStreamCreate(0),
                   driver.cuMemsetD8(memory, 9, 16), driver.cuDeviceGetCount()):
        assert int(answer[0]) == NOT_INITIALIZED, answer


def early(ready: int) -> None:
    os.read(ready, 1)  # the parent has its session by now
    use_the_device(3)


if sys.argv[1:] == ["exec"]:
    use_the_device(7)
    raise SystemExit(0)

reader, writer = os.pipe()
before = os.fork()
if before == 0:
    code = 99
    try:
        early(reader)
        code = 0
    finally:
        os._exit(code)
use_the_device(1)
memory = check(driver.cuMemAlloc(1 << 20))
check(driver.cuMemsetD8(memory, 5, 1 << 20))
os.write(writer, b"x")
assert os.waitstatus_to_exitcode(os.waitpid(before, 0)[1]) == 0, "forked before cuInit"
after, code = child(refused)
assert code == 0, "forked after cuInit"
with subprocess.Popen([sys.executable, "-W", "ignore", __file__, "exec"]) as spawned:
    assert spawned.wait() == 0, "exec"
host = np.zeros(1 << 20, np.uint8)
check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
assert (host == 5).all(), "the parent goes on"
print("pids", os.getpid(), before, spawned.pid)
print("ok")
