"""Which samples a step sees is a function of the step alone; ranks share them out without gap or overlap."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lm.data.dataset import Dataset, MixtureDataset
from lm.data.loader import Batch, Data, DataConfig, Loader, derive_global_batch_size, open_data
from lm.data.tokens import TokenWindowDataset
from lm.errors import ConfigError
from model import IGNORE_INDEX

CPU = torch.device("cpu")
SEQ_LEN = 3


def config(**settings: Any) -> DataConfig:
    return DataConfig.model_validate(settings)


def numbered(samples: int) -> TokenWindowDataset:
    """A source whose sample i reads 3i, 3i + 1, 3i + 2, with 3i + 3 as last target."""
    return TokenWindowDataset(np.arange(samples * SEQ_LEN + 1), SEQ_LEN)


def loader(
    samples: int, total: int, *, rank: int = 0, ranks: int = 1, validation: int = 1, seed: int = 0, **keys: Any
) -> Loader:
    data = Data(MixtureDataset([numbered(samples)]), numbered(validation), None)
    return loader_of(data, total, rank=rank, ranks=ranks, seed=seed, **keys)


def loader_of(data: Data, total: int, *, rank: int = 0, ranks: int = 1, seed: int = 0, **keys: Any) -> Loader:
    return Loader(config(**keys), data, total, rank, ranks, seed, CPU)


def ids(inputs: torch.Tensor) -> list[int]:
    return [int(first) // SEQ_LEN for first in inputs[:, 0]]


def ids_of(batch: Batch) -> list[int]:
    return [i for micro in batch.micro_batches for i in ids(micro.inputs)]


def row_of_ids(source: Loader, steps: int, start: int = 0) -> list[int]:
    """The samples of `steps` batches, one after the other."""
    return [i for batch in itertools.islice(source.training(start), steps) for i in ids_of(batch)]


some_samples = st.integers(1, 40)
some_steps = st.integers(0, 30)
a_few = st.integers(1, 4)


# ---- training ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(some_samples, a_few, a_few, a_few, some_steps, st.booleans())
def test_a_global_batch_holds_the_same_samples_whatever_ranks_and_batch_size(
    samples: int, ranks: int, batch_size: int, accumulation: int, step: int, shuffle: bool
) -> None:
    total = ranks * batch_size * accumulation
    shares = []
    for rank in range(ranks):
        mine = loader(samples, total, rank=rank, ranks=ranks, batch_size=batch_size, shuffle=shuffle)
        batch = next(mine.training(step))
        assert len(batch.micro_batches) == accumulation
        shares += ids_of(batch)
    alone = loader(samples, total, shuffle=shuffle)
    assert shares == ids_of(next(alone.training(step))) == alone.sample_ids(step)


@settings(deadline=None)
@given(some_samples, st.integers(1, 12), st.integers(0, 5))
def test_every_epoch_holds_every_sample_once_also_where_batches_do_not_divide_it(
    samples: int, total: int, seed: int
) -> None:
    row = row_of_ids(loader(samples, total, seed=seed), math.ceil(3 * samples / total))
    for epoch in range(3):
        assert sorted(row[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(deadline=None)
@given(some_samples, a_few, some_steps)
def test_a_resumed_row_goes_on_where_it_would_have(samples: int, total: int, step: int) -> None:
    undisturbed = row_of_ids(loader(samples, total), step + 5)
    assert row_of_ids(loader(samples, total), 5, start=step) == undisturbed[step * total :]


def test_without_shuffling_samples_come_in_order_again_and_again() -> None:
    assert row_of_ids(loader(5, 2, shuffle=False), 6) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_the_order_follows_seed_and_epoch() -> None:
    row = row_of_ids(loader(50, 10), 10)
    first, second = row[:50], row[50:]
    assert first != second
    assert row_of_ids(loader(50, 10), 5) == first
    assert row_of_ids(loader(50, 10, seed=1), 5) != first


def test_a_batch_is_inputs_and_the_tokens_that_follow_them() -> None:
    batch = next(loader(10, 4, ranks=2, rank=1, shuffle=False, batch_size=2).training(0))
    (micro,) = batch.micro_batches
    assert micro.inputs.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert micro.targets.tolist() == [[7, 8, 9], [10, 11, 12]]
    assert micro.inputs.dtype == micro.targets.dtype == torch.int64
    assert batch.targets == 4 * SEQ_LEN


# ---- validation ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(some_samples, a_few, a_few, a_few, st.integers(1, 5))
def test_validation_sees_each_of_its_samples_once_in_equally_many_passes(
    samples: int, ranks: int, batch_size: int, accumulation: int, batches: int
) -> None:
    total = ranks * batch_size * accumulation
    keys = {"validation": samples, "batch_size": batch_size, "validation_batches": batches}
    seen: Counter[int] = Counter()
    passes = set()
    for rank in range(ranks):
        micro_batches = list(loader(1, total, rank=rank, ranks=ranks, **keys).validation())
        passes.add(len(micro_batches))
        for micro in micro_batches:
            assert micro.inputs.shape == (batch_size, SEQ_LEN)
            counts = (micro.targets != IGNORE_INDEX).all(dim=1)
            assert torch.equal(counts, (micro.targets != IGNORE_INDEX).any(dim=1))
            assert (micro.inputs >= 0).all()  # filled-up rows too: they are looked up in the embedding
            seen.update(ids(micro.inputs[counts]))
    assert seen == Counter(range(min(samples, batches * total)))
    assert len(passes) == 1


def test_validation_is_the_same_every_time() -> None:
    source = loader(1, 2, validation=7)
    first, second = ([micro.inputs.tolist() for micro in source.validation()] for _ in range(2))
    assert first == second


# ---- the size of a batch ---------------------------------------------------------------------------------------


def test_a_step_takes_one_batch_of_every_rank_unless_told_otherwise() -> None:
    assert derive_global_batch_size(config(batch_size=3), dp_size=4) == 12
    assert derive_global_batch_size(config(batch_size=3, total_batch_size=36), dp_size=4) == 36


@pytest.mark.parametrize(("total", "nearest"), [(13, "12 or 24"), (35, "24 or 36"), (5, "12")])
def test_an_uneven_total_is_refused_with_the_nearest_that_work(total: int, nearest: str) -> None:
    message = f"total_batch_size: {total} is no multiple of batch_size 3 x 4 ranks; use {nearest}$"
    with pytest.raises(ConfigError, match=message):
        derive_global_batch_size(config(batch_size=3, total_batch_size=total), dp_size=4)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"dataset": "jsonl5"}, {"validation_batches": 0}, {"total_batch_size": -2}], ids=str
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        config(**wrong)


# ---- synthetic data --------------------------------------------------------------------------------------------


def ids_in(source: object, index: int) -> list[int]:
    """The sample's ids: its inputs, and its last target."""
    assert isinstance(source, Dataset)
    row = source[index]
    assert row.document_ids is None
    assert row.inputs[1:].tolist() == row.targets[:-1].tolist()
    return [*row.inputs.tolist(), int(row.targets[-1])]


