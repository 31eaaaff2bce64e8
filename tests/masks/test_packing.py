"""Packing splits no sample of JSON Lines, only chosen tokens are targets, errors name the line."""

from __future__ import annotations

import datetime
import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.data.chat_template import ChatTemplate
from lm.data.loader import Loader
from lm.data.packing import PackedDataset
from lm.data.run_data import DataConfig, open_data
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError
from lm.training import parallelize
from model import IGNORE_INDEX, ModelConfig, Transformer
from tests.support.hyperparameters import TINY, named_keys
from tests.support.records import pack_files
from tests.support.tokenizer_files import CHAT_TEMPLATE, byte_level_tokenizer, llama_tokenizer

BYTES = ByteTokenizer()
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA_FILE = llama_tokenizer()


def llama(template: str) -> FileTokenizer:
    config = json.dumps(SPECIALS | {"chat_template": template}).encode()
    return FileTokenizer({TOKENIZER_JSON: LLAMA_FILE, "tokenizer_config.json": config}, "llama")


LLAMA = llama(CHAT_TEMPLATE)


def write(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def targets(samples: PackedDataset) -> list[int]:
    """All targets that are not ignored."""
    return [
        int(token)
        for i in range(len(samples))
        for token in samples[i].targets
        if token != IGNORE_INDEX
    ]


texts = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=8)


def tokens_of(texts: list[str], seq_len: int) -> list[tuple[list[int], list[int]]]:
    """The inputs and targets of each text, truncated."""
    ids = [[*BYTES.encode(text), BYTES.eos_id] for text in texts]
    return [(each[:-1][:seq_len], each[1:][:seq_len]) for each in ids]


@given(texts, st.integers(1, 9))
def test_packing_keeps_samples_in_one_piece(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], seq_len: int
) -> None:
    file = write(tmp_path_factory.mktemp("packed") / "a.jsonl", [{"text": text} for text in texts])
    samples = pack_files([file], BYTES, seq_len)
    expected = tokens_of(texts, seq_len)
    found, used = [], []
    for i in range(len(samples)):
        inputs, targets, document_ids, _ = samples[i]
        assert document_ids is not None
        documents = [document_ids == number for number in range(document_ids[-1] + 1)]
        pieces = [(inputs[here].tolist(), targets[here].tolist()) for here in documents]
        if (
            pieces[-1][1][0] == IGNORE_INDEX
        ):  # padding is a separate document, so that nothing attends to it
            assert set(pieces.pop()[1]) == {IGNORE_INDEX}
        found += pieces
        used.append(sum(len(piece) for piece, _ in pieces))
        assert samples.count_terms(i) == used[-1]
    assert sorted(found) == sorted(expected)
    assert len(used) < 2 or sum(sorted(used)[:2]) > seq_len  # no two of them fit into one


def test_packing_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", [{"text": text} for text in ("ab", "efgh", "klm", "c", "de", "ij")]
    )
    samples = pack_files([file], BYTES, 5)
    assert [bytes(samples[i].inputs.tolist()) for i in range(len(samples))] == [
        b"abklm",
        b"efgh\0",
        b"cdeij",
    ]


@given(texts, st.integers(1, 9))
def test_without_packing_a_sample_is_a_sequence(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], seq_len: int
) -> None:
    file = write(tmp_path_factory.mktemp("single") / "a.jsonl", [{"text": text} for text in texts])
    samples = pack_files([file], BYTES, seq_len, packing=False)
    assert len(samples) == len(texts)
    for i, (inputs, targets) in enumerate(tokens_of(texts, seq_len)):
        assert samples[i].document_ids is None
        assert samples[i].inputs[: len(inputs)].tolist() == inputs
        assert samples[i].targets.tolist() == targets + [IGNORE_INDEX] * (seq_len - len(targets))


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA], ids=["bytes", "llama"])
def test_loss_on_completion_targets(
    tokenizer: ByteTokenizer | FileTokenizer, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "to be, or", "completion": " not to be"}])
    only = pack_files([file], tokenizer, 64, completion_only=True)
    ids = tokenizer.encode("to be, or not to be")
    prompt = tokenizer.encode("to be, or")
    assert ids[: len(prompt)] == prompt
    assert targets(only) == [*ids[len(prompt) :], tokenizer.eos_id]
    assert targets(pack_files([file], tokenizer, 64)) == [*ids[1:], tokenizer.eos_id]


