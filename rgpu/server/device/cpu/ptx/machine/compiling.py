"""Compiles IR to object code by LLVM: small IR at once, large IR in a process with limits of its own.

=================  ==================  =========================================  ==================================
IR, bytes          where               how                                        because
=================  ==================  =========================================  ==================================
≤ 256 Ki           this process        optimised                                  a second at most
≤ 1 Mi             another process     optimised                                  the optimiser's time grows with the
                                                                                  square of blocks and instructions
more               another process     not optimised: time grows with the size    the largest takes half a minute
a million lines    nowhere             refused (:mod:`rgpu.server.device.cpu.ptx.control`)
=================  ==================  =========================================  ==================================

The other process has bounds of memory and processor time. IR that exceeds them, or would need more stack than a thread
has, is refused: :class:`CompileLimit`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from rgpu.server.device.cpu.ptx.errors import CompileLimit

AT_ONCE, OPTIMISED = 256 << 10, 1 << 20  #: bytes of IR
MEMORY = 4 << 30  #: of address space, bytes
CPU_SECONDS = 60
PATIENCE = 240.0  #: s by the clock: other processes may need the processors, too
MOST_FRAME = 4 << 20  #: bytes of stack of one kernel: threads have 8 MiB
_PROLOGUE, _SUB_RSP = 96, b"\x48\x81\xec"  #: bytes of code in which ``sub rsp, imm32`` stands
_PR_SET_PDEATHSIG = 1


@cache
def machine(opt: int) -> llvm.TargetMachine:
    """Return LLVM's description of this processor; ``opt``: effort of code generation, 0 to 3."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=opt, jit=True, codemodel="jitdefault")


def effort(size: int, level: int) -> int:
    """Return the effort for ``size`` bytes of IR: ``level``, or 0 where time would grow with the square of the size."""
    return level if size <= OPTIMISED else 0


def object_code(text: str, level: int, *, memory: int = MEMORY, seconds: int = CPU_SECONDS) -> bytes:
    """Return object code of the IR, made here or in a process with those limits. Raises :class:`CompileLimit`."""
    level = effort(len(text), level)
    if len(text) <= AT_ONCE:
        return _compile(text, level)
    job = json.dumps({"level": level, "memory": memory, "seconds": seconds}).encode() + b"\n" + text.encode()
    try:
        process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise CompileLimit(f"no process could be started that compiles it: {error}") from error
    try:
        code, _ = process.communicate(job, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise CompileLimit(f"it was not compiled within {PATIENCE:.0f} s") from None
    if process.returncode or not code:
        how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"status {process.returncode}"
        raise CompileLimit(f"the process that compiled it ended ({how}): it may have {seconds} s of processor time and "
                           f"{memory >> 20} MiB of memory")
    frame = frame_bytes(code)
    if frame > MOST_FRAME:
        raise CompileLimit(f"it needs {frame} bytes of stack, {MOST_FRAME} at most")
    return code


def frame_bytes(code: bytes) -> int:
    """Return the bytes by which the first function of the object code lowers the stack; 0 where it does not."""
    for section in llvm.ObjectFileRef.from_data(code).sections():
        if section.is_text() and section.size():  # one function; .text, or .ltext where code may lie far apart
            start = bytes(section.data()[:_PROLOGUE])
            at = start.find(_SUB_RSP)
            return int.from_bytes(start[at + 3:at + 7], "little") if at >= 0 else 0
    return 0


def _compile(text: str, level: int) -> bytes:
    target = machine(level)
    module = llvm.parse_assembly(text)
    module.verify()
    if level:
        options = llvm.create_pipeline_tuning_options(speed_level=level)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        builder = llvm.create_pass_builder(target, options)
        builder.getModulePassManager().run(module, builder)
    return bytes(target.emit_object(module))


def main() -> None:
    """Compile the IR on stdin, and write its object code to stdout."""
    head, _, text = sys.stdin.buffer.read().partition(b"\n")
    job = json.loads(head)
    for what, most in ((resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_CPU, job["seconds"]),
                       (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent has ended
        raise SystemExit(1)
    code = _compile(text.decode(), int(job["level"]))
    sys.stdout.buffer.write(code)


if __name__ == "__main__":
    main()
