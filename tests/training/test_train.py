"""A run trains as the original example, skips nonfinite steps, ends after its steps or epochs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.config.reading import load_hyperparameters
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.fileio import read_records
from lm.metrics.records import Sample
from lm.report import RunRecords
from lm.runtime.world import World
from tests.support import REPOSITORY
from tests.support.hyperparameters import EXACT_RUN, TINY
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp, train_in_world
from tests.support.tokenizer_files import byte_level_tokenizer


def test_skip_nonfinite_ends_the_run_after_too_many(tmp_path: Path) -> None:
    done = run_fsdp(
        tmp_path,
        "max_steps=50",
        "lr=1e5",
        "amp_dtype=float16",
        "report_rate=5",
        "skip_nonfinite=3",
        code=2,
    )
    assert re.fullmatch(
        r"inf or NaN gradients in \d+ .* step \d+ \(skip_nonfinite: 3\): .*amp_dtype.*\n",
        done.stderr,
    )


@pytest.mark.slow
def test_epochs_set_the_length(tmp_path: Path) -> None:
    done = run_fsdp(tmp_path, "max_epochs=1.5", "total_batch_size=2", "batch_size=2", code=0)
    assert "step 15/15" in done.stdout


@pytest.mark.slow
def test_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    done = run_fsdp(tmp_path, config=TINY | {"prompt": "to be"}, code=2)
    assert done.stderr.startswith("prompt: 'to be' has no token")


TEXT = EXACT_RUN | {
    "dataset": "text",
    "train_data": "text.txt",
    "vocab_size": 264,
    "max_steps": 4,
    "num_tokens": 8,
}
TEXT |= {"validation_rate": 2}


def sample_by_sharding(world: World) -> list[Path]:
    settings: list[dict[str, Any]] = [{}, {"sharding": "no-shard"}]
    settings += [{"sharding": "hybrid-full-shard", "shard_group_size": 1}]
    settings += [{"num_tokens": 0}, {"sample_rate": 3, "cpu_offload": True}]
    return [
        train_in_world(world, TEXT | each | {"run_name": f"run{i}"})
        for i, each in enumerate(settings)
    ]


@pytest.mark.slow
def test_sample_rate_changes_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    monkeypatch.chdir(tmp_path)
    paths = [Path(path) for path in run_ranks(2, sample_by_sharding)[0]]
    runs = list(map(RunRecords, paths))
    first, *others, silent, offloaded = (
        [(s.step, s.prompt, s.text) for s in read_records(path / "samples.jsonl", Sample)]
        for path in paths
    )
    assert [step for step, *_ in first] == [2, 4]
    assert all(prompt.isprintable() and len(prompt) == 16 and text for _, prompt, text in first)
    assert others == [first] * 2
    assert silent == []
    assert [step for step, *_ in offloaded] == [3, 4]
    losses = [each.curve("training", "loss") for each in runs]
    assert losses[3] == losses[0]


@pytest.mark.slow
def test_epochs_below_0_only_validate_and_generate(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be, that is the question\n" * 50)
    text = TINY | {
        "dataset": "text",
        "train_data": "text",
        "val_data": "text",
        "vocab_size": 257,
        "prompt": "to be",
        "num_tokens": 5,
    }
    run_fsdp(tmp_path, "max_steps=3", config=text, code=0)
    (tmp_path / "b.txt").write_text("whether 'tis nobler in the mind to suffer\n" * 50)
    other = run_fsdp(tmp_path, "max_epochs=-1", "val_data=b.txt", config=text, code=0)
    lines = (tmp_path / "runs" / "test" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"validation"' in line] == [3, 3]
    assert "changed: val_data" in other.stdout
    again = run_fsdp(tmp_path, "max_epochs=-1", config=text, code=0)
    assert "validation  step 3" in again.stdout
    assert "training" not in again.stdout
    assert "sample      step 3\nto be" in again.stdout
    run_fsdp(tmp_path, "sample_rate=1", "run_name=other", config=TINY, code=2)  # no text
    assert not (tmp_path / "runs" / "other").exists()
    assert load_hyperparameters(tmp_path / "runs" / "test" / "config.yaml", []).run.max_epochs == -1


@pytest.mark.parametrize("option", [(), ("--dry-run",)])
def test_metric_of_the_searcher_that_no_validation_reports_is_refused(
    option: tuple[str, ...], tmp_path: Path
) -> None:
    searcher = {"name": "single", "metric": "validation_loss"}
    experiment = {"searcher": searcher, "hyperparameters": TINY}
    (tmp_path / "own.yaml").write_text(json.dumps(experiment))
    done = run_fsdp(tmp_path, "--config", "own.yaml", *option, code=2)
    problem = "'validation_loss' is not in the validation reports; use loss or perplexity"
    assert done.stderr == f"searcher.metric: {problem}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_text_dataset_needs_only_file_and_tokenizer(tmp_path: Path) -> None:
    text = "To be, or not to be, that is the question.\n" * 40
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer(300))
    own = {"dataset": "text", "train_data": "a.txt", "tokenizer": TOKENIZER_JSON}
    small = {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 16, "report_rate": 2}
    done = run_fsdp(tmp_path, "max_steps=2", config=own | small, code=0)
    assert "sequences of train_data are held out" in done.stdout
    manifest = json.loads((checkpoints_by_step(tmp_path)[2] / "manifest.json").read_text())
    assert manifest["model"]["vocab_size"] == manifest["hyperparameters"]["vocab_size"] == 320
    resumed = run_fsdp(tmp_path, "max_steps=4", "vocab_size=320", config=own | small, code=0)
    assert "step 2\n" in resumed.stdout
    assert "changed:" not in resumed.stdout
    tokenizer = load_tokenizer(str(tmp_path))
    end = text[-round(len(text) * 0.05) :]
    held_out = [*tokenizer.encode(end), tokenizer.eos_id]
    targets = held_out[1 : (len(held_out) - 1) // 16 * 16 + 1]
    said = tokenizer.decode([token for token in targets if token != tokenizer.eos_id])
    bits_per_nat = len(targets) / len(said.encode()) / math.log(2)
    lines = read_reports(tmp_path, "validation")
    assert sorted(lines) == [2, 4]
    assert all(
        line["bits_per_byte"] == pytest.approx(bits_per_nat * line["loss"])
        for line in lines.values()
    )


@pytest.mark.slow
def test_original_example_memorizes_random_samples(
    tmp_path: Path,
) -> None:
    """config.yaml with a smaller model and vocabulary, so that 100 steps take seconds."""
    hyperparameters = yaml.safe_load((REPOSITORY / "config.yaml").read_text())["hyperparameters"]
    small = {
        "d_model": 64,
        "n_heads": 2,
        "n_layers": 2,
        "vocab_size": 500,
        "max_seq_len": 64,
        "lr": 1e-3,
    }
    run_fsdp(tmp_path, "max_steps=100", config=hyperparameters | small, code=0)
    training, validation = read_reports(tmp_path), read_reports(tmp_path, "validation")
    assert sorted(training) == sorted(validation) == list(range(10, 101, 10))
    uniform = math.log(500)
    assert abs(training[10]["loss"] - uniform) < 0.3
    assert training[100]["loss"] < uniform - 1.0
    assert all(abs(line["loss"] - uniform) < 0.5 for line in validation.values())


SLOW_START_OF_FILES = """
import time
from lm.runtime.run_dir import RunDir
add_session, perf_counter = RunDir.add_session, time.perf_counter
late = 0

def add_slowly(self, *arguments):
    global late
    add_session(self, *arguments)
    late = 1000

RunDir.add_session = add_slowly
time.perf_counter = lambda: perf_counter() + late
"""
"""The clock of the reports is 1000 s later once the run's files are open."""


@pytest.mark.slow
def test_step_seconds_of_the_first_report_are_of_steps_only(tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=1", "report_rate=1", script=SLOW_START_OF_FILES, code=0)
    assert read_reports(tmp_path)[1]["step_seconds"] < 1000
