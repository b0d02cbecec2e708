"""``rgpu completion``: the script by which a shell completes rgpu's verbs, options, sessions and hosts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rgpu.cli import common


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common.verb
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  rgpu completion bash > ~/.local/share/bash-completion/completions/rgpu
    zsh:   rgpu completion zsh > "${fpath[1]}/_rgpu"
    fish:  rgpu completion fish > ~/.config/fish/completions/rgpu.fish
    """
    from rgpu.cli.command_line import cli

    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(cli, {}, "rgpu", "_RGPU_COMPLETE").source())
