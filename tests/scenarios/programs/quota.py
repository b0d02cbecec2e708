"""What cuMemGetInfo calls free can be allocated to the last granule, and not one granule more; nothing is awaited."""

import random

from common import check, start
from cuda.bindings import driver

GRANULE, OUT_OF_MEMORY = 2 << 20, 2


def free() -> int:
    return check(driver.cuMemGetInfo())[0]


def refused(size: int) -> None:
    assert int(driver.cuMemAlloc(size)[0]) == OUT_OF_MEMORY, size


start()
everything, total = check(driver.cuMemGetInfo())
assert everything % GRANULE == 0 and everything <= total
whole = check(driver.cuMemAlloc(everything))
assert free() == 0
refused(1)
refused(GRANULE)
check(driver.cuMemFree(whole))
refused(everything + 1)
refused(1 << 62)

pieces = [check(driver.cuMemAlloc(GRANULE)) for _ in range(everything // GRANULE)]
assert free() == 0
refused(1)
for piece in pieces[::2]:
    check(driver.cuMemFree(piece))
assert free() == len(pieces[::2]) * GRANULE
scattered = check(driver.cuMemAlloc(free()))  # holes do not matter: memory is mapped where there is room
refused(1)
for memory in [scattered, *pieces[1::2]]:
    check(driver.cuMemFree(memory))
assert free() == everything

chance = random.Random(2)
held: dict[int, int] = {}
for _ in range(2000):
    size = chance.choice([1, 500, 512, 70_000, 1 << 20, (1 << 20) + 1, 3 << 20])
    if held and chance.random() < 0.45:
        address = chance.choice(list(held))
        check(driver.cuMemFree(address))
        del held[address]
        continue
    room = free()
    error, address = driver.cuMemAlloc(size)
    assert int(error) in (0, OUT_OF_MEMORY)
    if int(error):
        assert room < (size + GRANULE - 1) // GRANULE * GRANULE, (room, size)
    else:
        assert not any(a < int(address) + size and int(address) < a + s for a, s in held.items())
        held[int(address)] = size
for address in held:
    check(driver.cuMemFree(address))
assert free() == everything
print("ok")
