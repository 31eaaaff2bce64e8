"""Text files are found and tokenized without loss; errors name the file and the offset."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from lm import prepare
from lm.data.blocks import READ_BLOCK_BYTES, read_text_blocks
from lm.data.files import find_files
from lm.data.json_lines import read_json_lines
from lm.data.readers import read_documents, read_ids
from lm.data.run_data import DataConfig, open_data
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT, FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import end_text
from lm.errors import ConfigError
from lm.tasks.questions import read_tasks
from lm.training import parallelize
from model import IGNORE_INDEX, ModelConfig, Transformer
from tests.support.hyperparameters import LLAMA_STYLE, TINY
from tests.support.records import read_text
from tests.support.tokenizer_files import byte_level_tokenizer

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_id


def write(folder: Path, *names: str) -> list[Path]:
    """Files whose content is their name, made in the order given."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return [folder / name for name in names]


# ---- finding files


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".root/a.txt", ["a.txt"]),
        (".root", ["a.txt", "b.txt", "d.md", "deep/er/c.txt"]),
        (".root/*.txt", ["a.txt", "b.txt"]),
        (".root/**/*.txt", ["a.txt", "b.txt", "deep/er/c.txt"]),
    ],
    ids=["file", "folder", "glob", "recursive glob"],
)
def test_find_files_without_hidden_ones(
    name: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / ".root"
    write(root, "b.txt", "a.txt", "deep/er/c.txt", "d.md")
    write(root, ".b.txt", ".git/config", "c/.d/e", "c/__pycache__/f")
    found = [root / each for each in expected]
    assert find_files(str(tmp_path / name), "train_data") == found
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(f"~/{name}", "train_data") == found


def test_find_files_follows_links_and_ends_loops(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, *_ = write(root, "a/one.txt")
    write(tmp_path, "else/two.txt", "else/.hidden.txt")
    (root / "linked").symlink_to(tmp_path / "else")
    (root / "a" / "loop").symlink_to(root)
    assert find_files(str(root), "train_data") == [one, root / "linked" / "two.txt"]


@pytest.mark.parametrize("name", ["data", "data/*.txt", "data/none.txt", "**/*.txt"])
def test_link_to_nothing_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, "data/a.txt")
    (tmp_path / "data/none.txt").symlink_to("../.git/annex/objects/0x/MD5E-s9--00.txt")
    with pytest.raises(ConfigError, match=r"data/none.txt: is a link to .*, which does not exist"):
        find_files(f"{tmp_path}/{name}", "train_data")


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_find_files_names_a_folder_without_permission(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "root/a.txt", "root/b/c.txt")
    monkeypatch.chdir(tmp_path)  # relative: the other user may not enter the parents
    for path in (tmp_path, tmp_path / "root"):
        path.chmod(0o755)
    (tmp_path / "root" / "b").chmod(mode)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(ConfigError, match=r"train_data: root/b.*: Permission denied"):
            find_files("root", "train_data")
    finally:
        os.seteuid(user)
        (tmp_path / "root" / "b").chmod(0o755)


def test_train_data_null_is_the_standard_librarys_source() -> None:
    files = find_files(None, "train_data")
    names = {path.name for path in files}
    assert {"argparse.py", "ast.py", "decoder.py"} <= names
    assert not [path for path in files if "test" in path.parts or "site-packages" in path.parts]
    text = read_text(files, TOKENIZER)
    tokens, ends = text[:], text.ends
    assert ends is not None
    assert len(tokens) > 5_000_000
    assert (tokens == END).sum() == len(ends) == sum(path.stat().st_size > 0 for path in files)


@pytest.mark.parametrize("name", ["none.txt", "*.txt", "empty"])
def test_find_files_refuses_a_name_without_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"^val_data: .*{re.escape(f'{tmp_path}/{name}')}"):
        find_files(f"{tmp_path}/{name}", "val_data")


@pytest.mark.parametrize("dataset", ["text", "jsonl", "tokens", "hf"])
def test_url_is_refused(dataset: str) -> None:
    config = DataConfig.model_validate({"dataset": dataset, "train_data": "s3://bucket/a.txt"})
    with pytest.raises(ConfigError, match=r"^train_data: .*s3:/+bucket/a\.txt"):
        open_data(config, 257, 16, 2, 0)


@pytest.mark.parametrize("name", ["a.jsonl", "b.csv.gz", "c.tsv", "d.json", "e.parquet"])
def test_records_are_not_read_as_text(name: str, tmp_path: Path) -> None:
    text, records = write(tmp_path, "a.txt", name)
    for key in ("train_data", "val_data"):
        values = {"dataset": "text", "train_data": str(text), key: str(tmp_path)}
        with pytest.raises(ConfigError, match=f"^{key}: {records}: has records"):
            open_data(DataConfig.model_validate(values), 257, 16, 2, 0)


# ---- reading files