@pytest.mark.parametrize(
    ("plain", "rendered", "completion_only"),
    [
        ({"text": "to be"}, {"text": "<s>to be</s>"}, False),
        (
            {"prompt": "to be, or", "completion": " not to be"},
            {"prompt": "<s>to be, or", "completion": " not to be</s>"},
            True,
        ),
    ],
)
def test_rendered_text_has_one_start_and_one_end(
    plain: Any, rendered: Any, completion_only: bool, tmp_path: Path
) -> None:
    samples = [
        pack_files([write(tmp_path / "a.jsonl", [record])], LLAMA, 64, None, completion_only)
        for record in (plain, rendered)
    ]
    assert samples[0].fingerprint() == samples[1].fingerprint()
    assert targets(samples[1])[-2:] == [LLAMA.encode("to be")[-1], LLAMA.eos_id]


def test_chat_targets_are_the_assistants_messages(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "to be"},
        {"role": "assistant", "content": "or not"},
        {"role": "user", "content": "that is"},
        {"role": "assistant", "content": "the question"},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    replies = LLAMA.decode(targets(pack_files([file], LLAMA, 256, completion_only=True)))
    assert replies.split("\n\n") == ["or not", "the question", ""]
    everything = targets(pack_files([file], LLAMA, 256))
    assert LLAMA.decode(everything).startswith("[user] to be\n\n[assistant] or not\n\n")
    assert everything.count(LLAMA.eos_id) == 4  # written by the template


def test_chat_tool_call_needs_no_content(tmp_path: Path) -> None:
    calls = (
        "<s>{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.name }}{% endfor %}</s>{% endfor %}"
    )
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "question", "arguments": {}}}],
    }
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}, call]}])
    assert (
        LLAMA.decode(targets(pack_files([file], llama(calls), 64, completion_only=True)))
        == "question\n\n"
    )


def test_nulls_that_a_table_adds_to_messages_are_left_out(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "or not", "image_url": None}]
    chat = [
        {"role": "user", "content": "to be", "weight": None, "tool_calls": None},
        {"role": "assistant", "content": parts, "weight": None, "name": None},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    found = targets(pack_files([file], LLAMA, 64, completion_only=True))
    assert LLAMA.decode(found) == "or not\n\n"


def test_chat_keys_that_the_template_ignores_are_refused(tmp_path: Path) -> None:
    user = {
        "role": "user",
        "content": "hi",
        "name": None,
        "tool_call_id": "1",
    }  # null says nothing; an ID is no text
    reply = {"role": "assistant", "content": "ho", "thinking": "hm", "name": "bob"}
    file = write(tmp_path / "a.jsonl", [{"messages": [user, reply]}])
    with pytest.raises(ConfigError) as error:
        pack_files([file], LLAMA, 64)
    assert str(error.value).startswith(f"{file}:1: ")
    assert "messages[1].thinking" in str(error.value)
    assert "messages[1].name" in str(error.value)
    assert "messages[0]" not in str(error.value)
    reads = llama(CHAT_TEMPLATE + "{{ messages[1].name }} {{ messages[1].reasoning_content }}")
    assert "bob" in LLAMA.decode(targets(pack_files([file], reads, 64)))
    assert "hm" in LLAMA.decode(targets(pack_files([file], reads, 64)))


def test_chat_message_of_weight_0_is_no_target(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "to be"},
        {"role": "assistant", "content": "or not", "weight": 0},
        {"role": "user", "content": "that is"},
        {"role": "assistant", "content": "the question", "weight": 1},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    assert (
        LLAMA.decode(targets(pack_files([file], LLAMA, 256, completion_only=True)))
        == "the question\n\n"
    )
    with pytest.raises(ConfigError, match=r"weight is read only .* loss_on: completion"):
        pack_files([file], LLAMA, 256)


def test_chat_template_gets_the_tools(tmp_path: Path) -> None:
    template = (
        "<s>{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE
    )
    tokenizer = llama(template)
    tools = [{"type": "function", "function": {"name": "question"}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}])
    assert LLAMA.decode(targets(pack_files([file], tokenizer, 256))).startswith("question")
    assert (
        LLAMA.decode(targets(pack_files([file], tokenizer, 256, completion_only=True))).strip()
        == "ho"
    )
    with pytest.raises(ConfigError, match="leaves out tools"):
        pack_files([file], LLAMA, 256)


