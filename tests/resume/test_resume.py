"""A run resumes bit for bit with the same world size, and on the same samples with any other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.multiprocessing import ProcessExitedException

from lm import sampling, strict_yaml
from lm.checkpoint.manifest import Manifest, read_manifest
from lm.checkpoint.store import LocalCheckpoints
from lm.data.loader import Loader, MicroBatch, PairBatch
from lm.errors import ConfigError
from lm.resume import require_same_run
from lm.runtime.world import World
from lm.tasks.scoring import Scorer
from tests.support import PATIENCE
from tests.support.checkpoints import RUN_INFO, copy_with_hyperparameters
from tests.support.hyperparameters import EXACT_RUN
from tests.support.ranks import run_ranks
from tests.support.runs import (
    EXACT_METRICS,
    checkpoints_by_step,
    read_exact_metrics,
    read_reports,
    run_fsdp,
    start_fsdp,
    train_in_world,
)

RUN = EXACT_RUN | {"total_batch_size": 6, "checkpoint_rate": 5, "max_steps": 10}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten uninterrupted steps on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    run_fsdp(folder, ranks=2, config=RUN, code=0)
    assert sorted(checkpoints_by_step(folder)) == [5, 10]
    return folder


def test_resume_after_five_steps_equals_ten_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=5", ranks=2, config=RUN, code=0)
    second = run_fsdp(tmp_path, ranks=2, config=RUN, code=0)
    assert "resumed from checkpoint" in second.stdout
    assert read_exact_metrics(tmp_path) == read_exact_metrics(reference)
    assert read_exact_metrics(tmp_path, "validation") == read_exact_metrics(reference, "validation")
    found = read_manifest(checkpoints_by_step(tmp_path)[10])
    assert found.files == read_manifest(checkpoints_by_step(reference)[10]).files  # with checksums


@pytest.mark.slow
def test_stop_at_step_keeps_the_schedule_of_all_steps(tmp_path: Path) -> None:
    decaying = RUN | {"lr_schedule": "cosine"}
    run_fsdp(tmp_path / "whole", code=0, config=decaying)
    parts = tmp_path / "parts"
    for _ in range(2):  # the second start is already there
        result = run_fsdp(
            parts, "stop_at_step=3", code=0, config=decaying, RESTART_WHEN_STOPPED="1"
        )
        assert "stopped after step 3/10 as stop_at_step is 3" in result.stdout
        assert list(checkpoints_by_step(parts)) == [3]
    (config,) = parts.glob("runs/*/config.yaml")
    assert strict_yaml.load_experiment(config)[0]["hyperparameters"]["stop_at_step"] is None
    run_fsdp(parts, code=0, config=decaying)
    for group in ("training", "validation"):
        assert read_exact_metrics(parts, group) == read_exact_metrics(tmp_path / "whole", group)


@pytest.mark.slow
def test_resume_with_another_world_size(tmp_path: Path) -> None:
    quiet = RUN | {"dropout": 0.0}
    run_fsdp(tmp_path / "2", ranks=2, config=quiet, code=0)
    expected = read_reports(tmp_path / "2")
    source = checkpoints_by_step(tmp_path / "2")[5]
    for ranks in (1, 3):
        run_fsdp(tmp_path / f"{ranks}", f"resume={source}", ranks=ranks, config=quiet, code=0)
        found = read_reports(tmp_path / f"{ranks}")
        assert sorted(found) == [6, 7, 8, 9, 10]
        for step, line in found.items():
            assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("bfloat16", "float16"), ("float16", "null"), ("float16", "float16")]
)
def test_resume_may_change_amp_dtype(before: str, after: str, tmp_path: Path) -> None:
    first = (f"amp_dtype={before}", "max_steps=2", "resume=fresh")
    run_fsdp(tmp_path, *first, config=RUN, code=0)
    done = run_fsdp(tmp_path, f"amp_dtype={after}", "max_steps=4", config=RUN, code=0)
    assert ("changed: amp_dtype" in done.stdout) == (before != after)
    assert "changed: resume" not in done.stdout
    assert read_reports(tmp_path)[4]["skipped_steps"] == 0


@pytest.mark.slow
def test_sigusr2_saves_and_resumes_exactly(reference: Path, tmp_path: Path) -> None:
    process = start_fsdp(tmp_path, "checkpoint_rate=1000", ranks=2, config=RUN)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("training"):
            process.send_signal(signal.SIGUSR2)
            break
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    (step,) = checkpoints_by_step(tmp_path)
    if step < 10:
        assert "stopped" in output
    run_fsdp(tmp_path, ranks=2, config=RUN, code=0)
    assert read_exact_metrics(tmp_path) == read_exact_metrics(reference)


def test_sigterm_to_one_rank_stops_all_after_the_same_step(reference: Path, tmp_path: Path) -> None:
    process = start_fsdp(
        tmp_path, "max_steps=1000", "checkpoint_rate=1000", "resume=fresh", ranks=2, config=RUN
    )
    assert process.stdout is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for line in process.stdout:
        if line.startswith("training"):
            os.kill(int(children.read_text().split()[1]), signal.SIGTERM)
            break
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "rerun with resume=auto" in output, "the same command would start at step 0"
    (step,) = checkpoints_by_step(tmp_path)
    reported = read_exact_metrics(tmp_path)
    last = max(reported)
    # Stopped in the validation after a report, or after a step, which a resume would report.
    assert last in (step - 1, step)
    assert step < 1000
    first = {key: value for key, value in read_exact_metrics(reference).items() if key <= last}
    assert {key: value for key, value in reported.items() if key <= 10} == first


INTERRUPTED = RUN | {
    "report_rate": 3,
    "validation_rate": 4,
    "checkpoint_rate": 4,
    "max_steps": 12,
    "total_batch_size": 2,
    "validation_batches": 4,
    "keep_checkpoints": None,
    "dataset": "text",
    "train_data": "../text.txt",
    "vocab_size": 264,
    "sample_rate": 6,
    "num_tokens": 8,
    "eval_tasks": ["../own.jsonl"],
    "eval_rate": 8,
}


def interrupt(world: World, step: int, how: str) -> None:
    """Run until a signal arrives in step `step`, or in the validation, tasks or sample after it.

    If `how` is "kill", SIGKILL arrives in the step; if it is "kill tasks", in the tasks.
    """

    def on_step_start(completed: int) -> None:
        if completed == step - 1 and how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if completed == step - 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def validation(self: Loader) -> Iterator[tuple[int, MicroBatch | PairBatch]]:
        for batch in batches(self):
            if how == "validation" and list(read_reports(Path()))[-1] >= step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    def generate(*args: Any, **options: Any) -> Iterator[int]:
        for number, token in enumerate(tokens(*args, **options)):
            assert how != "sample" or number < 2, "the stop is answered at once"
            if how == "sample" and number == 1 and list(read_reports(Path()))[-1] >= step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield token

    def score(self: Scorer) -> Iterator[None]:
        for number, _ in enumerate(batches_of_tasks(self)):
            assert how != "tasks" or number == 0, "the stop is answered after a batch"
            if how == "tasks":
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "kill tasks":
                os.kill(os.getpid(), signal.SIGKILL)
            yield

    batches_of_tasks = Scorer.score
    Scorer.score = score
    tokens = sampling.generate
    sampling.generate = generate
    batches = Loader.validation
    Loader.validation = validation
    train_in_world(world, INTERRUPTED, on_step_start)


Curve = list[tuple[Any, ...]]
"""Group, step, prompt, text and metrics of every report and sample, in their order."""


def read_curve(folder: Path) -> Curve:
    keys = ("group", "step", "prompt", "text", *EXACT_METRICS, "eval_own_acc", "eval_own_bpb")
    curve = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        for line in (folder / "runs" / "test" / name).read_text().splitlines():
            record = json.loads(line)
            curve.append(tuple(record.get(key) for key in keys))
    return curve


@dataclass(frozen=True)
class Interrupted:
    """An uninterrupted run, and the same run interrupted ten times."""

    expected: Curve
    found: Curve
    newest_after_stop: list[tuple[int, int]]
    """for every stop by a signal, its step and that of the newest checkpoint"""
    before_last_start: list[Manifest]
    manifests: list[Manifest]


def read_manifests(folder: Path) -> list[Manifest]:
    complete = (folder / "runs" / "test" / "checkpoints").glob("*-*/manifest.json")
    return [read_manifest(path.parent) for path in complete]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    root = tmp_path_factory.mktemp("interrupted")
    (root / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    question = {"context": "to be or", "choices": [" not to be", " that"], "gold": 0}
    (root / "own.jsonl").write_text(f"{json.dumps(question)}\n" * 40)
    run_fsdp(root / "reference", config=INTERRUPTED, code=0)
    folder = root / "interrupted"
    folder.mkdir()
    # Before a report; in a validation; again in that validation; before a report and a sample; in
    # that sample; in the tasks of a validation; killed after a saved checkpoint; before the last
    # report; killed in the last tasks; in the last sample.
    stops = [(3, "signal"), (4, "validation"), (4, "validation"), (6, "signal"), (6, "sample")]
    stops += [(8, "tasks"), (11, "kill"), (12, "signal"), (12, "kill tasks"), (12, "sample")]
    newest = []
    with contextlib.chdir(folder):
        for step, how in stops:
            if how.startswith("kill"):
                with pytest.raises(ProcessExitedException):
                    run_ranks(1, interrupt, step, how)
            else:
                run_ranks(1, interrupt, step, how)
                newest.append((step, max(checkpoints_by_step(folder))))
        before_last_start = read_manifests(folder)
        run_ranks(1, interrupt, 100, "signal")
    expected = read_curve(root / "reference")
    found = read_curve(folder)
    return Interrupted(expected, found, newest, before_last_start, read_manifests(folder))


@pytest.mark.slow
def test_reports_and_samples_have_the_steps_of_their_rates(interrupted: Interrupted) -> None:
    assert [(group, step) for group, step, *_ in interrupted.expected] == [
        ("training", 3), ("validation", 4), ("training", 6), ("validation", 8), ("training", 9),
        ("training", 12), ("validation", 12), ("sample", 6), ("sample", 12),
    ]  # fmt: skip
    assert all(text for group, _, _, text, *_ in interrupted.expected if group == "sample")


@pytest.mark.slow
def test_tasks_are_scored_at_multiples_of_eval_rate(interrupted: Interrupted) -> None:
    scored = [(step, bpb) for group, step, *_, bpb in interrupted.expected if bpb is not None]
    assert [step for step, _ in scored] == [8, 12]


@pytest.mark.slow
def test_sigterm_at_any_moment_saves_that_step(interrupted: Interrupted) -> None:
    assert all(step == newest for step, newest in interrupted.newest_after_stop)


@pytest.mark.slow
def test_interruptions_do_not_change_the_curve(interrupted: Interrupted) -> None:
    assert interrupted.found == interrupted.expected


@pytest.mark.slow
def test_manifests_say_what_was_validated_and_sampled(interrupted: Interrupted) -> None:
    validated = {each.step for each in interrupted.manifests if each.validation_loss is not None}
    assert validated == {4, 8, 12}
    assert {each.step for each in interrupted.manifests if each.sampled} == {12}


@pytest.mark.slow
def test_stop_in_the_last_sample_keeps_the_validation(interrupted: Interrupted) -> None:
    last = [manifest for manifest in interrupted.before_last_start if manifest.step == 12]
    assert any(manifest.validation_loss is not None for manifest in last)
    assert not any(manifest.sampled for manifest in last)


@pytest.mark.slow
def test_resume_of_a_complete_run_changes_nothing(reference: Path) -> None:
    def times() -> dict[Path, int]:
        return {
            path: path.stat().st_mtime_ns
            for path in (reference / "runs").rglob("*")
            if path.name != "lock"
        }

    before = times()
    again = run_fsdp(reference, config=RUN, code=0)
    assert "complete: 10 steps; raise max_steps" in again.stdout
    assert times() == before


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps."""
    folder = tmp_path_factory.mktemp("two_steps")
    run_fsdp(folder, "max_steps=2", code=0)
    return folder


