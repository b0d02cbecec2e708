"""An S3 server on loopback (moto), as a process of its own; and a proxy-free way to break it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from types import TracebackType

from tests.support.pools.proxy import free_port

SCRIPT = "import sys; from moto.server import main; main(sys.argv[1:])"


class MotoServer:
    """``endpoint``: http://127.0.0.1:PORT. Use as a context manager."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MotoServer:
        self._process = subprocess.Popen([sys.executable, "-c", SCRIPT, "-H", "127.0.0.1", "-p", str(self.port)],
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/moto-api/data.json", timeout=5):
                    return self
            except OSError:
                assert self._process.poll() is None, "moto's server ended at once"
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.1)

    def bucket(self, name: str) -> str:
        """Make a bucket; returns its store address."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT", headers={
            "Host": f"127.0.0.1:{self.port}", "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3"
            "/aws4_request, SignedHeaders=host, Signature=0"})
        with urllib.request.urlopen(request, timeout=10):
            pass
        return f"s3://{name}/here?endpoint={self.endpoint}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
