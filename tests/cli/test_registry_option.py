"""``--registry``: where it comes from, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.pools import server
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
