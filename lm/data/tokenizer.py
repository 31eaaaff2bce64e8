"""Tokenizers: UTF-8 bytes, or a `tokenizer.json` of the Hugging Face `tokenizers` library.

A tokenizer is defined by its files alone. Every checkpoint holds a copy of them, so that it can
generate text anywhere.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lm.data.files import download_from_hub
from lm.errors import ConfigError, oserror_as_config_error
from lm.fileio import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_GROWTH,
    MAX_VOCABULARY,
    parse_json,
    read_bytes,
)

FILE = "tokenizer.json"
GENERATION = "generation_config.json"
FILES = (
    FILE,
    "tokenizer_config.json",
    "chat_template.jinja",
    GENERATION,
)  # only the first is required
END_OF_TEXT = "<|endoftext|>"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_REPLY = "x7q"
"""content that no chat template writes itself"""
_NOW = re.compile(r"strftime_now\s*\(([^()]*)\)")
_REASONING = {"reasoning_content", "thinking", "reasoning"}  # transformers copies one to the others
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EOS_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")


IdsAndEnds = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""The tokens of a text, and for each the number of the first character after it: arrays of shape (tokens,)."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    identity = "bytes"
    vocab_size = 257
    eos_id = 256
    stop_ids = frozenset((eos_id,))
    bos_id: int | None = None
    template_kwargs: Mapping[str, Any] = {}
    date: datetime.date | None = None
    files: Mapping[str, bytes] = {}
    text_bytes: NDArray[np.int64] = np.array([1] * 256 + [0])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def encode_with_ends(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,  # noqa: ARG002
    ) -> list[IdsAndEnds]:
        ends = (
            np.repeat(np.arange(1, len(text) + 1), [len(c.encode()) for c in text])
            for text in texts
        )
        return list(zip(self.encode_batch(texts), ends, strict=True))

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Return the text of `ids`: end-of-text tokens become blank lines, invalid UTF-8 becomes U+FFFD."""
        return "".join(self.stream(ids, after))

    def stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:  # noqa: ARG002
        """Yield text while `ids` arrive, each character once all of its bytes have."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            if token < 256:
                yield decoder.decode(bytes([token]))
            else:
                yield decoder.decode(b"", final=True) + (
                    "\n\n" if token == self.eos_id else "\ufffd"
                )
        yield decoder.decode(b"", final=True)

    def render(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"tokenizer: {self.identity}: has no chat template for messages; use a Hugging Face tokenizer that has one"
        )


class FileTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        files: contents of `tokenizer.json` and of the optional `FILES`, by name.
        name: name of the tokenizer in errors.
    """

    def __init__(self, files: Mapping[str, bytes], name: str) -> None:
        try:
            self._encoder: Any = _CheckedEncoder(_parse(files[FILE]), name)
            self._config: dict[str, Any] = dict(
                parse_json(files.get("tokenizer_config.json", b"{}"))
            )
            self._generation: dict[str, Any] = dict(parse_json(files.get(GENERATION, b"{}")))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer: {name}: cannot be read: {error}") from None
        if (size := self._encoder.get_vocab_size()) > MAX_VOCABULARY:
            raise ConfigError(
                f"tokenizer: {name}: has {size:,} tokens, but at most {MAX_VOCABULARY:,} are read"
            )
        stages = self._encoder.normalizer, self._encoder.pre_tokenizer, self._encoder.post_processor
        if (
            math.prod(_growth(json.loads(stage.__getstate__())) for stage in stages if stage)
            > MAX_TOKENIZER_GROWTH
        ):
            raise ConfigError(
                f"tokenizer: {name}: its stages can lengthen a text more than {MAX_TOKENIZER_GROWTH} times"
            )
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._name = name
        self.template_kwargs: Mapping[str, Any] = {}
        """variables of the chat template; `date_string` replaces today's date"""
        self.date: datetime.date | None = None
        """the day that the chat template reads as today's; None = today"""
        self.files = dict(files)
        vocabulary = self._encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.identity = (
            f"{self.vocab_size} tokens, sha256 {hashlib.sha256(files[FILE]).hexdigest()}"
        )
        if (eos := self._special_token("eos_token")) is None:
            eos = next((token for token in _EOS_TOKENS if token in vocabulary), None)
        if eos not in vocabulary:
            what = (
                f"eos_token {eos!r} is not in its vocabulary"
                if eos
                else "it has no end-of-text token"
            )
            raise ConfigError(
                f"tokenizer: {name}: {what}; set eos_token in a tokenizer_config.json in the same directory"
            )
        self.eos_id: int = vocabulary[eos]
        self.bos_id: int | None = vocabulary.get(self._special_token("bos_token") or "")

    def _special_token(self, key: str) -> str | None:
        value = self._config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated text: end of text, the template's end of turn, those of generation_config.json."""
        named = self._generation.get("eos_token_id")
        ids = {self.eos_id} | set(
            named if isinstance(named, list) else [] if named is None else [named]
        )
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
        with contextlib.suppress(
            ConfigError
        ):  # without a chat template for such a chat, no turn has an end
            after = self.render(chat, add_generation_prompt=False)[0].rpartition(_REPLY)[2]
            special = {
                token
                for token, added in self._encoder.get_added_tokens_decoder().items()
                if added.special
            }
            encoded = self._encoder.encode(after, add_special_tokens=False).ids
            ids |= set([token for token in encoded if token in special][:1])
        return frozenset(ids)

    @functools.cached_property
    def text_bytes(self) -> NDArray[np.int64]:
        """Bytes of UTF-8 that each id adds to a text, (vocab_size,); 0 for special tokens."""
        before = self._encoder.encode("a", add_special_tokens=False).ids
        texts = self._encoder.decode_batch([[*before, i] for i in range(self.vocab_size)])
        sizes = np.array([len(text.encode()) for text in texts]) - len(
            self._encoder.decode(before).encode()
        )
        for i, text in enumerate(texts):
            if "\ufffd" in text and "\ufffd" not in (token := str(self._encoder.id_to_token(i))):
                sizes[i] = (
                    1 if token.startswith("<0x") else len(token)
                )  # a part of a character, byte by byte
        return sizes

    def _without_eos(self, ids: list[int]) -> list[int]:
        return (
            ids[:-1] if ids[-1:] == [self.eos_id] else ids
        )  # some tokenizers append it to every text

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the tokenizer's own start of text, without an end-of-text token."""
        return self._without_eos(self._encoder.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text as `encode` does, on all cores unless TOKENIZERS_PARALLELISM is false."""
        encodings = self._encoder.encode_batch_fast(list(texts))
        return [np.array(self._without_eos(encoding.ids), np.uint32) for encoding in encodings]

    def encode_with_ends(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[IdsAndEnds]:
        """Return the ids of each text and their ends; texts from `render` contain their special tokens already."""
        encodings = []
        for encoding in self._encoder.encode_batch(
            list(texts), add_special_tokens=add_special_tokens
        ):
            ids = self._without_eos(encoding.ids) if add_special_tokens else encoding.ids
            ends = [end for _, end in encoding.offsets[: len(ids)]]
            encodings.append((np.array(ids, np.uint32), np.array(ends, np.int64)))
        return encodings

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Return the text of `ids`; see `stream`."""
        return "".join(self.stream(ids, after))

    def stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield text while `ids` arrive, each character once all of its bytes have.

        End-of-text tokens become blank lines; other special tokens are skipped. The ids `after`
        which the first one follows decide whether the text starts with a space.
        """
        from tokenizers.decoders import DecodeStream

        prefix = list(after)
        while self._encoder.decode(prefix).endswith("\ufffd"):
            prefix.pop()  # an incomplete character makes DecodeStream repeat the prefix
        decoder = DecodeStream(ids=prefix, skip_special_tokens=True)
        pending: list[int] = []
        for token in ids:
            if token == self.eos_id:
                yield self._encoder.decode(pending) + "\n\n"
                decoder, pending = DecodeStream(skip_special_tokens=True), []
                continue
            pending.append(token)
            try:
                piece = decoder.step(self._encoder.encoder, token)
            except (
                Exception
            ):  # invalid UTF-8 after valid bytes; the library raises nothing narrower
                piece, decoder = (
                    self._encoder.decode(pending),
                    DecodeStream(ids=pending, skip_special_tokens=True),
                )
            if piece is not None:
                pending = []
                yield piece
        yield self._encoder.decode(pending)

    @functools.cached_property
    def _template(self) -> str:
        template = self.files.get("chat_template.jinja", b"").decode() or self._config.get(
            "chat_template"
        )
        if isinstance(template, list):  # several, by name
            template = next(
                (each.get("template") for each in template if each.get("name") == "default"), None
            )
        if not isinstance(template, str):
            raise ConfigError(
                f"tokenizer: {self._name}: has no chat template (chat_template in tokenizer_config.json)"
            )
        return template

    @functools.cached_property
    def _template_words(self) -> set[str]:
        """Keys of messages that may be set: those that the template mentions, and a call's ID."""
        words = {*re.findall(r"\w+", self._template), "role", "content", "tool_call_id"}
        return words | _REASONING if words & _REASONING else words

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Any = None,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return the text that the chat template writes, and the start and end of each reply in it.

        The latter is None for templates without `{% generation %}` tags.

        Args:
            add_generation_prompt: append the start of the next reply.
            tools: JSON schemas of the functions that the assistant can call; the template must read
                them.
        """
        template, words = self._template, self._template_words
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError:
            raise ConfigError(
                f"tokenizer: {self._name}: chat templates require a package: pip install transformers"
            ) from None
        if tools is not None and "tools" not in words:
            raise ConfigError(
                f"tokenizer: {self._name}: its chat template does not read tools; remove them from the data"
            )
        if unread := sorted(
            {key for message in messages for key in message if message[key] is not None} - words
        ):
            program = f"del((.messages, .prompt, .completion)[]?{json.dumps(unread)})"
            problem = f"its chat template does not read {', '.join(unread)} of messages"
            raise ConfigError(
                f"tokenizer: {self._name}: {problem}; remove: jq -c '{program}' OLD.jsonl > NEW.jsonl"
            )
        variables: Any = {key: self._special_token(key) for key in _SPECIAL_TOKENS} | dict(
            self.template_kwargs
        )
        chats, has_tags = [list(map(dict, messages))], bool(_GENERATION_TAG.search(template))
        date = self.date or datetime.date.today()

        def today(call: re.Match[str]) -> str:
            return (
                "date_string"
                if "date_string" in variables
                else repr(date.strftime(ast.literal_eval(call[1])))
            )

        try:
            texts, spans = render_jinja_template(
                chats,
                tools,
                chat_template=_NOW.sub(today, template),
                return_assistant_tokens_mask=has_tags,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"tokenizer: {self._name}: its chat template rejects the messages: {error}"
            ) from None
        marked: Any = spans
        return texts[0], marked[0] if has_tags else None


@functools.lru_cache(maxsize=2)
def _parse(content: bytes) -> Any:
    """Parse a `tokenizer.json` once, although a run asks for the size of the vocabulary before it opens the data."""
    import tokenizers

    return tokenizers.Tokenizer.from_buffer(content)


def _growth(stage: Any) -> int:
    """Return by what factor a stage of a tokenizer, as JSON, can lengthen a text."""
    children = (
        stage.values() if isinstance(stage, dict) else stage if isinstance(stage, list) else ()
    )
    growth = math.prod(map(_growth, children))
    match stage:
        case {"type": "Replace", "content": str(content)}:
            return growth * max(1, len(content))
        case {"type": "ByteLevel"}:
            return growth * 2
        case {"type": "TemplateProcessing", "single": list(pieces)}:
            return growth * max(1, sum("Sequence" in piece for piece in pieces))
    return growth


class _CheckedEncoder:
    """A `tokenizers.Tokenizer` that raises ConfigError where its Rust code panics."""

    def __init__(self, encoder: Any, name: str) -> None:
        self.encoder = encoder
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:  # data workers receive a copy
        return _CheckedEncoder, (self.encoder, self._name)

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self.encoder, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return value(*args, **kwargs)
            except BaseException as error:
                if type(error).__name__ != "PanicException":
                    raise
                raise ConfigError(
                    f"tokenizer: {self._name}: the tokenizers library panicked: {error}; use another tokenizer"
                ) from None

        return call if callable(value) else value


Tokenizer = ByteTokenizer | FileTokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE tokenizer like GPT-2's of at most `vocab_size` tokens and return its `tokenizer.json`."""
    from tokenizers import ByteLevelBPETokenizer

    encoder = ByteLevelBPETokenizer()
    encoder.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    return encoder.to_str().encode()


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    """Return the ids of each text with an end-of-text token."""
    end = np.uint32(tokenizer.eos_id)
    return [np.append(ids, end) for ids in tokenizer.encode_batch(texts)]


@oserror_as_config_error
def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer `name`: "bytes", a `tokenizer.json`, a directory with one, or a Hugging Face Hub name."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_file() and path.name != FILE:
        return FileTokenizer({FILE: _read(path.resolve(), FILE)}, name)
    if not path.exists():
        if name.startswith((".", "/", "~")) or name.endswith(".json"):
            raise ConfigError(f"tokenizer: {name}: no such file or directory in {Path.cwd()}")
        path = download_from_hub(name, FILES, "tokenizer")
    files = read_files(path.parent if path.is_file() else path)
    if FILE not in files:
        raise ConfigError(f"tokenizer: {name}: has no {FILE}")
    return FileTokenizer(files, name)


@oserror_as_config_error
def saved_tokenizer(
    identity: str, directory: Path, names: Collection[str], hyperparameters: Mapping[str, Any]
) -> Tokenizer:
    """Load the tokenizer `identity` of the checkpoint in `directory`, for chats as in its run.

    Args:
        names: the files that the checkpoint lists.
    """
    if identity == ByteTokenizer.identity:
        return ByteTokenizer()
    if FILE not in names:
        raise ConfigError(f"tokenizer: {directory}: the checkpoint lists no {FILE}")
    files = {name: _read(directory / name, name) for name in FILES if name in names}
    tokenizer = FileTokenizer(files, str(directory))
    if tokenizer.identity != identity:
        raise ConfigError(
            f"tokenizer: {directory}: {FILE} has {tokenizer.identity}, the checkpoint was written with {identity}"
        )
    date = hyperparameters.get("chat_template_date")
    try:
        tokenizer.template_kwargs = dict(hyperparameters.get("chat_template_kwargs") or {})
        tokenizer.date = datetime.date.fromisoformat(date) if date else None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"tokenizer: {directory}: chat_template_date or chat_template_kwargs of the checkpoint: {error}"
        ) from None
    return tokenizer


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in `directory`, by name. Checkpoints and exports get copies of them.

    Raises:
        ConfigError: one is a link that leaves `directory` and is not one of the Hub's cache.
    """
    files = {}
    for path in (directory / name for name in FILES if (directory / name).is_file()):
        target, root = path.resolve(), directory.resolve()
        if target.parent not in (root, root.parent.parent / "blobs"):
            raise ConfigError(f"tokenizer: {path}: is a link to {target}; copy the file")
        files[path.name] = _read(target, path.name)
    return files


def _read(path: Path, name: str) -> bytes:
    return read_bytes(path, MAX_TOKENIZER_BYTES if name == FILE else MAX_JSON_BYTES)
