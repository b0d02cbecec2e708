"""A filter of system calls (seccomp(2)), put together here: sixty lines instead of a library that not every node has.

It denies what no worker needs, with EPERM, and lets the rest through: what a driver calls is its maker's, and changes.
Calls that are newer than this table give ENOSYS, so that libraries take the older way, which is judged. x86-64 only;
calls by another table of numbers (32 bit, x32) end the process. Needs no right: no_new_privs is set first.
"""

from __future__ import annotations

import ctypes
import errno
import struct

#: Numbers of x86-64 (asm/unistd_64.h). Other processes' memory, descriptors and execution:
OTHERS = {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
          "process_madvise": 440, "process_mrelease": 448, "perf_event_open": 298, "move_pages": 279,
          "migrate_pages": 256}
#: mounts, namespaces, roots:
PLACES = {"pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308,
          "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
          "mount_setattr": 442, "open_by_handle_at": 304, "name_to_handle_at": 303, "mknod": 133, "mknodat": 259,
          "quotactl": 179, "quotactl_fd": 443, "fanotify_init": 300}
#: the kernel itself, its clocks, keys and tracing, and those parts of it that were broken out of most:
KERNEL = {"modify_ldt": 154, "acct": 163, "settimeofday": 164, "swapon": 167, "swapoff": 168, "reboot": 169,
          "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
          "init_module": 175, "delete_module": 176, "adjtimex": 159, "syslog": 103, "vhangup": 153,
          "clock_settime": 227, "clock_adjtime": 305, "kexec_load": 246, "kexec_file_load": 320, "finit_module": 313,
          "add_key": 248, "request_key": 249, "keyctl": 250, "lookup_dcookie": 212, "bpf": 321, "userfaultfd": 323,
          "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "nfsservctl": 180, "uselib": 134,
          "ustat": 136, "sysfs": 139, "_sysctl": 156, "vmsplice": 278}
DENIED = {**OTHERS, **PLACES, **KERNEL}
CLONE, CLONE3, SOCKET, SOCKETPAIR, PERSONALITY = 56, 435, 41, 53, 135
NEWEST = 462  #: mseal; what came later gives ENOSYS
NAMESPACES = 0x7E020080  #: CLONE_NEW… of clone(2)
AF_UNIX = 1
ASK = 0xFFFFFFFF  #: personality(2): changes nothing

AUDIT_ARCH_X86_64 = 0xC000003E
X32 = 0x40000000
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  #: BPF instructions
_NUMBER, _ARCH, _FIRST = 0, 4, 16  #: offsets in struct seccomp_data; low half of the first argument
_SET_MODE_FILTER, _TSYNC, _SECCOMP = 1, 1, 317


def program(network: bool = False) -> bytes:
    """Return the filter as the kernel reads it: instructions of 8 bytes. ``network``: sockets of any family."""
    deny, unknown = ERROR | errno.EPERM, ERROR | errno.ENOSYS
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, AUDIT_ARCH_X86_64), (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER), (_GREATER_EQUAL, 0, 1, X32), (_RETURN, 0, 0, KILL),
        (_GREATER_EQUAL, 0, 1, NEWEST + 1), (_RETURN, 0, 0, unknown),
        (_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, unknown)]  # its flags lie in memory: libraries fall back to clone
    for number in sorted(DENIED.values()):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, deny)]
    # (call, test of its first argument, what follows where it is true, and where it is false)
    code += _judged(CLONE, (_ANY, NAMESPACES), deny, ALLOW)
    code += _judged(PERSONALITY, (_EQUAL, ASK), ALLOW, deny)
    if not network:
        code += _judged(SOCKET, (_EQUAL, AF_UNIX), ALLOW, deny)
        code += _judged(SOCKETPAIR, (_EQUAL, AF_UNIX), ALLOW, deny)
    code.append((_RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def _judged(number: int, test: tuple[int, int], then: int, otherwise: int) -> list[tuple[int, int, int, int]]:
    return [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST), (test[0], 0, 1, test[1]), (_RETURN, 0, 0, then),
            (_RETURN, 0, 0, otherwise)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def install(network: bool = False) -> None:
    """Hold this process, and all that it starts, to the filter. Raises OSError. no_new_privs must be set."""
    libc, code = ctypes.CDLL(None, use_errno=True), program(network)
    held = ctypes.create_string_buffer(code, len(code))
    filled = _Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    if libc.syscall(_SECCOMP, _SET_MODE_FILTER, _TSYNC, ctypes.byref(filled)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {errno.errorcode.get(number, number)}")
