"""Text in any format becomes the same token files, whole or not at all; what cannot be read is named and placed."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers

from lm.data.files import blocks
from lm.data.tokenizer import FILE, ByteTokenizer, FileTokenizer, load_tokenizer
from lm.data.tokens import read_index
from lm.errors import ConfigError, RunError
from lm.prepare import command, readers, token_writer, workers
from lm.prepare.readers import Chunk, TokenChunk, held_out, read_chunks, read_ids, split
from tests.support import ROOT, byte_level_tokenizer, llama2_tokenizer, llama_tokenizer

TEXTS = ["to be", "that is\nthe question", "Sein oder Nichtsein, Größe ½", '"or", not', "NA", "1984", "to be"]
END = ByteTokenizer.end_of_text


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command as a person would."""
    command = [sys.executable, "-m", "lm.prepare", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*arguments: object) -> tuple[int, str, str]:
    """The command's exit code and both outputs."""
    process = start(*arguments)
    output, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors, errors
    return process.returncode, output, errors


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says where it ends before it begins."""
    assert command.main(list(map(str, arguments))) == 2
    return capsys.readouterr().err.rstrip("\n")


def dataset(folder: Path, name: str = "train") -> list[list[int]]:
    """Each document's ids, as a reader of the format's description alone would find them."""
    index = json.loads((folder / f"{name}.json").read_text())
    ids = np.fromfile(folder / f"{name}.bin", "<u2" if index["dtype"] == "uint16" else "<u4")
    ends = np.fromfile(folder / f"{name}.ends", "<u8").astype(int)
    assert (len(ids), len(ends), ends[-1]) == (index["tokens"], index["documents"], index["tokens"])
    return [document.tolist() for document in np.split(ids, ends[:-1])]


def as_bytes(*texts: str) -> list[list[int]]:
    return [[*text.encode(), END] for text in texts]


def write_all(folder: Path) -> list[Path]:
    """`TEXTS` in a file of every format."""
    table = pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})
    lines = "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in TEXTS).encode()
    names = ["a.jsonl", "b.jsonl.gz", "c.ndjson.zst", "d.csv", "e[1].parquet", "f.arrow", "g.arrow"]
    paths = [folder / name for name in names]
    paths[0].write_bytes(b"\n" + lines.rstrip())
    paths[1].write_bytes(gzip.compress(lines))
    paths[2].write_bytes(zstandard.compress(lines))
    with paths[3].open("w", newline="") as file:
        csv.writer(file).writerows([("n", "text"), *enumerate(TEXTS)])
    parquet.write_table(table, paths[4])
    for path, new in ((paths[5], ipc.new_file), (paths[6], ipc.new_stream)):
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as file:
            file.write_table(table)
    return paths


def read(path: Path, tokenizer: str = "bytes", **how: Any) -> list[TokenChunk]:
    """The tokens of a file, read in this process."""
    settings = {"given": None, "field": "text", "fraction": 0.0, "cut": load_tokenizer(tokenizer).splits_at} | how
    return [
        part
        for chunk in read_chunks([path], **settings)
        for part in workers.tokenise(chunk, tokenizer, settings["fraction"])
    ]


def refused(path: Path, content: bytes | None = None, **how: Any) -> str:
    """What is said of a file, behind its name, that cannot be read."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path, **how)
    (problem,) = caught.value.problems
    assert problem.startswith(str(path))
    return problem.removeprefix(str(path))


# ---- formats -------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_documents_in_the_order_of_the_input(tmp_path: Path) -> None:
    paths = write_all(tmp_path)
    (tmp_path / "z").mkdir()
    for name, text in zip("abc", TEXTS, strict=False):
        (tmp_path / f"z/{name}.txt").write_text(text)
    (tmp_path / "z/empty.md").touch()
    (tmp_path / "z/h.txt.gz").write_bytes(gzip.compress(TEXTS[3].encode()))
    code, output, errors = run(*paths, tmp_path / "z", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert (code, errors) == (0, "")
    assert dataset(tmp_path / "out") == as_bytes(*TEXTS * len(paths), *TEXTS[:4])
    index = read_index(tmp_path / "out/train.json")
    assert (index.tokenizer, index.vocab_size, index.dtype) == ("bytes", 257, "uint16")
    assert [source.name for source in index.sources[:7]] == list(map(str, paths))
    assert [source.bytes for source in index.sources[:7]] == [path.stat().st_size for path in paths]
    assert output.splitlines()[-1] == (
        f"{tmp_path}/out/train.bin: {index.tokens:,} tokens (uint16) in {index.documents} documents"
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "lock",
        "train.bin",
        "train.ends",
        "train.json",
    ]
    assert token_writer.verify(tmp_path / "out") == [output.splitlines()[-1] + ": whole"]


def test_the_tokenizers_files_lie_beside_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / "a.txt").write_text(TEXTS[1])
    out = tmp_path / "out"
    assert run(tmp_path / "a.txt", "--tokenizer", tmp_path, "--out", out, "--workers", 1)[0] == 0
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.files == load_tokenizer(str(tmp_path)).files
    assert read_index(out / "train.json").tokenizer == tokenizer.identity
    assert dataset(out) == [[*tokenizer.encode(TEXTS[1]), tokenizer.end_of_text]]


