"""The command ``rgpu`` for click: one module for each verb, in the packages beside this one."""

from __future__ import annotations

import importlib

import click

from rgpu import __version__
from rgpu.cli.groups import Group

#: verb → (module, attribute); loaded when used, so that `rgpu run` starts fast.
VERBS = {
    "up": "pools.up", "down": "pools.down", "server": "pools.server", "run": "sessions.run", "ps": "sessions.ps",
    "describe": "sessions.describe", "logs": "sessions.logs", "kill": "sessions.kill", "nodes": "pools.nodes",
    "migrate": "moves.migrate", "checkpoint": "checkpoints.checkpoint", "restore": "checkpoints.restore", "image":
    "checkpoints.image", "cordon": "moves.cordon", "uncordon": "moves.uncordon", "drain": "moves.drain", "leave":
    "pools.leave", "rebalance": "moves.rebalance", "pool": "pools.pool_group", "history": "sessions.history",
    "events": "sessions.events", "journal": "checkpoints.journal", "keys": "pools.keys", "config": "helpers.config",
    "doctor": "helpers.doctor", "demo": "helpers.demo", "top": "sessions.top", "completion": "helpers.completion",
    "simulate": "helpers.simulate", "login": "access.login", "context": "access.context", "quota": "pools.quota",
    "attach": "runs.attach", "wait": "runs.wait", "signal": "runs.signalling", "web": "access.web",
}


class LazyGroup(Group):
    """A group that imports a verb's module only when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs' names without loading their modules."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Load a verb's module and return its command; None if there is no such verb."""
        if name not in VERBS:
            return None
        module = importlib.import_module(f"rgpu.cli.{VERBS[name]}")
        return module.command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rgpu")
def cli() -> None:
    """Run CUDA programs on remote GPUs; move, checkpoint and recover them while they run.

    Exit codes are listed in docs/users/errors.md; `rgpu run` exits as its program does.
    """
