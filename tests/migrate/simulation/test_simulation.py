"""The simulator: hostile CSV, the same seed the same run, nothing held when all have left, the verb's output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rgpu.cli.command_line import cli
from rgpu.migrate.simulation import arrivals, trace
from rgpu.migrate.simulation.run import Options, Run
from rgpu.session.errors import Corrupt, NotFound, UsageError

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{i},64000,100000,4,{'AB'[i % 2]}\n" for i in range(6))
HEAD = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
TASKS = HEAD + "a,1000,10,1,500,,0,900\nb,1000,10,1,1000,A|B,5,4000\nc,1000,10,2,1000,,7,1800\nd,1000,10,1,305,,9,700\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "tasks.csv").write_text(TASKS)
    return tmp_path / "nodes.csv", tmp_path / "tasks.csv"


def test_reads_the_columns(files: tuple[Path, Path]) -> None:
    hosts, tasks = trace.read_nodes(files[0]), trace.read_tasks(files[1])
    assert len(hosts) == 6 and len(hosts[0].devices) == 4
    assert tasks[1].demand.models == {"A", "B"} and tasks[1].life == 3995
    assert tasks[3].demand.compute == 31, "a share is rounded up to 1 %"


def test_a_task_lives_from_its_start_and_one_that_never_ran_does_not_churn(tmp_path: Path) -> None:
    head = HEAD.replace("\n", ",scheduled_time\n")
    (tmp_path / "t.csv").write_text(head + "a,1,1,1,500,,0,900,100\nb,1,1,1,250,,0,900,\n")
    tasks = trace.read_tasks(tmp_path / "t.csv")
    assert [task.life for task in tasks] == [800, None]
    assert {a.request.demand.compute for a in arrivals.churn(tasks, 8, 0.9, 0, 3600)} == {50}
    assert {a.request.demand.compute for a in arrivals.filling(tasks, 8, 0.9, 0)} == {50, 25}
    (tmp_path / "t.csv").write_text(head + "a,1,1,1,500,,0,900,901\n")
    with pytest.raises(Corrupt, match="ran from 901"):
        trace.read_tasks(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text(head + "b,1,1,1,250,,0,900,\n")
    with pytest.raises(UsageError):
        arrivals.churn(trace.read_tasks(tmp_path / "t.csv"), 8, 0.9, 0, 3600)


def test_a_pool_is_filled_with_each_task_once_and_then_at_random(files: tuple[Path, Path]) -> None:
    tasks = trace.read_tasks(files[1])
    filled = arrivals.filling(tasks, 24, 1.0, 1)
    assert sorted(str(a.request.demand) for a in filled[:4]) == sorted(str(task.demand) for task in tasks)
    assert sum(a.request.demand.gpu_share for a in filled) >= 24 and filled != arrivals.filling(tasks, 24, 1.0, 2)


@pytest.mark.parametrize("text", ["", HEAD, HEAD + "a,x,1,1,1,,0,1\n", HEAD + "a,1,1,1,1001,,0,1\n",
                                  HEAD + "a,1,1,1,1,,5,1\n", HEAD + "a,1,1,1,1,,nan,1\n", HEAD + "a,1\n", "\xff"])
def test_broken_lists_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text, encoding="latin-1")
    with pytest.raises(Corrupt):
        trace.read_tasks(tmp_path / "t.csv")


def test_a_list_of_five_columns_fills_a_pool_and_says_what_churn_lacks(files: tuple[Path, Path]) -> None:
    """As the trace's lists of several GPUs are: no models, no times."""
    files[1].write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1000,10,1,500\nb,1000,10,2,1000\nc,1000,10,0,0\n")
    tasks = trace.read_tasks(files[1], lives=False)
    assert [(task.demand.gpus, task.demand.compute, task.demand.models, task.life) for task in tasks] == [
        (1, 50, frozenset(), None), (2, 100, frozenset(), None), (0, 0, frozenset(), None)]
    names = ["simulate", "--nodes", str(files[0]), "--tasks", str(files[1]), "--seeds", "1", "-o", "json"]
    done = CliRunner().invoke(cli, [*names, "--load", "0.5", "--no-churn"])
    assert done.exit_code == 0, done.output
    refused = CliRunner().invoke(cli, [*names, "--load", "0.5"])
    assert refused.exit_code and not isinstance(refused.exception, KeyError)
    for said in ("tasks.csv", "creation_time, deletion_time", "it has name, cpu_milli", "--no-churn"):
        assert said in " ".join(refused.output.split()), refused.output


