"""Asks for more than its quota three times, and goes on."""

from common import check, start
from cuda.bindings import driver

start()
check(driver.cuMemAlloc(40 << 20))
for _ in range(3):
    assert int(driver.cuMemAlloc(30 << 20)[0]) == 2