def test_a_vocabulary_that_two_bytes_cannot_hold_takes_four(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    encoder = Encoder(models.WordLevel(vocabulary, unk_token="w0"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.save(str(tmp_path / FILE))
    (tmp_path / "a.txt").write_text("w65536 w69999 w1")
    assert run(tmp_path / "a.txt", "--tokenizer", tmp_path, "--out", tmp_path / "out", "--workers", 1)[0] == 0
    assert read_index(tmp_path / "out/train.json").dtype == "uint32"
    assert dataset(tmp_path / "out") == [[65_536, 69_999, 1, 70_000]]


def test_a_tokenizer_is_trained_on_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"moves": f"e{n} d{n % 7}"}) + "\n" for n in range(3000)))
    out = tmp_path / "out"
    asked = (tmp_path / "a.jsonl", "--train-tokenizer", 300, "--text-field", "moves", "--out", out)
    code, output, errors = run(*asked)
    assert (code, errors) == (0, "")
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.vocab_size == read_index(out / "train.json").vocab_size == 300
    assert "".join(tokenizer.decode(document) for document in dataset(out)[:2]) == "e0 d0\n\ne1 d1\n\n"
    asked_more = (
        tmp_path / "a.jsonl",
        "--train-tokenizer",
        90_000,
        "--text-field",
        "moves",
        "--out",
        tmp_path / "more",
    )
    said = run(*asked_more)[1].splitlines()[1]
    assert re.fullmatch(r"the tokenizer has \d+ tokens: the text yields no more", said)
    code, output, errors = run(*asked)
    assert (code, errors) == (0, "")
    assert output.rstrip().endswith("is there already")


def test_a_parquet_file_without_rows_is_passed_over(tmp_path: Path) -> None:
    for name, rows in (("a", []), ("b", ["to be"])):
        parquet.write_table(pa.table({"text": pa.array(rows, pa.string())}), tmp_path / f"{name}.parquet")
    code, _, errors = run(tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out", "--workers", 1)
    assert (code, errors) == (0, "")
    assert dataset(tmp_path / "out") == as_bytes("to be")


def test_a_file_under_two_names_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    twice = (tmp_path / "b.txt", tmp_path, tmp_path / ".." / tmp_path.name / "a.txt")
    assert run(*twice, "--tokenizer", "bytes", "--out", tmp_path / "out", "--workers", 1)[0] == 0
    assert dataset(tmp_path / "out") == as_bytes("to be")


# ---- long documents ------------------------------------------------------------------------------------------


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK", 300)
    monkeypatch.setattr(readers, "AROUND", 50)


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "llama": llama_tokenizer(),
    "llama 2": llama2_tokenizer(),
    "llama 2, newer": llama2_tokenizer(newer=True),
}
WORDS = [
    "to",
    "be,",
    " ",
    "  ",
    " or",
    "\n",
    "\n\n",
    "\n  ",
    "\t",
    "é",
    "'s",
    "日本",
    "\u00a0",
    "42",
    "\u2581",
    "<0x41>",
]
WORDS += ["<|endoftext|>", "<s>", "</s>"]


def in_pieces(tokenizer: FileTokenizer, text: str) -> int:
    """How many pieces `text` is cut into, whose ids are seen to be its own."""
    blocks = (text[at : at + readers.CHUNK] for at in range(0, len(text), readers.CHUNK))
    pieces = list(split(blocks, tokenizer.splits_at, "text"))
    assert "".join(pieces) == text
    ids = [tokenizer.encode_serially([piece], opening=not at)[0] for at, piece in enumerate(pieces)]
    np.testing.assert_array_equal(np.concatenate(ids), tokenizer.encode(text))
    return len(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=600, max_size=900).map("".join))
