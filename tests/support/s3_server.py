"""An S3 server of moto on loopback, and stores of every kind for tests."""

from __future__ import annotations

import itertools
import logging
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from moto.server import ThreadedMotoServer

BUCKET = "roller"
_numbers = itertools.count()


@dataclass(frozen=True)
class S3Server:
    """A server with one bucket."""

    endpoint: str

    @property
    def options(self) -> Mapping[str, str]:
        """Options of a store."""
        return {
            "endpoint": self.endpoint,
            "aws_region": "us-east-1",
            "aws_access_key_id": "id",
            "aws_secret_access_key": "secret",
            "allow_http": "true",
        }

    def location(self) -> str:
        """A new location of a store."""
        return f"s3://{BUCKET}/test/{next(_numbers)}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that runs until the block ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")) as response:
            assert response.status == 200
        yield S3Server(endpoint)
    finally:
        server.stop()