def test_text_files_end_with_end_of_text(tmp_path: Path) -> None:
    names = ["ü.txt", *(f"{letter}.txt" for letter in "abcdefghij")]
    text = read_text(write(tmp_path, *names), TOKENIZER)
    tokens, ends = text[:], text.ends
    assert ends is not None
    assert (tokens[ends - 1] == END).all()
    assert len(ends) == len(names)
    assert tokens[-1] == END
    assert TOKENIZER.decode(tokens.tolist()).split() == names


def test_text_files_that_are_empty_are_skipped(tmp_path: Path) -> None:
    good, latin, cut, empty, blank = (
        tmp_path / name for name in ("good", "latin", "cut", "empty", "blank")
    )
    good.write_text("x")
    latin.write_bytes("Käse".encode("latin-1"))
    cut.write_bytes("aß".encode()[:-1])
    empty.touch()
    blank.touch()
    assert read_text([empty, good], TOKENIZER)[:].tolist() == [ord("x"), END]
    for files, start in (
        ([empty], f"{empty}: no text"),
        ([empty, blank], f"{empty} and 1 other .*no text"),
    ):
        with pytest.raises(ConfigError, match=f"^{start}"):
            read_text(files, TOKENIZER)
    for bad, problem in ((cut, "byte 1 "), (tmp_path / "gone", ""), (latin, "byte 1 ")):
        with pytest.raises(ConfigError, match=f"^{bad}: {problem}"):
            read_text([good, bad], TOKENIZER)


def test_file_whose_name_is_not_utf8_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / os.fsdecode(b"a\xe9.txt")
    odd.write_text("to be or not " * 99)
    config = DataConfig.model_validate({"dataset": "text", "train_data": str(tmp_path)})
    for _ in range(2):  # the second time, from the cache
        assert len(open_data(config, 257, 16, 2, 0).datasets[0]) > 70
    assert capsys.readouterr().err == ""


