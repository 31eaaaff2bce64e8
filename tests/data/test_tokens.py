"""Token files: windows are the ids that were written, and errors name the file and the offset."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.run_data import Data, DataConfig, default_vocab_size, open_data
from lm.data.token_file import TokenFile, TokenIndex, open_token_files
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.windows import WindowDataset, cut_file
from lm.errors import ConfigError
from lm.fileio import crc32c
from lm.storage.folder import write_manifest
from tests.support.hyperparameters import TINY
from tests.support.runs import run_fsdp
from tests.support.tokenizer_files import byte_level_tokenizer


def write(folder: Path, ids: Any, name: str = "train", **changes: Any) -> Path:
    """A token file as `lm.prepare` writes it, of one document."""
    folder.mkdir(parents=True, exist_ok=True)
    array = np.asarray(ids, changes.get("dtype", "uint16"))
    ends = np.array(changes.pop("ends", [len(array)]), "<u8")
    fields = {
        "format": 1,
        "tokenizer": "bytes",
        "vocab_size": 257,
        "max_id": int(array.max()),
        "tokens": len(array),
        "documents": len(ends),
        "dtype": "uint16",
    }
    (folder / f"{name}.bin").write_bytes(array.tobytes())
    (folder / f"{name}.ends").write_bytes(ends.tobytes())
    path = folder / f"{name}.json"
    path.write_text(TokenIndex.model_validate(fields | changes).model_dump_json())
    write_manifest(folder, {})
    return path


def open_train(folder: Path, vocab_size: int | None = None) -> TokenFile:
    (file,) = open_token_files(folder, ["train"], vocab_size)
    return file


def windows(path: Path, seq_len: int) -> WindowDataset:
    return cut_file(open_train(path.parent), seq_len, attend_across_documents=True)


@given(
    st.lists(st.integers(0, 299), min_size=2, max_size=40),
    st.integers(1, 9),
    st.sampled_from(["uint16", "uint32"]),
)
def test_token_windows_of_a_file_and_an_array(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], seq_len: int, dtype: str
) -> None:
    path = write(tmp_path_factory.mktemp("tokens"), ids, dtype=dtype)
    for source in (
        windows(path, seq_len),
        WindowDataset(np.array(ids, dtype), seq_len),
    ):
        assert len(source) == (len(ids) - 1) // seq_len
        for index in range(len(source)):
            start = index * seq_len
            sample = source[index]
            assert sample.inputs.tolist() == ids[start : start + seq_len]
            assert sample.targets.tolist() == ids[start + 1 : start + seq_len + 1]
            assert sample.inputs.dtype == sample.targets.dtype == np.int64
            assert source.count_terms(index) == seq_len


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("json", "", ".*JSON"),
        ("json", "{}", ".*format: "),
        ("json", '{"format": 2}', ".*format: .* 1"),
        ("json", '{"format": 1, "tokens": 0}', "not the index of a token file: "),
    ],
)
def test_token_file_that_is_damaged_is_refused(
    name: str, content: str, part: str, tmp_path: Path
) -> None:
    path = write(tmp_path, range(10))
    path.with_suffix(f".{name}").write_text(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/train.{name}: damaged: "):
        open_train(tmp_path)
    write_manifest(tmp_path, {})
    with pytest.raises(ConfigError, match=f"^{tmp_path}/train.{name}: {part}"):
        open_train(tmp_path)


def test_part_that_a_run_does_not_read_is_not_compared(tmp_path: Path) -> None:
    where = str(both(tmp_path / "a"))
    (tmp_path / "a" / "validation.bin").write_bytes(b"")
    opened(where, val_data=str(both(tmp_path / "b")))
    with pytest.raises(ConfigError, match=r"a/validation\.bin: damaged: "):
        opened(where)


def test_token_file_truncated_during_the_run_is_an_error(tmp_path: Path) -> None:
    source = windows(write(tmp_path, range(100)), 4)
    assert source[20].inputs.tolist() == [80, 81, 82, 83]
    os.truncate(tmp_path / "train.bin", 150)
    assert source[17].inputs.tolist() == [68, 69, 70, 71]
    with pytest.raises(ConfigError, match=r"train.bin: .*150"):
        source[18]


def test_ends_identify_what_is_trained_as_separate_documents(tmp_path: Path) -> None:
    """Of the same tokens in other documents, a resumed run says that its data differ."""
    whole = write(tmp_path / "whole", range(10))
    cut = write(tmp_path / "cut", range(10), ends=[4, 10])
    files = [open_train(path.parent) for path in (whole, cut)]
    one, other = (cut_file(file, 4, attend_across_documents=False).fingerprint() for file in files)
    assert one != other
    one, other = (cut_file(file, 4, attend_across_documents=True).fingerprint() for file in files)
    assert one == other


def test_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    ids = [1] * 100
    ids[37] = 256
    write(tmp_path, ids)
    assert len(open_train(tmp_path, vocab_size=257)) == 100
    with pytest.raises(
        ConfigError, match=r"train.bin: id 256 .*vocab_size 256; use vocab_size=257"
    ):
        open_train(tmp_path, vocab_size=256)


# ---- as a dataset


def opened(train_data: Any, *, vocab_size: int = 300, total: int = 2, **keys: Any) -> Data:
    config = DataConfig.model_validate({"dataset": "tokens", "train_data": train_data} | keys)
    return open_data(config, vocab_size, 4, total, 0)


def both(folder: Path, count: int = 50, **changes: Any) -> Path:
    write(folder, range(count), "validation", **changes)
    return write(folder, range(count), **changes).parent


def test_mixture_is_validated_on_each_of_its_directories(tmp_path: Path) -> None:
    a, b = str(both(tmp_path / "a")), str(both(tmp_path / "b", 30))
    data = opened({a: 3, b: 1})
    assert [(each.name, len(each.dataset)) for each in data.validation] == [("a", 12), ("b", 7)]
    c = str(write(tmp_path / "c", range(30)).parent)
    with pytest.raises(ConfigError, match=f"^val_data: {c} has no validation part"):
        opened({a: 3, c: 1})


@pytest.mark.slow
def test_run_says_how_often_it_reads_each_directory(tmp_path: Path) -> None:
    """Of 16 samples it reads 12 of the 12 in a, and 4 of the 8 in b."""
    for name, n_tokens in {"a": 49, "b": 33}.items():
        both(tmp_path / name, n_tokens)
    config = TINY | {"dataset": "tokens", "train_data": {"../a": 3, "../b": 1}}
    config |= {"vocab_size": 300, "max_seq_len": 4, "total_batch_size": 4, "max_steps": 4}
    printed = run_fsdp(tmp_path / "run", "--dry-run", config=config, code=0).stdout
    assert "steps read ../a 1 times, ../b 0.5 times" in printed


def test_directories_of_one_name_are_separate_validation_sets(tmp_path: Path) -> None:
    names = ("a/wiki", "b/wiki-2", "c/wiki", "d/wiki")
    sizes = (9, 13, 17, 21)
    directories = [str(both(tmp_path / name, n)) for name, n in zip(names, sizes, strict=True)]
    data = opened(dict.fromkeys(directories, 1))
    assert len({each.name for each in data.validation}) == 4
    assert [len(each.dataset) for each in data.validation] == [2, 3, 4, 5]


def test_validation_on_what_is_trained_on_is_said(tmp_path: Path) -> None:
    where = str(write(tmp_path, range(50)).parent)
    assert [note for note in opened(where, val_data=where).notes if "trained on" in note]


def test_token_folder_holds_training_and_validation_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(str(both(tmp_path)))
    assert (data.train.samples_per_epoch, len(data.validation[0].dataset)) == (12, 12)
    write(tmp_path, range(30), "validation")
    assert len(opened(str(tmp_path)).validation[0].dataset) == 7
    for val_data in (tmp_path, write(tmp_path / "other", range(50)).parent):
        held_out = opened(str(tmp_path), val_data=str(val_data)).validation[0].dataset
        assert len(held_out) == (7 if val_data == tmp_path else 12)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened("~", val_data="~/other").validation[0].dataset) == 12


def test_token_folder_whose_replacement_was_killed_is_put_back(tmp_path: Path) -> None:
    """`lm.prepare --overwrite` has moved it aside, and not renamed the new one."""
    folder = both(tmp_path / "a")
    folder.rename(tmp_path / ".a.replaced")
    assert len(opened(str(folder)).validation[0].dataset) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_val_data_names_several_token_files(tmp_path: Path) -> None:
    sets = {
        "a": str(write(tmp_path / "a", range(30), "validation").parent),
        "b": str(write(tmp_path / "b", range(10)).parent),
    }
    train = str(write(tmp_path / "train", range(50)).parent)
    data = opened(train, val_data=sets)
    assert [(name, len(dataset)) for name, dataset in data.validation] == [("a", 7), ("b", 2)]
    with pytest.raises(ConfigError, match=r"^val_data\.none: "):
        opened(train, val_data=sets | {"none": str(tmp_path / "none")})


@pytest.mark.parametrize("name", ["", "nanogpt", "older", "good/train.bin", "good/train.json"])
def test_what_is_no_directory_of_token_files_is_refused(name: str, tmp_path: Path) -> None:
    good = both(tmp_path / "good")
    for each in ("nanogpt", "older"):
        (tmp_path / each).mkdir()
        shutil.copy(good / "train.bin", tmp_path / each)
    (tmp_path / "older/train.json").write_text('{"checksums": {}}')
    where = str(tmp_path / name)
    refused = re.escape(f"{where} is not a directory of token files")
    with pytest.raises(ConfigError, match=rf"^train_data: {refused}.*--overwrite$"):
        opened(where)
    with pytest.raises(ConfigError, match=rf"^val_data: {refused}"):
        opened(str(good), val_data=where)
    config = DataConfig.model_validate({"dataset": "tokens", "train_data": where})
    with pytest.raises(ConfigError, match=rf"^train_data: {refused}"):
        default_vocab_size(config)


def test_token_file_of_another_directory_is_refused(tmp_path: Path) -> None:
    """Nothing says what its checksums are."""
    write(tmp_path / "a", range(50))
    for path in both(tmp_path / "b").glob("validation.*"):
        shutil.copy(path, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"a: manifest.json has no validation.bin; "):
        opened(str(tmp_path / "a"))


def test_token_folders_are_mixed_by_weight(tmp_path: Path) -> None:
    one, two = str(both(tmp_path / "one")), str(both(tmp_path / "two", 90))
    data = opened({one: 3, two: 1})
    assert data.train.samples_per_epoch == 12 + 22
    assert data.fingerprints()["data"]["train"].count("tokens, crc32c") == 2
    assert opened({one: 6, two: 2}).fingerprints() == data.fingerprints()
    assert opened({one: 1, two: 1}).fingerprints() != data.fingerprints()


def test_token_files_refuse_another_tokenizer(tmp_path: Path) -> None:
    one, own = (
        str(both(tmp_path / "bytes", tokenizer="bytes")),
        str(both(tmp_path / "own", tokenizer="some other")),
    )
    (tmp_path / "own" / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    data = opened(one)
    assert data.tokenizer is not None
    assert data.fingerprints()["tokenizer"] == ByteTokenizer.identity
    for train_data, part in (
        (own, rf"^tokenizer: {own} .*\(some other\)"),
        ({one: 1, own: 1}, f"^train_data: {own}/train.bin .*{one}/train.bin"),
    ):
        with pytest.raises(ConfigError, match=part):
            opened(train_data)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"train_data": None}, "train_data: .*python -m lm.prepare"),
        ({"train_data": "none"}, "train_data: none is not a directory of token files"),
        ({"total": 13}, "train_data: 12 sequences of max_seq_len 4, .*at least 13;"),
        (
            {"dataset": "text", "train_data": {"a": 1}},
            "train_data: weights require dataset: tokens, not text",
        ),
    ],
    ids=["null", "missing", "few", "weights"],
)
def test_token_files_that_are_missing_are_refused(
    keys: dict[str, Any], part: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"train_data": str(both(tmp_path))} | keys
    with pytest.raises(ConfigError, match=f"^{part}"):
        opened(**settings)


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


DAMAGES = [flip, Path.unlink, lambda path: path.write_bytes(bytes(path.stat().st_size))]


@pytest.mark.parametrize("name", ["train.bin", "train.ends", "validation.bin"])
@pytest.mark.parametrize("damage", [*DAMAGES, lambda path: os.truncate(path, 1)])
def test_token_files_are_verified(
    damage: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    folder = both(tmp_path / "a")
    damage(folder / name)
    with pytest.raises(ConfigError, match=rf"^(train|val)_data: {folder / name}: "):
        opened(str(folder))


def test_token_file_is_verified_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("lm.storage.cache.crc32c", lambda path: read.append(path) or crc32c(path))
    monkeypatch.setattr("lm.storage.cache._REMEMBERED_BYTES", 0)
    write(tmp_path, range(100))
    for _ in range(2):
        open_train(tmp_path)
        assert len(read) == 3
    flip(tmp_path / "train.bin")
    with pytest.raises(ConfigError, match=r"train.bin: damaged"):
        open_train(tmp_path)
