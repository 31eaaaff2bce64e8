"""Every format becomes the same token files, or none; errors name the place in the input."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc, parquet
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers

from lm import prepare as command
from lm.data import readers
from lm.data.blocks import read_blocks
from lm.data.encoder import CHUNK_SIZE
from lm.data.readers import is_held_out, read_documents, read_ids
from lm.data.run_data import DataConfig, open_data
from lm.data.stream import TokenStream, open_documents, open_windows
from lm.data.token_file import SPLITS, read_index
from lm.data.token_writer import TokenChunk
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError
from lm.storage.folder import MANIFEST, read_manifest
from lm.tasks.questions import read_tasks
from tests.support import PATIENCE, REPOSITORY
from tests.support.tokenizer_files import byte_level_tokenizer

TEXTS = [
    "to be",
    "that is\nthe question",
    "Sein oder Nichtsein, Größe ½",
    '"or", not',
    "NA",
    "1984",
    "to be",
]
END = ByteTokenizer.eos_id
FILES_OF_TEXT = ["manifest.json", "train.bin", "train.ends", "train.json"]


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command in a process."""
    command = [sys.executable, "-m", "lm.prepare", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(*arguments: object) -> tuple[int, str, str]:
    """Run the command in this process. Return its exit code, stdout and stderr."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = command.main(list(map(str, arguments)))
    return code, output.getvalue(), errors.getvalue()


def run_process(*arguments: object) -> tuple[int, str, str]:
    """Run the command in a process, whose files an error leaves open."""
    process = start(*arguments)
    output, errors = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in errors, errors
    return process.returncode, output, errors


def rejected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the errors of a command that ends before it starts a process."""
    assert command.main(list(map(str, arguments))) == 2
    return capsys.readouterr().err.rstrip("\n")


def dataset(folder: Path, name: str = "train") -> list[list[int]]:
    """Read the ids of each document by the description of the format alone."""
    index = json.loads((folder / f"{name}.json").read_text())
    ids = np.fromfile(folder / f"{name}.bin", "<u2" if index["dtype"] == "uint16" else "<u4")
    ends = np.fromfile(folder / f"{name}.ends", "<u8").astype(int)
    assert (len(ids), len(ends), ends[-1]) == (index["tokens"], index["documents"], index["tokens"])
    return [document.tolist() for document in np.split(ids, ends[:-1])]


def as_bytes(*texts: str) -> list[list[int]]:
    return [[*text.encode(), END] for text in texts]


def jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in texts).encode()


def csv_file(texts: Sequence[str]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("n", "text"), *enumerate(texts)])
    return file.getvalue().encode()


def parquet_file(columns: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file)
    return file.getvalue()


