"""Programs × disturbances × moments: `make chaos` on a machine with a GPU.

    python -m bench.chaos --device cuda:0 --minutes 8 --jobs 14
    python -m bench.chaos --device cpu --minutes 1 --jobs 2 --pace 15 --kinds prefetch,mapped
    python -m bench.chaos --device cuda:0 --seed 1 --session 12        # that one session again, alone

Each kind of program runs natively first (on the cpu device: in a session that nobody disturbs). Then sessions run
side by side in a pool of daemons that share the device, each disturbed by its own plan, and each digest is compared.
docs/developers/howto/chaos.md says how to read the table. Exit status 0 only if every session computed the same and
nothing was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.chaos import catalog, plan, table  # noqa: E402
from bench.chaos.harness import Chaos, Options  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402


def main(words: list[str] | None = None) -> int:
    arguments = _arguments(words)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupt)
    device = arguments.device
    cpu = device.startswith("cpu")
    try:
        kinds = catalog.chosen(device, arguments.kinds.split(",") if arguments.kinds else ())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options = Options(
        device=device, kinds=tuple(kinds), seed=arguments.seed, only=tuple(arguments.session),
        minutes=arguments.minutes, jobs=arguments.jobs or (2 if cpu else 14), faults=arguments.faults,
        pace=arguments.pace, scale=arguments.scale, patience=arguments.patience, nodes=arguments.nodes,
        lease=arguments.lease, store_bytes=(1 << 30) if cpu else 24 << 30, sessions=arguments.sessions)
    scratch = Path(tempfile.mkdtemp(prefix="rgpu-chaos-"))
    logs = arguments.logs or (Path(os.environ["OUT"]) / "chaos-logs" if os.environ.get("OUT") else scratch / "logs")
    logs.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(options, scratch, logs, lambda line: print(line, flush=True))
    began = time.monotonic()
    try:
        chaos.run()
    except KeyboardInterrupt:
        print("broken off: what ran is ended", file=sys.stderr, flush=True)
        chaos.missing["the rest"] = "broken off"
    about = {**environment(), "command": f"python -m bench.chaos {shlex.join(words or sys.argv[1:])}",
             "seed": options.seed, "seconds": round(time.monotonic() - began), "daemons_started_again": chaos.deaths}
    settings = f"--device {device} --pace {options.pace:g} --faults {options.faults} --scale {options.scale:g}" \
        + (f" --kinds {arguments.kinds}" if arguments.kinds else "")
    text = table.text(chaos.cases, chaos.missing, about, f"python -m bench.chaos {settings}")
    print(text, flush=True)
    _write(arguments.output, device, text, table.as_json(chaos.cases, chaos.missing, about))
    if why := table.why_not(chaos.cases, {} if arguments.allow_missing else chaos.missing):
        print(f"exit status 1: {why}", file=sys.stderr, flush=True)
    return 1 if why else 0


def _write(folder: Path, device: str, text: str, values: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y-%m-%d')}-chaos-{'cpu' if device.startswith('cpu') else 'gpu'}"
    (folder / f"{name}.txt").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
    print(f"written: {folder / name}.txt, .json")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description="Disturb programs, compare digests.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=1, help="of all plans; another seed, other moments (default 1)")
    parser.add_argument("--session", type=int, action="append", default=[], metavar="NUMBER",
                        help="only that session of the seed; several times for several")
    parser.add_argument("--sessions", type=int, default=0, help="so many; default: as many as there is time for")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it, native runs included (default 8)")
    parser.add_argument("--jobs", type=int, default=0, help="sessions side by side (default 14, on the cpu device 2)")
    parser.add_argument("--faults", "--blows", dest="faults", type=int, default=14,
                        help="disturbances of each session (default 14)")
    parser.add_argument("--pace", type=float, default=60.0, help="seconds over which a program spreads its steps")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many steps")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of silence that make a session hung")
    parser.add_argument("--nodes", type=int, default=3, help="daemons that share the device (default 3)")
    parser.add_argument("--lease", type=float, default=6.0, help="seconds, of a node")
    parser.add_argument("--kinds", default="", metavar="NAME,NAME", help=f"of {','.join(catalog.BY_NAME)}")
    parser.add_argument("--allow-missing", action="store_true",
                        help="end well though a kind of program or of disturbance could not be run here")
    parser.add_argument("--logs", type=Path, help="where output and what is kept of failures goes")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    parser.add_argument("--list", action="store_true", help="print the plans of the first sessions and end")
    options = parser.parse_args(words)
    if options.list:
        names = [kind.name for kind in catalog.chosen(options.device)]
        for number in options.session or range(options.sessions or 8):
            made = plan.session_plan(options.seed, number, names, options.faults)
            print(f"{number}: {made.kind}", *(f"\n    {fault}" for fault in made.faults), sep="")
        sys.exit(0)
    return options


if __name__ == "__main__":
    sys.exit(main())