def test_pieces_of_a_long_text_have_its_ids(name: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", 300)
        patch.setattr(readers, "AROUND", 50)
        in_pieces(FileTokenizer({FILE: TOKENIZERS[name]}, name), text + ".")


@pytest.mark.parametrize("name", ["llama 2", "llama 2, newer"])
def test_megabytes_without_words_are_cut_into_pieces_too(name: str) -> None:
    text = "".join(random.Random(0).choices(WORDS, k=1_000_000))
    assert in_pieces(FileTokenizer({FILE: TOKENIZERS[name]}, name), text + ".") > 1


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "jsonl", "csv"])
@pytest.mark.parametrize("make", [byte_level_tokenizer, llama_tokenizer, llama2_tokenizer])
def test_a_long_document_stays_one(suffix: str, make: Callable[[], bytes], tmp_path: Path) -> None:
    """Also with a tokenizer that opens every text with a token and a space."""
    (tmp_path / FILE).write_bytes(make())
    tokenizer = load_tokenizer(str(tmp_path))
    text = "".join(f"{n} to be\nor not " for n in range(200))
    path = tmp_path / f"a.{suffix}"
    contents = {
        "txt": text.encode(),
        "txt.gz": gzip.compress(text.encode()),
        "jsonl": json.dumps({"text": text}).encode(),
        "csv": f'text\nshort\n"{text}"\n'.encode(),
    }
    path.write_bytes(contents[suffix])
    parts = read(path, str(tmp_path))
    ids = np.concatenate([part.ids for part in parts]).tolist()
    expected = [*tokenizer.encode(text), tokenizer.end_of_text]
    assert ids[-len(expected) :] == expected
    assert sum(len(part.ends) for part in parts) == (2 if suffix == "csv" else 1)
    if suffix != "jsonl":
        assert len(parts) > 5


@pytest.mark.usefixtures("short_chunks")
def test_a_text_that_cannot_be_divided_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "WHOLE", 5000)
    (tmp_path / FILE).write_text(json.dumps(json.loads(byte_level_tokenizer()) | {"pre_tokenizer": None}))
    said = refused(tmp_path / "a.txt", b"to be " * 2000, tokenizer=str(tmp_path))
    assert said == (
        ": 5,100 characters that the tokenizer cannot be given in pieces; it has to be held whole: divide it into"
        " several documents"
    )