def test_chat_template_gets_its_variables_and_always_the_same_date() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]

    def date(tokenizer: FileTokenizer) -> str:
        return tokenizer.render(messages, add_generation_prompt=False)[0].partition("<s>")[0]

    prefix = (
        "{% if not date_string is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    )
    first = llama(prefix + "{{ date_string }}" + CHAT_TEMPLATE)
    second = llama(
        "{{ strftime_now( \"%Y\" ) }}, {{ strftime_now('%d') }}{{ mark }}" + CHAT_TEMPLATE
    )
    assert (date(first), date(second)) == ("26 Jul 2024", "2024, 26")
    first.template_kwargs = second.template_kwargs = {"date_string": "today", "mark": "!"}
    assert (date(first), date(second)) == ("today", "2024, 26!")


def masked_by_transformers(
    files: Mapping[str, bytes], chat: list[dict[str, Any]], folder: Path
) -> list[int]:
    """Return the tokens that transformers marks as the assistant's."""
    import transformers

    for name, content in files.items():
        (folder / name).write_bytes(content)
    masked = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        t for t, kept in zip(masked["input_ids"], masked["assistant_masks"], strict=True) if kept
    ]


def trl_templates() -> list[Path]:
    """The chat templates in TRL's package."""
    (package,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr]
    return sorted(Path(package, "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize(
    "unset",
    [
        (),
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for names in (("bos_token", "pad_token", "unk_token"), ("eos_token",))
        ),
    ],
)
def test_trl_templates_write_ids_as_transformers(
    unset: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr("lm.data.chat_template.TODAY", datetime.date.today())

    specials = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
    config = {key: "<|endoftext|>" for key in specials if key not in unset}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    files = {TOKENIZER_JSON: byte_level_tokenizer()}
    for name, content in (files | {"tokenizer_config.json": json.dumps(config).encode()}).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 2 + 2?", "tool_calls": None},
        {"role": "assistant", "content": "It is 4.", "reasoning_content": None},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    for path in trl_templates():
        template = path.read_text()
        settings = json.dumps(config | {"chat_template": template}).encode()
        ours = FileTokenizer(files | {"tokenizer_config.json": settings}, path.stem)
        try:
            expected = theirs.apply_chat_template(
                chat, chat_template=template, add_generation_prompt=True, return_dict=False
            )
        except Exception:  # it needs images, or a token that is not set
            with pytest.raises(ConfigError, match="rejects the messages"):
                ours.render(chat, add_generation_prompt=True)
            continue
        text, _ = ours.render(chat, add_generation_prompt=True)
        assert ours.encode_piece(text).tolist() == expected, path.stem
        assert "None" not in text, path.stem


def save_tokenizer(folder: Path) -> Path:
    """Write a tokenizer without a chat template to `folder`."""
    end = "<|endoftext|>"
    config = {"bos_token": end, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


CONTENTS = ["What is 2 + 2?", "It is 4.", "And 3 + 3?", "  Six,\nof them. "]
DIALOG = [
    {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(CONTENTS)
]
NEEDS_IMAGES = ("llava_next", "llava_next_training")
NEEDS_PARTS = ("idefics3", "idefics3_training", "smolvlm", "smolvlm_training")
"""write content only if it is a list of parts"""


def test_trl_templates_mark_targets_as_transformers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": DIALOG}])
    folder = save_tokenizer(tmp_path)
    compared = []
    for path in trl_templates():
        tokenizer = load_tokenizer(str(folder), path.stem)
        assert isinstance(tokenizer, FileTokenizer)
        without_text = (*NEEDS_IMAGES, *NEEDS_PARTS)
        if not tokenizer.find_template().marks_replies or path.stem in without_text:
            continue
        found = targets(pack_files([file], tokenizer, 8192, completion_only=True))
        assert found == masked_by_transformers(tokenizer.files, DIALOG, tmp_path), path.name
        assert found
        compared.append(path.name)
    assert len(compared) >= 28


@pytest.mark.slow
def test_trl_templates_that_are_refused_name_their_twins(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": DIALOG}])
    folder = str(save_tokenizer(tmp_path))
    refused = []
    for path in trl_templates():
        if path.stem in (*NEEDS_IMAGES, *NEEDS_PARTS):
            continue
        try:
            pack_files([file], load_tokenizer(folder, path.stem), 8192, completion_only=True)
        except ConfigError as error:
            (twin,) = re.findall(r"chat_template: (\w+_training)", str(error))
            assert twin == f"{path.stem}_training"
            pack_files([file], load_tokenizer(folder, twin), 8192, completion_only=True)
            refused.append(path.stem)
    assert {"qwen3", "deepseek_r1_distill", "gptoss", "phi3", "glm4moe"} <= set(refused)


@pytest.mark.slow
def test_trl_templates_mark_the_same_targets_in_a_completion(tmp_path: Path) -> None:
    """As in messages of which the replies before it have weight 0."""
    weighted = [DIALOG[0], DIALOG[1] | {"weight": 0}, *DIALOG[2:]]
    records = [
        {"messages": DIALOG[:2]},
        {"prompt": DIALOG[:1], "completion": DIALOG[1:2]},
        {"messages": weighted},
        {"prompt": DIALOG[:3], "completion": DIALOG[3:]},
    ]
    files = [write(tmp_path / f"{i}.jsonl", [record]) for i, record in enumerate(records)]
    folder = str(save_tokenizer(tmp_path))
    for path in trl_templates():
        if not path.stem.endswith("_training") or path.stem in (*NEEDS_IMAGES, *NEEDS_PARTS):
            continue
        tokenizer = load_tokenizer(folder, path.stem)
        found = [
            tokenizer.decode(targets(pack_files([file], tokenizer, 8192, completion_only=True)))
            for file in files
        ]
        assert found[1] == found[0], path.stem
        assert found[3] == found[2], path.stem
        assert "It is 4." in found[0], path.stem
        assert "It is 4." not in found[2], path.stem
        assert "Six,\nof them." in found[2], path.stem


@pytest.mark.parametrize("template", ["qwen2_5", "qwen2_5_training"])
def test_only_the_assistants_words_in_a_completion_are_targets(
    template: str, tmp_path: Path
) -> None:
    """As in messages: not what the user says meanwhile, nor the result of a tool."""
    result = {"role": "tool", "content": "4"}
    dialog = [*DIALOG[:2], result, *DIALOG[1:]]
    records = [{"messages": dialog}, {"prompt": dialog[:1], "completion": dialog[1:]}]
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), template)
    found = []
    for i, record in enumerate(records):
        file = write(tmp_path / f"{i}.jsonl", [record])
        found.append(targets(pack_files([file], tokenizer, 8192, completion_only=True)))
    assert np.array_equal(found[1], found[0])
    text = tokenizer.decode(found[1])
    assert text.count(DIALOG[1]["content"]) == 2
    assert DIALOG[2]["content"] not in text
    words = write(tmp_path / "user.jsonl", [{"prompt": dialog[:2], "completion": [dialog[0]]}])
    with pytest.raises(ConfigError, match=r"user\.jsonl:1: completion: none of the assistant"):
        pack_files([words], tokenizer, 8192, completion_only=True)


def test_trl_template_of_qwen3_trains_calls_of_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}])
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), "qwen3_training")
    text = tokenizer.decode(targets(pack_files([file], tokenizer, 8192, completion_only=True)))
    assert '{"name": "add", "arguments": {"x": 1}}' in text
    assert "It is 4.<|im_end|>" in text
    assert "tool_response" not in text


