"""Token files: every window is what was written, and a file that is not what it says is an error with a place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.loader import Data, DataConfig, open_data
from lm.data.tokenizer import FILE, ByteTokenizer
from lm.data.tokens import TokenFileDataset, TokenIndex
from lm.errors import ConfigError, DataError
from tests.support import byte_level_tokenizer
from tests.test_loader import loader_of


def write(folder: Path, ids: Any, name: str = "train", **changes: Any) -> Path:
    """A token file as `lm.prepare` writes it, of one document."""
    folder.mkdir(parents=True, exist_ok=True)
    array = np.asarray(ids, changes.get("dtype", "uint16"))
    fields = {
        "format": 1,
        "tokenizer": None,
        "vocab_size": 300,
        "tokens": len(array),
        "documents": 1,
        "dtype": "uint16",
        "crc32c": 0,
        "ends_crc32c": 0,
        "sources": [],
    }
    (folder / f"{name}.bin").write_bytes(array.tobytes())
    path = folder / f"{name}.json"
    path.write_text(TokenIndex.model_validate(fields | changes).model_dump_json())
    return path


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), min_size=2, max_size=40), st.integers(1, 9), st.sampled_from(["uint16", "uint32"]))
def test_windows_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], seq_len: int, dtype: str
) -> None:
    source = TokenFileDataset(write(tmp_path_factory.mktemp("tokens"), ids, dtype=dtype), seq_len, 300)
    assert len(source) == (len(ids) - 1) // seq_len
    for index in range(len(source)):
        start = index * seq_len
        row = source[index]
        assert row.inputs.tolist() == ids[start : start + seq_len]
        assert row.targets.tolist() == ids[start + 1 : start + seq_len + 1]
        assert source.targets(index) == seq_len


@pytest.mark.parametrize("size", [0, 19, 21])
def test_a_file_of_another_size_is_refused(size: int, tmp_path: Path) -> None:
    path = write(tmp_path, range(10))
    os.truncate(tmp_path / "train.bin", size)
    expected = f"{tmp_path}/train.bin: {size} bytes, but 10 tokens of uint16 are 20: damaged or cut short"
    with pytest.raises(ConfigError, match=expected):
        TokenFileDataset(path, 4, 300)


def test_a_file_cut_short_while_it_is_in_use_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    source = TokenFileDataset(write(tmp_path, range(100)), 4, 300)
    assert source[20].inputs.tolist() == [80, 81, 82, 83]
    os.truncate(tmp_path / "train.bin", 150)
    assert source[17].inputs.tolist() == [68, 69, 70, 71]
    with pytest.raises(DataError, match=r"train.bin: ends at byte 150; it was cut short while it was in use"):
        source[18]


def test_an_id_that_is_no_token_is_named_with_its_place(tmp_path: Path) -> None:
    ids = [1] * 100
    ids[37] = 256
    source = TokenFileDataset(write(tmp_path, ids), 10, vocab_size=256)
    assert source[2].inputs.tolist() == [1] * 10
    with pytest.raises(DataError, match=r"train.bin: byte 74: id 256 is not below vocab_size 256"):
        source[3]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "train.json: says not what it should of a token file"),
        ("{}", "format: Field required"),
        ('{"format": 2}', "format: Input should be 1"),
    ],
)
def test_an_index_that_is_none_is_refused(content: str, problem: str, tmp_path: Path) -> None:
    write(tmp_path, range(10)).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        TokenFileDataset(tmp_path / "train.json", 4, 300)


# ---- as a dataset --------------------------------------------------------------------------------------------


def opened(train_data: Any, *, vocab_size: int = 300, total: int = 2, **keys: Any) -> Data:
    config = DataConfig.model_validate({"dataset": "tokens", "train_data": train_data} | keys)
    return open_data(config, vocab_size, 4, total, 0)


def both(folder: Path, count: int = 50, **changes: Any) -> Path:
    write(folder, range(count), "validation", **changes)
    return write(folder, range(count), **changes).parent


def test_a_folder_holds_training_and_validation_data(tmp_path: Path) -> None:
    data = opened(str(both(tmp_path)))
    assert (data.samples, len(data.validation), data.tokenizer) == (12, 12, None)
    write(tmp_path, range(30), "validation")
    assert len(opened(str(tmp_path / "train.json")).validation) == 7  # beside it


def test_several_folders_are_mixed_by_weight(tmp_path: Path) -> None:
    one, two = both(tmp_path / "one"), both(tmp_path / "two", 90)
    data = opened({str(one): 3, str(two): 1})
    assert data.samples == 12 + 22
    assert data.describe()["data"]["train"].count("tokens, crc32c") == 2
    assert opened({str(one): 6, str(two): 2}).describe() == data.describe()
    assert opened({str(one): 1, str(two): 1}).describe() != data.describe()


def test_the_tokenizer_is_the_one_that_the_files_were_made_with(tmp_path: Path) -> None:
    assert opened(str(both(tmp_path / "bytes", tokenizer="bytes"))).tokenizer is not None
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / FILE).write_bytes(byte_level_tokenizer())
    identity = opened(str(both(tmp_path / "plain", tokenizer="bytes"))).describe()["tokenizer"]
    assert identity == ByteTokenizer.identity
    with pytest.raises(ConfigError, match="is not the one that the token files were made with"):
        opened(str(both(tmp_path / "own", tokenizer="some other")))
    with pytest.raises(ConfigError, match="was made with another tokenizer than"):
        opened({str(tmp_path / "plain"): 1, str(tmp_path / "own"): 1})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"train_data": None}, "train_data: dataset: tokens needs a folder written by python -m lm.prepare"),
        ({"train_data": "none"}, "none: No such file or directory; token files are written by: python -m lm.prepare"),
        ({"total": 13}, "train_data: makes 12 samples of max_seq_len 4, but 13 are needed"),
        ({"dataset": "text", "train_data": {"a": 1}}, "train_data: files with weights need dataset: tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(keys: dict[str, Any], problem: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_data": str(both(tmp_path))} | keys
    with pytest.raises(ConfigError) as caught:
        opened(**settings)
    assert problem in str(caught.value)


def test_a_weight_too_small_is_refused(tmp_path: Path) -> None:
    one, two = both(tmp_path / "one"), both(tmp_path / "two")
    with pytest.raises(ConfigError, match="train_data: a share of 1e-06 is less than one sample in 1024"):
        loader_of(opened({str(one): 1, str(two): 1e-6}), total=2)
