"""Text files are found and tokenized without loss; errors name the file and the offset."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from lm.data.files import find_files
from lm.data.run_data import DataConfig, open_data
from lm.data.tokenizer import ByteTokenizer
from lm.data.tokens import read_tokens
from lm.errors import ConfigError

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
    (root / "broken").symlink_to(tmp_path / "none")
    assert find_files(str(root), "train_data") == [one, root / "linked" / "two.txt"]


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
    tokens = read_tokens(files, TOKENIZER)
    assert len(tokens) > 5_000_000
    assert (tokens == END).sum() == sum(path.stat().st_size > 0 for path in files)


@pytest.mark.parametrize("name", ["none.txt", "*.txt", "empty"])
def test_find_files_refuses_a_name_without_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"^val_data: .*{re.escape(f'{tmp_path}/{name}')}"):
        find_files(f"{tmp_path}/{name}", "val_data")


def test_find_files_calls_a_directory_without_files_one(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("to be")
    with pytest.raises(ConfigError, match=r"^train_data: the directory .* has no files"):
        find_files(str(tmp_path), "train_data")


# ---- reading files


def test_text_files_end_with_end_of_text(tmp_path: Path) -> None:
    names = ["ü.txt", *(f"{letter}.txt" for letter in "abcdefghij")]
    one, two = (write(tmp_path / folder, *names) for folder in ("one", "two"))
    tokens = read_tokens(one, TOKENIZER)
    assert tokens[-1] == END
    documents = TOKENIZER.decode(tokens.tolist()).split()
    assert documents != sorted(documents) == sorted(names)
    assert np.array_equal(read_tokens(two[::-1], TOKENIZER), tokens)


def test_text_files_that_are_empty_are_skipped(tmp_path: Path) -> None:
    good, latin, cut, empty, blank = (
        tmp_path / name for name in ("good", "latin", "cut", "empty", "blank")
    )
    good.write_text("x")
    latin.write_bytes("Käse".encode("latin-1"))
    cut.write_bytes("aß".encode()[:-1])
    empty.touch()
    blank.touch()
    assert read_tokens([empty, good], TOKENIZER).tolist() == [ord("x"), END]
    for files, start in (
        ([empty], f"{empty}: no text"),
        ([empty, blank], f"{empty} and 1 other .*no text"),
    ):
        with pytest.raises(ConfigError, match=f"^{start}"):
            read_tokens(files, TOKENIZER)
    with pytest.raises(ConfigError) as caught:
        read_tokens([good, latin, cut, tmp_path / "gone"], TOKENIZER)
    starts = [f"{cut}: byte 1 ", f"{tmp_path}/gone: ", f"{latin}: byte 1 "]
    for problem, start in zip(sorted(caught.value.problems), starts, strict=True):
        assert problem.startswith(start)
    with pytest.raises(ConfigError, match=r"\.\.\. and 5 more$"):
        read_tokens([latin] * 25, TOKENIZER)


def test_read_tokens_lists_files_that_are_no_text_by_format(tmp_path: Path) -> None:
    starts = {"a.png": b"\x89PNG\r\n\x1a\n", "b.png": b"\x89PNG\r\n", "c.pdf": b"%PDF-1.7\n"}
    starts |= {"d.docx": b"PK\x03\x04", "x/e.md": b"text", "x/f.md": b"text", "g.txt": b"text"}
    for name, content in starts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_tokens(find_files(str(tmp_path), "train_data"), TOKENIZER)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{tmp_path}: 4 of 7 file(s) ")
    for part in ("2 x PNG image (a.png)", "1 x PDF (c.pdf)", ".docx", f"'{tmp_path}/**/*.md'"):
        assert part in problem


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be"])
def test_read_tokens_names_an_encoding_by_its_mark(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    mark = "\ufeff" if encoding.endswith("be") else ""
    path.write_bytes(f"{mark}text".encode(encoding))
    name = encoding.upper()[:6]
    with pytest.raises(
        ConfigError, match=f"^{path}: is {name}, .*iconv -f {name} -t UTF-8 {path} "
    ):
        read_tokens([path], TOKENIZER)


def test_text_of_records_and_little_text_are_noted(tmp_path: Path) -> None:
    def notes(name: str, size: int) -> str:
        path = tmp_path / name
        path.write_text("x" * size)
        config = DataConfig.model_validate({"dataset": "text", "train_data": str(path)})
        return "\n".join(open_data(config, 257, 16, 2, 0).notes)

    assert "train_data: 5,000 bytes " in notes("few.txt", 5_000)
    assert "train_data: " not in notes("enough.txt", 100_000)
    assert "dataset: jsonl" in notes("chats.jsonl", 100_000)
    for name in ("table.csv", "table.tsv"):
        assert "lm.prepare" in notes(name, 100_000)
        assert "dataset: jsonl" not in notes(name, 100_000)
