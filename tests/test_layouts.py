"""Records of published data sets are read, or refused where content would be lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm.data.json_lines import Record
from lm.data.jsonl import JsonlDataset
from lm.data.rendering import RecordRenderer
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.errors import ConfigError
from tests.support.jq import make_lines
from tests.support.tokenizer_files import llama_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "[{{ message.role }}] {{ message.content }}{{ message.tool_calls | tojson if message.tool_calls"
    " }}</s>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONFIG = json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}).encode()
TOKENIZER = FileTokenizer(
    {TOKENIZER_JSON: llama_tokenizer(), "tokenizer_config.json": CONFIG}, "small"
)

Chat = list[tuple[str, str]]
CHAT: Chat = [("user", "Q"), ("assistant", "A")]
WITH_SYSTEM: Chat = [("system", "S"), *CHAT]
TURNS: Chat = [("user", "Q0"), ("assistant", "A0"), *CHAT]
LONG = "a sentence of a text that is long, " * 9


def chat(turns: Chat = CHAT, role: str = "role", content: str = "content") -> list[dict[str, Any]]:
    return [{role: name, content: text} for name, text in turns]


def sharegpt(turns: Chat = CHAT) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt"}
    return chat([(names.get(role, role), text) for role, text in turns], "from", "value")


def tools_as_text() -> str:
    return json.dumps([{"type": "function", "function": {"name": "f", "description": "d"}}])


WEIGHTS = {"system": None, "user": 0.0, "assistant": 1.0}
SLIM_ORCA = [
    turn | {"weight": WEIGHTS[role]}
    for turn, (role, _) in zip(sharegpt(WITH_SYSTEM), WITH_SYSTEM, strict=True)
]
USER_AGENT = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko)"
VISITOR = {
    "country": "United States",
    "hashed_ip": "9f1c",
    "header": {"accept-language": "en-US,en;q=0.9", "user-agent": USER_AGENT},
    "language": "English",
    "redacted": False,
    "state": "New York",
    "timestamp": None,
    "toxic": False,
}
WILDCHAT = [turn | VISITOR | {"turn_identifier": 2} for turn in chat()]
BLOCKS = [
    {"role": role, "content": [{"type": "text", "text": text, "cache_control": None}]}
    for role, text in CHAT
]

# What users see of each set: the columns of its card, with short values.
READ: dict[str, tuple[dict[str, Any], Chat]] = {
    "ultrachat_200k": ({"prompt": "Q", "prompt_id": "f0e1", "messages": chat()}, CHAT),
    "no_robots": (
        {"prompt": "Q", "prompt_id": "f0e1", "messages": chat(), "category": "Closed QA"},
        CHAT,
    ),
    "smoltalk": ({"messages": chat(), "source": "smol-magpie-ultra"}, CHAT),
    "everyday-conversations": (
        {"full_topic": "Travel/Beaches", "messages": chat(TURNS), "source": "x"},
        TURNS,
    ),
    "tulu-3-sft-mixture": ({"id": "oasst1_1", "messages": chat(), "source": "ai2/oasst1"}, CHAT),
    "openhermes-2.5": (
        {
            "custom_instruction": None,
            "topic": None,
            "model_name": None,
            "model": "gpt-4",
            "skip_prompt_formatting": False,
            "category": "general",
            "conversations": sharegpt(),
            "views": None,
            "language": None,
            "id": None,
            "title": "Fixing a bike",
            "idx": 7,
            "hash": 123,
            "avatarUrl": None,
            "system_prompt": "S",
            "source": "airoboros2.2",
        },
        WITH_SYSTEM,
    ),
    "finetome-100k": ({"conversations": sharegpt(), "source": "infini", "score": 5.2}, CHAT),
    "open-platypus": (
        {"input": "", "output": "A", "instruction": "Q", "data_source": "MATH/PRM-800K"},
        CHAT,
    ),
    "wizardlm_v2_196k": ({"idx": "Ux1", "conversations": sharegpt(TURNS)}, TURNS),
    "wizardlm_70k": ({"instruction": "Q", "output": "A"}, CHAT),
    "dolly-15k": (
        {"instruction": "Q", "context": "C", "response": "A", "category": "closed_qa"},
        [("user", "Q\n\nC"), ("assistant", "A")],
    ),
    "alpaca": (
        {
            "instruction": "Q",
            "input": "I",
            "output": "A",
            "text": "Below ...\n\n### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\nA",
        },
        [("user", "Q\n\nI"), ("assistant", "A")],
    ),
    "alpaca-cleaned": ({"output": "A", "input": "", "instruction": "Q"}, CHAT),
    "openorca": (
        {"id": "niv.1", "system_prompt": "S", "question": "Q", "response": "A"},
        WITH_SYSTEM,
    ),
    "openorca-without-system": (
        {"id": "flan.1", "system_prompt": "", "question": "Q", "response": "A"},
        CHAT,
    ),
    "slimorca": ({"conversations": SLIM_ORCA}, WITH_SYSTEM),
    "gsm8k": ({"question": "Q", "answer": "A"}, CHAT),
    "orca-math-word-problems": ({"question": "Q", "answer": "A"}, CHAT),
    "numinamath-cot": (
        {"source": "aops_forum", "problem": "Q", "solution": "A", "messages": chat()},
        CHAT,
    ),
    "mathinstruct": ({"source": "data/CoT/aqua.json", "instruction": "Q", "output": "A"}, CHAT),
    "helpsteer2": (
        {"prompt": "Q", "response": "A", "helpfulness": 3, "correctness": 4, "verbosity": 2},
        CHAT,
    ),
    "lmsys-chat-1m": (
        {
            "conversation_id": "f0e1",
            "model": "vicuna-13b",
            "conversation": chat(),
            "turn": 1,
            "language": "English",
            "openai_moderation": [{"categories": {"hate": False}, "flagged": False}],
            "redacted": False,
        },
        CHAT,
    ),
    "wildchat-1m": (
        VISITOR
        | {
            "conversation_hash": "cf1b",
            "model": "gpt-4-0314",
            "conversation": WILDCHAT,
            "turn": 1,
            "openai_moderation": [{"flagged": False, "category_scores": {"hate": 1e-5}}],
            "detoxify_moderation": [{"insult": 2e-4}],
        },
        CHAT,
    ),
    "sharegpt": ({"id": "QWJhYvA_0", "conversations": sharegpt(TURNS)}, TURNS),
    "glaive-function-calling-v2-sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "Q"},
                {"from": "function-call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "function-response", "value": "R"},
                {"from": "gpt", "value": "A"},
            ]
        },
        [
            ("system", "S"),
            ("user", "Q"),
            (
                "assistant",
                '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]',
            ),
            ("tool", "R"),
            ("assistant", "A"),
        ],
    ),
    "llamafactory-glaive_toolcall": (
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'},
                {"from": "observation", "value": "R"},
                {"from": "gpt", "value": "A"},
            ],
            "tools": "[]",
        },
        [
            ("user", "Q"),
            ("assistant", '[{"type": "function", "function": {"name": "f", "arguments": {}}}]'),
            ("tool", "R"),
            ("assistant", "A"),
        ],
    ),
    "swift-agent": (
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
                {"role": "tool_response", "content": "R"},
                {"role": "assistant", "content": "A"},
            ]
        },
        [
            ("user", "Q"),
            ("assistant", '[{"type": "function", "function": {"name": "f", "arguments": {}}}]'),
            ("tool", "R"),
            ("assistant", "A"),
        ],
    ),
    "llamafactory-alpaca": (
        {"instruction": "Q", "input": "", "output": "A", "system": "S", "history": []},
        WITH_SYSTEM,
    ),
    "toolace": (
        {
            "system": "S",
            "conversations": [
                {"from": "user", "value": "Q"},
                {"from": "assistant", "value": "[f(x=1)]"},
                {"from": "tool", "value": "R"},
                {"from": "assistant", "value": "A"},
            ],
        },
        [
            ("system", "S"),
            ("user", "Q"),
            ("assistant", "[f(x=1)]"),
            ("tool", "R"),
            ("assistant", "A"),
        ],
    ),
    "hermes-function-calling-v1": (
        {
            "id": "85f8",
            "conversations": sharegpt(WITH_SYSTEM),
            "tools": tools_as_text(),
            "category": "IoT and Home Automation",
            "subcategory": "Locks",
            "task": "Smart locks",
        },
        [("tools", tools_as_text()), *WITH_SYSTEM],
    ),
    "codefeedback-filtered": (
        {"query": "Q", "answer": "A", "resource": "evolinstruct", "lang": "python"},
        CHAT,
    ),
    "code-feedback": ({"id": 1, "messages": chat(TURNS)}, TURNS),
    "magicoder-evol-instruct": ({"instruction": "Q", "response": "A"}, CHAT),
    "evol-codealpaca": ({"instruction": "Q", "output": "A"}, CHAT),
    "lima": ({"conversations": ["Q0", "A0", "Q", "A"], "source": "wikihow"}, TURNS),
    "capybara": (
        {
            "source": "Airoboros",
            "conversation": [{"input": "Q0", "output": "A0"}, {"input": "Q", "output": "A"}],
        },
        TURNS,
    ),
    "moss-003-sft": (
        {"conversation_id": 1, "conversation": [{"human": "Q", "assistant": "A"}]},
        CHAT,
    ),
    "openthoughts-114k": (
        {"system": "S", "conversations": chat(CHAT, "from", "value")},
        WITH_SYSTEM,
    ),
    "openthoughts3": (
        {"difficulty": 7, "source": "x", "domain": "math", "conversations": sharegpt()},
        CHAT,
    ),
    "nemotron-post-training": (
        {
            "input": chat([("user", "Q")]),
            "output": "A",
            "category": "math",
            "license": "cc-by-4.0",
            "generator": "DeepSeek-R1",
            "version": "v1",
            "reasoning": "on",
            "system_prompt": "S",
        },
        WITH_SYSTEM,
    ),
    "nemotron-v2": (
        {
            "uuid": "0f-1",
            "license": "cc-by-4.0",
            "generator": "Qwen3",
            "version": "v2",
            "category": "stem",
            "reasoning": "off",
            "metadata": "",
            "messages": chat(),
        },
        CHAT,
    ),
    "sql-create-context": (
        {"answer": "A", "question": "Q", "context": "CREATE TABLE"},
        [("user", "Q\n\nCREATE TABLE"), ("assistant", "A")],
    ),
    "cnn_dailymail": ({"article": "Q", "highlights": "A", "id": "42c0"}, CHAT),
    "samsum": ({"id": "1", "dialogue": "Q", "summary": "A"}, CHAT),
    "xsum": ({"document": "Q", "summary": "A", "id": "29750031"}, CHAT),
    "openai-fine-tuning": (
        {"messages": chat(WITH_SYSTEM), "parallel_tool_calls": False},
        WITH_SYSTEM,
    ),
    "openai-responses-parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "A", "annotations": []}],
                },
            ]
        },
        CHAT,
    ),
    "anthropic": ({"system": "S", "messages": BLOCKS}, WITH_SYSTEM),
    "anthropic-cached": (
        {
            "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
            "messages": BLOCKS,
        },
        WITH_SYSTEM,
    ),
    "bedrock": (
        {
            "schemaVersion": "bedrock-conversation-2024",
            "system": [{"text": "S"}],
            "messages": [{"role": role, "content": [{"text": text}]} for role, text in CHAT],
        },
        WITH_SYSTEM,
    ),
    "bedrock-text": ({"prompt": "Q", "completion": "A"}, [("", "Q"), ("completion", "A")]),
    "cohere": (
        {"messages": chat([("System", "S"), ("User", "Q"), ("Chatbot", "A")])},
        WITH_SYSTEM,
    ),
    "axolotl-gpteacher": ({"instruction": "Q", "input": "", "response": "A"}, CHAT),
    "axolotl-jeopardy": ({"question": "Q", "category": "Rivers", "answer": "A"}, CHAT),
    "axolotl-context_qa": (
        {"article": "C", "question": "Q", "answer": "A"},
        [("user", "Q\n\nC"), ("assistant", "A")],
    ),
    "axolotl-summarizetldr": ({"article": "Q", "summary": "A"}, CHAT),
    "axolotl-metharme": ({"prompt": "Q", "generation": "A"}, CHAT),
    "axolotl-pygmalion": ({"conversations": chat(CHAT, "role", "value")}, CHAT),
    "flan": ({"inputs": "Q", "targets": "A", "_task_name": "wsc", "_template_idx": 3}, CHAT),
    "xp3": ({"inputs": "Q", "targets": "A"}, CHAT),
    "aya": (
        {
            "inputs": "Q",
            "targets": "A",
            "language": "Standard Malay",
            "user_id": "ab12",
            "author": "J. R. Smith Jr.",
        },
        CHAT,
    ),
    "coig-cqia": (
        {
            "instruction": "Q",
            "input": "",
            "output": "A",
            "task_type": {"major": ["问答"], "minor": ["百科"]},
            "domain": ["医学"],
            "answer_from": "human",
            "human_verified": True,
        },
        CHAT,
    ),
    "firefly": ({"kind": "NLI", "input": "Q", "target": "A"}, CHAT),
    "belle": ({"instruction": "Q", "input": "", "output": "A"}, CHAT),
    "ultrainteract": (
        {
            "task": "Coding",
            "dataset": "codecontest",
            "instruction": "Q",
            "response": "A",
            "id": "0",
            "parent_id": "-1",
        },
        CHAT,
    ),
    "trl-prompt-completion": (
        {"prompt": chat([("user", "Q")]), "completion": chat([("assistant", "A")])},
        CHAT,
    ),
    "messages-as-json-text": (
        {"messages": json.dumps(chat()), "tools": tools_as_text()},
        [("tools", tools_as_text()), *CHAT],
    ),
    "labels-of-preferences": (
        {"messages": chat(), "chosen_avg_rating": 5.0, "chosen_policy": "m"},
        CHAT,
    ),
    "calls-as-json-text": (
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "A", "tool_calls": "[]"},
            ]
        },
        CHAT,
    ),
    "parquet-nulls": (
        {
            "messages": [
                turn | {"name": None, "tool_calls": None, "weight": None} for turn in chat()
            ],
            "prompt": None,
            "text": None,
        },
        CHAT,
    ),
    "json-as-content": (
        {"question": '{"a": 1, "a": 2}', "answer": "A", "text": 'Q: {"a": 1, "a": 2} A: A'},
        [("user", '{"a": 1, "a": 2}'), ("assistant", "A")],
    ),
    "content-list-of-strings": (
        {"messages": [{"role": role, "content": [text]} for role, text in CHAT]},
        CHAT,
    ),
}


def render(record: dict[str, Any], *, completion_only: bool = True) -> tuple[str, str]:
    """Return the text of a record, and that of its targets."""
    renderer = RecordRenderer(TOKENIZER, "text", completion_only)
    (rendered,) = renderer.render_lines([Record("file:1", record, 0)])
    spans = rendered.target_spans
    assert spans is not None
    return rendered.text, "".join(rendered.text[span.start : span.stop] for span in spans)


@pytest.mark.parametrize("name", READ)
def test_published_layouts_are_read(name: str) -> None:
    record, turns = READ[name]
    text = ""
    for role, content in turns:
        is_tagged = role not in ("", "completion", "tools")
        text += f"[{role}] {content}</s>" if is_tagged else content
    targets = "".join(
        f"{content}</s>" if role == "assistant" else content
        for role, content in turns
        if role in ("assistant", "completion")
    )
    assert render(record) == (text, targets)


# The keys that the error names first.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hh-rlhf": ({"chosen": "good", "rejected": "bad"}, "chosen: preferences"),
    "ultrafeedback_binarized": (
        {"prompt": "Q", "chosen": chat(), "rejected": chat(), "messages": chat()},
        "chosen: preferences",
    ),
    "orca_dpo_pairs": (
        {"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
        "chosen: preferences",
    ),
    "llamafactory-dpo": (
        {
            "conversations": sharegpt([("user", "Q")]),
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        "chosen: preferences",
    ),
    "swift-dpo": (
        {"messages": chat(), "rejected_response": "B"},
        "rejected_response: preferences",
    ),
    "chosen-response": (
        {"prompt": "Q", "chosen_response": "A", "rejected_response": "B"},
        "chosen_response: preferences",
    ),
    "llamafactory-kto": ({"messages": chat(), "kto_tag": False}, "kto_tag: labels"),
    "preferred": ({"messages": chat(), "preferred": False}, "preferred: labels"),
    "trl-prm": ({"prompt": "Q", "completions": ["A"], "labels": [True]}, "labels: labels"),
    "arena": (
        {"question": "Q", "response": "A", "winner": "model_b"},
        "winner: preferences",
    ),
    "openai-preference": (
        {
            "input": {"messages": chat()},
            "preferred_output": chat(),
            "non_preferred_output": chat(),
        },
        "preferred_output: preferences",
    ),
    "kto": ({"messages": chat(), "label": False}, "label: "),
    "kto-completion": ({"prompt": "Q", "completion": "A", "label": True}, "label: "),
    "ultrafeedback": (
        {"instruction": "Q", "completions": [{"response": "A"}, {"response": "B"}]},
        "no text (text_field)",
    ),
    "squad": (
        {"id": "5", "title": "T", "context": "C", "question": "Q", "answers": {"text": ["A"]}},
        "no text (text_field)",
    ),
    "glaive-function-calling-v2": (
        {"system": "SYSTEM: S", "chat": "USER: Q ASSISTANT: A <|endoftext|>"},
        "no text (text_field)",
    ),
    "xlam-function-calling-60k": (
        {"id": 0, "query": "Q", "answers": '[{"name": "f"}]', "tools": tools_as_text()},
        "no text (text_field)",
    ),
    "gemini": ({"contents": [{"role": "user", "parts": [{"text": "Q"}]}]}, "no text (text_field)"),
    "gretel-text-to-sql": (
        {"id": 1, "domain": "x", "sql_prompt": "Q", "sql_context": "C", "sql": "A"},
        "no text (text_field)",
    ),
    "the-stack": ({"content": "C", "lang": "Python", "size": 9}, "no text (text_field)"),
    "s1k": (
        {"question": "Q", "solution": "A", "cot": None, "thinking_trajectories": ["T"]},
        "thinking_trajectories: not read",
    ),
    "openr1-math": (
        {"problem": "Q", "solution": "A", "answer": "4", "messages": chat()},
        "answer: not read",
    ),
    "medical-o1": ({"Question": "Q", "Complex_CoT": "T", "Response": "A"}, "no text (text_field)"),
    "metamathqa": (
        {"type": "GSM", "query": "Q", "original_question": "Q0", "response": "A"},
        "original_question: not read",
    ),
    "magicoder-oss": (
        {"lang": "c", "index": 1, "seed": "int\nmain", "problem": "Q", "solution": "A"},
        "seed: not read",
    ),
    "llava": ({"id": "1", "image": "1.jpg", "conversations": sharegpt()}, "image: images"),
    "llamafactory-mllm": ({"messages": chat(), "images": ["1.jpg"]}, "images: images"),
    "axolotl-reflection": (
        {"instruction": "Q", "output": "A", "reflection": LONG, "corrected": LONG},
        "reflection, corrected: not read",
    ),
    "axolotl-explainchoice": (
        {"question": "Q", "choices": ["A", "B"], "solution": "A", "explanation": "E"},
        "choices, explanation: not read",
    ),
    "two-systems": ({"system": "T", "messages": chat(WITH_SYSTEM)}, "system: "),
    "system-of-text": ({"system": "S", "prompt": "Q", "completion": "A"}, "system: not read"),
    "tools-of-text": ({"tools": ["f"], "prompt": "Q", "completion": "A"}, "tools: not read"),
    "response-of-two": ({"prompt": "Q", "response": "A", "response2": "B"}, "response2: not read"),
    "thoughts": ({"question": "Q", "answer": "A", "Complex_CoT": "T"}, "Complex_CoT: not read"),
    "camel-case": ({"messages": chat(), "systemInstruction": "S"}, "systemInstruction: not read"),
    "texts-as-messages": ({"input": ["Q"], "output": ["A"]}, 'input[0] is "Q"'),
    "alternatives": ({"input": "Q", "output": ["A", "B"]}, "'output' is "),
    "null": ({"prompt": "Q", "completion": None}, "no text (text_field)"),
    "context-of-messages": ({"context": "C", "messages": chat()}, "context: not read"),
    "another-text": ({"instruction": "Q", "output": "A", "text": "C"}, "text: not read"),
    "long": ({"messages": chat(), "remarks": LONG}, "remarks: not read"),
    "variables": (
        {"messages": chat(), "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs: ",
    ),
    "definition": (
        {"definition": "Answer the question in a word.", "inputs": "Q", "targets": "A"},
        "definition: not read",
    ),
    "persona": ({"persona": "You are a pirate!", "messages": chat()}, "persona: not read"),
    "history": (
        {"instruction": "Q", "output": "A", "history": [["Q0", "A0"]]},
        "history: not read",
    ),
    "call": ({"conversations": [{"from": "function_call", "value": "f"}]}, "conversations[0] is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_content_without_a_place_is_refused(name: str) -> None:
    record, start = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        render(record)
    assert str(error.value).startswith(f"file:1: {start}")
    assert "jq" not in str(error.value)
    assert ('write the record as messages, {"messages": [' in str(error.value)) == (
        "not read" in start and not start.startswith("text")
    )


@pytest.mark.parametrize("key", ["data", "train-split"])
@pytest.mark.parametrize("records", [[{"text": "A"}], [{"prompt": "Q", "response": "A"}] * 2])
def test_records_in_a_list_are_named(key: str, records: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError) as error:
        render({"version": "1.0", key: records})
    assert make_lines(error.value, json.dumps({"version": "1.0", key: records})) == records


def test_content_in_a_message_is_refused() -> None:
    for key, value in {"function_call": {"name": "f"}, "note": "T", "refusal": "No."}.items():
        messages = chat()
        messages[1][key] = value
        with pytest.raises(ConfigError, match=key):
            render({"messages": messages})


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_reply_can_be_left_out_of_the_loss(key: str) -> None:
    messages = chat(TURNS)
    messages[1][key] = False
    messages[3][key] = True
    assert render({"messages": messages})[1] == "A</s>"


def test_roles_that_no_one_knows_are_noted() -> None:
    renderer = RecordRenderer(TOKENIZER, "text", completion_only=True)
    messages = chat([("developer", "S"), ("user", "Q0"), ("asistant", "A0"), *CHAT])
    list(renderer.render_lines([Record("file:1", {"messages": messages}, 0)]))
    ((what, count),) = renderer.notes.others.items()
    assert '"asistant"' in what
    assert count == 1


def test_keys_that_are_not_read_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    records = [
        {"messages": WILDCHAT, "id": 1, "source": "web"},
        {"messages": chat(), "id": 2, "source": ""},
        {"text": "t", "id": 3, "prompt": None},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    note = JsonlDataset([file], TOKENIZER, 256).note or ""
    assert "not read: id of 3, " in note
    assert "source of 1" in note
    assert "messages[].country of 1" in note


def test_what_a_template_reads_of_messages_is_kept() -> None:
    template = "{% for m in messages %}{{ m.country }}{{ 1 if m.role == 'Chatbot' else 'gpt' }}"
    config = json.dumps({"chat_template": template + "{% endfor %}"}).encode()
    files = {TOKENIZER_JSON: llama_tokenizer(), "tokenizer_config.json": config}
    reader = RecordRenderer(FileTokenizer(files, "small"), "text", completion_only=False).layouts
    user = {"role": "User", "content": "Q", "country": "Peru", "state": "Lima", "id": "1"}
    reply = {"role": "Chatbot", "content": "A"}
    read = reader.read({"messages": [user, reply]})
    assert read is not None
    assert read["messages"] == [{"role": "user", "content": "Q", "country": "Peru"}, reply]
    read = reader.read({"conversations": sharegpt()})
    assert read is not None
    assert [message["role"] for message in read["messages"]] == ["user", "gpt"]


@pytest.mark.parametrize(
    "record", [{"question": "Q", "answer": "A"}, {"prompt": "Q", "output": "A"}]
)
def test_questions_without_a_template_are_prompts(record: dict[str, Any]) -> None:
    renderer = RecordRenderer(ByteTokenizer(), "text", completion_only=True)
    (rendered,) = renderer.render_lines([Record("file:1", record, 0)])
    assert rendered.text == "Q\nA"
    assert rendered.target_spans == [(2, 3)]


def test_deep_values_are_not_read_without_recursion() -> None:
    value: Any = "label"
    for _ in range(100_000):
        value = [value]
    assert render({"messages": chat(), "meta": value})[1] == "A</s>"
