"""All steps that are possible in a world of a move, and the accidents among them: deaths, elections, recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rgpu.migrate.move.coordinator import CoordinatorRole
from rgpu.migrate.move.machine import Event
from tests.support.move_model.destination_side import destination_steps
from tests.support.move_model.leader_side import leader_steps
from tests.support.move_model.source_side import source_steps
from tests.support.move_model.world import CLOCK, TABLES, Leader, Step, World, dead


def accidents(world: World) -> Iterator[Step]:
    """Deaths, a broken link, an election, a recovery to a third node (also of a source that only seems dead)."""
    if world.deaths:
        fewer = replace(world, deaths=world.deaths - 1)
        if not dead(world.source):
            yield "source dies", replace(fewer.broken_link(), source=None), False
        if world.destination is not None and world.destination.prepared and not world.destination.gone:
            yield "destination dies", replace(fewer.broken_link(), destination=None), False
        if world.leaders[0].todo:
            yield "leader0 dies", replace(fewer, leaders=(Leader(CoordinatorRole("dead")), world.leaders[1])), False
    if world.breaks and world.link == "open":
        yield "the link breaks", replace(world.broken_link(), breaks=world.breaks - 1), False
    if world.leaders[1] is None and world.registry.move != "none":
        step = TABLES["coordinator"].step(CoordinatorRole(), Event("resume"))
        second = Leader(replace(step.role, reason=""), tuple(command.do for command in step.commands))
        yield "an election", replace(world, leaders=(world.leaders[0], second),
                                     registry=replace(world.registry, leader=1)), False
    elif world.leaders[1] is None and world.leaders[0].todo[:1] == ("write_begin",):  # nothing that it would find
        yield "an election", replace(world, leaders=(world.leaders[0], Leader(CoordinatorRole("over"))),
                                     registry=replace(world.registry, leader=1)), False
    if world.recoveries and world.registry.owner != "c":
        r = world.registry
        move = "aborted" if r.move in ("preparing", "ready") else r.move
        after = replace(r, owner="c", epoch=r.epoch + 1, move=move)
        yield "recovered at c", replace(world, recoveries=0, registry=after), False


def steps(world: World) -> Iterator[Step]:
    for every in (leader_steps(world, 0), leader_steps(world, 1), source_steps(world), destination_steps(world),
                  accidents(world)):
        for name, after, good in every:
            fair = (good and name != CLOCK) or not after.fair  # before its time: nobody else was so slow
            yield name, after if fair else replace(after, fair=False), good
