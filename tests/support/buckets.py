"""Object stores on this machine over HTTP: moto's S3 server, and a proxy that counts, delays and breaks requests."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["404", "500", "503", "reset", "reset after", "truncate", "slow"]

_COUNTING = threading.Lock()
_HOP = {"connection", "transfer-encoding", "keep-alive"}


def free_port() -> int:
    """A port on which nobody listens at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def server(*command: str, port: int) -> Iterator[str]:
    """Run a server process on the port until the end of the block. Yields the URL."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def s3_environment(url: str) -> Mapping[str, str]:
    """Environment variables that make boto's clients, such as s3fs, use this server."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass
class Request:
    """A request through a proxy: the bytes of its body and of its answer. ``part``: whether it uploads a part."""

    method: str
    path: str
    sent: int
    received: int = 0

    @property
    def part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.path


@dataclass
class Proxy:
    """A proxy with its own `url` in front of the server at `port`. `seen` has every request in order of arrival.

    latency: seconds before each answer. fault: the fault of a request, or None. before: runs before a request is
    forwarded; False drops the request. busy: number of requests in progress.
    """

    port: int
    latency: float = 0.0
    busy: int = 0
    fault: Callable[[Request], Fault | None] = lambda _: None
    before: Callable[[Request], bool] = lambda _: True
    seen: list[Request] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Proxy:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def sent(self) -> int:
        """Bytes that clients sent."""
        return sum(request.sent for request in self.seen)

    @property
    def received(self) -> int:
        """Bytes that clients received."""
        return sum(request.received for request in self.seen)


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do(self) -> None:
        body = self._body()
        request = Request(self.command, self.path, len(body))
        with _COUNTING:
            self.owner.seen.append(request)
            self.owner.busy += 1
        try:
            if self.owner.before(request):
                self._forward(request, body)
            else:
                self.close_connection = True
        finally:
            with _COUNTING:
                self.owner.busy -= 1

    def handle(self) -> None:
        # A killed client breaks its connection.
        with suppress(ConnectionError):
            super().handle()

    def _forward(self, request: Request, body: bytes) -> None:
        fault = self.owner.fault(request)
        time.sleep(self.owner.latency + (0.3 if fault == "slow" else 0.0))
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault in ("404", "500", "503"):
            code = b"NoSuchUpload" if fault == "404" else b"InternalError"
            self._answer(int(fault), {}, b"<Error><Code>" + code + b"</Code></Error>")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner.port, timeout=120)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault == "reset after":
            self.close_connection = True
            return
        request.received = len(data)
        self._answer(answer.status, dict(answer.getheaders()), data, cut=fault == "truncate")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, headers: Mapping[str, str], data: bytes, *, cut: bool = False) -> None:
        with suppress(OSError):
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {*_HOP, "content-length", "server", "date"}:
                    self.send_header(name, value)
            length = (
                headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
            )
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True


def kill_at(request: int, pid: Callable[[], int]) -> Callable[[Request], bool]:
    """Kill a process when its n-th request arrives, counted from 1. Drops this request and all later ones."""
    count = 0
    lock = threading.Lock()

    def before(_: Request) -> bool:
        nonlocal count
        with lock:
            count += 1
            if count == request:
                with suppress(ProcessLookupError):
                    os.kill(pid(), 9)
            return count < request

    return before
