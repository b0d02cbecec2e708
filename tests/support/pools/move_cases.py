"""Points of a move, and what breaks at them."""

from __future__ import annotations

SOURCE_WORKER = ("connected", "page", "round", "paused", "state", "verify", "sent")
DESTINATION_WORKER = ("receive", "rebuild", "verified")
DAEMONS = ("daemon.receive", "daemon.send", "daemon.activate", "daemon.forget")
COMMANDS = ("write_begin", "command_receive", "command_send", "write_ready", "write_commit", "reconcile", "write_clear")
LEADER = tuple(f"mover.{command}{after}" for command in COMMANDS for after in ("", ".done"))
WORKER_CASES = [f"{point}:{action}" for point in SOURCE_WORKER + DESTINATION_WORKER
                for action in ("kill", "stop", "fail")]
DAEMON_CASES = [f"{point}:{action}" for point in DAEMONS + LEADER for action in ("kill", "stop")]
LOST_CASES = [f"mover.{name}.done:lost" for name in ("write_begin", "write_ready", "write_commit")]
NODE_CASES = [f"{point}/{side}" for point in ("connected", "round", "paused", "verify", "rebuild", "verified",
                                              "mover.write_commit", "mover.write_commit.done")
              for side in ("source", "destination")]
#: Where pages are pulled out of the source's memory: grants and pulls, in both workers.
PEER_CASES = [f"{point}:{action}" for point in ("peer.grant", "peer.pull", "peer.import", "peer.pulled")
              for action in ("kill", "stop", "fail")]
#: Those of a move by replay, in the order in which they are reached.
REPLAY_SOURCE = ("replay.cut", "replay.sample", "replay.cut.sent", "replay.cut.verified", "replay", "replay.caught_up",
                 "replay.last", "replay.repair")
REPLAY_DESTINATION = ("replay.calls", "replay.probe", "replay.compare", "replay.finished")
REPLAY_CASES = [f"{point}:{action}" for point in REPLAY_SOURCE + REPLAY_DESTINATION
                for action in ("kill", "stop", "fail")]
#: The destination has no link while nothing moves.
LINK_CASES = [f"{mode}/{when}" for mode in ("drop", "stall", "delay", "cut", "flip")
              for when in ("source moving", "source running", "destination moving")]