def written_by(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def add_to_tar(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(LINES)
        archive.addfile(member, io.BytesIO(LINES))


LINES = b'{"text": "a"}\n' * 99
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
NUL = r"byte \d+ is NUL, not text; .*iconv -f UTF-16 "
NOT_TEXT = {
    "tar": (written_by(add_to_tar), NUL),
    "bz2": (bz2.compress(LINES), "byte .* is (NUL|not UTF-8)"),
    "gzip": (gzip.compress(LINES), NUL),
    "parquet": (
        written_by(lambda file: pq.write_table(pa.table({"text": ["a"]}), file)),
        NUL,
    ),
    "pointer": (POINTER, "Git LFS pointer.*git lfs pull"),
    "annex": (b"/annex/objects/MD5E-s9--00.txt\n", "git-annex pointer.*git annex get"),
    "dvc": (b"outs:\n- md5: 00\n  size: 9\n  path: a.txt\n", "DVC pointer.*dvc pull"),
    "NUL": (b"to be\0", "byte 5 is NUL"),
    "UTF-16LE": ("text".encode("utf-16-le"), "byte 1 is NUL"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "byte (0 is not UTF-8|3 is NUL)"),
    "UTF-32-BE": ("text".encode("utf-32-be"), "byte 0 is NUL"),
    "Latin-1": ('{"text": "ä"}'.encode("latin-1"), "byte 10 is not UTF-8.*iconv -f "),
}
POINTERS = ("pointer", "annex", "dvc")
READERS: dict[str, Callable[[Path], Any]] = {
    ".txt": lambda path: read_text([path], TOKENIZER),
    ".jsonl": lambda path: list(read_json_lines(path)),
    ".csv": lambda path: list(read_documents([path], None, "text")),
    ".md": lambda path: list(read_documents([path], None, "text")),
    ".task.jsonl": lambda path: read_tasks([str(path)]),
}


@pytest.mark.parametrize("name", NOT_TEXT)
@pytest.mark.parametrize("compress", [None, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("suffix", READERS)
def test_content_that_is_not_text_is_named_by_each_reader(
    suffix: str, compress: Callable[[bytes], bytes] | None, name: str, tmp_path: Path
) -> None:
    content, part = NOT_TEXT[name]
    path = tmp_path / f"a{suffix}"
    if compress is not None:
        path = path.with_name(f"{path.name}.gz")
        if name not in POINTERS:  # which are not compressed
            content = compress(content)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        READERS[suffix](path)
    (problem,) = caught.value.problems
    assert re.search(part, problem)
    assert str(path) in problem


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_pointer_is_named_whatever_the_suffix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(POINTER)
    part = r"Git LFS pointer.*git lfs pull"
    with pytest.raises(ConfigError, match=part):
        list(read_documents([path], None, "text"))
    with pytest.raises(ConfigError, match=part):
        list(read_ids(path, 9, 1))
    config = {"dataset": "hf", "train_data": str(path)}
    with pytest.raises(ConfigError, match=part):
        open_data(DataConfig.model_validate(config), 257, 16, 2, 0)


def test_what_is_held_out_is_noted(tmp_path: Path) -> None:
    def notes(size: int) -> str:
        path = tmp_path / "a.txt"
        path.write_text("x" * size)
        config = DataConfig.model_validate({"dataset": "text", "train_data": str(path)})
        return "\n".join(open_data(config, 257, 16, 2, 0).notes)

    with pytest.raises(ConfigError, match="at least 2; add data, or lower max_seq_len"):
        notes(12)
    assert "1 of the 24 sequences of train_data is held out" in notes(400)


# ---- documents


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_documents_that_do_not_attend_to_each_other_are_trained_as_separate_ones(
    kind: str, tmp_path: Path
) -> None:
    for number, text in enumerate(["to be", "or not to be, that", "is", "the question" * 3]):
        (tmp_path / f"{number}.txt").write_text(text)
    data = {"dataset": kind, "attend_across_documents": False, "batch_size": 1}
    if kind == "tokens":
        written = tmp_path / "written"
        assert (
            prepare.main([f"{tmp_path}/*.txt", "--out", str(written), "--tokenizer", "bytes"]) == 0
        )
        data |= {"train_data": str(written), "val_data": str(written)}
    else:
        data |= {"train_data": str(tmp_path), "val_data": str(tmp_path)}
    dataset = open_data(DataConfig.model_validate(data), 264, 16, 1, 0).validation[0].dataset
    model = Transformer(ModelConfig.model_validate(TINY | LLAMA_STYLE | {"vocab_size": 264}))
    parallelize.initialize_parameters(model, 7)
    n_documents = 0
    for index in range(len(dataset)):
        sample = dataset[index]
        inputs, targets, document_ids = (torch.from_numpy(part)[None] for part in sample[:3])
        loss = model(inputs, targets, document_ids)
        expected = 0.0
        for document in document_ids.unique():
            own = document_ids == document
            expected += model(inputs[own][None], targets[own][None]).item()
            is_end = inputs[own] == END
            assert (targets[own][is_end] == IGNORE_INDEX).all()
            assert (targets[own][~is_end] != IGNORE_INDEX).all()
            n_documents += 1
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert dataset.count_terms(index) == (targets != IGNORE_INDEX).sum()
    assert n_documents > len(dataset)


@pytest.mark.slow
def test_long_file_has_the_tokens_of_its_text(tmp_path: Path) -> None:
    """It is read in blocks, and its parts are encoded at the same time."""
    words = "to be or not to be: das ist die Königsfrage, "
    text = words * (3 * READ_BLOCK_BYTES // len(words.encode()))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text[:99])
    tokenizer = FileTokenizer({TOKENIZER_JSON: byte_level_tokenizer()}, "test")
    read = read_text([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer)
    encoded = tokenizer.encode_batch([text, text[:99]])
    first, second = [end_text(ids, tokenizer.eos_id) for ids in encoded]
    assert read.ends is not None
    for document in np.split(read[:], read.ends[:-1]):
        expected = first
        if len(document) < len(first):
            expected = second
        assert np.array_equal(document, expected)
    assert read.index.has_bytes


@pytest.mark.parametrize("first", [b"\xef\xbb\xbf", b"\xef", b"\xef\xbb\xbf\xc3", b""])
def test_first_frame_can_be_any_part_of_the_text(first: bytes, tmp_path: Path) -> None:
    text = "é hello world\n" * 50
    content = codecs.BOM_UTF8 + text.encode()
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(first) + zstandard.compress(content[len(first) :]))
    (tmp_path / "b.txt").write_text("other")
    for folder in (path, tmp_path):
        read = read_text(find_files(str(folder), ""), ByteTokenizer())
        assert read.index.documents == (1 if folder == path else 2)
        assert len(read) == len(text.encode()) + 1 + (0 if folder == path else 6)


def test_end_of_text_that_is_text_to_the_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(END_OF_TEXT.join(["to be or not to be"] * 30))
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    config = {"dataset": "text", "train_data": str(path), "tokenizer": str(tmp_path)}
    open_data(DataConfig.model_validate(config), 300, 8, 2, 0)
    config["tokenizer"] = "bytes"
    with pytest.raises(ConfigError, match=f"^train_data: {path}: has {re.escape(END_OF_TEXT)}, "):
        open_data(DataConfig.model_validate(config), 300, 8, 2, 0)


@pytest.mark.parametrize("n_before", [1, 7, 12])
def test_end_of_text_in_two_blocks_is_found(n_before: int, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * (READ_BLOCK_BYTES - n_before) + END_OF_TEXT + "to be")
    with pytest.raises(ConfigError, match=f"^{path}: has {re.escape(END_OF_TEXT)}, "):
        read_text([path], TOKENIZER)


@pytest.mark.parametrize("at_end", [False, True])
def test_character_that_is_cut_is_named_by_its_byte(at_end: bool, tmp_path: Path) -> None:
    content = b"x" * (READ_BLOCK_BYTES - 1) + "é".encode()
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert "".join(read_text_blocks(path)) == content.decode()
    cut = content[:-1]
    if not at_end:
        cut += b"x"
    path.write_bytes(cut)
    with pytest.raises(ConfigError, match=f"byte {READ_BLOCK_BYTES - 1} is not UTF-8; "):
        list(read_text_blocks(path))
