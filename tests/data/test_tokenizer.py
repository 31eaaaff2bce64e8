"""Text survives every tokenizer; a tokenizer that cannot be used is an error with a remedy."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from lm.data.chat_template import ChatTemplate
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_FILES, TOKENIZER_JSON
from lm.data.tokenizer.loading import Tokenizer, end_text, load_tokenizer
from lm.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.hyperparameters import named_keys
from tests.support.tokenizer_files import (
    CHAT_TEMPLATE,
    byte_level_tokenizer,
    llama2_tokenizer,
    llama_tokenizer,
)

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_id


# ---- bytes


@given(st.text())
def test_stream_decoding_yields_complete_characters(text: str) -> None:
    pieces = list(TOKENIZER.stream(TOKENIZER.encode(text)))
    assert "".join(pieces) == text
    ends = [i for character in text for i in [*[""] * (len(character.encode()) - 1), character]]
    assert pieces == [*ends, ""]


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
def test_byte_tokenizer_replaces_invalid_utf8(ids: list[int], text: str) -> None:
    assert TOKENIZER.decode(ids) == text


# ---- a tokenizer.json


def from_files(content: bytes, config: Mapping[str, Any] | None = None) -> FileTokenizer:
    files = {TOKENIZER_JSON: content}
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config).encode()
    return FileTokenizer(files, "test")


BYTE_LEVEL = from_files(byte_level_tokenizer())
LLAMA = from_files(llama_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"})
LLAMA2 = from_files(llama2_tokenizer())
BYTE_0 = LLAMA2.vocab_size - 256


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTE_LEVEL])
@given(
    st.text().filter(lambda text: "<|" not in text and "</s>" not in text)
)  # special tokens, which are not text
def test_tokenizer_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text])[0].tolist() == ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTE_LEVEL, LLAMA])
@given(st.lists(st.text(), min_size=1, max_size=4))
def test_token_ends_grow_to_the_length_of_the_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids, ends = tokenizer.encode_with_ends(text, with_start=True)
        assert ids.tolist() == tokenizer.encode(text)
        assert len(ends) == len(ids)
        assert (np.diff(ends) >= 0).all()
        if text.strip():
            assert ends[-1] == len(text)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTE_LEVEL])
def test_token_ends_count_characters(tokenizer: Tokenizer) -> None:
    ids, ends = tokenizer.encode_with_ends("a\u65e5b", with_start=False)
    assert tokenizer.decode(ids[ends <= 2]) == "a\u65e5"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTE_LEVEL, LLAMA2])
@given(st.text(min_size=1).filter(lambda text: "<" not in text))
def test_token_bytes_add_up_to_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = np.array(tokenizer.encode(text))
    before = np.append(tokenizer.eos_id, ids[:-1])
    assert tokenizer.count_bytes(before, ids) == len(text.encode())
    stops = np.array([*tokenizer.stop_ids])
    assert tokenizer.count_bytes(stops, stops) == 0


def writing(template: str, content: bytes) -> tuple[FileTokenizer, Any]:
    """A tokenizer that writes `template` around texts, with </s> after them, and transformers'."""
    encoder = tokenizers.Tokenizer.from_buffer(content)
    parts = [part for part in template.split() if part != "$A"]
    specials = [(part, encoder.token_to_id(part)) for part in parts]
    encoder.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=template, special_tokens=specials
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="</s>")
    return from_files(encoder.to_str().encode(), {"eos_token": "</s>"}), theirs


@pytest.mark.parametrize(
    "content",
    [llama_tokenizer(), llama2_tokenizer(), llama2_tokenizer(newer=True)],
    ids=["llama", "llama2", "newer"],
)
@pytest.mark.parametrize("template", ["$A", "<s> $A", "<unk> <s> $A", "<s> $A </s>", "</s> $A"])
def test_start_of_text_is_written_once(template: str, content: bytes) -> None:
    ours, theirs = writing(template, content)
    start, _, end = template.partition("$A")
    start = start.replace(" ", "")
    for text in ("to be", "hi</s>", "</s>", "hi</s></s>", " <s>hi", "be<s>hi"):
        expected = theirs(text).input_ids
        if end:
            expected.pop()
        if not start or not text.startswith(start):
            for ids in encoded(ours, text):
                assert ids == expected
        rendered = start + text
        if start:
            for ids in encoded(ours, rendered):
                assert ids == theirs(rendered, add_special_tokens=False).input_ids
    twice = theirs(2 * start + "hi", add_special_tokens=False).input_ids
    assert ours.encode(2 * start + "hi") == twice
    end_id = ours.eos_id
    for ids in ours.encode_batch(["hi", "hi</s>"]):
        assert end_text(ids, end_id).tolist()[-2:] == [ours.encode("hi")[-1], end_id]


