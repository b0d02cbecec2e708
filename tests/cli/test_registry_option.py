"""``--registry``: where it comes from, and what is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.pools import server
from rgpu.link.keys import PoolFiles
from rgpu.server.node import belonging
from rgpu.session.errors import Refused, UsageError

ADDRESS = "etcd://a:2379,b:2379/pool"


def test_option_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'registry = "{ADDRESS}-of-file"\n')
    environment = {"RGPU_CONFIG": str(file)}
    assert common.registry_address(Settings({}, environment)) == f"{ADDRESS}-of-file"
    environment["RGPU_REGISTRY"] = f"{ADDRESS}-of-environment"
    assert common.registry_address(Settings({}, environment)) == f"{ADDRESS}-of-environment"
    assert common.registry_address(Settings({"registry": ADDRESS}, environment)) == ADDRESS
    assert common.registry_address(Settings({"registry": "embedded"}, environment)) == ""
    assert common.registry_address(Settings({}, {"RGPU_CONFIG": "", "XDG_CONFIG_HOME": str(tmp_path)})) == ""


@pytest.mark.parametrize(("address", "error"), [
    ("etcd:", UsageError), ("postgres://a", UsageError), ("etcd://a?user=u&password-file=/p", Refused)])
def test_wrong_ones_are_refused(address: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        common.registry_address(Settings({"registry": address}, {"RGPU_CONFIG": ""}))


def test_the_daemon_does_not_start_with_a_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text("{}")
    result = CliRunner().invoke(server.command, ["--host", "a", "--pool", str(tmp_path), "--registry", "etcd://a:0"])
    assert result.exit_code == UsageError.exit_code
    assert not (tmp_path / "nodes").exists()


def test_a_node_that_is_started_otherwise_than_before_says_which_pool_it_belongs_to(tmp_path: Path) -> None:
    """No second pool is made of its folder: nothing is opened, or written."""
    files = PoolFiles(tmp_path / "pool")
    pool = files.create()
    files.add_node("node-a")
    belonging.remember(files, belonging.look(files, "node-a"), ADDRESS, "data-1")
    before = sorted(path for path in files.root.rglob("*"))
    verb = ("server", "--host", "node-a", "--registry", "embedded")
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", *verb], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "RGPU_POOL": str(files.root), "RGPU_CONFIG": ""})
    assert done.returncode == Refused.exit_code, done.stderr
    assert f"node-a belongs to pool {pool.id}, whose registry is {ADDRESS}" in done.stderr
    assert sorted(path for path in files.root.rglob("*")) == before