def test_a_file_larger_than_any_chunk_takes_no_more_memory_and_gives_the_same_tokens(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (2, 50):
        path = tmp_path / f"{megabytes}.txt"
        path.write_bytes(b"To be, or not to be, that is the question:\n" * (megabytes * 1_000_000 // 43))
        process = start(path, "--tokenizer", "bytes", "--out", tmp_path / "out", "--overwrite", "--workers", 2)
        assert process.stdout is not None
        assert process.stderr is not None
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, process.stderr.read()
        process.stdout.close()
        process.stderr.close()
        peaks.append(usage.ru_maxrss / 1024)
    ids = np.fromfile(tmp_path / "out/train.bin", "<u2")
    assert ids[:-1].astype(np.uint8).tobytes() == path.read_bytes()
    assert ids[-1] == END
    assert peaks[1] - peaks[0] < 60, f"{peaks} MiB"


# ---- validation ----------------------------------------------------------------------------------------------


def test_documents_are_held_out_by_their_content_alone(tmp_path: Path) -> None:
    numbered = [f"document {n}" for n in range(400)]
    lines = [json.dumps({"text": text}) for text in [*numbered, *reversed(numbered)]]
    sides = []
    for count in (200, 800):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[:count]))
        out = tmp_path / str(count)
        code, output, _ = run(
            tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", out, "--validation-fraction", 0.2, "--workers", 1
        )
        assert code == 0
        assert [line.split(":")[0] for line in output.splitlines()[1:]] == [
            str(out / "train.bin"),
            str(out / "validation.bin"),
        ]
        sides.append(
            [[ByteTokenizer().decode(one[:-1]) for one in dataset(out, name)] for name in ("train", "validation")]
        )
    (train, validation), (more_train, more_validation) = sides
    assert [*train, *validation] != []
    assert train == more_train[: len(train)]
    assert validation == more_validation[: len(validation)]
    assert not set(more_train) & set(more_validation)
    assert more_train == [text for text in [*numbered, *reversed(numbered)] if text not in more_validation]
    assert 50 < len(set(more_validation)) < 110


@pytest.mark.usefixtures("short_chunks")
def test_the_side_of_a_document_does_not_depend_on_how_it_is_read(tmp_path: Path) -> None:
    for number in range(8):
        text = f"{number} to be or not to be\n" * 50
        expected = held_out(text.encode(), 0.5)
        (tmp_path / "a.txt").write_text(text)
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
        (tmp_path / "a.csv").write_text(f'text\n"{text}"\n')
        for name in ("a.txt", "a.jsonl", "a.csv"):
            assert {part.held_out for part in read(tmp_path / name, fraction=0.5)} == {expected}


def test_a_fraction_that_leaves_one_side_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    out = tmp_path / "out"
    code, _, errors = run(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", out, "--validation-fraction", 1e-9)
    assert code == 2
    assert errors == (
        "--validation-fraction: 1e-09 of 1 document(s) leaves none for validation; choose another fraction, or prepare"
        " files of their own for validation in another folder\n"
    )
    assert [path.name for path in out.iterdir()] == ["lock"]


# ---- HDF5 ----------------------------------------------------------------------------------------------------


def hdf5(path: Path, samples: Sequence[Sequence[int]], name: str = "input_ids", dtype: str = "uint16") -> Path:
    with h5py.File(path, "w") as file:
        file[name] = np.array(samples, dtype)
    return path


def joined(parts: list[TokenChunk], side: bool = False) -> tuple[list[int], list[int]]:
    """Ids and ends of one side, as they are written."""
    ids: list[int] = []
    ends: list[int] = []
    for part in parts:
        if part.held_out == side:
            ends += [len(ids) + int(end) for end in part.ends]
            ids += part.ids.tolist()
    return ids, ends


def test_samples_are_joined_and_a_document_ends_at_an_end_of_text_and_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hdf5(tmp_path / "a.h5", [[9, 9, 1, 2], [3, 4, 5, 9], [9, 9, 6, 9], [9, 7, 8, 1]])
    for chunk in (1 << 20, 1, 4, 8):
        monkeypatch.setattr(readers, "CHUNK", chunk)
        assert joined(list(read_ids(path, 10, 9, 0.0))) == ([1, 2, 3, 4, 5, 9, 6, 9, 7, 8, 1, 9], [6, 8, 12])
    samples = [9, 9, 1, 2, 3, 4, 5, 9, 9, 9, 6, 9, 9, 7, 8, 1]
    assert joined(list(read_ids(path, 10, None, 0.0))) == (samples, [16])


def test_samples_are_held_out_one_by_one_and_a_cut_ends_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = np.random.default_rng(0).integers(0, 900, (60, 4))
    path = hdf5(tmp_path / "a.h5", samples.tolist())
    sides = [held_out(np.array(row, "<u4").tobytes(), 0.4) for row in samples]
    for chunk in (1 << 20, 12):
        monkeypatch.setattr(readers, "CHUNK", chunk)
        parts = list(read_ids(path, 1000, 999, 0.4))
        for side in (False, True):
            ids, ends = joined(parts, side)
            assert [token for token in ids if token != 999] == samples[[s == side for s in sides]].ravel().tolist()
            assert ends == [at + 1 for at, token in enumerate(ids) if token == 999]
            assert ends[-1] == len(ids)
            runs = sum(sides[at] == side and (at == 0 or sides[at - 1] != side) for at in range(60))
            assert len(ends) == runs


def test_hdf5_needs_no_tokenizer_but_the_size_of_a_vocabulary(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "a.hdf5", [[1, 2], [70_000, 3]], dtype="int32")
    out = tmp_path / "out"
    code, _, errors = run(path, "--tokenizer", "none", "--vocab-size", 70_001, "--out", out)
    assert (code, errors) == (0, "")
    assert dataset(out) == [[1, 2, 70_000, 3]]
    assert read_index(out / "train.json").tokenizer is None


@pytest.mark.parametrize("bad", [300, -1])
def test_an_id_out_of_range_is_named_with_its_place(bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK", 4)
    path = hdf5(tmp_path / "a.h5", [[1, 2], [3, 4], [5, 6], [7, bad]], dtype="int64")
    with pytest.raises(ConfigError) as caught:
        list(read_ids(path, 257, 256, 0.0))
    assert str(caught.value) == (
        f"{path}: sample 3, token 1: id {bad} is not below the vocabulary's size, 257; give the tokenizer that the file"
        " was made with"
    )


def test_an_hdf5_file_without_samples_of_ids_is_refused(tmp_path: Path) -> None:
    cases = {
        hdf5(tmp_path / "a.h5", [[1, 2]], "tokens"): "only: tokens (1, 2)",
        hdf5(tmp_path / "b.h5", [[1, 2]], dtype="float32"): "only: input_ids (1, 2)",
        hdf5(tmp_path / "c.h5", [1, 2]): "only: input_ids (2,)",  # type: ignore[arg-type]
    }
    for path, there in cases.items():
        with pytest.raises(ConfigError) as caught:
            list(read_ids(path, 257, 256, 0.0))
        assert str(caught.value) == f"{path}: has no input_ids of whole numbers, samples x tokens, {there}"
    (tmp_path / "d.h5").write_bytes(b"no HDF5")
    with pytest.raises(ConfigError, match=r"d\.h5: cannot be read as HDF5: "):
        list(read_ids(tmp_path / "d.h5", 257, 256, 0.0))


# ---- what cannot be read -------------------------------------------------------------------------------------


def test_records_without_text_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"text": "to be"}\n\n'
    assert refused(path, good + b'{"text": ').startswith(":3: is no JSON: ")
    assert refused(path, good + b'{"moves": "e4", "n": 1}') == (
        ":3: has no 'text', only 'moves', 'n'; name one as --text-field"
    )
    assert refused(path, good + b'["to be"]') == """:3: is not a JSON object: b'["to be"]'"""
    mend = "but it has to be text; leave the record out or mend it"
    assert refused(path, good + b'{"text": null}') == f":3: 'text' is null, {mend}"
    assert refused(path, good + b'{"text": 4}') == f":3: 'text' is of type int, {mend}"
    assert (
        refused(path, good + rb'{"text": "\ud800"}') == ":3: 'text' is no Unicode: character 0 is half a surrogate pair"
    )
    assert refused(path, good + b'{"text": "\xff"}') == ":3: byte 10 of the line is not UTF-8"


def test_rows_without_text_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert refused(path, b"moves,n\ne4,1\n") == ":1: has no 'text', only 'moves', 'n'; name one as --text-field"
    assert refused(path, b'n,text\n1,"to\nbe"\n2\n') == (
        ":4: has 1 columns, and the first line names 2; a text with commas in it needs quotes"
    )
    assert refused(path, b"n,text\n1,to be, or not\n").startswith(":2: has 3 columns")
    assert refused(path, b'n,text\n1,"to').startswith(":2: is no CSV: ")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["to be", None], "n": [1, 2]}), path)
    assert refused(path) == ": row 2: 'text' is null, but it has to be text; leave the record out or mend it"
    assert (
        refused(path, field="n")
        == ": row 1: 'n' is of type int, but it has to be text; leave the record out or mend it"
    )
    assert refused(path, field="moves") == ": has no 'moves', only 'text', 'n'; name one as --text-field"
    assert refused(path, b"no Parquet").startswith(": cannot be read as parquet: ")