def attempt(
    number: int, folder: Path, *overrides: str, launch: str = "a", code: int = 0, script: str = ""
) -> str:
    """Start a run as torchrun does, first or after a failure; return what it prints."""
    env: dict[str, Any] = {"TORCHELASTIC_RUN_ID": launch, "TORCHELASTIC_RESTART_COUNT": str(number)}
    env["SLURM_JOB_ID"] = "7"  # several starts in one allocation
    return run_fsdp(folder, *overrides, code=code, script=script, **env).stdout


@pytest.mark.slow
@pytest.mark.parametrize("value", ["fresh", "checkpoint"])
def test_restart_resumes_whatever_resume_is(value: str, two_steps: Path, tmp_path: Path) -> None:
    resume = "fresh" if value == "fresh" else str(checkpoints_by_step(two_steps)[2])
    attempt(0, tmp_path, "max_steps=3", f"resume={resume}")
    assert ", step 3\n" in attempt(1, tmp_path, "max_steps=4", f"resume={resume}")
    assert not list((tmp_path / "runs" / "test").glob("before-*"))
    # Another start, whose first attempt failed before it recorded itself:
    started = attempt(1, tmp_path, "max_steps=4", f"resume={resume}", launch="b")
    assert ", step 4\n" not in started
    assert list((tmp_path / "runs" / "test").glob("before-*"))


