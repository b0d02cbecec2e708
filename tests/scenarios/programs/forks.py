"""fork before cuInit: the child has a session of its own. fork after it: the child gets CUDA_ERROR_NOT_INITIALIZED."""

import os
import sys

from common import check, start
from cuda.bindings import driver


def child(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException as error:  # noqa: BLE001
            print("child:", error, file=sys.stderr, flush=True)
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def own_session() -> int:
    start()
    memory = check(driver.cuMemAlloc(1 << 20))
    check(driver.cuMemsetD8(memory, 3, 1 << 20))
    check(driver.cuCtxSynchronize())
    return 0


def not_initialised() -> int:
    return 0 if int(driver.cuMemAlloc(4096)[0]) == 3 and int(driver.cuCtxSynchronize()[0]) == 3 else 1


assert child(own_session) == 0, "fork before cuInit"
start()
memory = check(driver.cuMemAlloc(1 << 20))
assert child(not_initialised) == 0, "fork after cuInit"
check(driver.cuMemsetD8(memory, 5, 1 << 20))
check(driver.cuCtxSynchronize())
print("ok")
