"""Numbers by 32-byte name, for many names at once, with the GIL released: a compiled hash table with open addressing.

A dict delays the thread that applies a session's calls more than the rest of a checkpoint does: it holds the GIL for
two thirds of a microsecond for each of a hundred thousand pages; NumPy, 256 names at a time, costs as much
(docs/benchmarks.md, "What checkpoints cost").

A name's place is found by multiply-add hashing of its four words with random odd factors, another set in each process
(Dietzfelbinger et al., "A Reliable Randomized Algorithm for the Closest-Pair Problem", 1997): names chosen by an
attacker do not collide more often than others.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from rgpu.checkpoint.native import jit

Array = np.ndarray[Any, Any]

_EMPTY = 0xFFFFFFFF
_FEWEST_BITS = 11  #: of places, to begin with; half of them are used at most
_FACTORS = np.array([secrets.randbits(64) | 1 for _ in range(4)], np.uint64)


def _ir() -> str:
    """Return the IR of ``look(wanted, n, names, places, shift, mask, factors, count, add, found, fresh)``.

    It returns the new number of names. ``found``: the number of each of ``wanted``, or −1; with ``add`` an unknown name
    gets the next number, and its ``fresh`` is set.
    """

    def each(*lines: str) -> str:
        return "".join(f"\n  {line.replace('#', str(word))}" for word in range(4) for line in lines)

    factors = each("%f#.p = getelementptr i64, ptr %factors, i64 #", "%f# = load i64, ptr %f#.p")
    words = each("%w#.p = getelementptr i64, ptr %w.p, i64 #", "%w# = load i64, ptr %w#.p, align 1",
                 "%m# = mul i64 %w#, %f#")
    others = each("%t#.p = getelementptr i64, ptr %there, i64 #", "%t# = load i64, ptr %t#.p",
                  "%x# = xor i64 %t#, %w#")
    stores = each("%n#.p = getelementptr i64, ptr %new, i64 #", "store i64 %w#, ptr %n#.p")
    return f"""
define i64 @look(ptr %wanted, i64 %n, ptr %names, ptr %places, i64 %shift, i64 %mask, ptr %factors, i64 %count,
                 i64 %add, ptr %found, ptr %fresh) {{
entry:{factors}
  %any = icmp ne i64 %n, 0
  %adding = icmp ne i64 %add, 0
  br i1 %any, label %name, label %done
name:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next.name ]
  %known = phi i64 [ %count, %entry ], [ %known.next, %next.name ]
  %w.at = mul i64 %i, 4
  %w.p = getelementptr i64, ptr %wanted, i64 %w.at{words}
  %h01 = add i64 %m0, %m1
  %h23 = add i64 %m2, %m3
  %h = add i64 %h01, %h23
  %first = lshr i64 %h, %shift
  %found.p = getelementptr i64, ptr %found, i64 %i
  br label %probe
probe:
  %at = phi i64 [ %first, %name ], [ %after, %step ]
  %place = getelementptr i32, ptr %places, i64 %at
  %number = load i32, ptr %place
  %empty = icmp eq i32 %number, {_EMPTY - (1 << 32)}
  br i1 %empty, label %missing, label %compare
compare:
  %wide = zext i32 %number to i64
  %there.at = mul i64 %wide, 4
  %there = getelementptr i64, ptr %names, i64 %there.at{others}
  %x01 = or i64 %x0, %x1
  %x23 = or i64 %x2, %x3
  %x = or i64 %x01, %x23
  %same = icmp eq i64 %x, 0
  br i1 %same, label %hit, label %step
step:
  %behind = add i64 %at, 1
  %after = and i64 %behind, %mask
  br label %probe
hit:
  store i64 %wide, ptr %found.p
  br label %next.name
missing:
  br i1 %adding, label %insert, label %unknown
unknown:
  store i64 -1, ptr %found.p
  br label %next.name
insert:
  %narrow = trunc i64 %known to i32
  store i32 %narrow, ptr %place
  %new.at = mul i64 %known, 4
  %new = getelementptr i64, ptr %names, i64 %new.at{stores}
  store i64 %known, ptr %found.p
  %fresh.p = getelementptr i8, ptr %fresh, i64 %i
  store i8 1, ptr %fresh.p
  %more = add i64 %known, 1
  br label %next.name
next.name:
  %known.next = phi i64 [ %known, %hit ], [ %known, %unknown ], [ %more, %insert ]
  %i.next = add i64 %i, 1
  %again = icmp ult i64 %i.next, %n
  br i1 %again, label %name, label %done
done:
  %result = phi i64 [ %count, %entry ], [ %known.next, %next.name ]
  ret i64 %result
}}
"""


@jit.once
def _compiled() -> tuple[Any, Any]:
    cpu, features, _ = jit.host()
    engine = jit.compile_ir(_ir(), cpu, features)
    word, pointer = jit.WORD, jit.POINTER
    return jit.function(engine, "look", pointer, word, pointer, pointer, word, word, pointer, word, word, pointer,
                        pointer, result=word), engine


def prepare() -> None:
    """Compile the code now instead of at its first use."""
    _compiled()


class NameIndex:
    """Index of ``count`` different names, numbered in the order in which they were added. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self._bits = _FEWEST_BITS
        self._places = np.full(1 << self._bits, _EMPTY, np.uint32)
        self._names = np.zeros((1 << self._bits - 1, 4), np.uint64)

    def find(self, wanted: Array) -> Array:
        """Find the number of each row of (n, 32) uint8 ``wanted``, or −1: (n,) int64."""
        return self._look(wanted, False)[0]

    def add(self, wanted: Array) -> tuple[Array, Array]:
        """Find as :meth:`find` does, and add unknown names; return the numbers and (n,) bool: which rows were added."""
        while self.count + len(wanted) > len(self._names):
            self._grow()
        return self._look(wanted, True)

    def names(self) -> Array:
        """Return the names by number: (count, 32) uint8."""
        return self._names[:self.count].view(np.uint8)

    def _look(self, wanted: Array, add: bool) -> tuple[Array, Array]:
        wanted = np.ascontiguousarray(wanted)
        found, fresh = np.empty(len(wanted), np.int64), np.zeros(len(wanted), bool)
        look, _ = _compiled()
        self.count = look(wanted.ctypes.data, len(wanted), self._names.ctypes.data, self._places.ctypes.data,
                          64 - self._bits, len(self._places) - 1, _FACTORS.ctypes.data, self.count, add,
                          found.ctypes.data, fresh.ctypes.data)
        return found, fresh

    def _grow(self) -> None:
        known = self.names()
        self._bits += 2
        self._places = np.full(1 << self._bits, _EMPTY, np.uint32)
        self._names = np.zeros((1 << self._bits - 1, 4), np.uint64)
        self.count = 0
        self._look(known, True)