def encoded(tokenizer: FileTokenizer, text: str) -> list[list[int]]:
    ids, ends = tokenizer.encode_with_ends(text, with_start=True)
    assert len(ends) == len(ids)
    if text.strip():
        assert ends[-1] == len(text)
    return [ids.tolist(), tokenizer.encode(text), tokenizer.encode_batch([text])[0].tolist()]


def test_decode_after_other_ids_keeps_the_space() -> None:
    tokens = LLAMA.encode("to be or not to be")
    for cut in range(2, len(tokens)):
        before = LLAMA.decode(tokens[:cut])
        assert before + LLAMA.decode(tokens[cut:], after=tokens[:cut]) == "to be or not to be"


@given(
    *[st.lists(st.integers(0, LLAMA2.vocab_size - 1) | st.integers(BYTE_0, LLAMA2.vocab_size - 1))]
    * 2
)
def test_decode_of_any_ids_is_text(ids: list[int], before: list[int]) -> None:
    for tokenizer in (TOKENIZER, LLAMA2):
        assert isinstance(tokenizer.decode(ids, after=before).encode(), bytes)


def test_decode_replaces_invalid_bytes() -> None:
    (a,) = LLAMA2.encode("a")[-1:]
    letter = BYTE_0 + 0x41
    assert LLAMA2.decode([letter, BYTE_0 + 0xFF, a, a]) == "A\ufffdaa"
    assert LLAMA2.decode(
        [*LLAMA2.encode("to be \u65e5"), BYTE_0 + 0xE6, *LLAMA2.encode(" or")[1:]]
    ) == ("to be \u65e5\ufffd  or")
    assert LLAMA2.decode([a, a], after=LLAMA2.encode("to \ufffd\ufffd")) == "aa"


def test_decode_of_end_of_text_is_a_blank_line() -> None:
    first, *_ = BYTE_LEVEL.encode("\u65e5")
    ids = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.eos_id, *BYTE_LEVEL.encode("b"), first]
    assert BYTE_LEVEL.decode(ids) == "a\n\nb\ufffd"


def with_token(content: bytes, token: str) -> FileTokenizer:
    encoder = tokenizers.Tokenizer.from_buffer(content)
    encoder.add_special_tokens([token])
    return from_files(encoder.to_str().encode())


def test_ids_that_the_model_does_not_have_are_refused_where_they_occur() -> None:
    tokenizer = with_token(byte_level_tokenizer(), "<image>")
    n_ids = BYTE_LEVEL.vocab_size
    assert tokenizer.encode("to <image>")[-1] == n_ids
    tokenizer.limit_ids(n_ids)
    assert tokenizer.encode("to be") == BYTE_LEVEL.encode("to be")
    encodes = (
        lambda text: tokenizer.encode(text),
        lambda text: tokenizer.encode_batch(["to be", text]),
        lambda text: tokenizer.encode_with_ends(text, with_start=True),
        lambda text: tokenizer.encode_with_ends(text, with_start=False),
        lambda text: pickle.loads(pickle.dumps(tokenizer)).encode(text),
    )
    for encode in encodes:
        encode("to <image")
        with pytest.raises(ConfigError, match=f'^tokenizer: test: "<image>" is id {n_ids}, '):
            encode("to <image> be")


def test_end_of_text_that_the_model_does_not_have_is_refused() -> None:
    for tokenizer, end in ((TOKENIZER, 257), (BYTE_LEVEL, "<|endoftext|>")):
        with pytest.raises(ConfigError, match=r"^tokenizer: ") as refused:
            tokenizer.limit_ids(tokenizer.eos_id)
        assert str(end) in str(refused.value)
    tokenizer = from_files(llama_tokenizer(), {"bos_token": "be", "eos_token": "<unk>"})
    assert tokenizer.bos_id is not None
    tokenizer.limit_ids(tokenizer.bos_id)
    assert tokenizer.bos_id is None


def test_tokenizer_file_truncation_and_padding_are_disabled() -> None:
    content = json.loads(byte_level_tokenizer())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    assert len(from_files(json.dumps(content).encode()).encode("x y z x y z")) > 2