def synthetic(seed: int = 42, total: int = 2) -> Data:
    return open_data(config(), vocab_size=100, seq_len=8, global_batch_size=total, seed=seed)


@pytest.mark.parametrize("key", ["train_data", "val_data", "tokenizer"])
def test_data_that_nobody_would_read_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: dataset: synthetic reads none; choose text, tokens, jsonl or hf$"):
        open_data(config(**{key: "somewhere"}), 100, 8, 1, 0)


def test_synthetic_samples_are_these_on_every_machine() -> None:
    data = synthetic()
    assert ids_in(data.train, 0) == [56, 43, 75, 98, 24, 50, 40, 12, 66]
    assert ids_in(data.train, 3) == [56, 11, 89, 93, 56, 25, 18, 82, 57]
    assert ids_in(data.validation, 0) == [18, 58, 36, 53, 42, 32, 3, 7, 23]


def test_synthetic_samples_are_ten_batches_and_differ_by_index_part_and_seed() -> None:
    data = synthetic(total=3)
    assert data.samples == len(data.validation) == 30
    sources = (data.train, data.validation, synthetic(seed=1).train)
    rows = [ids_in(source, i) for source in sources for i in range(20)]
    assert len({tuple(row) for row in rows}) == 60
    assert {len(row) for row in rows} == {9}
    assert {min(map(min, rows)), max(map(max, rows))} == {0, 99}
    assert data.tokenizer is None


# ---- text ------------------------------------------------------------------------------------------------------


def open_text(folder: Path, *, vocab_size: int = 257, seq_len: int = 10, total: int = 2, **keys: Any) -> Data:
    return open_data(config(dataset="text", train_data=str(folder), **keys), vocab_size, seq_len, total, seed=0)


