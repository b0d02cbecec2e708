"""The entry point of ``rgpu``: a plain ``rgpu run`` goes straight to an agent, everything else through click."""

from __future__ import annotations

import io
import os
import sys

from rgpu.cli import plain_run


def main() -> None:
    """Run ``rgpu``; characters that the terminal cannot show are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and reasons may have characters that the terminal lacks
            stream.reconfigure(errors="backslashreplace")
    plain = plain_run.read(sys.argv[1:]) if "_RGPU_COMPLETE" not in os.environ else None
    if plain is not None:
        from rgpu.cli.resident.handing import hand_over

        plain.run(begins_resident=hand_over(plain))
    from rgpu.cli.command_line import cli

    cli(prog_name="rgpu")


if __name__ == "__main__":
    main()