def test_a_missing_list_and_one_without_gpus(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        trace.read_nodes(tmp_path / "none.csv")
    (tmp_path / "t.csv").write_text(HEAD + "a,1,1,0,0,,0,1\n")
    with pytest.raises(UsageError):
        arrivals.filling(trace.read_tasks(tmp_path / "t.csv"), 8, 1.0, 0)


@pytest.mark.parametrize("policy", ["random", "best-fit", "packing", "fgd"])
@pytest.mark.parametrize("rebalance", [False, True])
def test_a_run_gives_back_what_it_took(files: tuple[Path, Path], policy: str, rebalance: bool) -> None:
    hosts, tasks = trace.read_nodes(files[0]), trace.read_tasks(files[1])
    runs = []
    for _ in range(2):
        run = Run(hosts, tasks, arrivals.churn(tasks, 24, 0.9, 3, 7200), Options(policy, rebalance, 3))
        result = run.go()
        assert all(0 <= sample.allocated <= 1 for sample in result.samples)
        runs.append((result.samples, result.refused, result.moves))
        run._until(1e12)  # everything ends, every move is over, and room that was made is used
        run._until(1e12)
        assert not run.sessions and not run.leaving and not run.coming
        assert run.index.allocated() == 0 and (run.index.cpu == run.index.total_cpu).all()
    assert runs[0] == runs[1], "the same seed, another run"


@pytest.mark.parametrize("rebalance", [False, True])
def test_tasks_of_several_gpus_go_over_hosts_whole_or_not_at_all(files: tuple[Path, Path], rebalance: bool) -> None:
    files[1].write_text(HEAD + "a,8000,4000,6,1000,,0,900\nb,1000,10,3,1000,A,5,4000\nc,1000,10,1,500,,7,1800\n")
    hosts, tasks = trace.read_nodes(files[0]), trace.read_tasks(files[1])
    filled = arrivals.churn(tasks, 24, 0.9, 3, 7200)
    alone, spread = (Run(hosts, tasks, filled, Options("fgd", rebalance, 3, gangs=gangs)) for gangs in (False, True))
    assert alone.go().spread == 0 and spread.go().spread > 0
    assert alone.result.refused > spread.result.refused, "no host has six devices"
    for name, placed in spread.sessions.items():
        if placed.pinned:
            task = name.rpartition(".")[0]
            whole = [one for other, one in spread.sessions.items() if other.rpartition(".")[0] == task]
            assert sum(one.demand.gpus for one in whole) in (3, 6) and len({one.host for one in whole}) == len(whole)
            assert sum(one.demand.cpu_milli for one in whole) in (1000, 1001, 1002, 8000, 8001, 8002)
    spread._until(1e12)
    spread._until(1e12)
    assert not spread.sessions and spread.index.allocated() == 0
    assert (spread.index.cpu == spread.index.total_cpu).all()


def test_the_verb(files: tuple[Path, Path]) -> None:
    words = ["simulate", "--nodes", str(files[0]), "--tasks", str(files[1]), "--seeds", "2", "-o", "json"]
    answer = CliRunner().invoke(cli, words)
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    assert len(report["seeds"]) == 2
    for figures in (*report["seeds"], report["mean"]):
        assert {"allocated_share", "fragmented_gpus", "refused", "moves", "decision_us"} <= figures.keys()
    assert report["mean"]["allocated_share"] > 0.9
    assert CliRunner().invoke(cli, [*words, "--policy", "none"]).exit_code == 2
    over = json.loads(CliRunner().invoke(cli, [*words, "--gangs"]).stdout)
    assert over["gangs"] and not report["gangs"] and report["mean"]["spread"] == 0 and "spread" in over["mean"]
