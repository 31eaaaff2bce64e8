"""Tokenizers: UTF-8 bytes, or a `tokenizer.json` of the Hugging Face `tokenizers` library.

A tokenizer is defined by its files alone. Every checkpoint holds a copy of them, so that it can
generate text anywhere.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from lm.data import special_tokens
from lm.data.chat_template import (
    ChatTemplate,
    MissingPackageError,
    RenderedChat,
    read_chat_template,
)
from lm.data.hub import download_from_hub, find_directory
from lm.data.signatures import ENCODINGS
from lm.errors import ConfigError, error_text, nearest_file, oserror_as_config_error
from lm.fileio import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    parse_json,
    read_bytes,
)

TOKENIZER_JSON = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens.json"
_COPIED_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Not read here, but by what converts an export: merge scores are in tokenizer.model only."""
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    _TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    _SPECIAL_TOKENS_MAP,
    _ADDED_TOKENS,
    *_COPIED_FILES,
)
"""of a tokenizer; only the first is required"""
_MORE_TEMPLATES = "additional_chat_templates"
_OLD_TEMPLATE = "chat_template.json"
SOURCE_FILES = (*TOKENIZER_FILES, f"{_MORE_TEMPLATES}/*.jinja", _OLD_TEMPLATE)
"""of a model on the Hub"""
END_OF_TEXT = "<|endoftext|>"
_EOS_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_DEFAULT = "default"
_TOOL_USE = "tool_use"
_SPLIT_SPECIAL = "split_special_tokens"
_CONTENT_HASH = re.compile("[0-9a-f]{30,64}")
"""name of a file in the caches of the Hub and of DVC, which nothing else has"""
_PIECE_SIZE = 2**17
"""Characters of a longer text that are encoded at a time; the library takes 200 bytes for each."""
_SEAM = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
"""before the space between two words, where most tokenizers split a text"""
_SEAM_CONTEXT = 500
_SEAMS_TRIED = 5
_MARKED_REPLY = "x7q"
"""content that no chat template writes itself"""