LOOP = "{% for m in messages %}[{{ m.role }}] "
UNUSABLE = {
    "no end": (LOOP + "{{ m.content }} {% endfor %}", "no end of turn"),
    "an end that is not marked": (
        LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}",
        "no end of turn",
    ),
    "an end only after the last reply": (
        LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% if loop.last %}</s>{% endif %}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}",
        "no end of turn",
    ),
    "no text": (LOOP + "{{ m.content.text }}</s>{% endfor %}", "leaves out"),
}


@pytest.mark.parametrize(("template", "part"), UNUSABLE.values(), ids=UNUSABLE)
def test_template_without_end_of_turn_is_refused(template: str, part: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": DIALOG}])
    with pytest.raises(ConfigError, match=f"^{file}:1: tokenizer: llama: .*{part}") as error:
        pack_files([file], llama(template), 512, completion_only=True)
    assert named_keys(error.value) >= {"chat_template"}


def test_a_reply_can_be_part_of_an_end_of_turn(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": ">"}
    file = write(tmp_path / "a.jsonl", [{"messages": [*DIALOG[:2], DIALOG[0], reply]}])
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), "qwen2_5_training")
    text = tokenizer.decode(targets(pack_files([file], tokenizer, 512, completion_only=True)))
    assert f"{DIALOG[1]['content']}<|im_end|>" in text
    assert "><|im_end|>" in text


def said(role: str, *words: str, **keys: Any) -> dict[str, Any]:
    """A message whose content is a text or, with two words, a text after its thinking."""
    content = words[-1]
    if len(words) == 2:
        content = f"<think>\n{words[0]}\n</think>\n\n{words[1]}"
    return {"role": role, "content": content} | keys


