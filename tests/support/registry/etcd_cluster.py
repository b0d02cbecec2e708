"""A real etcd for tests: members on loopback, each a process with data of its own, killed and paused at will."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from rgpu.migrate.registry.etcd import rpc as etcd_rpc
from tests.support.pools.proxy import free_port

#: Debian puts it into /usr/bin.
BINARY = shutil.which("etcd")

needs_etcd = pytest.mark.skipif(
    BINARY is None, reason="no etcd on this machine: install Debian's etcd-server (apt-get install etcd-server; "
                           "`make setup` does it where it may)")


@dataclass
class Tls:
    """Files of a test's own authority."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, name: str = "localhost") -> Tls:
        """An authority and one certificate for ``name`` and 127.0.0.1, of it."""
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        (folder / "ext").write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")

        def openssl(*arguments: object) -> None:
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=folder)

        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", made.ca, "-days", 2, "-subj", "/CN=test authority")
        openssl("req", *curve, "-keyout", made.key, "-out", "csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", "csr", "-CA", made.ca, "-CAkey", "ca.key", "-CAcreateserial", "-days", 2,
                "-extfile", "ext", "-out", made.cert)
        made.key.chmod(0o600)
        return made


@dataclass
class Member:
    name: str
    client: int
    peer: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    host: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.client}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Every thread of it stands still when this returns."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks, until = Path(f"/proc/{self.process.pid}/task"), time.monotonic() + 10
        while any(path.read_text().rpartition(")")[2].split()[0] not in "TZ" for path in tasks.glob("*/stat")):
            assert time.monotonic() < until, "a stopped process runs on"
            time.sleep(0.001)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


@dataclass
class EtcdCluster:
    """Use as a context manager. ``arguments``: more options of etcd; ``host``: the address that members listen at."""

    folder: Path
    size: int = 1
    tls: Tls | None = None
    arguments: tuple[str, ...] = ()
    members: list[Member] = field(default_factory=list)
    host: str = "127.0.0.1"
    fsync: bool = False  #: members are killed here, never the machine: the page cache is enough

    def __enter__(self) -> EtcdCluster:
        for index in range(self.size):
            self.members.append(Member(f"m{index}", free_port(self.host), free_port(self.host),
                                       self.folder / f"m{index}", host=self.host))
        for member in self.members:
            self.start(member)
        self.wait_ready()
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.kill()

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def start(self, member: Member) -> None:
        """Start, or start again with the data it has."""
        member.folder.mkdir(parents=True, exist_ok=True)
        cluster = ",".join(f"{m.name}={self.scheme}://{m.host}:{m.peer}" for m in self.members)
        urls = f"{self.scheme}://{member.endpoint}"
        peer = f"{self.scheme}://{member.host}:{member.peer}"
        secure = []
        if self.tls:
            for kind in ("", "peer-"):
                secure += [f"--{kind}cert-file", str(self.tls.cert), f"--{kind}key-file", str(self.tls.key),
                           f"--{kind}trusted-ca-file", str(self.tls.ca), f"--{kind}client-cert-auth"]
        with open(member.folder / "log", "ab") as log:
            member.process = subprocess.Popen(
                [str(BINARY), "--name", member.name, "--data-dir", str(member.folder / "data"),
                 "--listen-client-urls", urls, "--advertise-client-urls", urls,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
                 *secure, *([] if self.fsync else ["--unsafe-no-fsync"]), *self.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")})

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Until every running member knows a leader."""
        until = time.monotonic() + seconds
        for member in self.members:
            while member.process is not None:
                with contextlib.suppress(grpc.RpcError):
                    if self.status(member).leader:
                        break
                if member.process.poll() is not None or time.monotonic() > until:
                    raise AssertionError(f"etcd {member.name} is not ready:\n"
                                         + (member.folder / "log").read_text(errors="replace")[-3000:])
                time.sleep(0.05)

    # -- asking a member ------------------------------------------------------------
    def ask(self, member: Member, method: str, message: Any, token: str = "", seconds: float = 5.0) -> Any:
        """One request to one member, past everything that is tested. Raises :class:`grpc.RpcError`."""
        credentials = None
        if self.tls:
            credentials = grpc.ssl_channel_credentials(self.tls.ca.read_bytes(), self.tls.key.read_bytes(),
                                                       self.tls.cert.read_bytes())
        with (grpc.secure_channel(member.endpoint, credentials) if credentials
              else grpc.insecure_channel(member.endpoint)) as channel:
            metadata = (("token", token),) if token else ()
            return etcd_rpc.load().method(channel, method)(message, timeout=seconds, metadata=metadata)

    def status(self, member: Member) -> Any:
        return self.ask(member, "Maintenance.Status", etcd_rpc.load().StatusRequest(), seconds=1.0)

    def leader(self, seconds: float = 30.0) -> Member:
        """Whoever leads; an election under way is waited for."""
        until = time.monotonic() + seconds
        while True:
            for member in self.members:
                if member.process is not None:
                    with contextlib.suppress(grpc.RpcError):
                        status = self.status(member)
                        if status.leader == status.header.member_id:
                            return member
            assert time.monotonic() < until, "no leader"
            time.sleep(0.1)

    def followers(self) -> list[Member]:
        leader = self.leader()
        return [member for member in self.members if member is not leader and member.process is not None]

    def authentication(self, user: str, password: str, prefix: str) -> None:
        """A root, and a user who may touch what is below ``prefix`` only; then authentication on."""
        rpc, first = etcd_rpc.load(), self.members[0]
        self.ask(first, "Auth.UserAdd", rpc.AuthUserAddRequest(name="root", password="root-password"))
        self.ask(first, "Auth.RoleAdd", rpc.AuthRoleAddRequest(name="root"))
        self.ask(first, "Auth.UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        self.ask(first, "Auth.UserAdd", rpc.AuthUserAddRequest(name=user, password=password))
        self.ask(first, "Auth.RoleAdd", rpc.AuthRoleAddRequest(name="pool"))
        permission = rpc.Permission if hasattr(rpc, "Permission") else None
        assert permission is not None
        self.ask(first, "Auth.RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(
            name="pool", perm=permission(permType=permission.READWRITE, key=f"{prefix}/".encode(),
                                         range_end=f"{prefix}0".encode())))
        self.ask(first, "Auth.UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role="pool"))
        self.ask(first, "Auth.AuthEnable", rpc.AuthEnableRequest())

    # -- addresses -------------------------------------------------------------------
    def address(self, prefix: str, *, members: list[Member] | None = None, **options: object) -> str:
        """``etcd://…`` with the options given (``password_file`` for password-file)."""
        if self.tls:
            options = {"ca": self.tls.ca, "cert": self.tls.cert, "key": self.tls.key, **options}
        query = "&".join(f"{name.replace('_', '-')}={value}" for name, value in options.items())
        endpoints = ",".join(member.endpoint for member in members or self.members)
        return f"etcd://{endpoints}/{prefix}" + (f"?{query}" if query else "")
