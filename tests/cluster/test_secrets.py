"""Storage credentials in an experiment's config are not written anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.cluster import trial
from tests.cluster.master import Master

moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")
UNAVAILABLE = trial.unavailable_reason()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

BUCKET = "checkpoints"
KEY, SECRET = "storage-access-key", "storage-secret-key"


class S3Master(Master):
    """A master whose checkpoint storage is an S3 bucket."""

    bucket: Any

    def files(self, checkpoint: str) -> dict[str, int]:
        found = self.bucket.objects.filter(Prefix=f"{checkpoint}/")
        return {item.key.partition("/")[2]: item.size for item in found if not item.key.endswith("/")}


@pytest.mark.slow
def test_storage_credentials_are_not_in_checkpoints_tensorboard_files_or_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    s3: Any = boto3.resource(
        "s3", endpoint_url=f"http://{host}:{port}", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    bucket = s3.Bucket(BUCKET)
    bucket.create()
    master = S3Master(tmp_path)
    master.bucket = bucket
    config = trial.experiment(max_steps=6)
    storage = {"type": "s3", "bucket": BUCKET, "access_key": KEY, "secret_key": SECRET}
    config["checkpoint_storage"] = storage | {"endpoint_url": f"http://{host}:{port}"}
    trial.submit(master, config, tmp_path / "cli")
    done = trial.run(master, folder=tmp_path)
    try:
        assert done.process.returncode == 0, done.log
        assert master.refused == []
        stored = {item.key: item.get()["Body"].read() for item in bucket.objects.all()}
    finally:
        master.close()
        server.stop()
    assert any(key.endswith("/manifest.json") for key in stored)
    assert any("tensorboard" in key and "tfevents" in key for key in stored)
    for secret in (KEY, SECRET, done.allocation.token):
        assert not [key for key, content in stored.items() if secret.encode() in content]
        assert secret not in done.log