def calls(*names: str) -> list[dict[str, Any]]:
    ids = {name: f"{i:09}" for i, name in enumerate(names)}
    return [
        {"type": "function", "id": ids[name], "function": {"name": name, "arguments": {"x": name}}}
        for name in names
    ]


WORDS = r"(?:amber|basil|cedar|delta|ember|fjord|grove|haven)7"
ASK, ANSWER_IT = said("user", "amber7"), said("assistant", "basil7")
THINK = {"reasoning_content": "cedar7"}
RESULT = said("tool", "delta7", name="ember7", tool_call_id="000000000")
CHATS = {
    "plain": [ASK, ANSWER_IT],
    "system": [said("system", "grove7"), ASK, ANSWER_IT],
    "developer": [said("developer", "grove7"), ASK, ANSWER_IT],
    "system twice": [said("system", "grove7"), said("system", "haven7"), ASK, ANSWER_IT],
    "system in the middle": [ASK, ANSWER_IT, said("system", "grove7"), ASK, ANSWER_IT],
    "reasoning": [ASK, ANSWER_IT | THINK],
    "thinking": [ASK, said("assistant", "cedar7", "basil7")],
    "thinking of an earlier reply": [ASK, said("assistant", "cedar7", "basil7"), ASK, ANSWER_IT],
    "name": [ASK | {"name": "fjord7"}, ANSWER_IT],
    "two calls": [ASK, said("assistant", "", tool_calls=calls("ember7", "fjord7"))],
    "content and call": [
        ASK,
        said("assistant", "haven7", tool_calls=calls("ember7")),
        RESULT,
        ANSWER_IT,
    ],
    "result": [ASK, said("assistant", "", tool_calls=calls("ember7")), RESULT, ANSWER_IT],
}


@pytest.mark.slow
def test_string_that_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path))
    refused: set[str] = set()
    for path in trl_templates():
        tokenizer = load_tokenizer(folder, path.stem)
        for chat, messages in CHATS.items():
            file = write(tmp_path / "a.jsonl", [{"messages": messages}])
            words = set(re.findall(WORDS, json.dumps(messages)))
            try:
                text = tokenizer.render(messages, add_generation_prompt=False).text
            except ConfigError:
                continue  # the template says why
            if all(word in text for word in words):
                pack_files([file], tokenizer, 8192)
            else:
                with pytest.raises(ConfigError, match=rf"^{file}:1: .*leaves out messages\[\d"):
                    pack_files([file], tokenizer, 8192)
                refused.add(chat)
    assert refused == CHATS.keys()


def test_tags_that_a_template_cuts_off_are_no_content(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    )
    file = write(tmp_path / "a.jsonl", [{"messages": [ASK, said("assistant", "", "basil7")]}])
    assert pack_files([file], llama(template), 64)
    file = write(tmp_path / "a.jsonl", [{"messages": [ASK, said("assistant", "cedar7", "basil7")]}])
    with pytest.raises(ConfigError, match=r"leaves out messages\[1\].content"):
        pack_files([file], llama(template), 64)


def test_template_that_demands_certain_strings_is_asked_with_those_of_the_record(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and not m.content.endswith('?') %}"
        "{{ raise_exception('no question') }}{% elif m.role != 'developer' %}"
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    question = said("user", "to be, or not to be?")
    file = write(tmp_path / "a.jsonl", [{"messages": [question, ANSWER_IT]}])
    assert pack_files([file], llama(template), 64)
    file = write(tmp_path / "a.jsonl", [{"messages": [said("developer", "grove7"), question]}])
    with pytest.raises(ConfigError, match=r'leaves out messages\[0\].content of role "developer";'):
        pack_files([file], llama(template), 64)


@pytest.mark.parametrize("template", ["qwen2_5", "llama3_1", "gptoss"])
def test_arguments_as_json_text_are_decoded(template: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), template)
    found = []
    for arguments in ({"x": [1, "é"]}, '{"x": [1, "\\u00e9"]}'):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        chat = [DIALOG[0], {"role": "assistant", "tool_calls": [call]}]
        file = write(tmp_path / "a.jsonl", [{"messages": chat}])
        found.append(targets(pack_files([file], tokenizer, 8192)))
    assert found[0] == found[1]


WRITES_CALLS = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}ARGUMENTS{% endfor %}"
)
WANT_TEXT = {
    "rejects objects": WRITES_CALLS.replace("ARGUMENTS", "{{ '<' + c.function.arguments + '>' }}"),
    "writes them as Python": WRITES_CALLS.replace("ARGUMENTS", "<{{ c.function.arguments }}>"),
}


