"""Samples to fine-tune on: nothing is lost, only what should be is learned, and a bad line is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.jsonl import JsonlDataset
from lm.data.tokenizer import FILE, ByteTokenizer, FileTokenizer
from lm.errors import ConfigError
from model import IGNORE_INDEX
from tests.support import CHAT_TEMPLATE, llama_tokenizer

BYTES = ByteTokenizer()
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
LLAMA = FileTokenizer({FILE: llama_tokenizer(), "tokenizer_config.json": json.dumps(SPECIALS).encode()}, "llama")


def write(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def learned(samples: JsonlDataset) -> list[int]:
    """All targets that count, row after row."""
    return [int(token) for i in range(len(samples)) for token in samples[i].targets if token != IGNORE_INDEX]


texts = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=8)


@settings(deadline=None)
@given(texts, st.integers(1, 9))
def test_packed_rows_hold_every_token_once_and_each_sample_starts_a_document(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], seq_len: int
) -> None:
    file = write(tmp_path_factory.mktemp("packed") / "a.jsonl", [{"text": text} for text in texts])
    samples = JsonlDataset([file], BYTES, seq_len)
    expected = [[*BYTES.encode(text), BYTES.eos_id] for text in texts]
    assert learned(samples) == [token for ids in expected for token in ids[1:]]
    rows = [samples[i] for i in range(len(samples))]
    assert len(rows) == -(-sum(len(ids) - 1 for ids in expected) // seq_len)  # no row has an unused end but the last
    inputs = np.concatenate([row.inputs for row in rows])
    numbers: list[int] = []
    for at, row in enumerate(rows):
        assert row.document_ids is not None
        assert row.document_ids[0] == 0
        assert samples.targets(at) == (row.targets != IGNORE_INDEX).sum()
        numbers += [(at, int(number)) for number in row.document_ids]  # type: ignore[misc]
    place = 0
    for ids in expected:
        pieces = numbers[place : place + len(ids) - 1]
        assert inputs[place : place + len(ids) - 1].tolist() == ids[:-1]
        in_rows = {at for at, _ in pieces}  # type: ignore[misc]
        assert len(set(pieces)) == len(in_rows)  # one document, or one piece of it a row
        place += len(ids) - 1
        if place < len(numbers):
            assert numbers[place] != numbers[place - 1]


@settings(deadline=None)
@given(texts, st.integers(1, 9))
def test_unpacked_every_sample_has_a_row_cut_or_filled(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], seq_len: int
) -> None:
    file = write(tmp_path_factory.mktemp("single") / "a.jsonl", [{"text": text} for text in texts])
    samples = JsonlDataset([file], BYTES, seq_len, packing=False)
    assert len(samples) == samples.documents == len(texts)
    longer = 0
    for index, text in enumerate(texts):
        ids = [*BYTES.encode(text), BYTES.eos_id]
        row = samples[index]
        assert row.document_ids is None
        used = min(seq_len, len(ids) - 1)
        assert row.inputs[:used].tolist() == ids[:used]
        assert row.targets[:used].tolist() == ids[1 : used + 1]
        assert (row.targets[used:] == IGNORE_INDEX).all()
        longer += len(ids) - 1 > seq_len
    assert samples.overlong == longer


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA], ids=["bytes", "llama"])
def test_of_prompt_and_completion_the_completion_alone_is_learned(
    tokenizer: ByteTokenizer | FileTokenizer, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "to be, or", "completion": " not to be"}])
    only = JsonlDataset([file], tokenizer, 64, completion_only=True)
    ids = tokenizer.encode("to be, or not to be")
    prompt = tokenizer.encode("to be, or")
    assert ids[: len(prompt)] == prompt
    assert learned(only) == [*ids[len(prompt) :], tokenizer.eos_id]
    assert learned(JsonlDataset([file], tokenizer, 64)) == [*ids[1:], tokenizer.eos_id]


def test_of_a_chat_what_the_assistant_says_is_learned(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "to be"},
        {"role": "assistant", "content": "or not"},
        {"role": "user", "content": "that is"},
        {"role": "assistant", "content": "the question"},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    (row,) = (JsonlDataset([file], LLAMA, 256, completion_only=True)[0],)
    spoken = LLAMA.decode(int(token) for token in row.targets if token != IGNORE_INDEX)
    assert spoken.split("\n\n") == ["or not", "the question", ""]
    whole = learned(JsonlDataset([file], LLAMA, 256))
    assert LLAMA.decode(whole).startswith("[user] to be\n\n[assistant] or not\n\n")
    assert whole.count(LLAMA.eos_id) == 4  # the template writes them; none is added


def test_a_message_that_calls_a_tool_needs_no_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}, call]}])
    assert len(JsonlDataset([file], LLAMA, 64)) == 1


def test_compressed_files_are_read_and_empty_lines_are_none(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "zwei \u00fc"}])
    plain.write_text(plain.read_text().replace("\n", "\n\n"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    expected = learned(JsonlDataset([plain], BYTES, 8))
    for packed in ("a.jsonl.gz", "a.jsonl.zst"):
        assert learned(JsonlDataset([tmp_path / packed], BYTES, 8)) == expected


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"body": "xy"}])
    assert learned(JsonlDataset([file], BYTES, 8, text_field="body")) == [ord("y"), BYTES.eos_id]


def test_the_fingerprint_follows_what_is_learned(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}])
    first = JsonlDataset([file], BYTES, 8).fingerprint()
    assert JsonlDataset([file], BYTES, 8).fingerprint() == first
    assert JsonlDataset([file], BYTES, 8, completion_only=True).fingerprint() != first
    assert JsonlDataset([file], BYTES, 2).fingerprint() != first


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("[1]", "is not a JSON object: b'[1]'"),
        ('{"txt": "a", "n": 1}', "has neither text, nor prompt and completion, nor messages; its keys: txt, n"),
        ('{"text": null}', "text is null, not text"),
        ('{"text": 5}', "text is 5, not text"),
        ('{"prompt": "a", "completion": ["b"]}', 'completion is ["b"], not text'),
        ('{"text": "\\ud800"}', "has half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "has half a surrogate pair"),
        ('{"messages": "hi"}', 'messages is "hi", not a list of objects with role and content'),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0]: its content is no text: {"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "contnt": "b"}]}',
            'messages[1]: its content is no text: {"role": "assistant", "contnt": "b"}',
        ),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages[0]: its content is no text"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "messages[0]: its content is no text"),
        ('{"messages": [{"role": "cat", "content": ""}]}', "tokenizer: llama: its chat template rejects the messages"),
        ("\udcff", "byte 0 of the line is not UTF-8"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "ok"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError) as caught:
        JsonlDataset([file, write(tmp_path / "b.jsonl", [{}])], LLAMA, 8)
    first, second = caught.value.problems
    assert first.startswith(f"{file}:2: {problem}")
    assert second.startswith(f"{tmp_path}/b.jsonl:1: has neither text")


def test_files_that_break_off_and_files_with_nothing_to_learn_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "a.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    with pytest.raises(ConfigError, match=r"a.jsonl.gz: cannot be read behind byte \d+: "):
        JsonlDataset([cut], BYTES, 8)
    empty = write(tmp_path / "empty.jsonl", [{"prompt": "ab", "completion": ""}])
    assert len(JsonlDataset([empty], BYTES, 8, completion_only=True)) == 1  # its end is to be learned
    nothing = write(tmp_path / "nothing.jsonl", [{"messages": [{"role": "user", "content": "to be"}]}])
    with pytest.raises(ConfigError, match=f"{nothing}: no line has anything to learn"):
        JsonlDataset([nothing], LLAMA, 8, completion_only=True)


def test_the_completion_is_not_to_be_told_in_plain_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "ab"}])
    with pytest.raises(ConfigError, match="loss_on: completion needs prompt and completion, or messages"):
        JsonlDataset([file], BYTES, 8, completion_only=True)