KILL_AT_DATA = """
import signal
from lm import preflight

def kill(*_arguments, **_options):
    os.kill(os.getpid(), signal.SIGKILL)

preflight.open_data = kill
"""
FAIL_TO_BUILD = "from lm.training import parallelize; parallelize.initialize_parameters = None\n"


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [(KILL_AT_DATA, -9), (FAIL_TO_BUILD, 1)])
def test_restart_is_not_of_an_earlier_start_with_the_same_id(
    end: str, code: int, tmp_path: Path
) -> None:
    """As torchrun calls all starts "none" without --rdzv-id; the first attempt ends early."""
    attempt(0, tmp_path, "max_steps=2", "resume=fresh")
    attempt(0, tmp_path, "max_steps=2", "resume=fresh", code=code, script=end)
    assert "resumed from" not in attempt(1, tmp_path, "max_steps=2", "resume=fresh")
    assert len(list((tmp_path / "runs" / "test").glob("before-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("refused_by", ["preflight", "load_state"])
def test_start_that_is_refused_is_not_taken_for_the_last_one(
    refused_by: str, two_steps: Path, tmp_path: Path
) -> None:
    attempt(0, tmp_path, "max_steps=2", "resume=fresh")
    arguments = ["resume=fresh", "prompt=data without a tokenizer"]
    if refused_by == "load_state":
        arguments = [f"resume={checkpoints_by_step(two_steps)[2]}", "n_layers=3"]
    attempt(0, tmp_path, "max_steps=3", *arguments, code=2)
    assert ", step 2\n" in attempt(1, tmp_path, "max_steps=3", "resume=fresh")


@pytest.mark.slow
def test_restart_without_a_checkpoint_resumes_the_given_one(
    two_steps: Path, tmp_path: Path
) -> None:
    source = checkpoints_by_step(two_steps)[2]
    printed = attempt(1, tmp_path, "max_steps=3", f"resume={source}")
    assert f"resumed from checkpoint {source.name}, step 2" in printed


@pytest.mark.slow
def test_restart_after_resume_moved_its_run_aside(two_steps: Path, tmp_path: Path) -> None:
    """The run's first start resumes its own checkpoint, and moves it aside with the others."""
    shutil.copytree(two_steps / "runs", tmp_path / "runs")
    resume = f"resume={checkpoints_by_step(tmp_path)[2]}"
    attempt(0, tmp_path, "max_steps=3", resume)
    assert ", step 3\n" in attempt(1, tmp_path, "max_steps=4", resume)


KILL_IN_STEP = """
import signal
from lm.runtime.watchdog import Watchdog

def kill(self, step):
    if step > 0:
        os.kill(os.getpid(), signal.SIGKILL)

Watchdog.on_step_start = kill
"""


@pytest.mark.parametrize(
    "source", ["its own", pytest.param("another run's", marks=pytest.mark.slow)]
)
def test_start_is_remembered_until_the_first_checkpoint(
    source: str, two_steps: Path, tmp_path: Path
) -> None:
    if source == "its own":
        shutil.copytree(two_steps / "runs", tmp_path / "runs")
        two_steps = tmp_path
    checkpoint = checkpoints_by_step(two_steps)[2]
    resume = f"resume={checkpoint}"
    run_fsdp(tmp_path, "max_steps=4", resume, script=KILL_IN_STEP, code=-signal.SIGKILL)
    run_fsdp(tmp_path, "max_steps=4", script=KILL_IN_STEP, code=-signal.SIGKILL)
    again = run_fsdp(tmp_path, "max_steps=4", resume, script=KILL_IN_STEP, code=-signal.SIGKILL)
    assert f"resumed from checkpoint {checkpoint.name}, step 2\n" in again.stdout
    assert f"{checkpoint.name}, step 2\n" in attempt(1, tmp_path, "max_steps=3", resume)
    done = run_fsdp(tmp_path, "max_steps=4", code=0)
    assert ", step 3\n" in done.stdout


KILL_IN_LOAD = """
import signal
from lm.checkpoint.checkpointer import SavedState

def kill(self, state):
    os.kill(os.getpid(), signal.SIGKILL)

SavedState.read_into = kill
"""


def test_start_is_remembered_while_its_weights_are_loaded(two_steps: Path, tmp_path: Path) -> None:
    resume = f"resume={checkpoints_by_step(two_steps)[2]}"
    run_fsdp(tmp_path, "max_steps=3", resume, script=KILL_IN_LOAD, code=-signal.SIGKILL)
    run_fsdp(tmp_path, "max_steps=3", "d_model=64", code=2)
    assert ", step 2\n" in run_fsdp(tmp_path, "max_steps=3", code=0).stdout


def test_start_whose_weights_cannot_be_loaded_is_forgotten(two_steps: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoints_by_step(two_steps)[2], damaged)
    (weights,) = damaged.glob("model-*")
    os.truncate(weights, 100)
    run_fsdp(tmp_path, "max_steps=3", f"init_from={damaged}", code=1)
    assert not (tmp_path / "runs").exists()


def test_start_whose_checkpoint_is_gone_is_refused(two_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(two_steps / "runs" / "test", tmp_path / "source")
    resume = f"resume={tmp_path / 'source'}"
    run_fsdp(tmp_path, "max_steps=4", resume, script=KILL_IN_STEP, code=-signal.SIGKILL)
    shutil.rmtree(tmp_path / "source")
    refused = run_fsdp(tmp_path, "max_steps=4", code=2)
    assert f"which resumed from: {tmp_path / 'source'}/" in refused.stderr


@pytest.mark.slow
def test_initial_weights_are_remembered_until_the_first_checkpoint(
    two_steps: Path, tmp_path: Path
) -> None:
    init_from = f"init_from={two_steps / 'runs' / 'test'}"
    run_fsdp(tmp_path, "max_steps=2", init_from, script=KILL_IN_STEP, code=-signal.SIGKILL)
    for other in ("init_from=null", f"{init_from}/checkpoints"):
        refused = run_fsdp(tmp_path, "max_steps=2", other, code=2)
        assert init_from in refused.stderr
    run_fsdp(tmp_path, "max_steps=2", init_from, code=0)
    run_fsdp(tmp_path, "max_steps=3", code=0)  # a checkpoint holds them now


@pytest.mark.slow
def test_weights_without_an_optimizer_start_another_run(two_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(two_steps / "runs", tmp_path / "runs")
    checkpoint = checkpoints_by_step(tmp_path)[2]
    (state,) = checkpoint.glob("optim-*")
    state.unlink()
    for resume in ("auto", checkpoint, tmp_path / "runs" / "test"):
        refused = run_fsdp(tmp_path, "max_steps=3", f"resume={resume}", code=1)
        assert f"{state.name}: missing" in refused.stderr
        assert f"init_from={checkpoint} " in refused.stderr
    run_fsdp(tmp_path, "max_steps=1", f"init_from={checkpoint}", "run_name=another", code=0)


@pytest.mark.slow
def test_restart_of_a_start_that_failed_early_is_that_start(
    two_steps: Path, tmp_path: Path
) -> None:
    """Its first attempt has not moved the files of an earlier run aside."""
    run_fsdp(tmp_path, "max_steps=1", code=0)
    checkpoint = checkpoints_by_step(two_steps)[2]
    for resume, start in ((f"{checkpoint}", f"{checkpoint.name}, step 2\n"), ("fresh", "")):
        printed = attempt(1, tmp_path, "max_steps=3", f"resume={resume}")
        assert start in printed
        assert ("resumed from" in printed) == bool(start)
    assert len(list((tmp_path / "runs" / "test").glob("before-*"))) == 2


@pytest.mark.slow
def test_resume_from_another_run_moves_the_earlier_one_aside(
    two_steps: Path, tmp_path: Path
) -> None:
    resume = f"resume={checkpoints_by_step(two_steps)[2]}"
    run_fsdp(tmp_path, "max_steps=4", "checkpoint_rate=3", resume, code=0)
    earlier = read_reports(tmp_path)
    run_fsdp(tmp_path, "max_steps=3", resume, code=0)
    assert list(checkpoints_by_step(tmp_path)) == [3]
    (before,) = (tmp_path / "runs" / "test").glob("before-*")
    before.rename(tmp_path / "runs" / "before")
    assert read_reports(tmp_path, name="before") == earlier, "step 4 is not made again"
    assert sorted(checkpoints_by_step(tmp_path, "before")) == [3, 4]


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", [1]), ("max_steps", "x")],
)
def test_resume_refuses_hyperparameters_of_wrong_types(
    key: str, value: object, two_steps: Path, tmp_path: Path
) -> None:
    original = checkpoints_by_step(two_steps)[2]
    forged = copy_with_hyperparameters(original, tmp_path / "forged", {key: value})
    refused = run_fsdp(tmp_path, "max_steps=3", f"resume={forged}", code=1)
    problem, remedy = refused.stderr.splitlines()
    assert f"{forged}/manifest.json: damaged: hyperparameters.{key}: " in problem
    assert "set resume to another one" in remedy


@pytest.mark.slow
def test_decay_that_branches_equals_a_complete_run(tmp_path: Path) -> None:
    stable, branch, complete = (tmp_path / name for name in ("stable", "branch", "complete"))
    every = "keep_checkpoints=null"
    run_fsdp(stable, "max_steps=6", "checkpoint_rate=4", every, config=RUN, code=0)
    checkpoint = checkpoints_by_step(stable)[4]
    decay = ["lr_schedule=wsd", "decay_steps=3", "max_steps=7"]
    run_fsdp(branch, *decay, f"resume={checkpoint}", config=RUN, code=0)
    run_fsdp(complete, *decay, config=RUN, code=0)
    metrics = read_exact_metrics(complete)
    assert metrics[7]["lr"] < metrics[4]["lr"]
    assert read_exact_metrics(branch) == {k: v for k, v in metrics.items() if k > 4}
    last = [checkpoints_by_step(folder)[7] for folder in (branch, complete)]
    assert read_manifest(last[0]).files == read_manifest(last[1]).files  # with checksums


@pytest.mark.slow
def test_branch_continues_moments_and_schedule_on_other_data(tmp_path: Path) -> None:
    for name in ("a", "b", "val"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{i * i} " for i in range(400)))
    of_text = {"dataset": "text", "tokenizer": "bytes", "max_seq_len": 16, "vocab_size": 257}
    config = RUN | of_text | {"val_data": f"{tmp_path}/val.txt", "report_rate": 1, "dropout": 0.0}
    config["lr"] = 1e-30  # so that a loss tells which samples were read
    stable, branch, killed, new = (
        tmp_path / name for name in ("stable", "branch", "killed", "new")
    )
    before = [f"train_data={tmp_path}/a.txt", "max_steps=9", "stop_at_step=4", "report_rate=3"]
    run_fsdp(stable, *before, config=config, code=0)
    checkpoint = checkpoints_by_step(stable)[4]
    decay = ["lr_schedule=wsd", "decay_steps=3", "max_steps=7", f"train_data={tmp_path}/b.txt"]
    refused = run_fsdp(stable, *decay, config=config, code=2)
    assert "train_data: " in refused.stderr

    started = run_fsdp(branch, *decay, f"resume={checkpoint}", config=config, code=0)
    assert "changed: train_data: " in started.stdout
    metrics = read_exact_metrics(branch)
    assert sorted(metrics) == [5, 6, 7]
    assert metrics[7]["lr"] < metrics[5]["lr"]
    run_fsdp(new, *decay, config=config, code=0)
    from_first_sample = read_exact_metrics(new)
    assert [metrics[step]["loss"] for step in (5, 6, 7)] == [
        from_first_sample[step]["loss"] for step in (1, 2, 3)
    ]
    optimizer = load_file(next(checkpoints_by_step(branch)[7].glob("optim-*")))
    assert {value.item() for name, value in optimizer.items() if name.endswith("step")} == {7.0}

    run_fsdp(killed, *decay, f"resume={checkpoint}", "stop_at_step=5", config=config, code=0)
    resumed = run_fsdp(killed, *decay, config=config, code=0)
    assert "changed: train_data" not in resumed.stdout
    assert read_exact_metrics(killed) == metrics
    epochs = ["max_steps=null", "max_epochs=1"]
    refused = run_fsdp(killed, *decay, *epochs, config=config, code=2)
    assert "max_epochs" in refused.stderr


@pytest.mark.slow
def test_last_step_is_validated_again_on_other_data(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 400)
    config = RUN | {"dataset": "text", "vocab_size": 257, "num_tokens": 0, "max_steps": 2}
    config |= {"train_data": "a.txt", "report_rate": 2}
    losses: list[float] = []
    for name in ("a", "b"):
        run_fsdp(tmp_path, f"val_data={name}.txt", config=config, code=0)
        losses.append(read_reports(tmp_path, "validation")[2]["loss"])
    first, second = losses
    assert first != second
    saved, _ = LocalCheckpoints(tmp_path / "runs" / "test" / "checkpoints").list_saved()
    assert [entry.manifest.validation_loss for entry in saved] == [first, second]
    assert "is complete" in run_fsdp(tmp_path, "val_data=b.txt", config=config, code=0).stdout


@pytest.mark.slow
def test_stopped_run_with_fewer_steps_says_how_to_train_on(tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=6", "checkpoint_rate=3", code=0)
    shutil.rmtree(checkpoints_by_step(tmp_path)[6])
    done = run_fsdp(tmp_path, "max_steps=2", "checkpoint_rate=3", code=0)
    assert "complete: 3 steps; raise max_steps" in done.stdout
    assert ", step 3\n" in attempt(1, tmp_path, "max_steps=6")


@pytest.mark.slow
def test_complete_run_says_how_to_train_on(tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=2", code=0)
    done = run_fsdp(tmp_path, "max_steps=2", "lr=0.5", code=0)
    assert "complete: 2 steps; raise max_steps" in done.stdout
    assert "with max_steps=4: learning rate: " in done.stdout
    assert "resumed from" in run_fsdp(tmp_path, "max_steps=4", code=0).stdout


def test_change_of_a_key_that_changes_the_data_is_named() -> None:
    saved = RUN_INFO.model_copy(update={"hyperparameters": {"packing": True, "lr": 1.0}})
    changed = {"packing": False, "lr": 2.0}
    data = {"train": "another", "validation": "another"}  # as of validation that is held out
    now = saved.model_copy(update={"hyperparameters": changed, "data": data})
    with pytest.raises(ConfigError) as refused:
        require_same_run(saved, now)
    first, second, _ = refused.value.problems
    assert first == "packing: true in the checkpoint, now false"
    assert second.startswith("train_data: ")


def test_change_of_a_config_of_transformers_makes_another_run() -> None:
    saved = {"norm_eps": 1e-5, "dropout": 0.0, "conv_bias": False}
    now = {"norm_eps": 1e-3, "dropout": 0.0, "use_cache": True}  # of a newer version
    infos = [
        RUN_INFO.model_copy(update={"model": {"transformers_config": config}})
        for config in (saved, now)
    ]
    with pytest.raises(ConfigError) as refused:
        require_same_run(infos[0], infos[1])
    change, remedy = refused.value.problems
    assert change == "norm_eps: 1e-05 in the checkpoint, now 0.001"
    assert "different run" in remedy
