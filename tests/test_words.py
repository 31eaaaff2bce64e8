"""The quick way to tokens gives the library's own, id for id."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder

from lm.data import words
from lm.data.files import find_files
from lm.data.tokenizer import FILE, FileTokenizer
from lm.data.words import Words, word_pattern
from tests.support import byte_level_tokenizer, llama2_tokenizer, llama_tokenizer

GPT2: dict[str, Any] = json.loads(byte_level_tokenizer(600))


def cutting_by(pattern: str) -> dict[str, Any]:
    """The tokenizer with words as Llama 3's and its relatives are described, and a beginning of its own."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return GPT2 | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, plain]}}


KINDS = {
    "gpt2": GPT2,
    "llama3": cutting_by(words._LLAMA3),
    "qwen2": cutting_by(words._QWEN2) | {"normalizer": {"type": "NFC"}},
}
ENCODERS = {name: Encoder.from_str(json.dumps(kind)) for name, kind in KINDS.items()}

ASCII = [
    "a",
    "The",
    "don't",
    "I'LL",
    "x1234567",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\n\n",
    "\x00",
    "\x1c",
    "\x7f",
    "'s",
    "_(",
]
BEYOND = ["\xe9", "e\u0301", "\xa0", "\u2028", "\u3000", "\x85", "\u65e5", "\xbd", "'\u017f", "\u212a", "\U0001f600"]
pieces = st.sampled_from([*ASCII, *ASCII, *BEYOND, "<|endoftext|>", "<|"])
texts = st.one_of(st.lists(pieces).map("".join), st.text(st.characters(exclude_categories=["Cs"])))


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_any_text_has_the_librarys_ids(kind: str, text: str) -> None:
    encoder = ENCODERS[kind]
    pattern = word_pattern(KINDS[kind])
    assert pattern is not None
    assert Words(encoder, pattern).encode(text).tolist() == encoder.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_source_code_has_the_librarys_ids_also_where_the_cache_is_full(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "_CACHED", 100)
    encoder = ENCODERS[kind]
    quick = Words(encoder, word_pattern(KINDS[kind]) or "")
    for path in random.Random(0).sample(find_files(None, "train_data"), 20):
        text = path.read_text()
        assert quick.encode(text).tolist() == encoder.encode(text, add_special_tokens=False).ids
        assert len(quick) <= 100


def test_long_words_have_the_librarys_ids_and_are_not_remembered() -> None:
    quick = Words(ENCODERS["gpt2"], words.GPT2)
    for length in (64, 65, 10_000):
        assert quick.encode("x" * length).tolist() == ENCODERS["gpt2"].encode("x" * length).ids
    assert list(map(len, quick)) == [64]


def test_a_tokenizer_whose_words_are_not_known_is_left_to_the_library() -> None:
    assert word_pattern(GPT2) == words.GPT2
    spaced = GPT2["pre_tokenizer"] | {"add_prefix_space": True}
    others = [
        json.loads(llama_tokenizer()),
        GPT2 | {"pre_tokenizer": spaced},
        GPT2 | {"pre_tokenizer": None},
        GPT2 | {"normalizer": {"type": "Lowercase"}},
        GPT2 | {"model": GPT2["model"] | {"dropout": 0.1}},
        cutting_by(r"\w+|\W+"),
    ]
    assert [word_pattern(other) for other in others] == [None] * len(others)


OPENING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


def test_a_tokenizers_own_beginning_is_kept() -> None:
    tokenizer = FileTokenizer({FILE: json.dumps(GPT2 | {"post_processor": OPENING}).encode()}, "t")
    documents = ["to be", "that<|endoftext|>", "é\nor not"]
    for quick, plain in zip(tokenizer.encode_serially(documents), tokenizer.encode_batch(documents), strict=True):
        assert quick[0] == tokenizer.end_of_text
        np.testing.assert_array_equal(quick, plain)
    (continuing,) = tokenizer.encode_serially(["to be"], opening=False)
    assert continuing.tolist() == tokenizer.encode("to be")[1:]


def test_a_vocabulary_of_few_letters_has_its_beginning_in_front() -> None:
    model = GPT2["model"] | {"vocab": {"<|endoftext|>": 0, "b": 1, "o": 2}, "merges": []}
    content = json.dumps(GPT2 | {"model": model, "post_processor": OPENING})
    tokenizer = FileTokenizer({FILE: content.encode()}, "t")
    assert [ids.tolist() for ids in tokenizer.encode_serially(["bob", ""])] == [[0, 1, 2, 1], []]
    assert [ids.tolist() for ids in tokenizer.encode_serially(["bob"], opening=False)] == [[1, 2, 1]]


def test_a_file_of_an_older_version_has_its_words_found_too() -> None:
    older = json.loads(json.dumps(GPT2))
    del older["model"]["type"], older["pre_tokenizer"]["use_regex"]
    tokenizer = FileTokenizer({FILE: json.dumps(older).encode()}, "t")
    assert tokenizer._words is not None
    assert tokenizer.encode_serially(["to be"])[0].tolist() == tokenizer.encode("to be")


def test_the_cut_of_a_text_is_seen_not_to_change_its_ids() -> None:
    gpt2 = FileTokenizer({FILE: json.dumps(GPT2).encode()}, "t")
    assert gpt2.splits_at("to be\n", "or not")
    assert gpt2.splits_at("to be", " or not")
    assert not gpt2.splits_at("to ", "be")
    assert not gpt2.splits_at("to be\n\n", "or not")
    assert not gpt2.splits_at("th", "at")
    assert not gpt2.splits_at("that<|endoftext|>", " is")
    spaced = FileTokenizer({FILE: llama_tokenizer()}, "t")
    assert not spaced.splits_at("to be\n", "or not")
    wordless = FileTokenizer({FILE: json.dumps(GPT2 | {"pre_tokenizer": None}).encode()}, "t")
    assert not wordless.splits_at("to be\n", "or not")


def test_without_words_a_text_is_cut_before_spaces_that_no_token_reaches_over() -> None:
    for newer in (False, True):
        tokenizer = FileTokenizer({FILE: llama2_tokenizer(newer=newer)}, "t")
        assert tokenizer.splits_at("to be", " or not")
        assert tokenizer.splits_at("日本", " or not")
        assert not tokenizer.splits_at("to be\n", "or not")
        assert not tokenizer.splits_at("to be ", " or not")
        assert not tokenizer.splits_at("to be\u2581", " or not")
        assert not tokenizer.splits_at("to be</s>", " or not")
        (ids,) = tokenizer.encode_serially([" or not"], opening=False)
        assert [*tokenizer.encode("to be"), *ids] == tokenizer.encode("to be or not")
    content = json.loads(llama2_tokenizer())
    vocabulary = content["model"]["vocab"] | {"e\u2581o": 999}
    merged = content | {"model": content["model"] | {"vocab": vocabulary}}
    assert not FileTokenizer({FILE: json.dumps(merged).encode()}, "t").splits_at("that is", " the question")
    lower = content | {"normalizer": {"type": "Lowercase"}}
    assert not FileTokenizer({FILE: json.dumps(lower).encode()}, "t").splits_at("to be", " or not")
