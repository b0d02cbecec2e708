"""The command ``rgpu``: one file for each verb beside this one."""

from __future__ import annotations

import importlib

import click

from rgpu import __version__

#: verb → (module, attribute); loaded when used, so that `rgpu run` starts fast.
VERBS = {
    "up": "up", "down": "down", "server": "server", "run": "run", "ps": "ps", "describe": "describe", "logs": "logs",
    "kill": "kill", "nodes": "nodes", "migrate": "migrate", "checkpoint": "checkpoint", "restore": "restore",
    "image": "image", "cordon": "cordon", "uncordon": "uncordon", "drain": "drain", "leave": "leave",
    "rebalance": "rebalance", "pool": "pool_group", "history": "history", "events": "events", "journal": "journal",
    "keys": "keys", "config": "config", "doctor": "doctor", "demo": "demo", "top": "top", "completion": "completion",
    "simulate": "simulate",
}


class LazyGroup(click.Group):
    """Imports a verb's module only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"rgpu.cli.{VERBS[name]}")
        return module.command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rgpu")
def cli() -> None:
    """Run CUDA programs on remote GPUs; move, checkpoint and recover them while they run.

    Exit codes are listed in docs/errors.md; `rgpu run` exits as its program does.
    """


def main() -> None:
    cli(prog_name="rgpu")


if __name__ == "__main__":
    main()
