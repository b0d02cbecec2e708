"""Modules of a rebuild stand where they stood although other pieces of the driver's allocator are free then."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

pytest.importorskip("cuda.bindings")
from rgpu.server.address_layout import fixed_in_children
from rgpu.server.device.cuda.memory.steering import MOST, PIECE, WIDE, Fillers, missed, steer
from rgpu.session.objects.module_table import GlobalVariable
from tests.support.pools.pool import ROOT

BASE = 0x7FFD00000000


@dataclass
class Driver:
    """An allocator as the driver's: arenas in the order they were mapped, the first free piece of the first one."""

    arenas: list[int] = field(default_factory=lambda: [BASE, BASE - 64 * PIECE])
    size: int = 16
    taken: set[int] = field(default_factory=set)
    idle: bool = True

    def allocate(self) -> int | None:
        for arena in self.arenas:
            for index in range(self.size):
                if (address := arena + index * PIECE) not in self.taken:
                    self.taken.add(address)
                    return address
        return None

    def free(self, address: int) -> None:
        self.taken.remove(address)

    def load(self, count: int = 1) -> list[GlobalVariable]:
        """A module with a variable in each of so many pieces of its own."""
        return [GlobalVariable(f"v{number}", self.allocate() or 0, 64) for number in range(count)]

    def unload(self, loaded: list[GlobalVariable]) -> None:
        for variable in loaded:
            self.free(variable.address)

    def steer(self, wanted: list[GlobalVariable], fillers: Fillers) -> list[GlobalVariable]:
        return steer(lambda: self.load(len(wanted) or 1), self.unload, list, wanted, fillers,
                     lambda: self.idle)


@pytest.mark.parametrize("before", [0, 1, 7, 15, 16, 20])
@pytest.mark.parametrize("count", [1, 3])
def test_what_others_had_before_is_filled(before: int, count: int) -> None:
    session, rebuilt = Driver(), Driver()
    for _ in range(before):
        session.allocate()
    wanted = session.load(count)
    fillers = Fillers(rebuilt.allocate, rebuilt.free)
    assert rebuilt.steer(wanted, fillers) == wanted
    assert len(fillers) == before
    fillers.release()
    assert rebuilt.taken == {variable.address for variable in wanted}


def test_modules_one_after_another_and_a_hole_between() -> None:
    session, rebuilt = Driver(), Driver()
    noise = [session.allocate() for _ in range(5)]
    first = session.load()
    session.free(noise[2] or 0)
    second, third = session.load(), session.load(2)
    fillers = Fillers(rebuilt.allocate, rebuilt.free)
    assert [rebuilt.steer(wanted, fillers) for wanted in (first, second, third)] == [first, second, third]


def test_a_place_that_something_else_has_stays_missed_and_nothing_is_lost() -> None:
    session, rebuilt = Driver(), Driver()
    wanted = session.load()
    rebuilt.allocate()  # what the session did not have
    fillers = Fillers(rebuilt.allocate, rebuilt.free)
    loaded = rebuilt.steer(wanted, fillers)
    assert loaded != wanted and not len(fillers)
    fillers.release()
    assert len(rebuilt.taken) == 2
    assert MOST > 32, "not the whole of this driver was tried"


def test_while_work_may_wait_for_later_calls_nothing_is_unloaded() -> None:
    session, rebuilt = Driver(), Driver(idle=False)
    session.allocate()
    wanted = session.load()
    fillers = Fillers(lambda: pytest.fail("nothing is to be filled"), rebuilt.free)
    assert rebuilt.steer(wanted, fillers) != wanted and len(rebuilt.taken) == 1


def test_without_a_wish_a_module_is_loaded_once() -> None:
    driver = Driver()
    fillers = Fillers(lambda: pytest.fail("nothing is to be filled"), driver.free)
    assert driver.steer([], fillers)[0].address == BASE
    same = [GlobalVariable("v0", BASE + PIECE, 64)]
    assert driver.steer(same, fillers) == same


def test_other_variables_than_before_and_very_wide_ones_are_left() -> None:
    one, other = GlobalVariable("a", BASE, 8), GlobalVariable("b", BASE, 8)
    assert missed([one], [one]) == frozenset() and missed([one], []) == frozenset()
    assert missed([one], [other]) == {BASE}
    assert missed([one], [GlobalVariable("a", BASE + 8 * PIECE - 4, 8)]) == {BASE + 7 * PIECE, BASE + 8 * PIECE}
    assert missed([one], [GlobalVariable("a", BASE + PIECE, (WIDE + 1) * PIECE)]) == frozenset()


SESSION = """
import json, sys
from rgpu.server.device.cuda.device import CudaDevice
PTX = b'''.version 7.0
.target sm_75
.address_size 64
.visible .global .align 256 .b8 table[700000];
.visible .entry nothing() { ret; }
'''
device = CudaDevice(0)
device.create_context(16, 0, True)
places, bare = json.loads(sys.argv[1]), "bare" in sys.argv
found = []
for number in range(12):
    if not bare and number % 3 == 0:
        for stream in range(8):
            device.create_stream(1000 + 8 * number + stream, 16, 1, 0)
    from rgpu.session.objects.module_table import GlobalVariable
    before = [GlobalVariable("table", places[number], 700000)] if places else ()
    table, _ = device.load(17 + number, PTX + bytes(1), b"", False, 0, before)
    if not bare:
        device.function_attributes(17 + number, 0)
    found.append(table.globals[0].address)
device.placed()
print(json.dumps(found))
"""


@pytest.mark.gpu
def test_a_rebuild_without_the_streams_and_kernels_of_a_session_places_its_modules_alike() -> None:
    def run(*arguments: str) -> list[int]:
        with fixed_in_children():
            done = subprocess.run([sys.executable, "-c", SESSION, *arguments], cwd=ROOT, capture_output=True, text=True,
                                  timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return list(json.loads(done.stdout.splitlines()[-1]))

    places = run("null")
    assert run(json.dumps(places), "bare") == places
    assert run("null", "bare") != places, "they stand alike anyway: this shows nothing"
