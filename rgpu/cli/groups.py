"""Groups of verbs that propose the nearest name for an unknown one."""

from __future__ import annotations

import click

from rgpu.cli.tables import did_you_mean


class Group(click.Group):
    """A click group whose error for an unknown verb names the nearest one."""

    def resolve_command(self, ctx: click.Context, args: list[str]
                        ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb that ``args`` begin with. Raises :class:`click.UsageError`."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = did_you_mean(args[0], self.list_commands(ctx)) or "."
            raise click.UsageError(error.message.rstrip(".") + near, ctx) from None
