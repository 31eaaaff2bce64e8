"""Any text survives its tokenizer, wherever that comes from; one that cannot be used is named with the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.tokenizer import FILE, ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, tokenizer_of
from lm.errors import ConfigError
from tests.support import CHAT_TEMPLATE, byte_level_tokenizer, llama2_tokenizer, llama_tokenizer

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end_of_text


# ---- bytes -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= token < END < TOKENIZER.vocab_size for token in ids)


@settings(deadline=None)
@given(st.text())
def test_streamed_pieces_are_whole_characters_in_time(text: str) -> None:
    pieces = list(TOKENIZER.stream(TOKENIZER.encode(text)))
    assert "".join(pieces) == text
    ends = [i for character in text for i in [*[""] * (len(character.encode()) - 1), character]]
    assert pieces == [*ends, ""]


@settings(deadline=None)
@given(st.lists(st.integers(0, 300)))
def test_any_ids_decode_to_text(ids: list[int]) -> None:
    assert isinstance(TOKENIZER.decode(ids).encode(), bytes)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([97, END, 98], "a\n\nb"),
        ([97, 0xC3, END, 98], "a\ufffd\n\nb"),
        ([0xC3], "\ufffd"),
        ([0xFF, 97], "\ufffda"),
        ([97, 263, 98], "a\ufffdb"),
    ],
)
def test_what_is_no_text_shows_as_such(ids: list[int], text: str) -> None:
    assert TOKENIZER.decode(ids) == text


# ---- a tokenizer.json ----------------------------------------------------------------------------------------


def from_files(content: bytes, config: Mapping[str, Any] | None = None) -> FileTokenizer:
    files = {FILE: content}
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config).encode()
    return FileTokenizer(files, "test")


BYTE_LEVEL = from_files(byte_level_tokenizer())
LLAMA = from_files(llama_tokenizer(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
LLAMA2 = from_files(llama2_tokenizer())
BYTE_0 = LLAMA2.vocab_size - 256


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_a_byte_level_tokenizer(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids) == text
    assert BYTE_LEVEL.encode_batch([text])[0].tolist() == ids
    assert all(0 <= token < BYTE_LEVEL.vocab_size for token in ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTE_LEVEL, LLAMA])
@settings(deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=4))
def test_ends_grow_from_0_to_the_length_of_the_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text, (ids, ends) in zip(texts, tokenizer.encode_with_ends(texts, rendered=False), strict=True):
        assert ids.tolist() == tokenizer.encode(text)
        assert len(ends) == len(ids)
        assert (np.diff(ends) >= 0).all()
        if text.strip():
            assert ends[-1] == len(text)


def test_a_tokenizers_own_beginning_is_kept_and_its_own_end_is_left_to_the_caller() -> None:
    assert LLAMA.encode("to be")[0] == LLAMA.encode("")[0]
    assert LLAMA.end_of_text not in LLAMA.encode("to be")
    assert LLAMA.encode("")[0] not in LLAMA.encode_with_ends(["to be"], rendered=True)[0].ids
    assert [LLAMA.beginning] == LLAMA.encode("")
    assert BYTE_LEVEL.beginning is LLAMA2.beginning is TOKENIZER.beginning is None


def test_a_continued_text_has_the_space_that_stands_between() -> None:
    tokens = LLAMA.encode("to be or not to be")
    for cut in range(2, len(tokens)):
        before = LLAMA.decode(tokens[:cut])
        assert before + LLAMA.decode(tokens[cut:], after=tokens[:cut]) == "to be or not to be"


@settings(deadline=None)
@given(*[st.lists(st.integers(0, LLAMA2.vocab_size - 1) | st.integers(BYTE_0, LLAMA2.vocab_size - 1))] * 2)
def test_bytes_that_are_no_text_decode_to_some(ids: list[int], before: list[int]) -> None:
    assert isinstance(LLAMA2.decode(ids, after=before).encode(), bytes)


def test_bytes_that_are_no_text_show_as_such_and_the_text_around_them_stays() -> None:
    (a,) = LLAMA2.encode("a")[-1:]
    letter = BYTE_0 + 0x41
    assert LLAMA2.decode([letter, BYTE_0 + 0xFF, a, a]) == "A\ufffdaa"
    assert LLAMA2.decode([*LLAMA2.encode("to be \u65e5"), BYTE_0 + 0xE6, *LLAMA2.encode(" or")[1:]]) == (
        "to be \u65e5\ufffd  or"
    )
    assert LLAMA2.decode([a, a], after=LLAMA2.encode("to \ufffd\ufffd")) == "aa"


def test_the_end_of_a_document_shows_as_a_blank_line_and_half_a_character_as_such() -> None:
    first, *_ = BYTE_LEVEL.encode("\u65e5")
    ids = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.end_of_text, *BYTE_LEVEL.encode("b"), first]
    assert BYTE_LEVEL.decode(ids) == "a\n\nb\ufffd"


def test_truncation_and_padding_that_a_file_asks_for_are_left_out() -> None:
    content = json.loads(byte_level_tokenizer())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(from_files(json.dumps(content).encode()).encode("x y z x y z")) > 2


def test_the_identity_follows_the_file() -> None:
    assert from_files(byte_level_tokenizer()).identity == BYTE_LEVEL.identity != LLAMA.identity


# ---- chats ---------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_a_chat_is_written_by_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(llama_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.render(CHAT, reply_follows=False) == "<s>[user] hi</s>[assistant] ho</s>"
    assert tokenizer.render(CHAT[:1], reply_follows=True) == "<s>[user] hi</s>[assistant] "
    with pytest.raises(ConfigError, match="chat template refuses the messages: no such role: cat"):
        tokenizer.render([{"role": "cat", "content": ""}], reply_follows=False)


def test_of_several_chat_templates_the_default_one_is_taken() -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    assert from_files(llama_tokenizer(), {"chat_template": templates}).render(CHAT, reply_follows=False) == "hi"
    with pytest.raises(ConfigError, match="no chat template"):
        from_files(llama_tokenizer(), {"chat_template": templates[:1]}).render(CHAT, reply_follows=False)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LLAMA])
def test_a_chat_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.render(CHAT, reply_follows=False)


# ---- finding one ---------------------------------------------------------------------------------------------


def test_a_file_and_a_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(llama_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    (tmp_path / "other.json").write_bytes(byte_level_tokenizer())
    assert load_tokenizer("bytes").identity == "bytes"
    for tokenizer in (load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path / FILE)), tokenizer_of(tmp_path)):
        assert tokenizer.identity == LLAMA.identity
        assert tokenizer.end_of_text == LLAMA.encode("")[0]
        assert set(tokenizer.files) == {FILE, "tokenizer_config.json"}
    assert load_tokenizer(str(tmp_path / "other.json")).identity == BYTE_LEVEL.identity


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("./none", "no such file or folder, seen from"),
        ("none.json", "no such file or folder, seen from"),
        ("acme/none", "hf download acme/none tokenizer.json tokenizer_config.json"),
        ("a b", "no such file or folder, and not in the Hugging Face cache"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused(name: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(name)
    (line,) = caught.value.problems
    assert line.startswith(f"tokenizer: {name}: ")
    assert problem in line


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer: {tmp_path}: holds no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer: test: cannot be read: "):
        from_files(b"{}")
    with pytest.raises(ConfigError, match="eos_token '<end>' is not in its vocabulary; name one as eos_token"):
        from_files(byte_level_tokenizer(), {"eos_token": "<end>"})
    with pytest.raises(ConfigError, match="tokenizer: test: cannot be read: "):
        FileTokenizer({FILE: byte_level_tokenizer(), "tokenizer_config.json": b"[1]"}, "test")
    assert from_files(llama_tokenizer(), {"eos_token": ["</s>"]}).end_of_text == LLAMA.end_of_text
    content = json.loads(byte_level_tokenizer())
    content["added_tokens"] = []
    del content["model"]["vocab"]["<|endoftext|>"]
    with pytest.raises(ConfigError, match="it has no end-of-text token; name one as eos_token in a tokenizer_config"):
        from_files(json.dumps(content).encode())