def test_bytes_that_are_no_text_are_named_with_their_offset(tmp_path: Path) -> None:
    said = " is not UTF-8; convert the file, e.g. with iconv"
    assert refused(tmp_path / "a.txt", "Größe ".encode() + b"\xff") == ": byte 8" + said
    assert refused(tmp_path / "a.txt", "Größe ½".encode()[:-1]) == ": byte 8" + said
    long = b"to be, or not to be\n" * 200_000
    assert refused(tmp_path / "a.txt", long + b"\xe9t\xe9") == f": byte {len(long)}{said}"
    assert refused(tmp_path / "a.csv", b"text\nto be\n\xff") == ": byte 11" + said
    assert refused(tmp_path / "a.txt.gz", gzip.compress(b"to \xff")) == ": byte 3" + said


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_damaged_compressed_file_is_named(suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    whole = compress(os.urandom(4000).hex().encode())
    assert refused(tmp_path / f"a.jsonl{suffix}", b"no such thing").startswith(": cannot be read behind byte ")
    assert refused(tmp_path / f"a.txt{suffix}", whole[: len(whole) // 2]).startswith(": cannot be read behind byte ")
    assert refused(tmp_path / f"a.jsonl{suffix}", b"").startswith(": cannot be read behind byte 0: is empty")


def test_a_little_zst_that_becomes_much_is_read_in_blocks(tmp_path: Path) -> None:
    path, line = tmp_path / "a.txt.zst", b"to be, or not to be\n"
    path.write_bytes(zstandard.compress(line * 10_000_000))
    assert path.stat().st_size < 50_000
    sizes = list(map(len, blocks(path)))
    assert sum(sizes) == len(line) * 10_000_000
    assert max(sizes) < 80_000_000


def test_a_zst_of_a_long_window_is_read_and_one_cut_short_is_named(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=30)
    ).compressobj()
    packed = packer.compress(b'{"text": "to be"}\n' * 1000) + packer.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << 30
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert sum(len(part.ends) for part in read(tmp_path / "a.jsonl.zst")) == 1000
    assert refused(tmp_path / "a.jsonl.zst", packed[:-1]).endswith(": ends in the middle of a frame")


def test_all_that_is_wrong_with_the_input_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pdf").touch()
    (tmp_path / "b.parquet.gz").touch()
    hdf5(tmp_path / "c.h5", [[1]])
    inputs = [tmp_path / name for name in ("none.txt", "*.jsonl", "a.pdf", "b.parquet.gz", "c.h5")]
    said = refusal(capsys, *inputs, "--train-tokenizer", 300, "--out", tmp_path / "out").splitlines()
    somewhere = f"(a file, a folder or a glob, seen from {Path.cwd()})"
    known = ".txt, .md, .py, .jsonl, .ndjson, .csv, .parquet, .arrow, .h5, .hdf5"
    unknown = f"its suffix names no format that can be read ({known}); name one with --format"
    assert said == [
        f"INPUT: no file at {tmp_path}/none.txt {somewhere}",
        f"INPUT: no file at {tmp_path}/*.jsonl {somewhere}",
        f"{tmp_path}/a.pdf: {unknown}",
        f"{tmp_path}/b.parquet.gz: {unknown}",
        f"{tmp_path}/c.h5: holds ids, no text to train a tokenizer on; give --tokenizer",
    ]
    assert not (tmp_path / "out").exists()


def test_all_that_is_wrong_with_the_command_line_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--train-tokenizer", 256, "--vocab-size", 9, "--validation-fraction", 1, "--workers", 0)
    assert said.splitlines() == [
        "INPUT: is missing; give files, folders or globs",
        "--out: is missing; give the folder to write to",
        "--train-tokenizer: 256 is less than 257, the bytes and <|endoftext|>",
        "--vocab-size: goes with --tokenizer none, and that with it",
        "--validation-fraction: 1 is not 0 or more and below 1",
        "--workers: 0 is less than 1",
    ]
    assert refusal(capsys, "a", "--out", "o") == "--tokenizer: give it, or --train-tokenizer, and not both"


def test_text_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("to be")
    said = refusal(capsys, tmp_path / "a.txt", "--tokenizer", "none", "--vocab-size", 9, "--out", tmp_path / "out")
    assert said == f"{tmp_path}/a.txt: is text, but --tokenizer is none, which goes with HDF5 alone"


@pytest.mark.parametrize("package", ["datasets", "h5py", "zstandard"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    name = {"datasets": "a.arrow", "h5py": "a.h5", "zstandard": "a.txt.zst"}[package]
    (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(ConfigError) as caught:
        list(read_ids(tmp_path / name, 9, 1, 0.0)) if package == "h5py" else read(tmp_path / name)
    assert str(caught.value).endswith(f" needs a package: pip install {package}")


def test_empty_input_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n')
    out = tmp_path / "out"
    code, _, errors = run(tmp_path / "a.txt", tmp_path / "b.jsonl", "--tokenizer", "bytes", "--out", out)
    assert (code, errors) == (2, f"{tmp_path}/a.txt and 1 others: no text, nothing to make tokens of\n")
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_an_error_in_a_worker_ends_the_run_in_the_order_of_the_input_and_leaves_nothing(tmp_path: Path) -> None:
    for name in ("b", "c"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "to be"}\n{"text": 4}\n')
    (tmp_path / "a.txt").write_text("to be")
    out = tmp_path / "out"
    code, output, errors = run(tmp_path, "--tokenizer", "bytes", "--out", out)
    assert (code, output) == (2, "")
    assert errors.startswith(f"{tmp_path}/b.jsonl:2: 'text' is of type int, ")
    assert len(errors.splitlines()) == 1
    assert [path.name for path in out.iterdir()] == ["lock"]


# ---- whole or not at all -------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}


def test_a_dataset_that_is_there_is_kept_and_another_one_replaces_it_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(50)))
    out = tmp_path / "out"
    common = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", out, "--workers", 1)
    assert run(*common, "--validation-fraction", 0.3)[0] == 0
    before = content(out)
    code, output, _ = run(*common, "--validation-fraction", 0.3)
    assert (code, output.splitlines()) == (
        0,
        [
            f"{out}/train.bin: {len(before['train.bin']) // 2} tokens (uint16) in "
            f"{len(before['train.ends']) // 8} documents: is there already"
        ],
    )
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    code, output, errors = run(*common)
    assert (code, output) == (2, "")
    assert errors == (
        f"--out: {out}: holds a dataset that was made otherwise (validation_fraction, input); choose another folder, or"
        " give --overwrite to replace it\n"
    )
    assert content(out) == before
    (out / "train.bin").write_bytes(before["train.bin"][:-1])
    code, _, errors = run(*common)
    assert code == 2
    assert errors.endswith("damaged or cut short; write it anew with python -m lm.prepare; --overwrite replaces it\n")
    assert run(*common, "--overwrite")[0] == 0
    assert len(dataset(out)) == 51
    assert sorted(content(out)) == ["train.bin", "train.ends", "train.json"]


@pytest.mark.parametrize("name", ["data", "."])
def test_a_dataset_is_no_input_of_its_own(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_bytes(byte_level_tokenizer())
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("to be")
    out = tmp_path / "in" / name
    common = (tmp_path / "in", "--tokenizer", tmp_path / FILE, "--out", out, "--workers", 1)
    assert run(*common)[0] == 0
    code, output, errors = run(*common)
    assert (code, errors) == (0, "")
    assert output.endswith("is there already\n")
    (tmp_path / "in/a.txt").unlink()
    said = refusal(capsys, out / "train.*", "--tokenizer", "bytes", "--out", out)
    assert said == f"INPUT: holds nothing but the files of --out, {out}; give what to make them of"


class Killed(BaseException):
    pass


def test_a_kill_while_files_are_put_in_place_loses_nothing_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = dict.fromkeys(token_writer.OUTPUT - {token_writer.LOCK}, b"old")
    new = dict.fromkeys((FILE, "train.bin", "train.ends", "train.json"), b"new")
    steps = 0

    def step(act: Callable[..., None], *args: Any, **how: Any) -> None:
        nonlocal steps
        if not steps:
            raise Killed
        steps -= 1
        act(*args, **how)

    for name in ("rename", "unlink", "rmdir"):
        act = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda *args, act=act, **how: step(act, *args, **how))
    kills = 0
    for kills in itertools.count():
        out = tmp_path / str(kills)
        (out / token_writer.READY).mkdir(parents=True)
        for folder, files in ((out, old), (out / token_writer.READY, new)):
            for name, each in files.items():
                (folder / name).write_bytes(each)
        steps = kills
        try:
            token_writer.install(out)
            break
        except Killed:
            pass
        there = content(out)
        assert all(b"new" in (there.get(name), content(out / token_writer.READY).get(name)) for name in new)
        if "train.json" in there:
            assert there in (old, new)
        steps = 100
        token_writer.install(out)
        assert content(out) == new
        assert not (out / token_writer.READY).exists()
    assert kills == len(old) + len(new) + 1


def test_a_start_finishes_what_an_earlier_one_had_ready(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    common = (tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "out", "--workers", 1)
    assert run(*common)[0] == 0
    (tmp_path / "out" / token_writer.READY).mkdir()
    for name in ("train.ends", "train.json"):
        (tmp_path / "out" / name).rename(tmp_path / "out" / token_writer.READY / name)
    assert run(*common)[1].endswith("is there already\n")
    assert dataset(tmp_path / "out") == as_bytes("to be")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in {"a.txt": "to be", "b.csv": "text,n\nto be,1\n", "c.jsonl": '{"text": "to be"}\n'}.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        code, _, errors = run(tmp_path / name, "--tokenizer", "bytes", "--out", tmp_path / "out" / name)
        assert code == 0, errors
        assert dataset(tmp_path / "out" / name) == [[*b"to be", 256]]


def test_a_name_need_not_be_utf8(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.txt")
    odd.write_text("to be")
    common = (odd, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert run(*common)[0] == 0
    (source,) = json.loads((tmp_path / "out" / "train.json").read_text())["sources"]
    assert source["name"].endswith("caf\\xe9.txt")
    assert "is there already" in run(*common)[1]


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that has written something and has more to do, and its folder."""
    (tmp_path / "a.txt").write_bytes(b"To be, or not to be, that is the question:\n" * 2_000_000)
    out = tmp_path / "out"
    process = start(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", out, "--workers", 2)
    draft = out / token_writer.DRAFTS / "train.bin"
    deadline = time.monotonic() + 60
    while not (draft.exists() and draft.stat().st_size > 0):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process, out
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_a_killed_run_leaves_no_dataset_and_no_process_and_the_next_one_starts_clean(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert sorted(path.name for path in out.iterdir()) == [token_writer.DRAFTS, "lock"]
    with pytest.raises(ConfigError, match="token files are written by"):
        token_writer.verify(out)
    (out.parent / "b.txt").write_text("to be")
    assert run(out.parent / "b.txt", "--tokenizer", "bytes", "--out", out)[0] == 0
    assert dataset(out) == as_bytes("to be")
    assert not (out / token_writer.DRAFTS).exists()


def test_a_killed_worker_ends_the_run_with_a_name_and_leaves_nothing(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    workers[0].send_signal(signal.SIGKILL)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "")
    assert errors == (
        "a worker process was killed, most likely for want of memory; nothing was kept: start again with fewer"
        " --workers than 2\n"
    )
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_ctrl_c_ends_the_run_without_a_word(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, out = long_run
    for each in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:  # as a terminal does
        each.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (130, "", "")
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_a_second_run_into_the_same_folder_is_refused(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, out = long_run
    (out.parent / "b.txt").write_text("to be")
    code, _, errors = run(out.parent / "b.txt", "--tokenizer", "bytes", "--out", out)
    assert code == 1
    assert errors.startswith(f"--out: {out}: held by process {process.pid} on ")
    assert (out / token_writer.DRAFTS / "train.bin").exists()


def test_input_that_changes_meanwhile_is_noticed(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, out = long_run
    os.utime(out.parent / "a.txt", (0, 0))
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (1, f"{out.parent}/a.txt: changed while it was read; start again\n")
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_a_full_disk_is_named_and_nothing_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        (tmp_path / "a.txt").write_bytes(b"to be\n" * 500_000)
        code, output, errors = run(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", disk, "--workers", 1)
        assert (code, output) == (1, "")
        assert errors.startswith(f"{disk}: No space left on device; ")
        assert errors.endswith(" bytes are free; nothing was kept\n")
        assert [path.name for path in disk.iterdir()] == ["lock"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_verify_names_the_file_that_is_not_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("to be")
    out = tmp_path / "out"
    assert run(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", out)[0] == 0
    assert command.main(["--verify", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/train.bin: 6 tokens (uint16) in 1 documents: whole\n"
    for name in ("train.bin", "train.ends"):
        before = (out / name).read_bytes()
        for bit in range(len(before) * 8):
            flipped = bytearray(before)
            flipped[bit // 8] ^= 1 << bit % 8
            (out / name).write_bytes(flipped)
            with pytest.raises(RunError) as caught:
                token_writer.verify(out)
            assert str(caught.value) == (
                f"{out}/{name}: is not what was written; write the dataset anew with python -m lm.prepare --overwrite"
            )
        (out / name).write_bytes(before)
    (out / "train.ends").unlink()
    assert command.main(["--verify", str(out)]) == 1
    assert capsys.readouterr().err.startswith(f"{out}/train.ends: is missing; ")


def test_a_line_now_and_then_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SPEAK_SECONDS", 0.0)
    with command.Progress("tokenising", None) as progress:
        progress.add(1_500_000, 300)
    said = capsys.readouterr().err
    assert said.startswith("tokenising: 1.5 MB in 0.0 s: ")
    assert "MB/s" in said
    assert "tokens/s" in said


def test_a_chunk_can_be_read_twice() -> None:
    chunk = Chunk(lambda: ["to be"], 5, "a.txt")
    first, second = (workers.tokenise(chunk, "bytes", 0.0)[0] for _ in range(2))
    assert first.ids.tolist() == second.ids.tolist() == as_bytes("to be")[0]
