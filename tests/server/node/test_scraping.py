"""The metrics port of a real node with TLS and a token, asked by a real client."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rgpu.session.errors import AuthenticationFailed, NotFound, UsageError
from tests.support.eventually import eventually

ROOT = Path(__file__).resolve().parents[3]


def write_certificate(cert: Path, key: Path, name: str = "metrics.test") -> None:
    """A self-signed certificate for 127.0.0.1, and its key (mode 0600)."""
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(private.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .sign(private, hashes.SHA256()))
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                serialization.NoEncryption())
    for path, data in ((key, pem), (cert, made.public_bytes(serialization.Encoding.PEM))):
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(data)
        fresh.chmod(0o600)
        os.replace(fresh, path)


@dataclass
class Node:
    """A daemon whose metrics have TLS and a token, and the files that it was given."""

    folder: Path
    cert: Path
    key: Path
    token: Path
    port: int = 0

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rgpu.cli.main", "server", "--host", "one", "--pool", str(self.folder / "pool"),
                "--metrics", "127.0.0.1:0", "--metrics-cert", str(self.cert), "--metrics-key", str(self.key),
                "--metrics-token-file", str(self.token)]

    def scrape(self, token: str | None = None, trust: Path | None = None) -> str:
        """Ask over HTTPS, the certificate verified."""
        context = ssl.create_default_context(cafile=str(trust or self.cert))
        headers = {"Authorization": token} if token is not None else {}
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return str(answer.read().decode())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RGPU_CONFIG": "", "RGPU_SPARES": "0"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("scraped")
    made = Node(folder, folder / "cert.pem", folder / "key.pem", folder / "token")
    write_certificate(made.cert, made.key)
    made.token.write_text(secrets.token_hex(32) + "\n")
    made.token.chmod(0o600)
    init = [sys.executable, "-m", "rgpu.cli.main", "keys", "init", "--pool", str(folder / "pool")]
    subprocess.run(init, env=environment(), cwd=ROOT, check=True, capture_output=True, timeout=60)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(made.command(), env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=log)
    state = folder / "pool" / "nodes" / "one" / "server.json"
    try:
        eventually(lambda: process.poll() is not None or state.exists() and json.loads(state.read_bytes())["ready"])
        assert process.poll() is None, (folder / "log").read_text()
        made.port = json.loads(state.read_bytes())["metrics"]
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_with_certificate_and_token(node: Node) -> None:
    assert "rgpu_node_in_time 1.0" in node.scrape(f"Bearer {node.token.read_text().strip()}")


@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer ", "Bearer wrong-token-wrong-token", "Basic {token}",
                                   "{token}", "Bearer {token}x", "Bearer \u00e9"])
def test_without_the_token(node: Node, shown: str | None) -> None:
    token = node.token.read_text().strip()
    with pytest.raises(urllib.error.HTTPError) as refused:
        node.scrape(shown if shown is None else shown.format(token=token))
    assert refused.value.code == 401 and refused.value.headers["WWW-Authenticate"].startswith("Bearer")
    body = refused.value.read().decode()
    assert "rgpu_" not in body and token not in body


def test_plain_http_is_refused(node: Node) -> None:
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as plain:
        token = node.token.read_text().strip()
        plain.sendall(f"GET /metrics HTTP/1.0\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        got = b""
        try:
            while part := plain.recv(4096):
                got += part
        except ConnectionError:
            pass
    assert b"HTTP/" not in got and b"rgpu_" not in got


def test_a_peer_that_says_nothing_holds_nobody_up(node: Node) -> None:
    with socket.create_connection(("127.0.0.1", node.port), timeout=10):
        began = time.monotonic()
        node.scrape(f"Bearer {node.token.read_text().strip()}")
        assert time.monotonic() - began < 4.0  # the silent one is given 5 s


def test_renewed_files_are_read_and_bad_ones_leave_the_last(node: Node, tmp_path: Path) -> None:
    old_cert, old_token = tmp_path / "old.pem", node.token.read_text().strip()
    old_cert.write_bytes(node.cert.read_bytes())
    node.token.write_text("short")
    node.cert.write_bytes(b"no certificate")
    assert "rgpu_leader" in node.scrape(f"Bearer {old_token}", trust=old_cert)
    assert b"still in force" in (node.folder / "log").read_bytes()
    write_certificate(node.cert, node.key)
    node.token.write_text("a-new-token-a-new-token\n")
    with pytest.raises(urllib.error.URLError):  # the certificate is another one
        node.scrape("Bearer a-new-token-a-new-token", trust=old_cert)
    assert "rgpu_leader" in node.scrape("Bearer a-new-token-a-new-token")
    with pytest.raises(urllib.error.HTTPError):
        node.scrape(f"Bearer {old_token}")


@pytest.mark.parametrize(("change", "error", "why"), [
    ("no key", UsageError, "belong together"), ("no metrics", UsageError, "need --metrics"),
    ("open key", AuthenticationFailed, "can be read by others"), ("open token", AuthenticationFailed, "by others"),
    ("short token", UsageError, "holds no token"), ("other key", UsageError, "cannot be used"),
    ("no certificate", UsageError, "cannot be used"), ("no token", NotFound, "does not exist")])
def test_a_node_does_not_start_with_files_that_protect_nothing(change: str, error: type[UsageError], why: str,
                                                               tmp_path: Path) -> None:
    made = Node(tmp_path, tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token")
    write_certificate(made.cert, made.key)
    made.token.write_text(secrets.token_hex(32))
    made.token.chmod(0o600)
    command = made.command()
    if change == "no key":
        command = [word for word in command if word not in ("--metrics-key", str(made.key))]
    elif change == "no metrics":
        command = [word for word in command if word not in ("--metrics", "127.0.0.1:0")]
    elif change.startswith("open"):
        (made.key if "key" in change else made.token).chmod(0o644)
    elif change == "short token":
        made.token.write_text("0123")
    elif change == "other key":
        write_certificate(tmp_path / "other.pem", made.key)
    elif change == "no certificate":
        made.cert.unlink()
    else:
        made.token.unlink()
    init = [sys.executable, "-m", "rgpu.cli.main", "keys", "init", "--pool", str(tmp_path / "pool")]
    subprocess.run(init, env=environment(), cwd=ROOT, check=True, capture_output=True, timeout=60)
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == error.exit_code and why in done.stderr, done.stderr
