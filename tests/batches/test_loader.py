"""A global batch is a function of the step alone; the ranks train on disjoint slices of it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import Unigram, WordPiece
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import Metaspace, Whitespace

from lm import preflight, prepare
from lm.checkpoint.store import LocalCheckpoints
from lm.config.reading import read_hyperparameters
from lm.data.config import derive_global_batch_size
from lm.data.dataset import Dataset, ValidationSet, validation_metric_names
from lm.data.loader import Batch, Loader
from lm.data.readers import is_held_out
from lm.data.run_data import Data, DataConfig, open_data
from lm.data.sampler import SampledSource
from lm.data.tokenized import HELD_OUT
from lm.data.windows import WindowDataset
from lm.errors import ConfigError
from model import IGNORE_INDEX
from tests.support.hyperparameters import TINY
from tests.support.ranks import in_world
from tests.support.tokenizer_files import byte_level_tokenizer, llama2_tokenizer, llama_tokenizer

CPU = torch.device("cpu")
SEQ_LEN = 3


def config(**settings: Any) -> DataConfig:
    return DataConfig.model_validate(settings)


def numbered(samples: int) -> WindowDataset:
    """A dataset whose sample i has the inputs 3i, 3i + 1, 3i + 2 and the last target 3i + 3."""
    return WindowDataset(np.arange(samples * SEQ_LEN + 1), SEQ_LEN)


def loader(
    samples: int,
    total: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    validation: int = 1,
    seed: int = 0,
    **keys: Any,
) -> Loader:
    source = SampledSource(
        [numbered(samples)], [1.0], total, rank, ranks, seed, keys.get("shuffle", True)
    )
    data = Data(source, [ValidationSet(None, numbered(validation))], None)
    return Loader(config(**keys), data, total, rank, ranks, CPU)


def ids(inputs: torch.Tensor) -> list[int]:
    return [int(first) // SEQ_LEN for first in inputs[:, 0]]


def ids_of(batch: Batch) -> list[int]:
    return [i for micro in batch.micro_batches for i in ids(micro.inputs)]


def sample_ids(source: Loader, steps: int, start: int = 0) -> list[int]:
    """The indices of the samples of `steps` batches."""
    return [i for batch in itertools.islice(source.training(start), steps) for i in ids_of(batch)]


some_samples = st.integers(1, 40)
some_steps = st.integers(0, 30)
a_few = st.integers(1, 4)


# ---- training


@given(some_samples, a_few, a_few, a_few, some_steps, st.booleans())
def test_global_batch_samples_depend_on_no_ranks_or_batch_size(
    samples: int, ranks: int, batch_size: int, accumulation: int, step: int, shuffle: bool
) -> None:
    total = ranks * batch_size * accumulation
    shares = []
    for rank in range(ranks):
        mine = loader(
            samples, total, rank=rank, ranks=ranks, batch_size=batch_size, shuffle=shuffle
        )
        batch = next(mine.training(step))
        assert len(batch.micro_batches) == accumulation
        shares += ids_of(batch)
    alone = SampledSource([numbered(samples)], [1.0], total, 0, 1, seed=0, shuffle=shuffle)
    assert shares == [index for _, index in alone.global_batch(step)]


@given(some_samples, st.integers(1, 12), st.integers(0, 5))
def test_epoch_holds_every_sample_once(samples: int, total: int, seed: int) -> None:
    indices = sample_ids(loader(samples, total, seed=seed), math.ceil(3 * samples / total))
    for epoch in range(3):
        assert sorted(indices[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_shuffle_false_keeps_the_order() -> None:
    assert sample_ids(loader(5, 2, shuffle=False), 6) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


# ---- validation


@given(some_samples, a_few, a_few, a_few, st.integers(1, 5))
def test_validation_uses_each_sample_once(
    samples: int, ranks: int, batch_size: int, accumulation: int, batches: int
) -> None:
    total = ranks * batch_size * accumulation
    keys = {"validation": samples, "batch_size": batch_size, "validation_batches": batches}
    seen: Counter[int] = Counter()
    passes = set()
    for rank in range(ranks):
        batches_of_sets = list(loader(1, total, rank=rank, ranks=ranks, **keys).validation())
        passes.add(len(batches_of_sets))
        for number, micro in batches_of_sets:
            assert number == 0
            assert micro.inputs.shape == (batch_size, SEQ_LEN)
            counts = (micro.targets != IGNORE_INDEX).all(dim=1)
            assert torch.equal(counts, (micro.targets != IGNORE_INDEX).any(dim=1))
            assert (micro.inputs >= 0).all()  # also of padding: the embedding looks them up
            seen.update(ids(micro.inputs[counts]))
    assert seen == Counter(range(min(samples, batches * total)))
    assert len(passes) == 1


# ---- the size of a batch


@pytest.mark.parametrize(("total", "nearest"), [(13, "12 or 24"), (35, "24 or 36"), (5, "12")])
def test_total_batch_size_error_names_the_nearest_multiples(total: int, nearest: str) -> None:
    assert derive_global_batch_size(config(batch_size=3), dp_size=4) == 12
    assert derive_global_batch_size(config(batch_size=3, total_batch_size=36), dp_size=4) == 36
    with pytest.raises(
        ConfigError, match=f"^total_batch_size: {total} .*batch_size 3 x 4 .* {nearest}$"
    ):
        derive_global_batch_size(config(batch_size=3, total_batch_size=total), dp_size=4)


# ---- synthetic data


def ids_in(dataset: Dataset, index: int) -> list[int]:
    """The ids of a sample: its inputs and its last target."""
    sample = dataset[index]
    assert sample.document_ids is None
    assert sample.inputs[1:].tolist() == sample.targets[:-1].tolist()
    return [*sample.inputs.tolist(), int(sample.targets[-1])]


def train_dataset(data: Data) -> Dataset:
    assert isinstance(data.train, SampledSource)
    dataset, _ = data.train.global_batch(0)[0]
    return dataset


def test_synthetic_samples_are_ten_fixed_batches() -> None:
    data, other = (
        open_data(config(), vocab_size=100, seq_len=8, global_batch_size=3, seed=seed)
        for seed in (42, 1)
    )
    assert data.train.samples_per_epoch == len(data.validation[0].dataset) == 30
    datasets = (train_dataset(data), data.validation[0].dataset, train_dataset(other))
    samples = [ids_in(dataset, i) for dataset in datasets for i in range(20)]
    assert samples[0] == [56, 43, 75, 98, 24, 50, 40, 12, 66]
    assert samples[3] == [56, 11, 89, 93, 56, 25, 18, 82, 57]
    assert samples[20] == [18, 58, 36, 53, 42, 32, 3, 7, 23]
    assert len({tuple(sample) for sample in samples}) == 60
    assert {min(map(min, samples)), max(map(max, samples))} == {0, 99}
    assert data.tokenizer is None


# ---- text


def test_run_opens_its_data_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_opened = 0

    def count(*arguments: Any, **options: Any) -> Data:
        nonlocal n_opened
        n_opened += 1
        return open_data(*arguments, **options)

    monkeypatch.setattr(preflight, "open_data", count)
    (tmp_path / "a.txt").write_text("a short text " * 50)
    keys = {"dataset": "text", "train_data": str(tmp_path), "vocab_size": 257, "max_steps": 1}
    hp = read_hyperparameters({"hyperparameters": TINY | keys}, [], "test")
    store = LocalCheckpoints(tmp_path / "checkpoints")
    in_world(lambda world: preflight.preflight(preflight.Job(hp, None, None), None, world, store))
    assert n_opened == 1


def open_text(
    folder: Path, *, vocab_size: int = 257, seq_len: int = 10, total: int = 2, **keys: Any
) -> Data:
    return open_data(
        config(dataset="text", train_data=str(folder), **keys), vocab_size, seq_len, total, seed=0
    )


def decoded(data: Data, windows: Dataset) -> str:
    assert data.tokenizer is not None
    return data.tokenizer.decode(
        int(token) for i in range(len(windows)) for token in windows[i].inputs
    )


def test_val_data_default_of_one_text_is_its_end(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val/a.txt").write_text("val" * 20)
    text = "".join(map(chr, range(32, 127))) * 20
    (tmp_path / "a.txt").write_text(text)
    data = open_text(tmp_path / "a.txt")
    cut = len(text) - round(len(text) * 0.05)
    assert decoded(data, train_dataset(data)) == text[: cut // 10 * 10]
    assert decoded(data, data.validation[0].dataset) == text[cut:][: (len(text) - cut) // 10 * 10]
    data = open_text(tmp_path / "a.txt", val_data=str(tmp_path / "val"))
    assert decoded(data, train_dataset(data)) == text
    assert decoded(data, data.validation[0].dataset) == "val" * 20


def test_fewer_samples_than_a_batch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    assert open_text(tmp_path, val_data=str(tmp_path), total=9).train.samples_per_epoch == 9
    (tmp_path / "b").mkdir()
    (tmp_path / "b/b.txt").write_text("x")
    for key, total, val_data, few, needed in (
        ("train_data", 10, str(tmp_path), 9, 10),
        ("val_data", 2, str(tmp_path / "b"), 0, 1),
    ):
        with pytest.raises(
            ConfigError, match=f"^{key}: {few} sequences of max_seq_len 10, .*at least {needed};"
        ):
            open_text(tmp_path / "a.txt", total=total, val_data=val_data)


def test_data_fingerprint_depends_only_on_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 300)
    before = open_text(tmp_path).fingerprints()["data"]
    assert open_text(tmp_path, batch_size=2, shuffle=False).fingerprints()["data"] == before
    (tmp_path / "a.txt").write_text("a" * 299 + "b")
    after = open_text(tmp_path).fingerprints()["data"]
    assert after["validation"] != before["validation"]
    assert after["train"] == before["train"]


def test_text_too_short_to_be_held_out_needs_val_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    with pytest.raises(ConfigError, match=r"^val_data: 0 sequences .*; add data"):
        open_text(tmp_path)


def test_validation_bytes_are_those_of_the_targets(tmp_path: Path) -> None:
    texts = ["to be", "or not to be, that is the question", "Größe"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    data = open_text(tmp_path, val_data=str(tmp_path))
    ids = [int(token) for i in range(4) for token in data.validation[0].dataset[i].targets]
    assert data.tokenizer
    assert data.tokenizer.eos_id in ids
    for validated, targets in ((2, ids[:20]), (99, ids)):
        settings = config(dataset="text", validation_batches=validated)
        n_bytes = sum(token < 256 for token in targets)  # the others end a text
        for rank, ranks in ((0, 1), (0, 3), (1, 3), (2, 3)):
            assert Loader(settings, data, 1, rank, ranks, CPU).validation_bytes == [n_bytes]
    synthetic = open_data(config(), 9, 4, 1, 0)
    assert Loader(config(), synthetic, 1, 0, 1, CPU).validation_bytes == [0]


def word_piece_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        WordPiece({"[UNK]": 0, "[EOS]": 1, "to": 2, "be": 3, "##e": 4}, unk_token="[UNK]")
    )
    tokenizer.add_special_tokens(["[EOS]"])
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def normalizing_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_tokenizer().decode())
    tokenizer.normalizer = NFC()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def unigram_tokenizer() -> tokenizers.Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("\u2581", -1.0),
        ("\u2581to", -2.0),
        ("\u2581be", -2.0),
    ]
    tokenizer = tokenizers.Tokenizer(Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


KINDS = {
    "byte-level": byte_level_tokenizer().decode(),
    "normal form": normalizing_tokenizer().to_str(),
    "llama": llama_tokenizer().decode(),
    "llama2": llama2_tokenizer().decode(),
    "unigram": unigram_tokenizer().to_str(),
    "word piece": word_piece_tokenizer().to_str(),
}
"""tokenizer.json by kind"""


def open_documents(directory: Path, dataset: str, tokenizer: str, documents: list[str]) -> Data:
    """Open the same documents for training and for validation, all of them in windows of 1."""
    (directory / "tokenizer.json").write_text(tokenizer)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (directory / "a.jsonl").write_text(lines)
    (directory / "a.txt").write_text(documents[0])
    settings = {"dataset": dataset, "tokenizer": str(directory / "tokenizer.json")}
    where = str(directory / {"text": "a.txt"}.get(dataset, "a.jsonl"))
    if dataset == "tokens":
        arguments = [where, "--tokenizer", settings["tokenizer"], "--out", str(directory / "out")]
        assert prepare.main([*arguments, "--validation-fraction", "0"]) == 0
        where = str(directory / "out")
    seq_len = 1
    if dataset == "jsonl":
        seq_len = 99
    settings |= {"train_data": where, "val_data": where, "validation_batches": 999}
    return open_data(config(**settings), 600, seq_len, 1, 0)


@pytest.mark.parametrize(
    ("kind", "dataset"),
    [
        *((kind, "jsonl") for kind in KINDS),
        *(
            pytest.param(kind, dataset, marks=pytest.mark.slow)
            for kind in ("byte-level", "llama", "word piece")
            for dataset in ("text", "hf", "tokens")
        ),
    ],
)
def test_validation_bytes_are_those_of_the_documents(
    kind: str, dataset: str, tmp_path: Path
) -> None:
    documents = ["to be or  not", "be", "to be"]
    if dataset == "text":
        documents = documents[:1]
    reference = tokenizers.Tokenizer.from_str(KINDS[kind])
    expected = 0
    for number, text in enumerate(documents):
        spans = reference.encode(text, add_special_tokens=False).offsets
        if dataset == "jsonl" or number == 0:
            is_started = "llama" in kind  # by <s>, which is no target
            spans = spans[0 if is_started else 1 :]
        expected += len("".join(text[start:stop] for start, stop in spans).encode())
    data = open_documents(tmp_path, dataset, KINDS[kind], documents)
    settings = config(dataset=dataset, validation_batches=999)
    found = Loader(settings, data, 1, 0, 1, CPU).validation_bytes
    is_exact = kind not in ("unigram", "word piece")  # which do not tell unknown text or spaces
    assert found == [expected * is_exact]
    assert ("bits_per_byte" in validation_metric_names(data.validation, True)) == is_exact


@pytest.mark.parametrize(
    "dataset",
    ["jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("text", "hf", "tokens"))],
)
@pytest.mark.parametrize(
    ("kind", "text"),
    [("normal form", "Gro\u0308\u00dfe und Ma\u00df"), ("llama", " to be")],
)
def test_no_bits_per_byte_of_text_that_a_tokenizer_changes(
    kind: str, text: str, dataset: str, tmp_path: Path
) -> None:
    data = open_documents(tmp_path, dataset, KINDS[kind], [text])
    settings = config(dataset=dataset, validation_batches=999)
    assert Loader(settings, data, 1, 0, 1, CPU).validation_bytes == [0]
    assert validation_metric_names(data.validation, True) == ["loss", "perplexity"]


# ---- JSON lines


def open_lines(
    folder: Path, *lines: dict[str, str], seq_len: int = 4, without: str = "", **keys: Any
) -> Data:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, Any] = {
        "dataset": "jsonl",
        "train_data": str(file),
        "val_data": str(file),
    } | keys
    settings.pop(without, None)
    return open_data(config(**settings), 300, seq_len, 1, 0)


def counts(data: Data) -> list[list[str]]:
    """The numbers in the notes on both files, which are one, each with what it counts."""
    *notes, last = data.notes
    assert last.endswith("is what the model is trained on")
    return [re.findall(r"[\d.]+ (?:% )?[a-z]+", note) for note in notes]


def test_data_note_counts_padded_truncated_and_dropped(tmp_path: Path) -> None:
    lines = [{"text": "abcdefgh"}, {"text": "ab"}]
    answers = [{"prompt": "abcdefgh", "completion": "i"}, {"prompt": "a", "completion": "b"}]
    truncated = ["2 samples", "2 sequences", "25.0 % padding", "1 truncated", "40.0 % of"]
    dropped = ["1 sample", "1 sequence", "50.0 % padding", "1 more"]
    for packing in (True, False):
        assert counts(open_lines(tmp_path, *lines, packing=packing)) == [truncated] * 2
        assert (
            counts(open_lines(tmp_path, *answers, packing=packing, loss_on="completion"))
            == [dropped] * 2
        )
    assert counts(open_lines(tmp_path, {"text": "ab"}, {"text": ""})) == [dropped] * 2


@pytest.mark.parametrize("packing", [True, False])
def test_jsonl_samples_that_are_all_too_long_are_refused(packing: bool, tmp_path: Path) -> None:
    lines = [{"prompt": "a" * length, "completion": "b"} for length in (11, 7)]
    with pytest.raises(ConfigError, match=r"max_seq_len 4 .*longest has 12"):
        open_lines(tmp_path, *lines, packing=packing, loss_on="completion")
    data = open_lines(tmp_path, *lines, packing=packing, loss_on="completion", seq_len=11)
    batch = next(Loader(config(), data, 1, 0, 1, CPU).training(0))
    assert batch.n_global_terms == (batch.micro_batches[0].targets != IGNORE_INDEX).sum() > 0


def test_batch_counts_the_target_tokens_of_all_ranks(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "completion": "b" * count} for count in range(1, 7)]
    data = open_lines(tmp_path, *lines, packing=False, loss_on="completion", seq_len=8)
    sources = [
        SampledSource([train_dataset(data)], [1.0], 4, rank, 2, 0, shuffle=True)
        for rank in range(2)
    ]
    batches = [next(source.batches(0, None)) for source in sources]
    counts = [
        int((sample.targets != IGNORE_INDEX).sum()) for batch in batches for sample in batch.samples
    ]
    assert len(counts) == 4
    assert batches[0].n_global_terms == batches[1].n_global_terms == sum(counts)


def first_ids(dataset: Dataset) -> list[str]:
    return [chr(dataset[i].inputs[0]) for i in range(len(dataset))]


def test_val_data_default_depends_on_the_content_of_lines(tmp_path: Path) -> None:
    """Not on their place, nor on others: equal ones are on one side."""
    letters = [chr(ord("A") + i) for i in range(52)]
    held_out: list[list[str]] = []
    for order in (letters, letters[::-1], letters * 2):
        lines = [{"text": letter} for letter in order]
        data = open_lines(tmp_path, *lines, without="val_data", packing=False)
        found = first_ids(data.validation[0].dataset)
        assert sorted(found + first_ids(train_dataset(data))) == sorted(order)
        assert data.notes[-1].startswith(f"{len(found)} of the {len(order)} ")
        held_out.append(sorted(set(found)))
    assert held_out[0] == held_out[1] == held_out[2]
    assert 0 < len(held_out[0]) < 10
    assert len(open_lines(tmp_path, *lines, packing=False).validation[0].dataset) == 104


def test_val_data_default_of_equal_lines_is_every_20th(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n' * 3)
    lines = [{"text": "b"}] * 38
    data = open_lines(
        tmp_path, *lines, train_data=f"{tmp_path}/*.jsonl", without="val_data", packing=False
    )
    assert len(data.validation[0].dataset) == 3
    assert data.train.samples_per_epoch == 38


def test_val_data_default_of_few_lines_is_every_20th_if_content_holds_out_too_many(
    tmp_path: Path,
) -> None:
    lines = [{"text": f"{number:04}"} for number in range(1000)]
    by_content = [is_held_out([json.dumps(line).encode()], HELD_OUT) for line in lines]
    held_out = list(itertools.compress(lines, by_content))
    others = [line for line in lines if line not in held_out]
    for few, n_held_out in (([*others[:95], *held_out[:9]], 9), ([*others[:30], *held_out[:9]], 2)):
        data = open_lines(tmp_path, *few, without="val_data", packing=False)
        assert len(data.validation[0].dataset) == n_held_out


def test_prompt_default_is_the_start_of_validation_data(tmp_path: Path) -> None:
    answer = {"prompt": "What?", "completion": "That."}
    data = open_lines(tmp_path, answer, answer, seq_len=12, loss_on="completion")
    assert bytes(data.prompt()) == b"What?"
    data = open_lines(tmp_path, {"text": "ab"}, {"text": "ab"}, packing=False)
    assert bytes(data.prompt()) == b"ab"