@pytest.mark.parametrize("template", WANT_TEXT)
@pytest.mark.parametrize("arguments", [{"x": "é"}, {}, '{"x": "\\u00e9"}'], ids=str)
def test_template_that_wants_arguments_as_text_gets_it(
    arguments: Any, template: str, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [DIALOG[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)))
    tokenizer = FileTokenizer(
        tokenizer.files, "x", ChatTemplate(WANT_TEXT[template] + "{{ eos_token }}{% endfor %}", "x")
    )
    text = tokenizer.decode(targets(pack_files([file], tokenizer, 512)))
    expected = '{"x": "é"}' if arguments else "{}"
    assert f"<{expected}>" in text


@pytest.mark.parametrize("template", ["qwen2_5", "llama3_1", "gptoss", "glm4moe", "gemma4"])
def test_messages_can_quote_arguments_as_python(template: str, tmp_path: Path) -> None:
    """The template writes the call as without this message, and not as text in JSON."""
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), template)
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": "y"}}}
    found: list[str] = []
    for result in ("nothing", "add of {'x': 'y'} failed"):
        tool = {"role": "tool", "content": result}
        chat = [DIALOG[0], {"role": "assistant", "content": "", "tool_calls": [call]}, tool]
        file = write(tmp_path / "a.jsonl", [{"messages": chat}])
        text = tokenizer.decode(targets(pack_files([file], tokenizer, 8192)))
        assert result in text
        found.append(text.replace(result, ""))
    assert found[0] == found[1]


def test_null_is_read_in_json_text_only(tmp_path: Path) -> None:
    """A table adds nulls to objects, and not to JSON text."""
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), "qwen2_5")
    tools: Any = [{"name": "f", "parameters": {"properties": {"a": {"default": None}}}}]
    arguments: Any = {"a": [{"b": None}]}

    def read(tools: Any, arguments: Any) -> str:
        calls = [{"id": None, "function": {"name": "f", "arguments": arguments}}]
        reply = {"role": "assistant", "content": "", "tool_calls": calls}
        file = write(tmp_path / "a.jsonl", [{"messages": [ASK, reply], "tools": tools}])
        return tokenizer.decode(targets(pack_files([file], tokenizer, 8192)))

    text = read(json.dumps(tools), json.dumps(arguments))
    assert '{"name": "f", "arguments": {"a": [{"b": null}]}}' in text
    assert '"properties": {"a": {"default": null}}' in text
    assert '"arguments": {"a": [null]}' in read(json.dumps(tools), {"a": [None]})
    with pytest.raises(ConfigError, match=r"a.jsonl:1: tools: .* has a null"):
        read(tools, json.dumps(arguments))
    match = r"a.jsonl:1: messages\[1\].tool_calls: arguments: .* has a null"
    with pytest.raises(ConfigError, match=match):
        read(json.dumps(tools), arguments)


def test_empty_thinking_that_the_start_of_a_reply_has_is_no_target(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), "qwen3")
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    file = write(tmp_path / "a.jsonl", [{"messages": chat}])
    found: list[str] = []
    for variables in ({}, {"enable_thinking": False}):
        tokenizer.template_kwargs = variables
        samples = pack_files([file], tokenizer, 512, completion_only=True)
        found.append(tokenizer.decode(targets(samples)))
    reply = "It is 4.<|im_end|>\n"
    assert found == [f"<think>\n\n</think>\n\n{reply}", reply]


def test_jsonl_fingerprint(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}])
    first = pack_files([file], BYTES, 8).fingerprint()
    assert pack_files([file], BYTES, 8).fingerprint() == first
    assert pack_files([file], BYTES, 8, completion_only=True).fingerprint() != first
    assert pack_files([file], BYTES, 2).fingerprint() != first