def decoded(data: Data, source: str) -> str:
    assert data.tokenizer is not None
    windows = getattr(data, source)
    return data.tokenizer.decode(int(token) for i in range(len(windows)) for token in windows[i].inputs)


def test_the_end_of_the_text_is_held_out_for_validation(tmp_path: Path) -> None:
    text = "".join(map(chr, range(32, 127))) * 20
    (tmp_path / "a.txt").write_text(text)
    data = open_text(tmp_path)
    cut = len(text) + 1 - round((len(text) + 1) * 0.05)
    train, held_out = decoded(data, "train"), decoded(data, "validation")
    assert text.startswith(train)
    assert 0 <= cut - 1 - len(train) < 10
    assert text[cut:].startswith(held_out)
    assert len(held_out) >= len(text) - cut - 10


def test_validation_text_of_its_own_leaves_the_training_text_whole(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name * 20)
    data = open_text(tmp_path / "train", val_data=str(tmp_path / "val"))
    assert decoded(data, "train") == "train" * 20
    assert decoded(data, "validation") == "val" * 20


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    with pytest.raises(ConfigError, match="vocab_size: 256 is less than the tokenizer's: bytes needs 257 or more"):
        open_text(tmp_path, vocab_size=256)


def test_fewer_samples_than_one_batch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    assert open_text(tmp_path, val_data=str(tmp_path), total=9).samples == 9
    message = "train_data: makes 9 samples of max_seq_len 10, but 10 are needed: give more data, or lower"
    with pytest.raises(ConfigError, match=message):
        open_text(tmp_path, val_data=str(tmp_path), total=10)
    with pytest.raises(ConfigError, match="val_data: makes 0 samples of max_seq_len 10, but 1 are needed"):
        open_text(tmp_path)


def test_the_fingerprint_changes_with_the_data_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 300)
    before = open_text(tmp_path).describe()["data"]
    assert open_text(tmp_path, batch_size=2, shuffle=False).describe()["data"] == before
    (tmp_path / "a.txt").write_text("a" * 299 + "b")
    after = open_text(tmp_path).describe()["data"]
    assert after["validation"] != before["validation"]
    assert after["train"] == before["train"]


# ---- JSON lines ------------------------------------------------------------------------------------------------


def open_lines(folder: Path, *lines: dict[str, str], seq_len: int = 4, without: str = "", **keys: Any) -> Data:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, Any] = {"dataset": "jsonl", "train_data": str(file), "val_data": str(file)} | keys
    settings.pop(without, None)
    return open_data(config(**settings), 300, seq_len, 1, 0)


def test_samples_that_are_cut_are_counted_and_said(tmp_path: Path) -> None:
    lines = [{"text": "abcdefgh"}, {"text": "ab"}]
    assert open_lines(tmp_path, *lines, packing=False).notes == ["1 of 2 samples are cut to max_seq_len 4"]
    assert open_lines(tmp_path, *lines).notes == []  # packed, nothing is lost
    answers = [{"prompt": "abcdefgh", "completion": "i"}, {"prompt": "a", "completion": "b"}]
    expected = "1 of 2 samples are cut to max_seq_len 4; 1 have nothing to learn in what is left, and are left out"
    assert open_lines(tmp_path, *answers, packing=False, loss_on="completion").notes == [expected]


def test_rows_with_nothing_to_learn_are_left_out(tmp_path: Path) -> None:
    data = open_lines(tmp_path, {"prompt": "a" * 11, "completion": "b"}, loss_on="completion")
    assert data.samples == 1  # the rows of the prompt alone are not among them
    batch = next(loader_of(data, total=1).training(0))
    assert batch.targets == 2
    assert (batch.micro_batches[0].targets != IGNORE_INDEX).sum() == 2


def test_a_batch_counts_the_targets_of_all_ranks(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "completion": "b" * count} for count in range(1, 7)]
    data = open_lines(tmp_path, *lines, packing=False, loss_on="completion", seq_len=8)
    batches = [next(loader_of(data, total=4, rank=rank, ranks=2).training(0)) for rank in range(2)]
    counts = [int((micro.targets != IGNORE_INDEX).sum()) for batch in batches for micro in batch.micro_batches]
    assert len(counts) == 4
    assert batches[0].targets == batches[1].targets == sum(counts)


@pytest.mark.parametrize("missing", ["train_data", "val_data"])
def test_both_names_are_needed(missing: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{missing}: dataset: jsonl needs it: a file, a folder or a glob"):
        open_lines(tmp_path, {"text": "ab"}, without=missing)