def write_files(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in {TOKENIZER_JSON: llama_tokenizer(), **contents}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        if isinstance(content, dict):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


# ---- special tokens of other files

FLAGS = {"lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
IM_START = {"content": "<|im_start|>", "special": True, **FLAGS}
NEXT = LLAMA.vocab_size
DECLARED: dict[str, dict[str, Any]] = {
    "decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "2": {"content": "</s>", **FLAGS},
                str(NEXT + 1): {
                    "content": "[ONE]",
                    **FLAGS,
                    "single_word": True,
                    "normalized": True,
                },
                str(NEXT): IM_START,
            },
            "eos_token": "</s>",
            "pad_token": "[PAD]",
            "additional_special_tokens": ["<|im_start|>", "hi"],
        },
        "special_tokens_map.json": {"eos_token": "<unk>", "cls_token": "[CLS]"},
        "added_tokens.json": {"[MORE]": NEXT},
    },
    "names": {
        "tokenizer_config.json": {
            "image_token": "<image>",
            "pad_token": {"__type": "AddedToken", "content": "[PAD]", "special": False, **FLAGS},
            "bos_token": "<s>",
            "eos_token": "<end>",
            "unk_token": "[UNK]",
            "mask_token": None,
            "add_bos_token": True,
            "extra_special_tokens": ["[A]", "to", "[A]"],
        }
    },
    "map": {
        "tokenizer_config.json": {"eos_token": "<unk>", "model_max_length": 9},
        "special_tokens_map.json": {
            "bos_token": {"content": "<s>", **FLAGS},
            "eos_token": {"content": "<end>", **FLAGS},
            "additional_special_tokens": ["[A]", "[B]"],
        },
    },
}


@pytest.mark.parametrize("contents", DECLARED.values(), ids=DECLARED)
def test_special_tokens_of_other_files_equal_transformers(
    contents: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    for name, value in contents.items():
        (tmp_path / name).write_text(json.dumps(value))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path))
    assert isinstance(ours, FileTokenizer)
    assert ours.vocab_size == len(theirs) > LLAMA.vocab_size
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    for token in (*theirs.get_added_vocab(), "[MORE]", "[CLS]", "<image", "be", "hi"):
        for text in (f"to {token}be or  {token}  not", f"[ONE]{token}", token):
            ids = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode_piece(text).tolist() == ids
    template = "{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ image_token }} {{ eoi_token }}"
    theirs.chat_template = template
    rendered = FileTokenizer(ours.files, "test", ChatTemplate(template, "test"))
    text = rendered.render(CHAT, add_generation_prompt=False).text
    if ours.bos_id is not None:
        assert text == theirs.apply_chat_template(CHAT, tokenize=False)
    assert FileTokenizer(ours.files, "saved").identity == ours.identity != LLAMA.identity


BYTES = byte_level_tokenizer(512)
OF_CLASSES: dict[str, dict[str, Any]] = {
    "gpt2": {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}},
    "qwen2, spaces": {
        "tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast", "add_prefix_space": True}
    },
    "llama": {
        TOKENIZER_JSON: llama2_tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"},
    },
    "by the model": {"config.json": {"model_type": "qwen2"}},
    "another than the model's": {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
        "config.json": {"model_type": "qwen2"},
    },
    "none, of a model": {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": {"model_type": "llama"},
    },
}


@pytest.mark.parametrize("contents", OF_CLASSES.values(), ids=OF_CLASSES)
def test_ids_equal_those_of_the_class_that_transformers_chooses(
    contents: dict[str, Any], tmp_path: Path
) -> None:
    write_files(tmp_path / "in", {TOKENIZER_JSON: BYTES} | contents)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    ours = load_tokenizer(str(tmp_path / "in"))
    assert isinstance(ours, FileTokenizer)
    write_files(tmp_path / "saved", ours.files)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    kept = FileTokenizer(ours.files, "kept")
    assert kept.identity == ours.identity
    for text in ("to be", " to  be\n", "e\u0301 \u65e5 \t", "x<|endoftext|></s>", ""):
        ids = theirs(text).input_ids
        assert ours.encode(text) == kept.encode(text) == ids == saved(text).input_ids


