"""A run resumes exactly: bit for bit with the same world size, on the same samples with any other."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from lm import generate, sampling
from lm.checkpoint.manifest import read_manifest
from lm.data.loader import Loader, MicroBatch
from lm.data.tokenizer import FILE
from lm.resume import extension
from lm.runtime.world import World
from lm.training.optim import OptimConfig, learning_rate
from tests.support.hyperparameters import EXACT_RUN, TINY
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
from tests.support.tokenizer_files import llama_tokenizer

RUN = EXACT_RUN | {"total_batch_size": 12, "checkpoint_rate": 5, "max_steps": 10}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten uninterrupted steps on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    run_fsdp(folder, ranks=2, config=RUN, code=0)
    assert sorted(checkpoints_by_step(folder)) == [5, 10]
    return folder


def test_five_steps_and_five_more_equal_ten_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=5", ranks=2, config=RUN, code=0)
    second = run_fsdp(tmp_path, ranks=2, config=RUN, code=0)
    assert "resumed from checkpoint" in second.stdout
    assert read_exact_metrics(tmp_path) == read_exact_metrics(reference)
    assert read_exact_metrics(tmp_path, "validation") == read_exact_metrics(reference, "validation")
    found, expected = (
        read_manifest(checkpoints_by_step(folder)[10]) for folder in (tmp_path, reference)
    )
    assert found.files == expected.files  # with checksums


@pytest.mark.slow
def test_another_world_size_resumes_with_the_same_weights_and_samples(tmp_path: Path) -> None:
    quiet = RUN | {"dropout": 0.0}
    run_fsdp(tmp_path / "2", ranks=2, config=quiet, code=0)
    expected, source = read_reports(tmp_path / "2"), checkpoints_by_step(tmp_path / "2")[5]
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
def test_a_resumed_run_may_change_its_precision(before: str, after: str, tmp_path: Path) -> None:
    first = f"amp_dtype={before}", "max_steps=2", "warmup_steps=3", "resume=fresh"
    assert (
        "warmup_steps 3 is more than max_steps 2"
        in run_fsdp(tmp_path, *first, config=RUN, code=0).stdout
    )
    done = run_fsdp(tmp_path, f"amp_dtype={after}", "max_steps=4", config=RUN, code=0)
    assert ("changed: amp_dtype" in done.stdout) == (before != after)
    assert "changed: resume" not in done.stdout
    assert read_reports(tmp_path)[4]["skipped_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves_a_checkpoint_and_the_resumed_run_has_the_same_losses(
    signum: signal.Signals, reference: Path, tmp_path: Path
) -> None:
    process = start_fsdp(tmp_path, "checkpoint_rate=1000", ranks=2, config=RUN)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("training"):
            process.send_signal(signum)
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (step,) = checkpoints_by_step(tmp_path)
    if step < 10:
        assert "stopped" in output
    run_fsdp(tmp_path, ranks=2, config=RUN, code=0)
    assert read_exact_metrics(tmp_path) == read_exact_metrics(reference)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    reference: Path, tmp_path: Path
) -> None:
    process = start_fsdp(
        tmp_path, "max_steps=1000", "checkpoint_rate=1000", "resume=fresh", ranks=2, config=RUN
    )
    assert process.stdout is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for line in process.stdout:
        if line.startswith("training"):
            os.kill(int(children.read_text().split()[1]), signal.SIGTERM)
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "rerun with resume=auto" in output, "the same command would start at step 0"
    (step,) = checkpoints_by_step(tmp_path)
    assert max(read_exact_metrics(tmp_path)) == step < 1000
    first = {key: value for key, value in read_exact_metrics(reference).items() if key <= step}
    assert {key: value for key, value in read_exact_metrics(tmp_path).items() if key <= 10} == first


INTERRUPTED = RUN | {"report_rate": 3, "validation_rate": 4, "checkpoint_rate": 4, "max_steps": 12}
INTERRUPTED |= {"total_batch_size": 2, "validation_batches": 4, "keep_checkpoints": None}
INTERRUPTED |= {
    "dataset": "text",
    "train_data": "../text.txt",
    "vocab_size": 264,
    "sample_rate": 6,
    "num_tokens": 8,
}


def interrupt(world: World, step: int, how: str) -> None:
    """Run until a signal arrives in step `step`, in the validation or the sample after it, or a kill in it."""

    def on_step_start(completed: int) -> None:
        if completed == step - 1 and how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if completed == step - 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def validation(self: Loader) -> Iterator[MicroBatch]:
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

    tokens, sampling.generate = sampling.generate, generate
    batches, Loader.validation = Loader.validation, validation
    train_in_world(world, INTERRUPTED, on_step_start)


@pytest.mark.slow
def test_an_interrupted_run_reports_the_curve_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def curve(folder: Path) -> list[tuple[Any, ...]]:
        files = (folder / "runs" / "test" / f"{name}.jsonl" for name in ("metrics", "samples"))
        keys = ("group", "step", "prompt", "text", *EXACT_METRICS)
        return [
            tuple(json.loads(line).get(key) for key in keys)
            for file in files
            for line in file.read_text().splitlines()
        ]

    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    run_fsdp(tmp_path / "reference", config=INTERRUPTED, code=0)
    expected = curve(tmp_path / "reference")
    assert [(group, step) for group, step, *_ in expected] == [
        ("training", 3), ("validation", 4), ("training", 6), ("validation", 8), ("training", 9),
        ("training", 12), ("validation", 12), ("sample", 6), ("sample", 12),
    ]  # fmt: skip
    assert all(text for group, _, _, text, *_ in expected if group == "sample")
    folder = tmp_path / "interrupted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # Before a report; in a validation; again in that validation; before a report and a sample; in
    # that sample; killed after a saved checkpoint; before the last report; in the last sample.
    stops = [(3, "signal"), (4, "validation"), (4, "validation"), (6, "signal"), (6, "sample")]
    stops += [(11, "kill"), (12, "signal"), (12, "sample")]
    for step, how in stops:
        if how == "kill":
            with pytest.raises(ProcessExitedException):
                run_ranks(1, interrupt, step, how)
        else:
            run_ranks(1, interrupt, step, how)
            assert max(checkpoints_by_step(folder)) == step
    run_ranks(1, interrupt, 100, "signal")
    assert curve(folder) == expected
    complete = [
        path.parent for path in (folder / "runs" / "test" / "checkpoints").glob("*-*/manifest.json")
    ]
    saved = list(map(read_manifest, complete))
    assert {manifest.step for manifest in saved if manifest.validation_loss is not None} == {
        4,
        8,
        12,
    }
    assert {manifest.step for manifest in saved if manifest.sampled} == {12}


@pytest.mark.slow
def test_a_complete_run_reports_it_and_changes_nothing(reference: Path) -> None:
    def times() -> dict[Path, int]:
        return {
            path: path.stat().st_mtime_ns
            for path in (reference / "runs").rglob("*")
            if path.name != "lock"
        }

    before = times()
    again = run_fsdp(reference, config=RUN, code=0)
    assert "max_steps=20" in again.stdout
    assert times() == before


@pytest.mark.slow
def test_a_launchers_restart_resumes_whatever_resume_was_set_to(tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=2", "run_name=elsewhere", code=0)
    source = checkpoints_by_step(tmp_path, "elsewhere")[2]
    for name, resume in (("fresh", "fresh"), ("from", str(source))):
        for steps, restarts in ((3, "0"), (4, "1")):
            overrides = (f"max_steps={steps}", f"run_name={name}", f"resume={resume}")
            done = run_fsdp(tmp_path, *overrides, TORCHELASTIC_RESTART_COUNT=restarts, code=0)
        assert ", step 3\n" in done.stdout
    assert not list((tmp_path / "runs" / "fresh").glob("before-*"))
    later = read_reports(tmp_path, name="from")
    run_fsdp(tmp_path, "max_steps=3", "run_name=from", f"resume={source}", code=0)
    assert list(checkpoints_by_step(tmp_path, "from")) == [3]
    (before,) = (tmp_path / "runs" / "from").glob("before-*")
    before.rename(tmp_path / "runs" / "before")
    assert read_reports(tmp_path, name="before") == later, "step 4 is not made again"
    assert sorted(checkpoints_by_step(tmp_path, "before")) == [3, 4]
    restarted_early = run_fsdp(
        tmp_path, "max_steps=3", f"resume={source}", TORCHELASTIC_RESTART_COUNT="1", code=0
    )
    assert f"resumed from checkpoint {source.name}, step 2" in restarted_early.stdout
    for steps, restarts in ((3, "0"), (4, "1")):  # the first start moves `source` aside
        overrides = (f"max_steps={steps}", "run_name=elsewhere", f"resume={source}")
        rolled_back = run_fsdp(tmp_path, *overrides, TORCHELASTIC_RESTART_COUNT=restarts, code=0)
    assert ", step 3\n" in rolled_back.stdout


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_first_start_for_its_chat_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}[date] {{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / FILE).write_bytes(llama_tokenizer())
    specials = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(specials))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}))
    data = {
        "dataset": "jsonl",
        "train_data": "chat.jsonl",
        "val_data": "chat.jsonl",
        "tokenizer": FILE,
    }
    how = {"vocab_size": 200, "max_seq_len": 32, "validation_batches": 1, "report_rate": 1}
    found = []
    for day in (1, 2):
        script = f"import datetime\nclass Day(datetime.date):\n    today = lambda: datetime.date(2026, 1, {day})\n"
        done = run_fsdp(
            tmp_path,
            f"max_steps={day}",
            config=TINY | data | how,
            script=f"{script}datetime.date = Day",
            code=0,
        )
        found.append(read_manifest(checkpoints_by_step(tmp_path)[day]))
    assert "step 1\n" in done.stdout
    assert "changed" not in done.stdout
    assert found[0].data == found[1].data
    assert [manifest.hyperparameters["chat_template_date"] for manifest in found] == [
        "2026-01-01",
        "2026-01-01",
    ]
    assert (
        "chat_template_date: '2026-01-01'\n"
        in (tmp_path / "runs" / "test" / "config.yaml").read_text()
    )
    _, tokenizer = generate.load_model(checkpoints_by_step(tmp_path)[2], torch.device("cpu"))
    assert tokenizer.render(chat, add_generation_prompt=True)[0] == "<s>[date] 2026-01-01hiho"


def test_a_longer_run_keeps_the_learning_rate_or_says_how_it_jumps() -> None:
    cosine = {"lr_schedule": "cosine", "min_lr_ratio": 0.1}
    for changes, expected in (
        ({}, "max_steps=600$"),
        (
            cosine,
            "max_steps=600 lr=0.0002 lr_schedule=constant warmup_steps=0, .*from 2.00e-04 to 1.15e-03",
        ),
        ({"lr_schedule": "cosine"}, r"max_steps=600 \(.*from 6.29e-08 to 1.05e-03"),
        ({"lr_schedule": "wsd"}, r"max_steps=600 \(.*from 3.33e-05 to 2.00e-03"),
    ):
        config = OptimConfig.model_validate({"lr": 2e-3, "warmup_steps": 20} | changes)
        assert re.match(expected, extension(config, 300))
    decayed = OptimConfig.model_validate({"lr": 2e-3} | cosine)
    assert f"lr={learning_rate(decayed, 299, 300):.3g} lr_schedule=constant" in extension(
        decayed, 300
    )
