"""The loop over lanes of helpers that process one lane after the other: LLVM IR around the work for one lane."""

from __future__ import annotations

from collections.abc import Sequence

Argument = tuple[str, str, str]  #: (name of a lane's value, the vector that holds it, the type of an element)


def each_lane(mask: str, arguments: Sequence[Argument], body: str, *, memory: str = "", after: str = "  ret void"
              ) -> str:
    """Return the body of a function that does ``body`` for each lane of the i32 ``mask``, the lowest first.

    In ``body`` ``%lane`` is the lane's number and each argument's name its value; a branch to ``%next`` ends the lane.
    ``memory``: IR before the loop, for results; ``after``: IR behind it, which returns. Names beginning with ``%lane``,
    and ``%loop``, ``%next``, ``%done`` are reserved.
    """
    saves = "\n".join(f"  %lanes.{name} = alloca <32 x {kind}>, align 64\n  store <32 x {kind}> {vector}, ptr "
                      f"%lanes.{name}" for name, vector, kind in arguments)
    reads = "\n".join(f"  %lane.{name} = getelementptr {kind}, ptr %lanes.{name}, i32 %lane\n"
                      f"  %{name} = load {kind}, ptr %lane.{name}" for name, _, kind in arguments)
    return f"""
{saves}
{memory}
  br label %loop
loop:
  %lanes.left = phi i32 [ {mask}, %0 ], [ %lanes.rest, %next ]
  %lanes.over = icmp eq i32 %lanes.left, 0
  br i1 %lanes.over, label %done, label %body
body:
  %lane = call i32 @llvm.cttz.i32(i32 %lanes.left, i1 true)
  %lanes.less = sub i32 %lanes.left, 1
  %lanes.rest = and i32 %lanes.left, %lanes.less
{reads}
{body}
  br label %next
next:
  br label %loop
done:
{after}"""