def test_special_tokens_with_ids_that_contradict_are_refused() -> None:
    def declare(i: Any, token: Any) -> FileTokenizer:
        config = {"eos_token": "</s>", "added_tokens_decoder": {i: token}}
        return from_files(llama_tokenizer(), config)

    assert declare(str(NEXT), IM_START).encode("<|im_start|>")[-1] == NEXT
    for i, token, part in (
        (NEXT + 1, IM_START, rf'"<|im_start|>" is id {NEXT + 1}, but {NEXT} '),
        (1, IM_START, rf'"<|im_start|>" is id 1, but {NEXT} '),
        (5, {"content": "</s>"}, '"</s>" is id 5, but 2 '),
    ):
        with pytest.raises(ConfigError, match=r"^tokenizer: test: tokenizer_config.json: ") as no:
            declare(str(i), token)
        assert part in str(no.value)
    for i, token in (("x", IM_START), ("5", "text"), ("5", {}), ("5", {"content": 5}), ("5", None)):
        with pytest.raises(ConfigError, match=r"^tokenizer: test: "):
            declare(i, token)
    for wrong in ([], 5, "text", {"5": {"content": "x", "more": 1}}):
        config = {"eos_token": "</s>", "added_tokens_decoder": wrong}
        with pytest.raises(ConfigError, match=r"^tokenizer: test: "):
            from_files(llama_tokenizer(), config)


def test_chat_template_reads_an_end_of_text_that_no_file_names() -> None:
    template = "{{ messages[0].content }}{{ eos_token }}"
    for content, text in (
        (byte_level_tokenizer(), "hi<|endoftext|>"),
        (llama_tokenizer(), "hi</s>"),
    ):
        tokenizer = from_files(content, {"chat_template": template})
        assert tokenizer.render(CHAT, add_generation_prompt=False).text == text


# ---- chats

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_render_uses_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (
        tokenizer.render(CHAT, add_generation_prompt=False)[0]
        == "<s>[user] hi</s>[assistant] ho</s>"
    )
    assert (
        tokenizer.render(CHAT[:1], add_generation_prompt=True)[0] == "<s>[user] hi</s>[assistant] "
    )
    with pytest.raises(ConfigError, match="no such role: cat") as caught:
        tokenizer.render([{"role": "cat", "content": ""}], add_generation_prompt=False)
    assert named_keys(caught.value) >= {"tokenizer"}


def test_chat_template_of_a_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    )
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(str(tmp_path), str(other))
    assert tokenizer.render(CHAT, add_generation_prompt=False)[0] == "hi"
    assert tokenizer.files["chat_template.jinja"] == other.read_bytes()
    saved = FileTokenizer(tokenizer.files, "saved")
    assert saved.render(CHAT, add_generation_prompt=False)[0] == "hi"
    assert saved.identity == load_tokenizer(str(tmp_path)).identity


@pytest.mark.parametrize(
    ("tokenizer", "name", "part"),
    [
        ("bytes", "qwen3", "requires a Hugging Face tokenizer"),
        ("none", "./READNE.md", "did you mean README.md"),
        ("none", "qwen3_train", "qwen3_training"),
    ],
)
def test_chat_template_that_does_not_exist(tokenizer: str, name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"^chat_template: {name}: .*{part}"):
        load_tokenizer(tokenizer, name)


@pytest.mark.parametrize(
    ("tokenizer", "part"),
    [(TOKENIZER, "bytes: .*no chat template"), (LLAMA, "test: .*no chat template")],
)
def test_render_needs_a_template(tokenizer: Tokenizer, part: str) -> None:
    with pytest.raises(ConfigError, match=f"^tokenizer: {part}"):
        tokenizer.render(CHAT, add_generation_prompt=False)