class TokenizedText(NamedTuple):
    """The tokens of a text: arrays of shape (tokens,)."""

    ids: NDArray[np.uint32]
    ends: NDArray[np.int64]
    """the number of the first character after each token"""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    identity = "bytes"
    vocab_size = 257
    eos_id = 256
    stop_ids = frozenset((eos_id,))
    chat_stop_ids = stop_ids
    bos_id: int | None = None
    template_kwargs: Mapping[str, Any] = {}
    date: datetime.date | None = None
    files: Mapping[str, bytes] = {}
    text_bytes: NDArray[np.int64] = np.array([1] * 256 + [0])

    def count_bytes(self, inputs: NDArray[Any], targets: NDArray[Any]) -> int:  # noqa: ARG002
        """Return the bytes of UTF-8 of `targets`, each the token after its input."""
        return int(self.text_bytes[targets].sum())

    def tells_bytes(self, *_: Any, **__: Any) -> bool:
        """Return whether `count_bytes` of the ids of a text are its own bytes."""
        return True

    def limit_ids(self, n_ids: int) -> None:
        """Raise ConfigError if the model has not all ids: texts have any byte."""
        if n_ids < self.vocab_size:
            problem = f"has {self.vocab_size} ids, and the model {n_ids} (vocab_size)"
            raise ConfigError(f"tokenizer: {self.identity}: {problem}; {_enlarge(self.vocab_size)}")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return list(map(self.encode_piece, texts))

    def split(self, blocks: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a text that can be encoded one by one: each of its blocks."""
        yield from blocks

    def encode_piece(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def encode_with_ends(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,  # noqa: ARG002 - there are none
    ) -> list[TokenizedText]:
        encodings: list[TokenizedText] = []
        for text in texts:
            n_bytes = [len(character.encode()) for character in text]
            ends = np.repeat(np.arange(1, len(text) + 1), n_bytes)
            encodings.append(TokenizedText(self.encode_piece(text), ends))
        return encodings

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Return the text of `ids`; see `stream`."""
        return "".join(self.stream(ids, after))

    def stream(
        self,
        ids: Iterable[int],
        after: Sequence[int] = (),  # noqa: ARG002 - bytes are the same after any others
    ) -> Iterator[str]:
        """Yield text while `ids` arrive, each character once all of its bytes have.

        End-of-text tokens become blank lines, and invalid UTF-8 becomes U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            if token < 256:
                yield decoder.decode(bytes([token]))
                continue
            incomplete = decoder.decode(b"", final=True)
            if token == self.eos_id:
                yield incomplete + "\n\n"
            else:
                yield incomplete + "\ufffd"
        yield decoder.decode(b"", final=True)

    def find_template(self, tools: Any = None) -> NoReturn:  # noqa: ARG002 - there is none
        raise self._no_template()

    @property
    def all_templates(self) -> NoReturn:
        raise self._no_template()

    def render(self, *_: Any, **__: Any) -> NoReturn:
        raise self._no_template()

    def _no_template(self) -> ConfigError:
        problem = f"{self.identity}: has no chat template for messages"
        return ConfigError(f"tokenizer: {problem}; use a Hugging Face tokenizer that has one")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        files: contents of `tokenizer.json` and of the optional `SOURCE_FILES`, by name.
        name: name of the tokenizer in errors.
        chat_template: replaces that of the files.
    """

    def __init__(
        self, files: Mapping[str, bytes], name: str, chat_template: ChatTemplate | None = None
    ) -> None:
        self._name = name
        self.files = dict(files)
        """of `TOKENIZER_FILES`"""
        self._move_templates()
        if chat_template is not None:
            self.files[CHAT_TEMPLATE] = chat_template.text.encode()
        self._set_template = chat_template
        self._encoder: Any = self._parse(files[TOKENIZER_JSON])
        self._config = special_tokens.merge_files(
            self._read_object(_TOKENIZER_CONFIG),
            self._read_object(_SPECIAL_TOKENS_MAP),
            self._read_object(_ADDED_TOKENS),
            self._encoder,
        )
        digest = hashlib.sha256(files[TOKENIZER_JSON])
        with self._library_errors():
            missing = special_tokens.find_missing(self._config, self._encoder)
            if missing:
                self._encoder = copy.deepcopy(self._encoder)  # which others may use
                self._encoder.add_tokens(missing)
                digest.update(json.dumps([each.__getstate__() for each in missing]).encode())
            conflict = special_tokens.describe_conflict(self._config, self._encoder)
        if conflict is not None:
            raise self._error(f"{_TOKENIZER_CONFIG}: {conflict}; correct added_tokens_decoder")
        if getattr(self._encoder.model, "dropout", None):
            problem = f"model.dropout is {self._encoder.model.dropout:g}, with which the tokens of"
            problem += " a text are random"
            raise self._error(f"{TOKENIZER_JSON}: {problem}; set it to null")
        if self._config.get(_SPLIT_SPECIAL):
            problem = f"{_SPLIT_SPECIAL} is true, with which special tokens in texts are text"
            raise self._error(f"{_TOKENIZER_CONFIG}: {problem}; set it to false")
        self._generation = self._read_object(GENERATION_CONFIG)
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.template_kwargs: Mapping[str, Any] = {}
        """variables of the chat template; `date_string` replaces today's date"""
        self.date: datetime.date | None = None
        """the day that the chat template reads as today's; None = today"""
        vocabulary = self._encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.identity = f"{self.vocab_size} tokens, sha256 {digest.hexdigest()}"
        self._named_tokens = special_tokens.find_named(self._config)
        self.eos_id: int = self._find_eos_id(vocabulary)
        self.bos_id: int | None = vocabulary.get(self._named_tokens.get("bos_token", ""))
        self.n_model_ids = self.vocab_size
        """ids that texts may have"""

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"tokenizer: {self._name}: {problem}")

    @contextlib.contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Raise ConfigError where the library raises, or panics in Rust."""
        try:
            yield
        except BaseException as error:  # the library raises nothing narrower than Exception
            is_panic = type(error).__name__ == "PanicException"  # which is no Exception
            if not isinstance(error, Exception) and not is_panic:
                raise
            problem = f"fails in the tokenizers library: {error_text(error)}"
            raise self._error(f"{problem}; use another tokenizer") from None

    def _parse(self, content: bytes) -> Any:
        """Return the library's tokenizer; where it can read none, maybe the content is not JSON."""
        try:
            with self._library_errors():
                return _parse_tokenizer(content)
        except ConfigError:
            problem = _describe_no_json(content)
            if problem is None:
                raise
            remedy = "download the file again, or write it as JSON in UTF-8 without a mark"
            raise self._error(f"{TOKENIZER_JSON}: {problem}; {remedy}") from None

    def _read_object(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, {} if there is none."""
        content = _parse_json(self.files.get(name, b"{}"), f"{self._name}: {name}")
        if not isinstance(content, dict):
            raise self._error(f"{name}: is not a JSON object")
        return content

    def _find_eos_id(self, vocabulary: Mapping[str, int]) -> int:
        for token in (self._named_tokens.get("eos_token", END_OF_TEXT), *_EOS_TOKENS):
            if token in vocabulary:
                return vocabulary[token]
        advice = f"set eos_token in a {_TOKENIZER_CONFIG} in the same directory"
        raise self._error(f"it has no end-of-text token; {advice}")

    def _move_templates(self) -> None:
        """Move the chat templates of other files to two that checkpoints have.

        Transformers reads several by name from tokenizer_config.json, too.
        """
        more = [name for name in self.files if name.startswith(_MORE_TEMPLATES)]
        old = self._read_object(_OLD_TEMPLATE).get("chat_template")
        self.files.pop(_OLD_TEMPLATE, None)
        config = self._read_object(_TOKENIZER_CONFIG)
        if more:
            if CHAT_TEMPLATE in self.files:
                more = [CHAT_TEMPLATE, *more]
            config["chat_template"] = [
                {
                    "name": _DEFAULT if name == CHAT_TEMPLATE else Path(name).stem,
                    "template": self._decode_template(name, self.files.pop(name)),
                }
                for name in more
            ]
            self.files[_TOKENIZER_CONFIG] = json.dumps(config, indent=2).encode()
        elif isinstance(old, str) and not config.get("chat_template"):
            self.files.setdefault(CHAT_TEMPLATE, old.encode(errors="surrogatepass"))

    def limit_ids(self, n_ids: int) -> None:
        """Refuse texts with ids that a model of `n_ids` does not have.

        Tokenizers may have more: Gemma 3's has an image's token, for which the text models have no
        embedding.

        Raises:
            ConfigError: end of text is such an id.
        """
        self.n_model_ids = n_ids
        if self.eos_id >= n_ids:
            problem = f"{self._describe_id(self.eos_id)}, and ends texts"
            advice = "set eos_token in its tokenizer_config.json to another token"
            raise self._error(f"{problem}; {advice}, or {_enlarge(self.eos_id + 1)}")
        if self.bos_id is not None and self.bos_id >= n_ids:
            self.bos_id = None  # no text of this model starts with it

    def _describe_id(self, token: int) -> str:
        text = json.dumps(self._encoder.id_to_token(token), ensure_ascii=False)
        return f"{text} is id {token}, which the model, with {self.n_model_ids} ids, does not have"

    def _check_ids(self, ids: Sequence[int] | NDArray[np.uint32]) -> None:
        """Raise ConfigError for ids that the model does not have."""
        if self.vocab_size <= self.n_model_ids:
            return
        highest = int(max(ids, default=0))
        if highest >= self.n_model_ids:
            problem = self._describe_id(highest)
            raise self._error(f"{problem}; remove it from the text, or {_enlarge(highest + 1)}")

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated text: end of text, and those of generation_config.json."""
        generation_eos = as_list(self._generation.get("eos_token_id"))
        if not all(type(each) is int for each in generation_eos):
            shown = json.dumps(self._generation["eos_token_id"])[:60]
            problem = f"{GENERATION_CONFIG}: eos_token_id is {shown}"
            raise self._error(f"{problem}, not an integer or a list of integers")
        return frozenset([self.eos_id, *generation_eos])

    @functools.cached_property
    def chat_stop_ids(self) -> frozenset[int]:
        """Ids that end a reply: `stop_ids`, and the chat template's end of turn."""
        try:
            return self.stop_ids | self._end_of_turn_ids()
        except MissingPackageError:
            raise
        except ConfigError:  # a template that rejects such a chat
            return self.stop_ids

    def _end_of_turn_ids(self) -> set[int]:
        """Return the first special token that the chat template writes after a reply, if any."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKED_REPLY}]
        rendered = self.render(chat)
        _, _, after_reply = rendered.text.rpartition(_MARKED_REPLY)
        for token in self._encode(after_reply):
            if token in self._special_tokens:
                return {token}
        return set()

    @functools.cached_property
    def text_bytes(self) -> NDArray[np.int64]:
        """Bytes of UTF-8 that each id adds to a text, (vocab_size,); 0 for special tokens."""
        return self._measure_ids(self._encode("a"))

    @functools.cached_property
    def _first_bytes(self) -> NDArray[np.int64]:
        """`text_bytes` at the start of a text, before which some tokenizers put a space."""
        return self._measure_ids([])

    def _measure_ids(self, before: list[int]) -> NDArray[np.int64]:
        """Return the bytes that each id adds after the ids `before`."""
        n_bytes_before = len(self._decode(before).encode())
        with self._library_errors():
            texts = self._encoder.decode_batch([[*before, i] for i in range(self.vocab_size)])
        sizes = np.array([len(text.encode()) for text in texts]) - n_bytes_before
        for i, text in enumerate(texts):
            if "\ufffd" not in text:
                continue
            token = str(self._encoder.id_to_token(i))
            if "\ufffd" in token:
                continue
            # The token is a part of a character: one byte such as <0xE2>, or a character per byte.
            if token.startswith("<0x"):
                sizes[i] = 1
            else:
                sizes[i] = len(token)
        sizes[self._is_special] = 0
        return sizes

    @functools.cached_property
    def _special_tokens(self) -> Mapping[int, str]:
        """Tokens that are no text, by id: those declared special, and the end of text."""
        added_tokens = self._encoder.get_added_tokens_decoder()
        special = {i: token.content for i, token in added_tokens.items() if token.special}
        return special | {self.eos_id: self._encoder.id_to_token(self.eos_id)}

    @functools.cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        """Whether each id is no text, (vocab_size,)."""
        is_special = np.zeros(self.vocab_size, np.bool_)
        is_special[list(self._special_tokens)] = True
        return is_special

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_tokens.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def count_bytes(self, inputs: NDArray[Any], targets: NDArray[Any]) -> int:
        """Return the bytes of UTF-8 of `targets`, each the token after its input.

        A text starts after a special token.
        """
        is_first = self._is_special[inputs]
        sizes = np.where(is_first, self._first_bytes[targets], self.text_bytes[targets])
        return int(sizes.sum())

    def tells_bytes(self, text: str, ids: NDArray[Any], *, is_start: bool = True) -> bool:
        """Return whether `count_bytes` of the ids of `text` are its own bytes.

        They are not where the tokenizer replaces characters, e.g. by their normal form.

        Args:
            is_start: False = of a piece that is not the first of its text.
        """
        n_bytes = len(self._special_text.sub("", text).encode())
        if is_start:
            return n_bytes == self.count_bytes(np.append(self.eos_id, ids[:-1]), ids)
        n_first = int(self.text_bytes[ids[:1]].sum())
        return n_bytes == n_first + self.count_bytes(ids[:-1], ids[1:])

    def _encode(self, text: str) -> list[int]:
        with self._library_errors():
            (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _decode(self, ids: Sequence[int]) -> str:
        with self._library_errors():
            return self._encoder.decode(ids)

    def _find_text(self, encoding: Any) -> slice:
        """Return which ids of an encoding are a text's, with the start of text once.

        The tokenizer writes a start before any text, also one that starts with it, as rendered
        chats do, and some append an end of text.
        """
        ids: list[int] = encoding.ids
        is_written: list[int] = encoding.special_tokens_mask  # by the tokenizer, not in the text
        n_start = sum(itertools.takewhile(bool, is_written))
        start = 0
        if ids[n_start : 2 * n_start] == ids[:n_start]:
            start = n_start
        stop = len(ids)
        if is_written[-1:] == [1] and ids[-1] == self.eos_id:
            stop -= 1
        return slice(start, stop)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the tokenizer's own start of text, once.

        End of text is among them only where the text has it.
        """
        (ids,) = self.encode_batch([text])
        return ids.tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text as `encode` does.

        The library uses all cores unless TOKENIZERS_PARALLELISM is false.
        """
        split = [list(self.split([text])) for text in texts]
        with self._library_errors():
            encodings = self._encoder.encode_batch_fast([first for first, *_ in split])
        results: list[NDArray[np.uint32]] = []
        for encoding, (_, *others) in zip(encodings, split, strict=True):
            first = np.array(encoding.ids[self._find_text(encoding)], np.uint32)
            self._check_ids(first)
            results.append(np.concatenate([first, *map(self.encode_piece, others)]))
        return results

    def encode_piece(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a piece that is not the first of its text."""
        ids = np.array(self._encode(text), np.uint32)
        self._check_ids(ids)
        return ids

    def split(self, blocks: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a text in blocks that can be encoded one by one.

        They are cut where this tokenizer encodes the words before and after apart as it does
        together; a text without such places is one piece.
        """
        remaining = iter(blocks)
        text = ""
        for block in remaining:
            text += block
            start = 0
            while len(text) - start > 2 * _PIECE_SIZE + _SEAM_CONTEXT:
                seam = self._find_seam(text, start + _PIECE_SIZE)
                if seam is None:
                    yield "".join([text[start:], *remaining])
                    return
                yield text[start:seam]
                start = seam
            text = text[start:]
        if len(text) > 2 * _PIECE_SIZE:
            seam = self._find_seam(text, _PIECE_SIZE) or 0
            if seam > 0:
                yield text[:seam]
            text = text[seam:]
        yield text

    def _find_seam(self, text: str, first: int) -> int | None:
        found = _SEAM.finditer(text, first, first + _PIECE_SIZE)
        for match in itertools.islice(found, _SEAMS_TRIED):
            seam = match.start()
            before = text[seam - _SEAM_CONTEXT : seam]
            after = text[seam : seam + _SEAM_CONTEXT]
            if self._encode(before + after) == self._encode(before) + self._encode(after):
                return seam
        return None

    def encode_with_ends(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[TokenizedText]:
        """Return the ids of each text and their ends.

        Args:
            add_special_tokens: False for texts from `render`, which contain theirs already.
        """
        with self._library_errors():
            encodings = self._encoder.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
        results: list[TokenizedText] = []
        for encoding in encodings:
            text = slice(None)
            if add_special_tokens:
                text = self._find_text(encoding)
            ids = encoding.ids[text]
            self._check_ids(ids)
            ends = [end for _, end in encoding.offsets[text]]
            results.append(TokenizedText(np.array(ids, np.uint32), np.array(ends, np.int64)))
        return results

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
        while self._decode(prefix).endswith("\ufffd"):
            prefix.pop()  # an incomplete character makes DecodeStream repeat the prefix
        decoder = DecodeStream(ids=prefix, skip_special_tokens=True)
        pending: list[int] = []
        for token in ids:
            if token == self.eos_id:
                yield self._decode(pending) + "\n\n"
                decoder = DecodeStream(skip_special_tokens=True)
                pending = []
                continue
            pending.append(token)
            try:
                with self._library_errors():
                    piece = decoder.step(self._encoder, token)
            except ConfigError:  # invalid UTF-8 after valid bytes
                piece = self._decode(pending)
                decoder = DecodeStream(ids=pending, skip_special_tokens=True)
            if piece is not None:
                pending = []
                yield piece
        yield self._decode(pending)

    @functools.cached_property
    def _templates(self) -> Mapping[str, ChatTemplate]:
        """Its chat templates by name, of which transformers uses `default` and `tool_use`."""
        texts = self._config.get("chat_template")
        if not isinstance(texts, list):
            texts = [{"name": _DEFAULT, "template": texts}]
        content = self.files.get(CHAT_TEMPLATE)
        if content:
            texts = [{"name": _DEFAULT, "template": self._decode_template(CHAT_TEMPLATE, content)}]
        templates: dict[str, ChatTemplate] = {}
        for each in texts:
            match each:
                case {"name": str(name), "template": str(text)}:
                    where = f"tokenizer: {self._name}: its chat template"
                    templates[name] = ChatTemplate(text, where)
                case _:  # transformers can read no other
                    pass
        return templates

    def _decode_template(self, name: str, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            problem = f"{name}: byte {error.start} is not UTF-8"
            raise self._error(problem) from None

    def find_template(self, tools: Any = None) -> ChatTemplate:
        """Return the chat template for a chat, as transformers chooses it."""
        if self._set_template is not None:
            return self._set_template
        if tools is not None and _TOOL_USE in self._templates:
            return self._templates[_TOOL_USE]
        if _DEFAULT in self._templates:
            return self._templates[_DEFAULT]
        problem = "has no chat template (chat_template in tokenizer_config.json)"
        remedy = "use that of a chat model, or set chat_template to a file or a name in TRL"
        raise self._error(f"{problem}; {remedy}")

    @property
    def all_templates(self) -> ChatTemplate:
        """The chat templates of all chats as one text, for what one of them mentions."""
        names = self._templates.keys() & {_DEFAULT, _TOOL_USE}
        if self._set_template is not None or not names:
            return self.find_template()
        used = [self._templates[name] for name in sorted(names)]
        return ChatTemplate("\n".join(each.text for each in used), used[0].name)

    @functools.cached_property
    def _found_tokens(self) -> Mapping[str, str]:
        """Variables of the chat template that no file may name."""
        found = {"eos_token": self._encoder.id_to_token(self.eos_id)}
        with self._library_errors():
            written = self._encoder.encode("").tokens
        if written and written[0] != found["eos_token"]:
            found["bos_token"] = written[0]
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """Return the text that the chat template writes.

        Args:
            tools: JSON schemas of the functions that the assistant can call; the template must read
                them.
            add_generation_prompt: append the start of the next reply.
        """
        variables = {**self._found_tokens, **self._named_tokens, **self.template_kwargs}
        date = self.date or datetime.date.today()
        return self.find_template(tools).render(
            messages, tools, variables, date, add_generation_prompt=add_generation_prompt
        )


def _describe_no_json(content: bytes) -> str | None:
    """Return why `content` is not JSON in UTF-8; None = it is."""
    marks = {codecs.BOM_UTF8: "UTF-8", **ENCODINGS}
    for mark, encoding in marks.items():
        if content.startswith(mark):
            return f"starts with the byte-order mark of {encoding}"
    try:
        json.loads(content)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    except ValueError as error:
        return f"not valid JSON: {error}"
    except RecursionError:
        return None
    return None


def _enlarge(n_ids: int) -> str:
    """Return what to do for a model with `n_ids`."""
    resize = "resize_token_embeddings() of a pretrained model with transformers"
    return f"set vocab_size to {n_ids} or more ({resize})"


@functools.lru_cache(maxsize=2)
def _parse_tokenizer(content: bytes) -> Any:
    """Parse a `tokenizer.json` once: a run needs its vocabulary before it opens the data."""
    import tokenizers

    return tokenizers.Tokenizer.from_buffer(content)


Tokenizer = ByteTokenizer | FileTokenizer


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all that the tokens of a text depend on, as JSON."""
    if isinstance(tokenizer, ByteTokenizer):
        return {"identity": tokenizer.identity}
    files = {name: hashlib.sha256(text).hexdigest() for name, text in tokenizer.files.items()}
    return {"identity": tokenizer.identity, "files": files, "n_ids": tokenizer.n_model_ids}


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE tokenizer like GPT-2's, and return its `tokenizer.json`.

    It has at most `vocab_size` tokens.
    """
    from tokenizers import ByteLevelBPETokenizer

    encoder = ByteLevelBPETokenizer()
    encoder.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    return encoder.to_str().encode()


class ByteCheck:
    """Whether the ids of all texts that were added tell their bytes."""

    is_exact = True

    def add(
        self, tokenizer: Tokenizer, text: str, ids: NDArray[np.uint32], *, is_start: bool = True
    ) -> None:
        self.is_exact = self.is_exact and tokenizer.tells_bytes(text, ids, is_start=is_start)


def end_text(ids: NDArray[np.uint32], eos_id: int) -> NDArray[np.uint32]:
    """Return `ids` with an end of text, which a text may have itself."""
    if len(ids) > 0 and ids[-1] == eos_id:
        return ids
    return np.append(ids, np.uint32(eos_id))


@oserror_as_config_error
def load_tokenizer(name: str, chat_template: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: "bytes", a `tokenizer.json`, a directory with one, or a Hugging Face Hub name.
        chat_template: replaces its chat template; see `read_chat_template`.
    """
    template = None
    if chat_template is not None:
        template = read_chat_template(chat_template)
    if name == "bytes":
        if template is not None:
            problem = f"{chat_template}: requires a Hugging Face tokenizer, not bytes"
            raise ConfigError(f"chat_template: {problem}; set tokenizer")
        return ByteTokenizer()
    path = Path(find_directory(name))
    if path.is_file() and path.name != TOKENIZER_JSON:
        content = _read_tokenizer_file(path.resolve(), TOKENIZER_JSON)
        return FileTokenizer({TOKENIZER_JSON: content}, name, template)
    if path.is_file():
        directory = path.parent
    elif path.exists():
        directory = path
    elif name.startswith((".", "/", "~")) or name.endswith(".json"):
        problem = f"no such file or directory in {Path.cwd()}{nearest_file(path)}"
        raise ConfigError(f"tokenizer: {name}: {problem}")
    else:
        directory = download_from_hub(name, (*SOURCE_FILES, MODEL_CONFIG), "tokenizer")
    files = read_tokenizer_files(directory)
    if TOKENIZER_JSON not in files:
        raise ConfigError(f"tokenizer: {name}: has no {TOKENIZER_JSON}")
    return FileTokenizer(files, name, template)


@oserror_as_config_error
def load_saved_tokenizer(
    identity: str, directory: Path, names: Collection[str], hyperparameters: Mapping[str, Any]
) -> Tokenizer:
    """Load the tokenizer `identity` of the checkpoint in `directory`, for chats as in its run.

    Args:
        names: the files that the checkpoint lists.
    """
    if identity == ByteTokenizer.identity:
        return ByteTokenizer()
    if TOKENIZER_JSON not in names:
        raise ConfigError(f"tokenizer: {directory}: the checkpoint lists no {TOKENIZER_JSON}")
    listed = [name for name in TOKENIZER_FILES if name in names]
    files = {name: _read_tokenizer_file(directory / name, name) for name in listed}
    tokenizer = FileTokenizer(files, str(directory))
    if tokenizer.identity != identity:
        problem = f"{TOKENIZER_JSON} has {tokenizer.identity}"
        raise ConfigError(
            f"tokenizer: {directory}: {problem}, the checkpoint was written with {identity}"
        )
    date = hyperparameters.get("chat_template_date")
    try:
        tokenizer.template_kwargs = dict(hyperparameters.get("chat_template_kwargs") or {})
        if date:
            tokenizer.date = datetime.date.fromisoformat(date)
    except (ValueError, TypeError) as error:
        keys = "chat_template_date or chat_template_kwargs of the checkpoint"
        raise ConfigError(f"tokenizer: {directory}: {keys}: {error}") from None
    return tokenizer


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in `directory`, by name.

    Checkpoints and exports get copies of them.

    Raises:
        ConfigError: one is a link that leaves `directory`, and not to a file of a cache.
    """
    more = sorted(path.name for path in directory.glob(f"{_MORE_TEMPLATES}/*.jinja"))
    names = [*TOKENIZER_FILES, _OLD_TEMPLATE, *(f"{_MORE_TEMPLATES}/{name}" for name in more)]
    files = {name: _read_inside(directory, name) for name in names if (directory / name).is_file()}
    model = directory
    if GENERATION_CONFIG not in files:
        model = _find_base(directory)
        if (model / GENERATION_CONFIG).is_file():
            files[GENERATION_CONFIG] = _read_inside(model, GENERATION_CONFIG)
    config = _read_settings(model / MODEL_CONFIG)
    for part in (config, config.get("text_config")):  # of a text model in a wrapper
        if isinstance(part, dict) and part.get("eos_token_id") is not None:
            content = files.get(GENERATION_CONFIG, b"{}")
            files[GENERATION_CONFIG] = _add_stops(content, part["eos_token_id"])
    return files


def _add_stops(content: bytes, stops: Any) -> bytes:
    """Return a generation_config.json with the `eos_token_id` of the model's config.json, too."""
    try:
        generation = parse_json(content)
    except ValueError:
        return content  # who reads it says why
    if not isinstance(generation, dict):
        return content
    known = as_list(generation.get("eos_token_id"))
    added = [stop for stop in as_list(stops) if stop not in known]
    if not added:
        return content
    merged = known + added
    if len(merged) == 1:
        (merged,) = merged
    return json.dumps(generation | {"eos_token_id": merged}, indent=2).encode()


def as_list(value: Any) -> list[Any]:
    """Return the ids of an `eos_token_id`, which is one, a list of them, or None."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def _find_base(directory: Path) -> Path:
    """Return the directory of the model that adapters in `directory` are for, else `directory`."""
    settings = _read_settings(directory / ADAPTER_CONFIG)
    source = settings.get("base_model_name_or_path")
    if not isinstance(source, str):
        return directory
    base = Path(find_directory(source))
    if base.is_dir():
        return base
    if settings.get("revision"):
        source = f"{source}@{settings['revision']}"
    try:
        return download_from_hub(source, (GENERATION_CONFIG, MODEL_CONFIG), "tokenizer")
    except ConfigError:  # the tokenizer works without it
        return directory


def _read_inside(directory: Path, name: str) -> bytes:
    path = directory / name
    target = path.resolve()
    if directory.resolve() not in target.parents and not _CONTENT_HASH.fullmatch(target.name):
        raise ConfigError(f"tokenizer: {path}: is a link to {target}; copy the file")
    return _read_tokenizer_file(target, name)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, {} if there is none or no object in it."""
    if not path.is_file():
        return {}
    raw = _parse_json(read_bytes(path.resolve(), MAX_JSON_BYTES), str(path))
    if not isinstance(raw, dict):
        return {}
    return raw


def _parse_json(content: bytes, where: str) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise ConfigError(f"tokenizer: {where}: not valid JSON: {error}") from None


def _read_tokenizer_file(path: Path, name: str) -> bytes:
    limit = MAX_JSON_BYTES
    if name == TOKENIZER_JSON or name in _COPIED_FILES:
        limit = MAX_TOKENIZER_BYTES
    return read_bytes(path, limit)
