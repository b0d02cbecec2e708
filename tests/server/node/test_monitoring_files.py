"""The dashboard and the alert rules of the documentation ask for metrics and labels that daemons export."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from rgpu.server.node.metrics import SPECS
from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool

FOLDER = ROOT / "docs" / "operators" / "monitoring"
NAME = re.compile(r"\brgpu_[a-z_]+")
ALWAYS = {"job", "instance", "le"}  #: labels that Prometheus gives


def alerts() -> list[dict[str, Any]]:
    found = yaml.safe_load((FOLDER / "rgpu-alerts.yaml").read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def targets() -> list[dict[str, Any]]:
    board = json.loads((FOLDER / "rgpu-dashboard.json").read_text())
    return [target for panel in board["panels"] for target in panel.get("targets", [])]


def expressions() -> dict[str, str]:
    """What is asked for, by who asks."""
    board = json.loads((FOLDER / "rgpu-dashboard.json").read_text())
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    found |= {f"{panel['title']} {target['refId']}": target["expr"] for panel in board["panels"]
              for target in panel.get("targets", [])}
    return found | {"variable job": board["templating"]["list"][1]["definition"]}


def base(name: str) -> str:
    """The metric of a series."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in SPECS and SPECS[stem].kind == "histogram" else name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kind of each metric that a real daemon, which leads, answers a scrape with."""
    with LocalPool(tmp_path_factory.mktemp("metrics"), nodes=1) as pool:
        environment = {**pool.environment, "RGPU_POOL": str(pool.folder / "other")}
        subprocess.run([sys.executable, "-m", "rgpu.cli.main", "keys", "init"], env=environment, check=True, timeout=60,
                       stdout=subprocess.DEVNULL)
        server = subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "server", "--host", "one", "--metrics",
                                   "127.0.0.1:0"], env=environment, stderr=subprocess.DEVNULL)
        try:
            state = Path(environment["RGPU_POOL"], "nodes", "one", "server.json")
            port = eventually(lambda: state.exists() and json.loads(state.read_text()).get("metrics"))

            def scraped() -> str:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                    text = str(answer.read().decode())
                return text if "\nrgpu_leader 1.0" in text and "rgpu_pool_nodes{" in text else ""

            text = eventually(scraped, "it does not lead")
        finally:
            server.terminate()
            server.wait(30)
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def test_what_is_asked_for_is_exported(exported: dict[str, str]) -> None:
    for who, text in expressions().items():
        names = NAME.findall(text) or (["up"] if text.startswith("up{") else [])
        assert names, f"{who} asks for nothing of rgpu: {text}"
        for name in names:
            if name != "up":
                assert exported.get(base(name)) == SPECS[base(name)].kind, f"{who}: no daemon exports {name}"


def test_counters_are_asked_for_as_rates_and_gauges_are_not() -> None:
    for who, text in expressions().items():
        for name in NAME.findall(text):
            rated = bool(re.search(rf"(rate|increase)\({name}[^a-z_]", text))
            assert rated == (SPECS[base(name)].kind != "gauge"), f"{who}: {text}"
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}"), f"{who}: {text}"


def test_labels_are_those_of_the_metrics() -> None:
    spoken = {rule["alert"]: (rule["expr"], re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
              for rule in alerts()}
    spoken |= {f"{number} {target['expr']}": (target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
               for number, target in enumerate(targets())}
    for who, (text, labels) in spoken.items():
        known = ALWAYS.union(*(SPECS[base(name)].labels for name in NAME.findall(text)))
        kept = [set(re.split(r",\s*", by)) for by in re.findall(r"by \(([^)]*)\)", text)]
        for by in kept:
            assert by <= known, f"{who}: {by - known}"
        left = set.intersection(*kept) - {"le"} if kept else set() if re.match(r"(sum|max)\(", text) else known
        assert set(labels) <= left, f"{who}: {set(labels) - left} is not in what is left: {text}"
        assert set(re.findall(r"[{,](\w+)(?:=|!=|=~)\"", text)) <= known, who


def test_alerts_say_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["action"], rule["alert"]


def test_panels_do_not_lie_over_each_other() -> None:
    board = json.loads((FOLDER / "rgpu-dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