PLAIN = "{% for each in messages %}[{{ each.role }}] {{ each.content }}</s>{% endfor %}"
WITH_TOOLS = "{% for tool in tools %}{{ tool.function.name }}; {% endfor %}" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "find"}}]
BOTH = {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": "{{ documents }}"}
LISTED = [{"name": name, "template": text} for name, text in BOTH.items()]
TEMPLATES: dict[str, dict[str, Any]] = {
    "list": {"tokenizer_config.json": {"chat_template": LISTED}},
    "list and default": {
        "tokenizer_config.json": {"chat_template": LISTED},
        "chat_template.jinja": PLAIN + "!",
    },
    "files": {
        "tokenizer_config.json": {"chat_template": "none", "eos_token": "</s>"},
        "chat_template.jinja": PLAIN,
        "additional_chat_templates/tool_use.jinja": WITH_TOOLS,
    },
    "tools alone": {"additional_chat_templates/tool_use.jinja": WITH_TOOLS},
}


@pytest.mark.parametrize("contents", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["chat", "tools"])
def test_chat_template_is_chosen_as_in_transformers(
    tools: Any, contents: dict[str, Any], tmp_path: Path
) -> None:
    write_files(tmp_path / "in", contents)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "in")
    ours = load_tokenizer(str(tmp_path / "in"))
    assert set(ours.files) < set(TOKENIZER_FILES)
    write_files(tmp_path / "saved", ours.files)
    for folder in ("in", "saved"):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / folder)
        ours = load_tokenizer(str(tmp_path / folder))
        try:
            expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(ConfigError, match="has no chat template"):
                ours.render(CHAT, tools=tools, add_generation_prompt=False)
            continue
        assert ours.render(CHAT, tools=tools, add_generation_prompt=False).text == expected
    other = load_tokenizer(str(tmp_path / "in"), str(tmp_path / "in" / TOKENIZER_JSON))
    assert other.find_template(TOOLS).text == (tmp_path / "in" / TOKENIZER_JSON).read_text()


def chat_files(template: str, **generation: Any) -> FileTokenizer:
    config = json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    ).encode()
    files = {TOKENIZER_JSON: llama_tokenizer(), "tokenizer_config.json": config}
    return FileTokenizer(
        files | {"generation_config.json": json.dumps(generation).encode()}, "test"
    )


UNK, BOS, EOS = 0, 1, 2


@pytest.mark.parametrize(
    ("generation", "model", "stop_ids"),
    [
        ({"top_p": 0.9}, [7, 9], {7, 9}),
        ({"eos_token_id": None}, 7, {7}),
        ({"eos_token_id": 8}, [7, 8], {8}),
        ({"eos_token_id": [8, 9]}, 7, {8, 9}),
        (None, 3, {3}),
        (None, 0, {0}),
        ({"eos_token_id": 8}, None, {8}),
    ],
)
def test_stop_ids_are_those_of_generation_config_or_config(
    generation: dict[str, Any] | None, model: Any, stop_ids: set[int], tmp_path: Path
) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": model}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.stop_ids == {EOS, *stop_ids}
    found = json.loads(tokenizer.files["generation_config.json"])
    assert found == (generation or {}) | {"eos_token_id": found["eos_token_id"]}


@pytest.mark.parametrize(
    ("template", "stop_ids"),
    [
        (CHAT_TEMPLATE, {EOS, 7}),
        (
            "{% for message in messages %}{{ message.content }} be<unk>\n<s>{% endfor %}",
            {EOS, 7, UNK},
        ),
        ("{% for message in messages %}{{ message.content }} be{% endfor %}", {EOS, 7}),
        ("{{ raise_exception('no user') }}", {EOS, 7}),
    ],
)
def test_chat_stop_ids_have_the_end_of_turn(template: str, stop_ids: set[int]) -> None:
    tokenizer = chat_files(template, eos_token_id=7)
    assert tokenizer.chat_stop_ids == stop_ids
    assert tokenizer.stop_ids == {EOS, 7}
    assert TOKENIZER.chat_stop_ids == {END}


def test_tokenizer_with_random_or_split_tokens_is_refused() -> None:
    content = json.loads(byte_level_tokenizer())
    content["model"]["dropout"] = 0.5
    with pytest.raises(ConfigError, match=r"model.dropout is 0.5, .*random; set it to null"):
        from_files(json.dumps(content).encode())
    content["model"]["dropout"] = 0.0
    good = json.dumps(content).encode()
    assert from_files(good, {"split_special_tokens": False}).encode("to be")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: split_special_tokens is true"):
        from_files(good, {"split_special_tokens": True})


WRONG_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "config": ({"tokenizer_config.json": [1]}, "tokenizer_config.json: is not"),
    "generation": ({"generation_config.json": 3}, "generation_config.json: is not"),
    "eos": ({"generation_config.json": {"eos_token_id": {}}}, ".*eos_token_id is {}"),
    "eos-text": ({"generation_config.json": {"eos_token_id": "x"}}, '.*eos_token_id is "x"'),
    "template": ({"tokenizer_config.json": {"chat_template": [1]}}, "transformers cannot use it"),
    "nested": (
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": 1}]}},
        "has no chat template",
    ),
}


