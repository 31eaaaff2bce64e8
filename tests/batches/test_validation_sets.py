"""Several validation sets have a loss each, on any number of ranks, wherever losses are shown."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.checkpoint.manifest import read_manifest
from lm.config.reading import read_hyperparameters
from lm.data.dataset import ValidationSet, combine_metrics, validation_metric_names
from lm.data.loader import Loader
from lm.data.run_data import Data, DataConfig, open_data
from lm.data.validation import ValidationSums
from lm.data.windows import WindowDataset
from lm.errors import ConfigError
from lm.launch.launch import Launch
from lm.metrics.records import Report
from lm.runtime.rendezvous import join_world
from tests.support.hyperparameters import EXACT_RUN
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp

CPU = torch.device("cpu")
SEQ_LEN = 4


def write_texts(folder: Path) -> dict[str, str]:
    """Write two texts of 8 and 3 sequences; return their paths by name."""
    paths: dict[str, str] = {}
    for name, text in (("wiki", "To be, or not to be, that is the"), ("code", "def f(x): +")):
        (folder / f"{name}.txt").write_text(text)
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        paths[name] = str(folder / f"{name}.txt")
    return paths


def open_sets(dataset: str, **keys: Any) -> Data:
    config = DataConfig.model_validate({"dataset": dataset, "validation_batches": 2} | keys)
    return open_data(config, 300, SEQ_LEN, 1, 0)


def texts_of(data: Data) -> dict[str | None, str]:
    """Return the start of each validation set."""
    assert data.tokenizer is not None
    texts: dict[str | None, str] = {}
    for name, dataset in data.validation:
        ids = [token for i in range(len(dataset)) for token in dataset[i].inputs.tolist()]
        texts[name] = data.tokenizer.decode(ids)[:4]
    return texts


@pytest.mark.parametrize("dataset", ["text", "jsonl", pytest.param("hf", marks=pytest.mark.slow)])
def test_val_data_opens_each_set_by_name(dataset: str, tmp_path: Path) -> None:
    paths = write_texts(tmp_path)
    if dataset != "text":
        paths = {name: path.replace(".txt", ".jsonl") for name, path in paths.items()}
    data = open_sets(dataset, train_data=paths["wiki"], val_data=paths)
    assert texts_of(data) == {"wiki": "To b", "code": "def "}
    swapped = open_sets(dataset, train_data=paths["wiki"], val_data=dict(reversed(paths.items())))
    other = open_sets(dataset, train_data=paths["wiki"], val_data=paths["code"])
    fingerprints = [each.fingerprints()["data"]["validation"] for each in (data, swapped, other)]
    assert len(set(fingerprints)) == 3
    assert data.prompt() == data.validation[0].dataset[0].inputs.tolist()


def test_validation_metrics_are_means_over_the_sets(tmp_path: Path) -> None:
    paths = write_texts(tmp_path)
    data = open_sets("text", train_data=paths["wiki"], val_data=paths)
    loader = Loader(DataConfig.model_validate({"validation_batches": 99}), data, 1, 0, 1, CPU)
    with join_world(Launch(), timeout=60) as world:
        sums = ValidationSums(data.validation, loader.validation_bytes, world)
        for number, loss_sum, n_targets in ((0, 40.0, 16), (0, 24.0, 16), (1, 3.0, 8), (1, 9.0, 4)):
            sums.add(number, torch.tensor(loss_sum), torch.tensor(n_targets), torch.empty(0))
        metrics = sums.metrics()

        one_set = ValidationSums([ValidationSet(None, data.validation[0].dataset)], [0], world)
        one_set.add(0, torch.tensor(10.0), torch.tensor(5), torch.empty(0))
        assert one_set.metrics() == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2))}
        with_another = ValidationSums(data.validation[:1], [0], world, ["z_loss"])
        with_another.add(0, torch.tensor(10.0), torch.tensor(5), torch.tensor([20.0]))
        found = with_another.metrics()
        assert (found["z_loss"], found["perplexity"]) == (4.0, pytest.approx(math.exp(2)))
    assert metrics["loss"] == (2.0 + 1.0) / 2
    assert (metrics["loss_wiki"], metrics["loss_code"]) == (2.0, 1.0)
    of_sets = (metrics["bits_per_byte_wiki"], metrics["bits_per_byte_code"])
    assert metrics["bits_per_byte"] == sum(of_sets) / 2
    assert set(metrics) == set(validation_metric_names(data.validation, has_text=True))


def test_validation_of_a_diverged_run_is_read() -> None:
    sets = [ValidationSet(None, WindowDataset(np.arange(SEQ_LEN + 1), SEQ_LEN))]
    metrics = combine_metrics(sets, [{"loss": 5000.0}])
    Report.model_validate({"group": "validation", "step": 1, "time": 0.0, **metrics})


def test_validation_limits_each_set_to_validation_batches(tmp_path: Path) -> None:
    paths = write_texts(tmp_path)
    data = open_sets("text", train_data=paths["wiki"], val_data=paths)
    for ranks in (1, 2, 3):
        seen = {0: 0, 1: 0}
        for rank in range(ranks):
            config = DataConfig.model_validate({"validation_batches": 4})
            loader = Loader(config, data, 1, rank, ranks, CPU)
            numbers = [number for number, _ in loader.validation()]
            assert numbers == sorted(numbers)
            for number, batch in loader.validation():
                seen[number] += int((batch.targets >= 0).sum())
        assert seen == {0: 4 * SEQ_LEN, 1: len(data.validation[1].dataset) * SEQ_LEN}


@pytest.mark.parametrize(
    ("val_data", "part"),
    [
        ({}, "val_data: {} names no data"),
        ({"two words": "a.txt"}, "val_data: 'two words' cannot be part of a metric's name"),
        ({"wiki": 5}, "val_data.wiki: 5 is not a string"),
        ({"wiki": ""}, "val_data.wiki: "),
    ],
    ids=str,
)
def test_val_data_names_and_values_are_checked(val_data: dict[str, Any], part: str) -> None:
    hyperparameters = {"dataset": "text", "val_data": val_data}
    with pytest.raises(ConfigError) as refused:
        read_hyperparameters({"hyperparameters": hyperparameters}, [], "test")
    (problem,) = refused.value.problems
    assert part in problem


@pytest.mark.parametrize("dataset", ["text", "jsonl", pytest.param("hf", marks=pytest.mark.slow)])
def test_val_data_errors_name_the_set(dataset: str, tmp_path: Path) -> None:
    paths = write_texts(tmp_path) | {"none": str(tmp_path / "none.txt")}
    if dataset != "text":
        paths = {name: path.replace(".txt", ".jsonl") for name, path in paths.items()}
    with pytest.raises(ConfigError, match=r"^val_data\.none: "):
        open_sets(dataset, train_data=paths["wiki"], val_data=paths)


@pytest.mark.slow
def test_validation_losses_of_sets_are_those_of_each_alone(tmp_path: Path) -> None:
    """On one rank and on two, after a resumption and in the report."""
    paths = write_texts(tmp_path)
    text = EXACT_RUN | {"dataset": "text", "train_data": paths["wiki"], "vocab_size": 264}
    text |= {"max_seq_len": SEQ_LEN, "validation_batches": 9, "checkpoint_rate": 2}
    text |= {"total_batch_size": 2, "dropout": 0.0, "max_steps": 4, "num_tokens": 0}
    several = text | {"val_data": paths}
    done = run_fsdp(tmp_path / "two", ranks=2, config=several, code=0)
    ours = read_reports(tmp_path / "two", "validation")
    assert f"loss_wiki {ours[4]['loss_wiki']:.4f}  loss_code" in done.stdout
    run_fsdp(tmp_path / "one", config=several, code=0)
    for step, report in read_reports(tmp_path / "one", "validation").items():
        assert report["loss"] == (report["loss_wiki"] + report["loss_code"]) / 2
        for metric in ("loss", "loss_wiki", "loss_code", "bits_per_byte_code"):
            assert report[metric] == pytest.approx(ours[step][metric], rel=1e-6)
    for name in paths:
        folder = tmp_path / name
        run_fsdp(folder, ranks=2, config=text | {"val_data": paths[name]}, code=0)
        alone = read_reports(folder, "validation")
        for metric in ("loss", "bits_per_byte"):
            values = [report[f"{metric}_{name}"] for report in ours.values()]
            assert values == [report[metric] for report in alone.values()]

    assert (
        read_manifest(checkpoints_by_step(tmp_path / "two")[4]).validation_loss == ours[4]["loss"]
    )
    text_of_report = (tmp_path / "two" / "runs" / "test" / "report.md").read_text()
    assert f"| validation loss_code | {ours[4]['loss_code']:.4f}, best " in text_of_report
    shutil.rmtree(checkpoints_by_step(tmp_path / "two")[4])
    run_fsdp(tmp_path / "two", ranks=2, config=several, code=0)
    again = read_reports(tmp_path / "two", "validation")
    for step, report in again.items():
        assert report | {"time": 0} == ours[step] | {"time": 0}
