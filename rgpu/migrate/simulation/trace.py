"""Reader of recorded pools and task lists in CSV files; the input is not trusted.

Nodes: ``sn,cpu_milli,memory_mib,gpu,model``. Tasks: ``name,cpu_milli,memory_mib,num_gpu,gpu_milli``
(``gpu_milli`` is for each GPU, in thousandths, rounded up to 1 %), and optionally ``gpu_spec``:
models, separated by ``|``; without it any model will do. Further columns are ignored.

Lifetimes of tasks are used with churn only. They need ``creation_time`` and ``deletion_time``: a task
lived from ``scheduled_time``, where the list has that column, else from ``creation_time``, to
``deletion_time``; where that column exists and is empty, it never ran. These are the columns of the public
trace cluster-trace-gpu-v2023, some of whose lists have the first five only.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rgpu.migrate.scheduling.snapshot import WHOLE, Demand, Device, Node
from rgpu.session.errors import Corrupt, NotFound, RgpuError

MAX_ROWS = 1_000_000
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
TASK_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
TIME_COLUMNS = ("creation_time", "deletion_time")
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Task:
    """Recorded task: its demand and its lifetime in seconds (None: not known)."""

    demand: Demand
    life: float | None  #: seconds; None: it never ran, or lifetimes were not read


def read_nodes(path: Path) -> list[Node]:
    """Read the hosts of a list. Raises :class:`NotFound` or :class:`Corrupt` (detail: line)."""
    nodes = list(_rows(path, NODE_COLUMNS, _node))
    if len({node.host for node in nodes}) != len(nodes):
        raise Corrupt(f"{path}: a host is named twice", reason="duplicate")
    return nodes


def read_tasks(path: Path, lives: bool = True) -> list[Task]:
    """Read the tasks of a list; ``lives``: also how long each ran.

    Raises :class:`NotFound` or :class:`Corrupt` (detail: line).
    """
    if not lives:
        return list(_rows(path, TASK_COLUMNS, _task))
    return list(_rows(path, TASK_COLUMNS + TIME_COLUMNS, lambda row: _task(row, _life(row)),
                      dict.fromkeys(TIME_COLUMNS, "they tell how long tasks live, which a run with churn needs: take a "
                                                  "list that has them, or fill the pool without churn (--no-churn)")))


def _rows(path: Path, columns: tuple[str, ...], parse: Callable[[dict[str, str]], Row],
          needed_for: Mapping[str, str] = MappingProxyType({})) -> Iterator[Row]:
    line = 1
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                why = next((needed_for[column] for column in missing if column in needed_for), "")
                raise Corrupt(f"{path}: no column {', '.join(missing)}; it has {', '.join(reader.fieldnames or ())}"
                              + (f": {why}" if why else ""), line=1)
            for line, row in enumerate(reader, 2):
                if line > MAX_ROWS:
                    raise Corrupt(f"{path}: more than {MAX_ROWS} lines", line=line)
                yield parse(row)
        if line == 1:
            raise Corrupt(f"{path}: no rows", line=1)
    except FileNotFoundError:
        raise NotFound(f"no file {path}") from None
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None
    except Corrupt:
        raise
    except (ValueError, TypeError, csv.Error, RgpuError) as error:
        raise Corrupt(f"{path}: line {line}: {error}", line=line) from None


def _node(row: dict[str, str]) -> Node:
    count = _whole(row["gpu"], 64)
    devices = tuple(Device(f"cuda:{n}", 0) for n in range(count))
    return Node(row["sn"], devices, row["model"].strip(), _whole(row["cpu_milli"]), _whole(row["memory_mib"]))


def _task(row: dict[str, str], life: float | None = None) -> Task:
    gpus, milli = _whole(row["num_gpu"], 64), _whole(row["gpu_milli"] or "0", 1000)
    share = -(-milli * WHOLE // 1000)
    models = frozenset(part.strip() for part in (row.get("gpu_spec") or "").split("|") if part.strip())
    demand = Demand(gpus, share if gpus else 0, 0, models, _whole(row["cpu_milli"]), _whole(row["memory_mib"]))
    return Task(demand, life)


def _life(row: dict[str, str]) -> float | None:
    begun, ended = float(row["creation_time"]), float(row["deletion_time"] or row["creation_time"])
    if not (math.isfinite(begun) and math.isfinite(ended)) or ended < begun:
        raise ValueError(f"a task from {begun} to {ended}")
    if "scheduled_time" not in row:
        return ended - begun
    if not row["scheduled_time"]:
        return None
    started = float(row["scheduled_time"])
    if not math.isfinite(started) or ended < started:
        raise ValueError(f"a task that ran from {started} to {ended}")
    return ended - started


def _whole(text: str, most: int = 1 << 30) -> int:
    value = int(float(text))
    if not 0 <= value <= most:
        raise ValueError(f"{text} is not within 0 to {most}")
    return value
