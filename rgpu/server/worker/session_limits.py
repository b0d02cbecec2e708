"""Bounds on what a session's calls make a worker keep beside device memory. They hold whatever the agent does.

==========================  ===========================================  =============================================
what                        bound                                        why an honest program is far below it
==========================  ===========================================  =============================================
live objects (streams,      524,288                                      frameworks have some ten thousand
events, modules, graphs,
allocations, arrays, …)
answers that the program    1 GiB and four times the session's device    each thread waits for one answer at a time,
has not confirmed           memory; 1,048,576 of them                    and none is longer than the memory it was read
                                                                         from
==========================  ===========================================  =============================================

A call above a bound breaks the session with error 2, as the driver does when it has no memory left. Answers of calls
that the ``cuda`` device's engine applies itself are not counted.
"""

from __future__ import annotations

from rgpu.session.answers import MAX_ANSWERS
from rgpu.session.calls.wire import BY_ID, Answer, Effect

MOST_OBJECTS = 1 << 19
ANSWERS_FREE = 1 << 30  #: bytes that every session may have, however little memory it has

_CREATES = frozenset(number for number, call in BY_ID.items() if call.effect is Effect.CREATES)
_AWAITED = frozenset(number for number, call in BY_ID.items() if call.answer is not Answer.ASYNC)


def above(call: int, objects: int, answers: int, answer_bytes: int, memory: int) -> str:
    """Return which bound a call would break; empty for none. Pure.

    ``objects``: live objects; ``answers``: answers not confirmed, of ``answer_bytes`` in all; ``memory``: bytes of the
    session's devices, 0 where it is not bounded.
    """
    if call in _CREATES and objects >= MOST_OBJECTS:
        return f"{objects} live objects: a session may have {MOST_OBJECTS}"
    if call in _AWAITED and memory and (answers >= MAX_ANSWERS or answer_bytes > ANSWERS_FREE + 4 * memory):
        return f"{answers} answers of {answer_bytes} bytes that the program has not confirmed: a session may have " \
               f"{MAX_ANSWERS}, of {ANSWERS_FREE + 4 * memory} bytes"
    return ""