INVALID = {
    "json": ("{", "not valid JSON"),
    "list": ("[1]", "not a JSON object: [1]"),
    "keys": ('{"txt": "a", "n": 1}', "keys: txt, n"),
    "null": ('{"text": null}', "the keys: none"),
    "number": ('{"text": 5}', "'text' is 5"),
    "completion": (
        '{"prompt": "a", "completion": ["b"]}',
        "'completion' is [\"b\"], not text",
    ),
    "surrogate-chat": (
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "'messages' is not valid Unicode: character 10 ",
    ),
    "messages": ('{"messages": "hi"}', 'messages is "hi"'),
    "content-null": (
        '{"messages": [{"role": "user", "content": null}]}',
        "messages[0]: content is null, not text",
    ),
    "content-missing": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "contnt": "b"}]}',
        "messages[1]: contnt: not read",
    ),
    "content-number": ('{"messages": [{"role": "user", "content": 5}]}', "messages[0]: content"),
    "sharegpt-role": ('{"conversations": [{"from": "dog", "value": "a"}]}', 'role is "dog"'),
    "sharegpt-list": ('{"conversations": {}}', "conversations is {}"),
    "weight": (
        '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
        "messages[0]: weight is 0.5",
    ),
    "parts": (
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]}',
        'messages[0]: content has {"type": "image_url"',
    ),
    "template": ('{"messages": [{"role": "cat", "content": ""}]}', "no such role: cat"),
    "arguments": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1"}}]}]}',
        'messages[0].tool_calls: arguments are "[1"',
    ),
    "calls": (
        '{"messages": [{"role": "assistant", "content": "", "tool_calls": "f(1)"}]}',
        'messages[0]: tool_calls is "f(1)", not a list',
    ),
    "nested": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"a": %s}}]}]}'
        % ("[" * 900 + "]" * 900),
        "nested too deeply",
    ),
    "tools-text": (
        '{"messages": [{"role": "user", "content": "a"}], "tools": "f(x)"}',
        'tools: "f(x)"',
    ),
    "tools-schema": (
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": 5}]}',
        'tools: [{"name": 5}] is not',
    ),
    "twice": ('{"text": "a", "n": {}, "text": "b"}', "an object has the key 'text' twice"),
    "twice-nested": (
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        "an object has the key 'content' twice",
    ),
    "twice-in-text": (
        '{"messages": [{"role": "user", "content": "a"}], "tools": "[{\\"f\\": 1, \\"f\\": 2}]"}',
        "an object has the key 'f' twice",
    ),
    "utf8": ("\udcff", "byte 0 is not UTF-8"),
    "recursion": ("[" * 100_000, "not valid JSON"),
}


