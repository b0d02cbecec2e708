"""Steps of a move, and who or which link breaks at them."""

from __future__ import annotations

from tests.support.pools.faults import ACTORS, POINTS

ACTOR_CASES = [f"{point}/{actor}/{how}" for point in POINTS for actor in ACTORS for how in ("kill", "freeze")]
#: The leader lives, and its lease runs out, as on a machine that is too busy.
LAPSE_CASES = [f"{point}/coordinator/lapse" for point in POINTS]
LINK_POINTS = ("connected", "round", "paused", "verify", "mover.write_commit", "daemon.activate", "mover.write_clear")
LINK_CASES = [f"{point}/{link} link/{mode}" for point in LINK_POINTS for link in ("agent", "page")
              for mode in ("drop", "stall", "delay", "cut", "flip")]
