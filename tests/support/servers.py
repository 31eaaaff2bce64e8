"""Servers of object storage for tests."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from lm.launch.spawn import reserve_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
ISOLATED = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "none",
    "AWS_SHARED_CREDENTIALS_FILE": "none",
}


@contextmanager
def serving(*command: str, port: int, **env: str) -> Iterator[str]:
    """The address of a server in a separate process."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=os.environ | env, stdout=quiet, stderr=quiet)
    try:
        for _ in range(6000):
            try:
                with closing(
                    http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                ) as connection:
                    connection.request("GET", "/")
                    connection.getresponse()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving_s3() -> Iterator[str]:
    """The address of a server that imitates S3."""
    port = reserve_port()
    moto = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with serving(*moto, port=port) as address:
        yield address


def use_s3(patch: pytest.MonkeyPatch, server: str, name: str) -> str:
    """Let this process and its children use the S3 at `server`; return a URL ending in `name`."""
    import boto3

    for variable, value in (CREDENTIALS | ISOLATED | {"AWS_ENDPOINT_URL": server}).items():
        patch.setenv(variable, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    return f"s3://bucket/{name}"