@pytest.fixture
def recursion_limit() -> Iterator[None]:
    """Python's own limit, as a compilation in this process may have raised it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("recursion_limit")
@pytest.mark.parametrize("name", INVALID)
def test_jsonl_error_names_the_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    line, part = INVALID[name]
    file.write_bytes(b'{"text": "ok"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError) as error:
        pack_files([file], LLAMA, 8)
    assert str(error.value).startswith(f"{file}:2: ")
    assert part in str(error.value)


def test_error_in_the_first_line_of_any_file_precedes_the_tokenizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for path, line in zip(files, ('{"text": "to be"}', '{"text": 1}', "[]"), strict=True):
        path.write_text(line)
    monkeypatch.delattr("lm.data.records._tokenize_files")
    with pytest.raises(ConfigError) as caught:
        pack_files(files[:2], BYTES, 16)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{files[1]}:1: ")


ANSWER = [{"role": "user", "content": "to be\n\nor"}, {"role": "assistant", "content": "not"}]


def test_json_array_is_read_as_lines(tmp_path: Path) -> None:
    records = [{"text": "to be"}, {"text": "or not"}]
    lines = write(tmp_path / "a.jsonl", records)
    array = tmp_path / "b.json"
    array.write_text("\n" + json.dumps(records, indent=1))
    found = pack_files([array], BYTES, 64)
    assert found.fingerprint() == pack_files([lines], BYTES, 64).fingerprint()
    array.write_text(json.dumps([*records, 1]))
    with pytest.raises(ConfigError) as error:
        pack_files([array], BYTES, 64)
    assert str(error.value).startswith(f"{array}[2]: ")
    array.write_text('[{"text": "a"},')
    with pytest.raises(ConfigError, match=f"^{array}: not valid JSON: "):
        pack_files([array], BYTES, 64)


@pytest.mark.parametrize("second", ["// b", "{'text': 'b'}", ""])
def test_json_array_with_a_mistake_is_named_by_its_line(second: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(f'[\n{{"text": "a"}},\n{second}\n]')
    with pytest.raises(ConfigError, match=r"line [34], .*; each line must be one JSON object"):
        pack_files([file], BYTES, 8)


def test_chat_that_starts_with_the_assistant_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "assistant", "content": "hi"}]}])
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path)), "qwen2_5")
    with pytest.raises(ConfigError, match=r"messages\[0\]: cannot be located"):
        pack_files([file], tokenizer, 512, completion_only=True)
    pack_files([file], tokenizer, 512)


def test_chat_template_kwargs_must_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": ANSWER}] * 40)
    chats = {"dataset": "jsonl", "train_data": f"{tmp_path}/a.jsonl", "chat_template": "qwen3"}
    chats["tokenizer"] = str(save_tokenizer(tmp_path))
    variables = {"enable_thinkin": False}
    config = DataConfig.model_validate(chats | {"chat_template_kwargs": variables})
    with pytest.raises(
        ConfigError, match=r"chat_template_kwargs: .* does not read enable_thinkin;"
    ):
        open_data(config, 264, 512, 2, 0)
    variables = {"enable_thinking": False}
    config = DataConfig.model_validate(chats | {"chat_template_kwargs": variables})
    tokenizer = open_data(config, 2**17, 512, 2, 0).tokenizer
    assert tokenizer is not None
    assert tokenizer.template_kwargs == variables


def test_chat_template_with_a_syntax_error_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": ANSWER}])
    with pytest.raises(ConfigError, match="not a valid Jinja template: line 2: "):
        pack_files([file], llama("\n{% for m in messages %}"), 64)


def test_jsonl_truncated_or_without_targets_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "a.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    with pytest.raises(ConfigError, match=rf"^{cut}: .* byte \d+"):
        pack_files([cut], BYTES, 8)
    users = write(tmp_path / "users.jsonl", [{"messages": [{"role": "user", "content": "to be"}]}])
    with pytest.raises(ConfigError, match=f"{users}:1: ") as error:
        pack_files([users], LLAMA, 8, completion_only=True)
    assert named_keys(error.value) >= {"loss_on"}
    assert len(pack_files([users], LLAMA, 8)) == 1
    empty = write(tmp_path / "empty.jsonl", [{"prompt": "ab", "completion": ""}])
    assert (
        len(pack_files([empty], BYTES, 8, completion_only=True)) == 1
    )  # its end-of-text token is a target
    nothing = write(
        tmp_path / "nothing.jsonl",
        [{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}],
    )
    with pytest.raises(ConfigError, match="no sample has a target"):
        pack_files([write(tmp_path / "no_text.jsonl", [{"text": ""}])], BYTES, 8)
    plain = write(tmp_path / "plain.jsonl", [{"text": "ab"}])
    for file, start in ((nothing, "no sample has a target"), (plain, f"{plain}:1: ")):
        with pytest.raises(ConfigError, match=f"^{start}") as error:
            pack_files([file], LLAMA, 8, completion_only=True)
        assert named_keys(error.value) >= {"loss_on"}


def test_jsonl_without_samples_is_refused(tmp_path: Path) -> None:
    empty, one = (
        write(tmp_path / "empty.jsonl", []),
        write(tmp_path / "one.jsonl", [{"text": "ab"}]),
    )
    for file, held_out, problem, keys in (
        (empty, None, "no text", set[str]()),
        (one, False, "none of 1 document is for train", {"val_data"}),
    ):
        with pytest.raises(ConfigError, match=f"{file}: {problem}") as error:
            pack_files([file], BYTES, 8, held_out=held_out)
        assert named_keys(error.value) == keys


def test_separate_samples_are_as_long_as_the_longest_of_a_micro_batch(tmp_path: Path) -> None:
    texts = ["to be", "or not to be, that is the question", "x" * 100, "y" * 9, "z" * 20]
    write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    path = str(tmp_path / "a.jsonl")
    keys = {"dataset": "jsonl", "train_data": path, "val_data": path, "packing": False}
    config = DataConfig.model_validate(keys | {"batch_size": 2, "validation_batches": 5})
    data = open_data(config, 264, 64, 2, 0)
    model = Transformer(ModelConfig.model_validate(TINY | {"vocab_size": 264, "max_seq_len": 64}))
    parallelize.initialize_parameters(model, 7)
    dataset = data.validation[0].dataset
    lengths: list[int] = []
    loss = 0.0
    for _, batch in Loader(config, data, 2, 0, 1, torch.device("cpu")).validation():
        lengths.append(batch.inputs.shape[1])
        loss += model(*batch).item()
    alone = 0.0
    for index in range(len(dataset)):
        inputs, targets, *_ = dataset[index]
        alone += model(torch.from_numpy(inputs)[None], torch.from_numpy(targets)[None]).item()
    assert loss == pytest.approx(alone, rel=1e-6)
    assert lengths == [40, 64, 24]
