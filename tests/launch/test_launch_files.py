"""Kubeflow and SkyPilot read the files of launch/ as meant; make installs where it may.

test_hosts.py starts what these say.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lm.config.reading import read_hyperparameters
from lm.errors import ConfigError
from lm.preflight import Job, preflight
from tests.support import REPOSITORY
from tests.support.hyperparameters import TINY
from tests.support.launch_files import Document, only_container, read_documents


def read_by_trainer(document: Document) -> Any:
    from kubeflow_trainer_api import models  # takes a second

    return getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict()


def mappings(value: Any) -> list[Document]:
    """Return all mappings inside of `value`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [
        *([value] if isinstance(value, dict) else []),
        *(found for item in inner for found in mappings(item)),
    ]


def test_kubeflow_models_know_every_field() -> None:
    """The models drop a field that they do not know, or refuse it."""
    for document in read_documents("trainjob.yaml"):
        assert read_by_trainer(document) == document
        for number, where in enumerate(mappings(document)):
            changed = copy.deepcopy(document)
            mappings(changed)[number]["unknown"] = {}
            with suppress(ValueError):
                assert read_by_trainer(changed) != changed, where


def test_grace_period_is_longer_than_a_save() -> None:
    runtime, job = read_documents("trainjob.yaml")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [(node["template"]["spec"]["template"], job["spec"]["trainer"]["env"])]
    for pod, env in pods:
        (timeout,) = (e["value"] for e in env if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        assert 30 < int(timeout) < pod["spec"]["terminationGracePeriodSeconds"]


def trainjob_failure_rule() -> Document:
    """The rule of the TrainJob's pods for a failure that no restart repairs."""
    runtime, _ = read_documents("trainjob.yaml")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (rule,) = node["template"]["spec"]["podFailurePolicy"]["rules"]
    return rule


def test_trainjob_fails_with_its_pods() -> None:
    """The exit code fails the Kubernetes Job, whose reason then fails the JobSet."""
    runtime, _ = read_documents("trainjob.yaml")
    rule = trainjob_failure_rule()
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["containerName"] == only_container(pod)["name"]
    assert pod["spec"]["restartPolicy"] == "Never", "or Kubernetes refuses a podFailurePolicy"
    (policy,) = runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"]
    assert policy["action"] == "FailJobSet"
    assert policy["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.slow
def test_trainjob_exit_code_after_a_bad_configuration(tmp_path: Path) -> None:
    _, job = read_documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    (tmp_path / "fsdp.py").symlink_to(REPOSITORY / "fsdp.py")
    (tmp_path / "config.yaml").write_text(json.dumps({"hyperparameters": TINY | {"lr": -1}}))
    env = {
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "1",
    }
    refused = subprocess.run(
        [*trainer["command"], *trainer["args"]],
        env=os.environ | env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert [refused.returncode] == trainjob_failure_rule()["onExitCodes"]["values"]
    assert "lr: -1" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("resume", ["fresh", "runs/other"])
def test_restart_when_stopped_needs_resume_auto(
    resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every restart would start over."""
    monkeypatch.setenv("RESTART_WHEN_STOPPED", "1")
    hp = read_hyperparameters({"hyperparameters": TINY | {"resume": resume}}, [], "test")
    nothing: Any = None
    with pytest.raises(ConfigError, match=f"^resume: {resume} .*RESTART_WHEN_STOPPED.* auto "):
        preflight(Job(hp, None, None), None, nothing, nothing)


SKYPILOT = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
assert resources.use_spot and resources.job_recovery, resources
"""


def test_skypilot_reads_sky_yaml(tmp_path: Path) -> None:
    command = shutil.which("sky")
    if command is None:
        pytest.skip("sky is not installed (pip install skypilot in a separate environment)")
    python = Path(command).read_text().partition("\n")[0].removeprefix("#!")
    env = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    subprocess.run(
        [python, "-c", SKYPILOT, str(REPOSITORY / "launch" / "sky.yaml")],
        env=env,
        cwd=REPOSITORY,
        check=True,
    )


@pytest.mark.parametrize(
    ("venv", "installs"), [("own", True), ("linked", False), ("another", False)]
)
def test_make_installs_only_into_a_venv_that_it_made(
    venv: str, installs: bool, tmp_path: Path
) -> None:
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt", "constraints.txt"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    bin_directory, variables = ".venv/bin", []
    if venv == "linked":
        (tmp_path / ".venv").symlink_to(tmp_path)
    if venv == "another":
        bin_directory, variables = "/other/bin", ["VENV=/other"]
    done = subprocess.run(
        ["make", "--dry-run", "train", "check", *variables],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("pip install" in done.stdout) is installs
    assert f"{bin_directory}/python -m lm.launch" in done.stdout
    assert f"{bin_directory}/ruff check" in done.stdout
