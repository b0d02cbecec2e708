"""The Python API on a real pool: the page's examples as written, programs and their handles, errors, current()."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rgpu
from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, HELD, ROOT, LocalPool
from tests.support.processes import living

EXAMPLE = [text for text in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/users/api.md").read_text(), re.M | re.S)
           if "rgpu.integrations" not in text]  # those are of frameworks: test_frameworks.py
#: `train.py` of the page: the heat example, which lasts a few seconds by its default of steps.
TRAIN = (f"import sys\nsys.argv = [{str(HELD)!r}, 'never', '0', '0.05', {str(EXAMPLES / 'heat.py')!r}, '--n', '64',"
         " '--steps', 'STEPS', '--report', '50']\n" f"exec(compile(open({str(HELD)!r}).read(), 'held', 'exec'))\n")
#: Uses the GPU, then asks where it is.
INSIDE = "from cuda.core import Device\nDevice(0).set_current()\n"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("api"), nodes=2, lease=8.0) as running:
        yield running


@pytest.fixture(scope="module")
def api(local: LocalPool) -> Iterator[rgpu.Pool]:
    with rgpu.Pool(local.environment["RGPU_POOL"]) as found:
        yield found


def example(local: LocalPool, folder: Path, number: int, *prefix: str, steps: int = 2000) -> list[str]:
    """The lines that an example of the page prints, in a folder with its ``train.py``."""
    (folder / "train.py").write_text(TRAIN.replace("STEPS", str(steps)))
    environment = {**local.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*prefix, sys.executable, "-c", EXAMPLE[number]], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(240)
def test_the_first_example(local: LocalPool, tmp_path: Path) -> None:
    lines = example(local, tmp_path, 0, steps=8000)  # it must last until it was moved, on a loaded machine too
    told = "\n".join(line for line in lines if not re.match(r"step|digest", line))
    assert re.search(r"^api-first runs as process \d+$", told, re.M)
    assert re.search(r"^running on node-[ab] {'team': 'vision'}$", told, re.M)
    assert re.search(r"^\['node-a', 'node-b'\]$", told, re.M) and re.search(r"^\S+ \d+ pages$", told, re.M)
    assert re.search(r"^committed \d+\.\d ms verified: True$", told, re.M) and lines[-1] == "exit code 0"


@pytest.mark.timeout(240)
def test_the_examples_of_errors_and_events(local: LocalPool, tmp_path: Path) -> None:
    refused, status = example(local, tmp_path, 1)
    assert "the largest that would fit is" in refused and status == str(rgpu.NotFound.exit_code)
    lines = example(local, tmp_path, 2)
    assert any(line.startswith("create api-watched ") for line in lines) and lines[-1] == "exit code 143"


@pytest.mark.timeout(240)
def test_the_example_inside_a_program(local: LocalPool, tmp_path: Path) -> None:
    run = (sys.executable, "-m", "rgpu.cli.main", "run", "--name", "inside", "--")
    assert example(local, tmp_path, 3, *run)[0] in ("inside on node-a", "inside on node-b")
    assert example(local, tmp_path, 3) == [], "outside rgpu run there is no session"


@pytest.mark.timeout(300)
def test_a_program_hears_of_its_moves(local: LocalPool, api: rgpu.Pool, tmp_path: Path) -> None:
    """By the page's example; what a callback raises is told, and the next is called. Other sessions' moves are not."""
    go = tmp_path / "go"
    assert "on_move" in EXAMPLE[4]
    code = (INSIDE + EXAMPLE[4] + "calls = []\n"
            "def fails(notice): calls.append(notice.outcome); raise ValueError('of the callback')\n"
            "here.on_move(before=fails)\n"
            f"import os, time; print('ready', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)\n"
            "while len(calls) < 2: time.sleep(0.1)\n"  # the second watch may be behind the first, which prints
            "print(calls)\n")
    with api.run([sys.executable, "-c", code], name="moved", stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                 env=local.environment, host="node-a") as run, \
            api.run([sys.executable, "-c", INSIDE + "import time; time.sleep(600)"], name="other",
                    host="node-a", env=local.environment, cwd=ROOT) as other:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == b"ready\n"
        local.wait_state("other", "running", 60)
        for host in ("node-b", "node-a"):
            assert api.migrate(other, host).outcome == "committed"
            assert api.migrate(run, host).outcome == "committed"
        lines = [run.stdout.readline().decode() for _ in range(4)]
        go.touch()
        assert [line.split(" on ")[0] for line in lines] == ["moved begun", "moved committed"] * 2, lines
        assert [line.split()[-1] for line in lines[1::2]] == ["node-b", "node-a"]
        assert run.stdout.readline() == b"['begun', 'begun']\n"
        assert run.wait(60) == 0 and run.stderr.read().count(b"ValueError: of the callback") == 2
        other.signal(signal.SIGKILL)


@pytest.mark.timeout(300)
def test_the_example_of_detached_runs(local: LocalPool, tmp_path: Path) -> None:
    lines = example(local, tmp_path, 5, steps=2_000_000)  # ended by the example's signal
    assert lines[0] == "True" and lines[1] == "exit code 143 its program was ended by SIGTERM"
    assert re.fullmatch(r"1 line; \['api-detached'.*", lines[2]), lines


@pytest.mark.timeout(300)
def test_a_handle_means_one_detached_run(local: LocalPool, api: rgpu.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RGPU_RUNS_DIR", local.environment["RGPU_RUNS_DIR"])
    with pytest.raises(rgpu.UsageError, match="follow"):
        api.run(["true"], detach=True, stdout=subprocess.PIPE)  # type: ignore[call-overload]
    with pytest.raises(rgpu.UsageError, match="detach"):
        api.run(["true"], log_limit="1MiB")  # type: ignore[call-overload]
    with pytest.raises(rgpu.Refused):
        api.run(["true"], name="too-much", memory="1TB", detach=True)
    with pytest.raises(rgpu.NotFound):
        rgpu.DetachedRun("too-much")
    first = api.run(["sh", "-c", "echo one; exit 3"], name="again", detach=True)
    assert (first.wait(60), first.poll(), first.logs()) == (3, 3, b"one\n")
    assert (first.status().state, first.status().reason) == ("ended", "its program ended with exit code 3")
    with pytest.raises(rgpu.NotFound, match="has ended"):
        first.signal(signal.SIGTERM)

    async def main() -> None:
        async with rgpu.AsyncPool(local.environment["RGPU_POOL"]) as pool:
            second = await pool.run(["sh", "-c", "echo two; exec sleep 600"], name="again", detach=True)
            for known in (first.wait, first.status, first.logs):
                with pytest.raises(rgpu.NotFound, match="another one has its name"):
                    known()
            assert second.poll() is None and (await pool.session(second)).name == "again"
            with pytest.raises(rgpu.AlreadyExists):
                await pool.run(["true"], name="again", detach=True)
            with pytest.raises(rgpu.TimedOut):
                await second.wait(0.2)
            async for piece in second.follow():
                assert piece == b"two\n"
                second.signal(signal.SIGKILL)
            assert await second.wait(60) == 137 == second.poll() and await second.logs(tail=1) == b"two\n"
            assert rgpu.AsyncDetachedRun("again").status().reason == "its program was ended by SIGKILL"

    asyncio.run(main())


@pytest.mark.timeout(300)
def test_the_example_of_asyncio(local: LocalPool, tmp_path: Path) -> None:
    lines = example(local, tmp_path, 6)
    assert "['api-async-0', 'api-async-1']" in lines and lines[-1] == "exit codes [0, 0]"


@pytest.mark.timeout(300)
def test_asynchronous_answers_are_those_of_the_pool(local: LocalPool, api: rgpu.Pool) -> None:
    async def main() -> None:
        async with rgpu.AsyncPool(local.environment["RGPU_POOL"]) as pool:
            with pytest.raises(rgpu.NotFound):
                await pool.session("nobody")
            with pytest.raises(rgpu.Refused):
                await pool.run(["true"], memory="1TB", env=local.environment)
            assert [node.host for node in await pool.nodes()] == [node.host for node in api.nodes()]
            program = [sys.executable, "-c", INSIDE + "import time; time.sleep(600)"]
            run = await pool.run(program, name="async", host="node-a", env=local.environment, cwd=ROOT)
            events = pool.events()
            first = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
            while (await pool.session(run)).calls in (None, 0):
                await asyncio.sleep(0.2)
            told: list[str] = []
            move = await pool.migrate(run, "node-b", on_progress=lambda word: told.append(str(word.get("phase"))))
            assert (move.outcome, (await pool.session("async")).host) == ("committed", "node-b") and told
            assert (await first).when > 0
            await events.aclose()  # type: ignore[attr-defined]
            assert (await pool.checkpoint(run)).image
            with pytest.raises(rgpu.TimedOut):
                await run.wait(0.3)
            waiting = asyncio.ensure_future(run.wait())
            await asyncio.sleep(0.1)
            run.signal(signal.SIGKILL)
            assert await waiting == await run.wait() == 137
            past = [event async for event in pool.events(last=2000, follow=False) if event.session == "async"]
            assert {"create", "commit", "end"} <= {event.decision for event in past}, past

    asyncio.run(main())


@pytest.mark.timeout(240)
def test_a_start_that_is_cancelled_leaves_no_program(local: LocalPool, api: rgpu.Pool) -> None:
    """A cancelled start leaves nothing behind, at whichever stage it is cancelled."""
    unique = f"600.{os.getpid()}"

    async def start_and_cancel(pool: rgpu.AsyncPool, name: str, after: float) -> bool:
        starting = asyncio.ensure_future(pool.run(["sleep", unique], name=name, env=local.environment))
        await asyncio.sleep(after)
        starting.cancel()
        try:
            run = await starting
        except asyncio.CancelledError:
            return True
        run.signal(signal.SIGKILL)  # it had started by then: this machine is quick
        assert await run.wait() == 137
        return False

    async def main() -> list[bool]:
        async with rgpu.AsyncPool(local.environment["RGPU_POOL"]) as pool:
            return [await start_and_cancel(pool, f"cancelled-{stage}", 0.05 * stage) for stage in range(12)]

    cancelled = asyncio.run(main())
    assert cancelled[0], "nothing runs before the event loop was given a turn"
    eventually(lambda: all(row.state == "ended" for row in api.sessions(all=True) if row.name.startswith("cancelled-")))
    assert any(row.name.startswith("cancelled-") for row in api.sessions(all=True))
    eventually(lambda: not living(Path(unique)))  # neither the program nor what started it


@pytest.mark.timeout(240)
def test_each_process_of_a_run_finds_its_own_session(api: rgpu.Pool) -> None:
    child = INSIDE + "import rgpu; print(rgpu.current().name)"
    code = (INSIDE + "import rgpu, subprocess, sys; print(rgpu.current().name, flush=True)\n"
            f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
            "c = rgpu.current().checkpoint(); print(c.session, bool(c.image))\n")
    with api.run([sys.executable, "-c", code], name="twice", stdout=subprocess.PIPE, cwd=ROOT) as run:
        assert run.stdout is not None
        assert [str(line, "utf-8").strip() for line in run.stdout] == ["twice", "twice/2", "twice True"]
    assert run.wait() == 0 and api.sessions(all=True, labels={"no": "such"}) == []


@pytest.mark.timeout(240)
def test_a_handle(api: rgpu.Pool) -> None:
    said = "import signal, time; signal.signal(signal.SIGINT, lambda *a: exit(7)); print(1, flush=True); time.sleep(99)"
    run = api.run([sys.executable, "-c", said], name="handled", labels={"of": "api"}, stdout=subprocess.PIPE)
    assert run.name == "handled" and run.poll() is None and run.stdout is not None and run.stdout.readline() == b"1\n"
    assert [row.name for row in api.sessions(labels={"of": "api"})] == ["handled"]
    with pytest.raises(rgpu.TimedOut):
        run.wait(0.05)
    with pytest.raises(rgpu.AlreadyExists):
        api.run(["true"], name="handled")
    run.signal(signal.SIGINT)
    assert run.wait(30) == 7 == run.poll()
    with pytest.raises(rgpu.NotFound, match="has ended"):
        run.signal(signal.SIGTERM)
    run.stdout.close()
    (row,) = eventually(lambda: [row for row in api.sessions(all=True, labels={"of": "api"}) if row.ended])
    assert (row.state, row.exit_code) == ("ended", 7)
    with pytest.raises(AttributeError):
        row.state = "running"  # type: ignore[misc]
    assert "end" in [event.decision for event in api.events(last=200, follow=False) if event.session == "handled"]


@pytest.mark.timeout(240)
def test_kill_and_restore(api: rgpu.Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("STEPS", "20000"))
    run = api.run([sys.executable, str(tmp_path / "train.py")], name="back", stdout=subprocess.PIPE,
                   stderr=subprocess.DEVNULL)
    assert run.stdout is not None and run.stdout.readline()
    image = api.checkpoint("back")
    back = api.restore(image)
    assert back.session == "back" and back.position == image.position and back.epoch > image.epoch
    api.kill(run)
    run.stdout.close()
    assert run.wait(60) != 0
    with pytest.raises(rgpu.NotFound):
        api.checkpoint("nobody")


@pytest.mark.timeout(240)
def test_what_cannot_start_raises_and_leaves_nothing(api: rgpu.Pool, tmp_path: Path) -> None:
    for command, options, error in ((["no-such-program"], {}, rgpu.NotFound), ([str(tmp_path)], {}, rgpu.Refused),
                                    (["true"], {"host": "node-x"}, rgpu.NotFound), (["true"], {"memory": "x"},
                                    rgpu.UsageError), ([], {}, rgpu.UsageError), ("true", {}, rgpu.UsageError)):
        with pytest.raises(error):
            api.run(command, name="never", **options)  # type: ignore[arg-type]
    holders = [api.run(["sleep", "99"], name=f"holds-{host}", memory="8GiB", host=host)
               for host in ("node-a", "node-b")]
    with pytest.raises(rgpu.TimedOut):
        api.run(["touch", str(tmp_path / "ran")], name="waits", queue=True, timeout=4, stderr=subprocess.DEVNULL)
    assert eventually(lambda: all(row.name != "waits" for row in api.sessions())), "the request was withdrawn"
    for holder in holders:
        holder.signal(signal.SIGKILL)
        assert holder.wait(30) == 137
    assert not (tmp_path / "ran").exists()
    with pytest.raises(rgpu.NotFound, match="there is no pool"):
        rgpu.Pool(tmp_path)