def arrow_file(texts: Sequence[str], new: Callable[..., Any]) -> bytes:
    file = io.BytesIO()
    table = pa.table({"text": texts})
    with new(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def long_zstd(content: bytes) -> bytes:
    """Compress as `zstd --long=27` does."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


FILES = {
    "a.jsonl": b"\n" + jsonl(TEXTS).rstrip(),
    "b.jsonl.gz": gzip.compress(jsonl(TEXTS[:4])) + gzip.compress(jsonl(TEXTS[4:])),
    "c.ndjson.zst": long_zstd(jsonl(TEXTS[:4])) + zstandard.compress(jsonl(TEXTS[4:])),
    "d.csv": csv_file(TEXTS),
    "f[1].parquet": parquet_file({"n": range(len(TEXTS)), "text": TEXTS}),
    "g.arrow": arrow_file(TEXTS, ipc.new_file),
    "h.arrow": arrow_file(TEXTS, ipc.new_stream),
    "k.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
}
"""`TEXTS` in every format that has several documents in a file."""


def read(path: Path, field: str = "text") -> list[str]:
    return ["".join(text.blocks()) for text in read_documents([path], None, field)]


# ---- formats


@pytest.mark.parametrize("name", FILES)
def test_prepare_reads_every_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert read(path) == TEXTS


def test_prepare_reads_files_in_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in FILES]
    for path in paths:
        path.write_bytes(FILES[path.name])
    (tmp_path / "z").mkdir()
    for name, text in zip("abc", TEXTS, strict=False):
        (tmp_path / f"z/{name}.txt").write_text(text, "utf-8-sig")
    (tmp_path / "z/empty.md").touch()
    (tmp_path / "z/h.txt.gz").write_bytes(gzip.compress(TEXTS[3].encode()))
    code, output, errors = run(
        *paths, tmp_path / "z", "--tokenizer", "bytes", "--out", tmp_path / "out"
    )
    warnings = [line for line in errors.splitlines() if line and "B/s" not in line]
    assert (code, warnings) == (0, [])
    assert dataset(tmp_path / "out") == as_bytes(*TEXTS * len(paths), *TEXTS[:4])
    index = read_index(tmp_path / "out/train.json")
    made_from = read_manifest(tmp_path / "out").made_from
    assert (index.tokenizer, index.vocab_size, index.dtype) == ("bytes", 257, "uint16")
    hashes = [sha256(content).hexdigest() for content in FILES.values()]
    expected = [f"{path.name}, sha256 {each}" for path, each in zip(paths, hashes, strict=True)]
    assert made_from["input"][: len(paths)] == expected
    assert sorted(content(tmp_path / "out")) == FILES_OF_TEXT
    assert output.splitlines()[-1].startswith(f"{tmp_path}/out/train.bin: ")


def test_prepare_copies_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / "a.txt").write_text(TEXTS[1])
    out = tmp_path / "out"
    assert run(tmp_path / "a.txt", "--tokenizer", tmp_path, "--out", out)[0] == 0
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.files == load_tokenizer(str(tmp_path)).files
    assert read_index(out / "train.json").tokenizer == tokenizer.identity
    assert dataset(out) == [[*tokenizer.encode(TEXTS[1]), tokenizer.eos_id]]


def test_validation_fraction_of_few_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 50)
    (tmp_path / "b.txt").write_text("x")
    out = tmp_path / "out"
    common = ("--train-tokenizer", 257, "--out", out, "--validation-fraction", 0.1)
    code, output, errors = run(tmp_path / "a.txt", tmp_path / "b.txt", *common)
    assert code == 0, errors
    parts = [
        f"{out}/train.bin: 948 tokens",
        f"{out}/validation.bin: 106 tokens",
    ]
    for line, part in zip(output.splitlines()[-2:], parts, strict=True):
        assert line.startswith(part)
    (text, other), (tail,) = dataset(out), dataset(out, "validation")
    tokenizer = load_tokenizer(str(out))
    assert (len(text), len(tail), other[:-1]) == (946, 106, tokenizer.encode("x"))
    assert tokenizer.decode([*text[:-1], *tail[:-1]]) == "To be, or not to be. " * 50
    data = {"dataset": "tokens", "train_data": str(out), "val_data": str(out)}
    opened = open_data(DataConfig.model_validate(data), 257, 16, 1, 0)
    assert (opened.train.samples_per_epoch, len(opened.validation[0].dataset)) == (59, 6)


def test_prepare_dtype_follows_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    encoder = Encoder(models.WordLevel(vocabulary, unk_token="w0"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.save(str(tmp_path / TOKENIZER_JSON))
    (tmp_path / "a.txt").write_text("w65536 w69999 w1")
    assert run(tmp_path / "a.txt", "--tokenizer", tmp_path, "--out", tmp_path / "out")[0] == 0
    assert read_index(tmp_path / "out/train.json").dtype == "uint32"
    assert dataset(tmp_path / "out") == [[65_536, 69_999, 1, 70_000]]


def test_train_tokenizer_on_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"moves": f"e{n} d{n % 7}"}) + "\n" for n in range(3000))
    )
    out = tmp_path / "out"
    common = (tmp_path / "a.jsonl", "--text-field", "moves", "--train-tokenizer")
    code, _, errors = run(*common, 300, "--out", out)
    assert (code, errors) == (0, "")
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.vocab_size == read_index(out / "train.json").vocab_size == 300
    assert (
        "".join(tokenizer.decode(document) for document in dataset(out)[:2]) == "e0 d0\n\ne1 d1\n\n"
    )
    before = content(out)
    code, output, _ = run(*common, 300, "--out", out)
    assert (code, content(out)) == (0, before)
    assert output == f"{out}: already exists\n"


def test_prepare_reads_a_file_of_two_names_once(tmp_path: Path) -> None:
    odd, link = (tmp_path / os.fsdecode(name) for name in (b"a\xe9.txt", b"b\xe9.txt"))
    odd.write_text("to be")
    link.symlink_to(odd)
    common = (
        link,
        tmp_path,
        tmp_path / ".." / tmp_path.name / odd.name,
        "--tokenizer",
        "bytes",
        "--out",
    )
    for _ in range(2):  # the second time, the dataset exists
        assert run(*common, tmp_path / "out")[0] == 0
        assert dataset(tmp_path / "out") == as_bytes("to be")
    (source,) = read_manifest(tmp_path / "out").made_from["input"]
    assert "b\\xe9.txt, sha256 " in source


def test_prepare_tokens_do_not_depend_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {n}\n" * (n % 3000) for n in range(400)] + [
        "longer than a chunk\n" * CHUNK_SIZE
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[1:]))
    common = (tmp_path / "a.jsonl", "--tokenizer", "bytes")
    contents = []
    for n_threads in (1, 3):
        monkeypatch.setattr("lm.data.text.usable_cores", lambda n=n_threads: n)
        assert run(*common, "--out", tmp_path / str(n_threads))[0] == 0
        contents.append(content(tmp_path / str(n_threads)))
    assert contents[0] == contents[1]
    assert dataset(tmp_path / "1") == as_bytes(*texts[1:])


def test_share_that_is_held_out_by_content_is_the_fraction() -> None:
    documents = [[f"document {n}".encode()] for n in range(1000)]
    assert 150 < sum(is_held_out(document, 0.2) for document in documents) < 250
    assert not any(is_held_out(document, 0) for document in documents)


@pytest.mark.slow
def test_validation_fraction_depends_on_content_alone(tmp_path: Path) -> None:
    numbered = [f"document {n}" for n in range(400)]
    texts = [*numbered, *reversed(numbered)]
    splits = []
    for count in (200, 800):
        (tmp_path / "a.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in texts[:count])
        )
        out = tmp_path / str(count)
        common = (
            tmp_path / "a.jsonl",
            "--tokenizer",
            "bytes",
            "--validation-fraction",
            0.2,
        )
        assert run(*common, "--out", out)[0] == 0
        splits.append(
            [[ByteTokenizer().decode(ids[:-1]) for ids in dataset(out, name)] for name in SPLITS]
        )
    (train, validation), (more_train, more_validation) = splits
    assert sorted(train + validation) == sorted(texts[:200])
    assert (train, validation) == (more_train[: len(train)], more_validation[: len(validation)])
    assert more_train == [text for text in texts if text not in more_validation]
    assert 50 < len(set(more_validation)) < 110


# ---- HDF5


def hdf5(
    path: Path, samples: Sequence[Sequence[int]], name: str = "input_ids", dtype: str = "uint16"
) -> Path:
    with h5py.File(path, "w") as file:
        file[name] = np.array(samples, dtype)
    return path


def joined(chunks: Iterator[TokenChunk]) -> tuple[list[int], list[int]]:
    """Return the ids and ends, as they are written."""
    ids: list[int] = []
    ends: list[int] = []
    for chunk in chunks:
        ends += [len(ids) + int(end) for end in chunk.ends]
        ids += np.concatenate(chunk.ids).tolist()
    return ids, ends


def test_hdf5_samples_are_joined_up_to_end_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hdf5(tmp_path / "a.h5", [[9, 9, 1, 2], [3, 4, 5, 9], [9, 9, 6, 9], [9, 7, 8, 1]])
    for chunk in (1 << 20, 1, 4, 8):
        monkeypatch.setattr(readers, "IDS_AT_ONCE", chunk)
        assert joined(read_ids(path, 10, 9)) == (
            [1, 2, 3, 4, 5, 9, 6, 9, 7, 8, 1, 9],
            [6, 8, 12],
        )


def write_virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((1, 2), "uint16")
    layout[:] = h5py.VirtualSource("secret.h5", "input_ids", (1, 2))
    file.create_virtual_dataset("input_ids", layout)


def write_ids(shape: tuple[int, ...], **options: Any) -> Callable[[h5py.File], object]:
    return lambda file: file.create_dataset("input_ids", shape, "uint16", **options)


def set_ids(values: Any, dtype: str, name: str = "input_ids") -> Callable[[h5py.File], object]:
    return lambda file: file.create_dataset(name, data=np.array(values, dtype))


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (set_ids([[1, 2]], "uint16", "tokens"), "has no input_ids"),
        (set_ids([[1, 2]], "float32"), "has no input_ids"),
        (set_ids([1, 2], "uint16"), "has no input_ids"),
        (set_ids([[1, 2], [3, 4], [5, 6], [7, 300]], "uint16"), ": sample 3, token 1: id 300 "),
        (set_ids([[1, 2], [3, 4], [5, 6], [7, -1]], "int64"), ": sample 3, token 1: id -1 "),
        (
            lambda file: file.update({"input_ids": h5py.ExternalLink("secret.h5", "input_ids")}),
            "outside",
        ),
        (write_virtual, "outside"),
        (write_ids((1, 2), external=[("secret.h5", 0, 4)]), "outside"),
        (None, "HDF5"),
    ],
    ids=itertools.count(),
)
def test_hdf5_without_samples_of_ids_is_refused(
    write: Callable[[h5py.File], object] | None,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readers, "IDS_AT_ONCE", 4)
    monkeypatch.chdir(tmp_path)
    hdf5(tmp_path / "secret.h5", [[1, 2]])
    path = tmp_path / "a.h5"
    if write is None:
        path.write_bytes(b"not HDF5")
    else:
        with h5py.File(path, "w") as file:
            write(file)
    with pytest.raises(ConfigError) as caught:
        list(read_ids(path, 257, 256))
    assert str(caught.value).startswith(f"{path}: ")
    assert found in str(caught.value)


# ---- invalid input

JSONL = b'{"text": "to be"}\n\n'
TABLE = parquet_file({"text": ["to be", None], "n": [1, 2]})
LINE = b'{"text": "to be"}\n'
NOISE = os.urandom(4000)


@pytest.mark.parametrize(
    ("name", "content", "field", "place"),
    [
        (
            "a.jsonl",
            JSONL + b'{"moves": "e4", "n": 1}',
            "text",
            ":3: has no 'text', only 'moves', 'n'",
        ),
        ("a.jsonl", JSONL + b'{"text": null}', "text", ":3: 'text' is null"),
        ("a.jsonl", JSONL + b'{"text": 4}', "text", ":3: 'text' is 4"),
        (
            "a.jsonl",
            b'{"prompt": "Q", "response": "A"}',
            "text",
            ":1: has no 'text', only 'prompt', 'response'; set --text-field to one of them",
        ),
        ("a.csv", b"text;label\na, b;1\n", "text", ":2: does not have the columns"),
        ("a.csv", b"text;label\na;1\n", "text", ":2: has no 'text', only 'text;label'"),
        ("a.csv", b'n,text\n1,"to\nbe"\n2\n', "text", ":4: does not have the columns of the he"),
        ("a.csv", b"n,text\n1,to be, or not\n", "text", ":2: does not have the columns of the "),
        ("a.tsv", b"n\ttext\n1\tto be,\tor\n", "text", ":2: does not have the columns of the "),
        ("a.csv", b'n,text\n1,"to', "text", ":2: is not valid CSV: "),
        ("a.csv", b"n,text\r1,to be\r2,or\r", "text", ":1: is not valid CSV: "),
        ("a.csv", b'n,text\n1,"to \\"be\\" or"\n', "text", ":2: is not valid CSV: "),
        ("a.csv", b"text,n\nto be,1,\n", "text", ":2: does not have the columns of the header"),
        ("a.csv", b"text,n,text\n", "text", ":1: has 2 columns 'text'; rename"),
        ("a.csv", b"\ntext\nto be\n", "text", ":1: is empty"),
        ("a.tsv.gz", gzip.compress(b"\n"), "text", ":1: is empty"),
        ("a.csv", b"text\nto be\n\xff", "text", ": byte 11"),
        ("a.txt", "Größe ".encode() + b"\xff", "text", ": byte 8"),
        ("a.txt", b"to be, or not to be\n" * 200_000 + b"\xe9t\xe9", "text", ": byte 4000000"),
        ("a.txt.gz", gzip.compress(b"to \xff"), "text", ": byte 3"),
        ("a.parquet", b"not Parquet", "text", ": "),
        ("a.parquet", TABLE, "text", ": row 2: 'text'"),
        ("a.parquet", TABLE, "moves", ": row 1: has no 'moves', only 'text', 'n'"),
        *(
            (f"a.jsonl{suffix}", damaged, "text", ":")
            for suffix, compress in ((".gz", gzip.compress), (".zst", long_zstd))
            for damaged in (
                b"not compressed",
                b"",
                compress(LINE)[:-1],
                compress(LINE) + compress(NOISE)[:2000],
            )
        ),
    ],
    ids=itertools.count(),
)
def test_prepare_names_an_invalid_document(
    name: str, content: bytes, field: str, place: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path, field)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}{place}")


TABLES = {
    "quotes.csv": (
        b'n,text\n1,"she said ""hi"", ok"\n2,5" pipe\n',
        ['she said "hi", ok', '5" pipe'],
    ),
    "guesses.csv": (
        b"text\nNA\nnull\nNone\nnan\n0012\n1.50\ntrue\n2020-01-01\n",
        ["NA", "null", "None", "nan", "0012", "1.50", "true", "2020-01-01"],
    ),
    "crlf.csv": (b'\xef\xbb\xbftext,n\r\n"a\r\nb",1\r\n\r\n c ,2\r\n', ["a\r\nb", " c "]),
    "unnamed.csv": (b",text,\n0,a,\n", ["a"]),
    "empty.csv": (b'text,n\n,1\n"",2\na,3\n', ["a"]),
    "huge.csv": (b"text\n" + b"x" * 200_000 + b"\n", ["x" * 200_000]),
    "one.csv.gz": (gzip.compress(b"text\na\n"), ["a"]),
    "quotes.tsv": (
        b'id\ttext\n1\t"starts\n2\t"big" deal\n3\t""\n4\tends"\n',
        ['"starts', '"big" deal', '""', 'ends"'],
    ),
    "crlf.tsv.zst": (zstandard.compress(b"\xef\xbb\xbftext\tn\r\nNA\t0012\r\n"), ["NA"]),
    "a.ndjson": (b'{"text": ""}\n{"text": "NA"}\n', ["NA"]),
    "a.parquet": (parquet_file({"text": ["", "NA"]}), ["NA"]),
}
"""Files, and their documents."""


@pytest.mark.parametrize("name", TABLES)
def test_prepare_and_stream_read_the_same_documents(name: str, tmp_path: Path) -> None:
    content, texts = TABLES[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert read(path) == texts
    records, _ = open_documents(str(path), "train_data", "train", None)
    tokens = open_windows(records, "text", ByteTokenizer(), 1_000_000, 1, "val_data").tokens[:]
    assert tokens.tolist() == list(itertools.chain.from_iterable(as_bytes(*texts)))
    if texts:
        stream = TokenStream(records, "text", ByteTokenizer(), 1, None)
        windows = itertools.islice(stream, 2 * len(tokens))  # two epochs
        assert [int(window.ids[0]) for window in windows] == [*tokens, *tokens]


def test_zst_file_is_read_in_blocks(tmp_path: Path) -> None:
    path, line = tmp_path / "a.txt.zst", b"to be, or not to be\n"
    path.write_bytes(zstandard.compress(line * 3_000_000))
    assert path.stat().st_size < 15_000
    sizes = list(map(len, read_blocks(path)))
    assert sum(sizes) == len(line) * 3_000_000
    assert max(sizes) < 30_000_000


def test_zst_file_that_needs_much_memory_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.txt.zst"
    path.write_bytes(compressor.compress(b"to be") + compressor.flush())
    with pytest.raises(ConfigError, match=f"^{path}: .*too much memory"):
        list(read_blocks(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_file_has_a_limit(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress((b" " * 1023 + b"\n") * (65 << 10)))
    with pytest.raises(ConfigError, match=r"expands to more than 67,108,864 .*decompress it"):
        read(path)
    with pytest.raises(ConfigError, match="more than"):
        read_tasks([str(path)])
    monkeypatch.setattr("lm.data.blocks.FREE_EXPANSION_BYTES", 1000)
    texts = [os.urandom(1000).hex()] * 100
    path.write_bytes(compress(jsonl(texts)))
    assert read(path) == texts
    path.write_bytes(compress(jsonl(["a"] * 20_000)))
    with pytest.raises(ConfigError, match="expands to more than"):
        read(path)


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("none.txt", (), "INPUT: no file found"),
        ("a.pdf", (), "has not the suffix of a format"),
        ("b.parquet.gz", (), "has not the suffix of a format"),
        ("*", ("--format", "hdf5"), "b.parquet.gz: has not the suffix"),
        ("c.*", (), "c.h5: has ids"),
        ("c.h5", ("--validation-fraction", 0.1), "c.h5: has ids"),
    ],
)
def test_prepare_refuses_files_that_it_does_not_read(
    name: str, options: tuple[object, ...], part: str, tmp_path: Path, capsys: Any
) -> None:
    for file in ("a.pdf", "b.parquet.gz", "c.txt"):
        (tmp_path / file).touch()
    hdf5(tmp_path / "c.h5", [[1]])
    common = ("--tokenizer", "bytes", "--out", tmp_path / "out")
    errors = rejected(capsys, tmp_path / name, *common, *options)
    assert part in errors
    assert str(tmp_path) in errors
    assert not (tmp_path / "out").exists()


def test_prepare_reports_all_problems_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = rejected(
        capsys,
        "--train-tokenizer",
        256,
        "--validation-fraction",
        1,
    )
    names = [
        "--out",
        "INPUT",
        "--train-tokenizer",
        "--validation-fraction",
    ]
    assert [line.split(":")[0] for line in errors.splitlines()] == names
    assert "--train-tokenizer: 256 is not from 257 " in errors
    for arguments, names in (
        ((), ["--tokenizer"]),
        (("--train-tokenizer", 10**11), ["--train-tokenizer"]),
        (("--tokenizer", "bytes", "--train-tokenizer", 0), ["--tokenizer", "--train-tokenizer"]),
        (("--tokenizer", "bytes", "--split", "train", "--format", "csv"), ["--format"]),
        (("--tokenizer", "bytes", "--hf-config", "en"), ["--hf-config"]),
        (("--config", "c", "--hf-config", "en", "--format", "csv"), ["--hf-config", "--format"]),
        (("--verify", "o", "--overwrite"), ["--out", "--overwrite", "INPUT"]),
    ):
        errors = rejected(capsys, "a", "--out", "o", *arguments)
        assert [line.split(":")[0] for line in errors.splitlines()] == names


@pytest.mark.parametrize(
    ("files", "options", "error"),
    [
        ({"a.txt": "", "b.jsonl": '\n{"text": ""}\n'}, (), "{0}/a.txt and 1 other"),
        ({"a.txt": "to be"}, ("--validation-fraction", 1e-9), "{0}/a.txt: none of 1 document"),
        (
            {"a.txt": "to be"}
            | dict.fromkeys(("b.jsonl", "c.jsonl"), JSONL.decode() * 9 + '{"text": 4}'),
            (),
            "{0}/b.jsonl:19: ",
        ),
    ],
    ids=["empty", "fraction", "invalid"],
)
def test_prepare_refuses_input_without_documents(
    files: dict[str, str], options: tuple[object, ...], error: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    code, output, errors = run_process(tmp_path, "--tokenizer", "bytes", "--out", out, *options)
    assert (code, output, len(errors.splitlines())) == (2, "", 1)
    assert errors.startswith(error.format(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--validation-fraction", 0.3),
        pytest.param(("--train-tokenizer", 300), marks=pytest.mark.slow),
    ],
)
def test_prepare_reads_a_file_of_text_in_blocks(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    text = "".join(f"line {n % 1000} of a long text\n" for n in range(60_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    common = options if "--train-tokenizer" in options else (*options, "--tokenizer", "bytes")
    for name in ("a.txt", "a.jsonl"):
        assert run(tmp_path / name, *common, "--out", tmp_path / f"{name}.out")[0] == 0
    of_text = content(tmp_path / "a.txt.out")
    of_record = content(tmp_path / "a.jsonl.out")
    assert of_text.keys() == of_record.keys()
    for name in of_text:
        if name != MANIFEST:
            assert of_text[name] == of_record[name]


@pytest.mark.slow
def test_prepare_memory_does_not_grow_with_a_file_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    peaks: list[int] = []
    for size in (8, 32):
        path.write_text("The quick brown fox jumps over the lazy dog.\n" * (size << 15))
        options = [str(path), "--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--overwrite"]
        script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        script += f"from lm.prepare import main; main({options}); "
        script += "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] - peaks[0] < 10_000, "KiB, of 35 MB more text"


def test_error_at_the_start_of_any_file_precedes_the_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("to be")
    (tmp_path / "b.jsonl").write_text('{"text": 1}')
    monkeypatch.delattr("lm.data.text.encode_in_threads")
    errors = rejected(capsys, tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert errors.startswith(f"{tmp_path}/b.jsonl:1: ")


def test_end_of_text_in_a_file_ends_a_document(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    (tmp_path / "a.txt").write_text(f"one{END_OF_TEXT}two{END_OF_TEXT}")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": f"one{END_OF_TEXT}two"}))
    for name, tokenizer, n_documents in (
        ("a.txt", tmp_path / TOKENIZER_JSON, 2),
        ("b.jsonl", tmp_path / TOKENIZER_JSON, 1),
        ("b.jsonl", "bytes", 1),
    ):
        out = tmp_path / f"{name}-{n_documents}"
        code, _, errors = run(
            tmp_path / name, "--tokenizer", tokenizer, "--out", out, "--overwrite"
        )
        assert (code, read_index(out / "train.json").documents) == (0, n_documents), errors


@pytest.mark.parametrize("n_before", [1, 7, 12])
def test_end_of_text_is_not_cut_by_what_is_held_out(
    n_before: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last 5 % of one text start after `n_before` of its characters."""
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    train = "x" * (380 - n_before)
    validation = "y" * (20 + n_before - len(END_OF_TEXT))
    (tmp_path / "a.txt").write_text(train + END_OF_TEXT + validation)
    common = (tmp_path / "a.txt", "--validation-fraction", 0.05, "--out", tmp_path / "out")
    errors = rejected(capsys, *common, "--tokenizer", "bytes")
    assert errors.startswith(f"{tmp_path}/a.txt: has {END_OF_TEXT}, ")
    code, _, errors = run(*common, "--tokenizer", tmp_path / TOKENIZER_JSON)
    assert code == 0, errors
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    for name, text in (("train", train), ("validation", validation)):
        (document,) = dataset(tmp_path / "out", name)
        assert document == [*tokenizer.encode(text), tokenizer.eos_id]


# ---- completely or not at all


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[str | Path, ...]:
    """Arguments of a command whose dataset exists, in `tmp_path / "out"`."""
    lines = [json.dumps({"text": f"document {n}"}) + "\n" for n in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    arguments = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert run(*arguments, "--validation-fraction", 0.3)[0] == 0
    return arguments


@pytest.mark.slow
def test_prepare_keeps_an_existing_dataset(
    prepared: tuple[str | Path, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before = content(out)
    out.rename(tmp_path / ".out.replaced")  # as a command with --overwrite that was killed
    code, output, _ = run(*prepared, "--validation-fraction", 0.3)
    assert (code, content(out)) == (0, before)
    assert output == f"{out}: already exists\n"


@pytest.mark.slow
def test_prepare_refuses_a_different_dataset(
    prepared: tuple[str | Path, ...], tmp_path: Path
) -> None:
    before = content(tmp_path / "out")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    code, output, errors = run(*prepared)
    assert (code, output, content(tmp_path / "out")) == (2, "", before)
    assert "(different: validation_fraction, input)" in errors


@pytest.mark.slow
def test_prepare_overwrite_replaces_a_damaged_dataset(
    prepared: tuple[str | Path, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "train.bin").write_bytes((out / "train.bin").read_bytes()[:-1])
    code, _, errors = run(*prepared, "--validation-fraction", 0.3)
    assert code == 2
    assert errors.startswith(f"--out: {out}/train.bin: damaged: ")
    assert "--overwrite" in errors
    assert run(*prepared, "--overwrite")[0] == 0
    assert len(dataset(out)) == 50
    assert sorted(content(out)) == FILES_OF_TEXT


@pytest.mark.slow
def test_prepare_input_excludes_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("to be")
    out = tmp_path / "in/data"
    common = (tmp_path / "in", "--tokenizer", tmp_path / TOKENIZER_JSON, "--out", out)
    assert run(*common)[0] == 0
    before = content(out)
    code, _, errors = run(*common)
    assert (code, errors, content(out)) == (0, "", before)
    (tmp_path / "in/a.txt").unlink()
    errors = rejected(capsys, out / "train.*", "--tokenizer", "bytes", "--out", out)
    assert errors.startswith(f"INPUT: contains only the files of --out, {out};")


def wait_for(process: subprocess.Popen[str], out: Path, size: int) -> None:
    """Wait until the running process has written `size` bytes of tokens to its draft of `out`."""
    deadline = time.monotonic() + PATIENCE
    while not any(
        path.stat().st_size >= size for path in out.parent.glob(f".{out.name}.draft-*/train.bin")
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that has written some of its tokens, and its folder."""
    (tmp_path / "a.jsonl").write_text(
        (json.dumps({"text": "To be, or not to be:\n" * 200}) + "\n") * 40_000
    )
    out = tmp_path / "out"
    process = start(tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", out)
    wait_for(process, out, size=1)
    yield process, out
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.slow
def test_prepare_killed_leaves_no_dataset(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    process.kill()
    process.wait()
    assert not out.exists()
    (out.parent / "b.txt").write_text("to be")
    assert run(out.parent / "b.txt", "--tokenizer", "bytes", "--out", out)[0] == 0
    assert dataset(out) == as_bytes("to be")
    assert sorted(path.name for path in out.parent.iterdir()) == ["a.jsonl", "b.txt", "out"]


@pytest.mark.slow
def test_prepare_refuses_input_that_changes(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    with (out.parent / "a.jsonl").open("a") as file:
        file.write("\n")
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (1, "")
    assert errors.splitlines()[-1].startswith(f"{out.parent}/a.jsonl: ")
    assert [path.name for path in out.parent.iterdir()] == ["a.jsonl"]


@pytest.mark.slow
def test_prepare_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    line = "To be, or not to be:\n"
    (tmp_path / "a.txt").write_text(line * (CHUNK_SIZE // 20))
    (tmp_path / "b.txt").write_text(line * 2_000_000)
    out = tmp_path / "out"
    process = start(tmp_path / "a.txt", tmp_path / "b.txt", "--tokenizer", tmp_path, "--out", out)
    try:
        # the tokens of a.txt are written after the encoding of b.txt has started
        wait_for(process, out, size=1)
        process.send_signal(signal.SIGINT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 130
        assert usage.ru_utime < 15, "the encoding takes 30 s"
    finally:
        process.kill()
        output, _errors = process.communicate()
    assert output == ""
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.slow
def test_prepare_refuses_a_folder_in_use(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, out = long_run
    process.send_signal(signal.SIGSTOP)  # otherwise it may finish first
    (out.parent / "b.txt").write_text("to be")
    code, _, errors = run(out.parent / "b.txt", "--tokenizer", "bytes", "--out", out)
    assert code == 1
    assert errors.startswith(f"{out}: in use by process {process.pid} on ")
    assert len(list(out.parent.glob(".out.draft-*/train.bin"))) == 1


def test_prepare_on_a_full_disk_leaves_no_files(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a file system is not allowed here")
    try:
        (tmp_path / "a.txt").write_bytes(b"to be\n" * 500_000)
        out = disk / "out"
        code, output, errors = run_process(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", out)
        assert (code, output) == (1, "")
        assert errors.startswith(f"{out}: cannot be written: No space left on device; ")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_prepare_verify_finds_every_flipped_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("to be")
    out = tmp_path / "out"
    assert run(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", out)[0] == 0
    assert command.main(["--verify", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 files: verified\n"
    for name in ("train.bin", "train.ends"):
        before = (out / name).read_bytes()
        for bit in range(len(before) * 8):
            flipped = bytearray(before)
            flipped[bit // 8] ^= 1 << bit % 8
            (out / name).write_bytes(flipped)
            with pytest.raises(ConfigError, match=f"^{out}/{name}: "):
                read_manifest(out)
        (out / name).write_bytes(before)
    (out / "train.ends").unlink()
    assert command.main(["--verify", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"{out}/train.ends: No such file")
    (out / MANIFEST).unlink()  # as in a directory of an older version
    assert command.main(["--verify", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "validation.ends"])
def test_prepare_refuses_an_existing_dataset_that_is_damaged(
    name: str, prepared: tuple[str | Path, ...], tmp_path: Path
) -> None:
    file = tmp_path / "out" / name
    file.write_bytes(file.read_bytes()[:-8])
    code, _, errors = run(*prepared, "--validation-fraction", 0.3)
    assert code == 2
    assert errors.startswith(f"--out: {file}: damaged: ")


def test_a_file_as_the_directory_is_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "out"):
        (tmp_path / name).write_text("to be")
    out = tmp_path / "out"
    code, _, errors = run(tmp_path / "a.txt", "--tokenizer", "bytes", "--out", out)
    assert code == 2
    assert errors.startswith(f"--out: {out}: is not a directory; ")


# ---- a dataset as a stream


def test_dataset_is_read_as_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Local files, through the calls that open a dataset of the Hub."""
    texts = [f"document {n}" for n in range(50)]
    (tmp_path / "a.parquet").write_bytes(parquet_file({"text": texts}))
    out = tmp_path / "out"
    arguments = [str(tmp_path / "a.parquet"), "--tokenizer", "bytes", "--out", str(out)]
    assert command.main([*arguments, "--split", "train"]) == 0
    assert dataset(out) == as_bytes(*texts)
    capsys.readouterr()
    assert command.main([*arguments, "--split", "train"]) == 0
    assert "already exists" in capsys.readouterr().out
    assert command.main([*arguments, "--split", "test"]) == 2
    assert "'test'; use --split train" in capsys.readouterr().err
    assert command.main([*arguments, "--split", "train", "--hf-config", "en"]) == 2
    assert capsys.readouterr().err.startswith("hf_config: en")
    assert command.main([*arguments[1:], "--split", "train", "a", "b"]) == 2
    assert capsys.readouterr().err.startswith("--split: pass one INPUT")