@pytest.mark.parametrize(("contents", "part"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_tokenizer_files_of_wrong_types_are_named(contents: dict[str, Any], part: str) -> None:
    files = {TOKENIZER_JSON: llama_tokenizer()}
    files["tokenizer_config.json"] = b'{"eos_token": "</s>"}'
    files |= {name: json.dumps(content).encode() for name, content in contents.items()}
    with pytest.raises(ConfigError, match=f"^tokenizer: test: {part}"):
        use_for_chat(FileTokenizer(files, "test"))


@pytest.mark.parametrize(
    ("name", "part"),
    [("chat_template.jinja", "0xff"), ("additional_chat_templates/a.jinja", "a.jinja: byte 0 ")],
)
def test_chat_template_that_is_not_utf8_is_refused(name: str, part: str, tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"^tokenizer: {tmp_path}: .*{part}"):
        use_for_chat(load_tokenizer(str(tmp_path)))


def use_for_chat(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids
    tokenizer.render(CHAT, add_generation_prompt=False)


# ---- loading


def test_load_tokenizer_of_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    (tmp_path / "other.json").write_bytes(byte_level_tokenizer())
    assert load_tokenizer("bytes").identity == "bytes"
    for tokenizer in (
        load_tokenizer(str(tmp_path)),
        load_tokenizer(str(tmp_path / TOKENIZER_JSON)),
    ):
        assert tokenizer.identity == LLAMA.identity
        assert tokenizer.eos_id == LLAMA.bos_id
        assert set(tokenizer.files) == {TOKENIZER_JSON, "tokenizer_config.json"}
    assert load_tokenizer(str(tmp_path / "other.json")).identity == BYTE_LEVEL.identity


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("./none", "no such file or directory, "),
        ("acme/none", "hf download acme/none "),
        ("a b", "no such file or directory, "),
    ],
)
def test_load_tokenizer_that_does_not_exist(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"^tokenizer: {name}: .*{part}"):
        load_tokenizer(name)


def test_load_tokenizer_refuses_files_it_cannot_use(tmp_path: Path) -> None:
    content = json.loads(byte_level_tokenizer())
    content["added_tokens"] = []
    del content["model"]["vocab"]["<|endoftext|>"]
    good, no_eos = byte_level_tokenizer(), json.dumps(content).encode()
    for load, part in (
        (lambda: load_tokenizer(str(tmp_path)), f"{tmp_path}: .*{TOKENIZER_JSON}"),
        (lambda: from_files(b"{}"), "test: transformers cannot use it: "),
        (
            lambda: FileTokenizer({TOKENIZER_JSON: good, "generation_config.json": b"{"}, "test"),
            "test: generation_config.json: ",
        ),
        (lambda: from_files(b""), "test: transformers cannot use it: "),
        (lambda: from_files(b"<html>"), "test: transformers cannot use it: "),
        (lambda: from_files(b"{\xff"), "test: transformers cannot use it: .*0xff"),
        (lambda: from_files(good.decode().encode("utf-16")), "test: transformers cannot use it: "),
        (lambda: from_files(good, {"eos_token": ["</s>"]}), "test: .* eos_token has to be"),
        (lambda: from_files(no_eos), "test: .*no end-of-text token; .*tokenizer_config.json"),
    ):
        with pytest.raises(ConfigError, match=f"^tokenizer: {part}"):
            load()


@pytest.mark.parametrize("content", [byte_level_tokenizer(), llama_tokenizer(), llama2_tokenizer()])
@given(st.lists(st.sampled_from(["to be", "or", " ", "\n", "e\u0301", "<s>", "That is"])))
def test_long_texts_are_encoded_in_pieces_as_in_one(content: bytes, words: list[str]) -> None:
    text = " ".join(words * 3)
    with pytest.MonkeyPatch.context() as context:
        context.setattr("lm.data.tokenizer.file_tokenizer._PIECE_SIZE", 10)
        (ids,) = from_files(content).encode_batch([text])
    assert ids.tolist() == from_files(content).encode_batch([text])[0].tolist()


MEMORY = """
import resource, sys
from pathlib import Path
from lm.data.tokenizer.loading import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
tokenizer.encode_batch(["to be"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer.encode_batch(["or not to be, that is the question: " * 100_000])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_of_a_long_text_is_bounded(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert int(done.stdout) < 200 * 1024  # KiB, for 3.6 MB of text
