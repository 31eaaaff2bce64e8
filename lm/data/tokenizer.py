"""Tokenizers: text to ids and back, by bytes or by a `tokenizer.json` of the Hugging Face `tokenizers` library.

A tokenizer is its files: they travel with every checkpoint, so that text can be made from it anywhere.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from lm.data.words import Words, word_pattern
from lm.errors import ConfigError, oserror_as_config_error

FILE = "tokenizer.json"
FILES = (FILE, "tokenizer_config.json", "chat_template.jinja")
"""What a tokenizer may consist of; only the first must be there."""

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_SPACE = "\u2581"
"""How tokenizers write a space that is a letter like others."""

Ids = TypeVar("Ids", list[int], NDArray[np.uint32])


class Encoded(NamedTuple):
    ids: NDArray[np.uint32]
    ends: NDArray[np.int64]
    """where in the text each token ends (characters)"""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    identity = "bytes"
    vocab_size = 257
    end_of_text = 256
    beginning: int | None = None
    files: Mapping[str, bytes] = {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, without an end-of-text token."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def encode_serially(self, texts: Sequence[str], *, opening: bool = True) -> list[NDArray[np.uint32]]:  # noqa: ARG002
        """As `encode_batch`; `opening` does not matter here."""
        return self.encode_batch(texts)

    def splits_at(self, before: str, after: str) -> bool:  # noqa: ARG002
        """A text can be cut anywhere."""
        return True

    def encode_with_ends(self, texts: Sequence[str], *, rendered: bool) -> list[Encoded]:  # noqa: ARG002
        """As `encode_batch`, and where each token ends; `rendered` does not matter here."""
        widths = ([len(character.encode()) for character in text] for text in texts)
        ends = [np.repeat(np.arange(1, len(each) + 1), each) for each in widths]
        return list(map(Encoded, self.encode_batch(texts), ends))

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """The text of `ids`; the end of a document becomes a blank line, what is no UTF-8 U+FFFD."""
        return "".join(self.stream(ids, after))

    def stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:  # noqa: ARG002
        """Text as `ids` come in, each character once all of its bytes have; `after` does not matter here."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            if token < 256:
                yield decoder.decode(bytes([token]))
            else:
                yield decoder.decode(b"", final=True) + ("\n\n" if token == self.end_of_text else "\ufffd")
        yield decoder.decode(b"", final=True)

    def render(self, messages: Sequence[Mapping[str, Any]], reply_follows: bool) -> str:  # noqa: ARG002
        raise ConfigError("tokenizer: bytes has no chat template for messages; give a Hugging Face tokenizer that has")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        files: `tokenizer.json` and what lies beside it, by name (`FILES`).
        name: for errors.

    Raises:
        ConfigError: the files cannot be used, or no end-of-text token can be found in them.
    """

    def __init__(self, files: Mapping[str, bytes], name: str) -> None:
        try:
            self._encoder = Encoder.from_buffer(files[FILE])
            self._settings: dict[str, Any] = dict(json.loads(files.get("tokenizer_config.json", b"{}")))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer: {name}: cannot be read: {error}") from None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._name = name
        self.files = dict(files)
        vocabulary = self._encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.identity = f"{self.vocab_size} tokens, sha256 {hashlib.sha256(files[FILE]).hexdigest()}"
        named = self._special("eos_token")
        end = named if named is not None else next((token for token in _ENDS if token in vocabulary), None)
        if end not in vocabulary:
            what = f"eos_token {named!r} is not in its vocabulary" if named else "it has no end-of-text token"
            raise ConfigError(f"tokenizer: {name}: {what}; name one as eos_token in a tokenizer_config.json beside it")
        self.end_of_text: int = vocabulary[end]
        self.beginning: int | None = vocabulary.get(self._special("bos_token") or "")
        """what opens a text, if its settings name a token for it"""

    def _special(self, key: str) -> str | None:
        value = self._settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def encode(self, text: str) -> list[int]:
        """The ids of `text` behind the tokenizer's own beginning, if it has one; no end-of-text token."""
        return self._open(self._encoder.encode(text).ids)

    def _open(self, ids: Ids) -> Ids:
        return ids[:-1] if len(ids) and ids[-1] == self.end_of_text else ids  # some end every text by themselves

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """As `encode`, on all cores."""
        batch = self._encoder.encode_batch_fast(list(texts))
        return [np.array(self._open(encoding.ids), np.uint32) for encoding in batch]

    def encode_serially(self, texts: Sequence[str], *, opening: bool = True) -> list[NDArray[np.uint32]]:
        """As `encode_batch` for one core of many that are busy: there faster, for the tokenizers that `Words` knows.

        Args:
            opening: false: the texts continue documents that were cut where `splits_at` says, so the tokenizer's
                beginning is left out.
        """
        if self._words is None:
            texts = texts if opening else list(map(self._continued, texts))
            batch = self._encoder.encode_batch_fast(list(texts), add_special_tokens=opening)
            return [np.array(self._open(each.ids) if opening else each.ids, np.uint32) for each in batch]
        every_ids = list(map(self._words.encode, texts))
        if not opening:
            return every_ids
        return [self._open(np.concatenate([self._frame[0], ids, self._frame[1]])) for ids in every_ids]

    @functools.cached_property
    def _words(self) -> Words | None:
        pattern = word_pattern(self._content())
        knows_text = self._encoder.encode("a", add_special_tokens=False).ids  # as `_frame` needs it
        return Words(self._encoder, pattern) if pattern and knows_text else None

    def _content(self) -> dict[str, Any]:
        """Of its `tokenizer.json`, with the keys that older files leave out."""
        return json.loads(self._encoder.to_str())

    @functools.cached_property
    def _frame(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """What the tokenizer puts around every text."""
        bare, framed = (self._encoder.encode("a", add_special_tokens=add).ids for add in (False, True))
        start = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        return np.array(framed[:start], np.uint32), np.array(framed[start + len(bare) :], np.uint32)

    def splits_at(self, before: str, after: str) -> bool:
        """Whether a text can be cut between `before` and `after`: its ids are then those of both parts.

        So it is where the tokenizer ends one word and begins another, because tokens are looked for in each
        word alone, provided that characters further away have no say in where words end; and before a space that no
        token holds behind another letter.
        """
        if self._spaced:
            apart = after.startswith(" ") and before[-1:] not in ("", " ", _SPACE)
        elif self._encoder.pre_tokenizer is None:
            apart = False
        else:
            whole, *parts = (self._cut(text) for text in (before + after, before, after))
            apart = whole == [*parts[0], *parts[1]]
        if not apart:
            return False
        texts = [before + after, before, self._continued(after)]
        ids, left, right = (each.ids for each in self._encoder.encode_batch_fast(texts, add_special_tokens=False))
        return ids == left + right and left[-1:] != [self.end_of_text]

    @functools.cached_property
    def _spaced(self) -> bool:
        """Whether words are not looked for, spaces are letters, and none stands behind another letter in a token."""
        content = self._content()
        model = content["model"]
        prepend = {"type": "Prepend", "prepend": _SPACE}
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        match content:
            case {"normalizer": {"normalizers": [first, second]}, "pre_tokenizer": None}:
                known = [first, second] == [prepend, replace]
            case {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "split": False}}:
                known = True
            case _:
                known = False
        if not known or model["type"] != "BPE" or model.get("dropout"):  # Unigram's sums depend on what is far away
            return False
        return not any(_SPACE in token.lstrip(_SPACE) for token in model["vocab"])

    def _continued(self, text: str) -> str:
        """What to encode of a text that continues a document: `Prepend` puts its first space there anyhow."""
        return text.removeprefix(" ") if self._spaced and self._encoder.pre_tokenizer is None else text

    def _cut(self, text: str) -> list[str]:
        normalizer = self._encoder.normalizer
        text = normalizer.normalize_str(text) if normalizer else text
        return [word for word, _ in self._encoder.pre_tokenizer.pre_tokenize_str(text)]

    def encode_with_ends(self, texts: Sequence[str], *, rendered: bool) -> list[Encoded]:
        """As `encode_batch`, and where each token ends.

        Args:
            rendered: the texts come from `render`, whose template writes beginnings and ends itself.
        """
        batch = self._encoder.encode_batch(list(texts), add_special_tokens=not rendered)
        every_ids = [encoding.ids if rendered else self._open(encoding.ids) for encoding in batch]
        return [
            Encoded(np.array(ids, np.uint32), np.array([end for _, end in encoding.offsets[: len(ids)]], np.int64))
            for ids, encoding in zip(every_ids, batch, strict=True)
        ]

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """The text of `ids`, as `stream`."""
        return "".join(self.stream(ids, after))

    def stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Text as `ids` come in, each character once all of its bytes have.

        The end of a document becomes a blank line; other special tokens are left out.

        Args:
            after: ids that stand before the first one; some tokenizers then begin with a space.
        """
        known = list(after)
        while self._encoder.decode(known).endswith("\ufffd"):
            known.pop()  # the library takes it for half a character, and would give the whole text again
        decoder = DecodeStream(ids=known, skip_special_tokens=True)
        pending: list[int] = []
        for token in ids:
            if token == self.end_of_text:
                yield self._encoder.decode(pending) + "\n\n"
                decoder, pending = DecodeStream(skip_special_tokens=True), []
                continue
            pending.append(token)
            try:
                piece = decoder.step(self._encoder, token)
            except Exception:  # bytes that are no UTF-8 behind some that were; the library raises nothing narrower
                piece, decoder = self._encoder.decode(pending), DecodeStream(ids=pending, skip_special_tokens=True)
            if piece is not None:
                pending = []
                yield piece
        yield self._encoder.decode(pending)

    def render(self, messages: Sequence[Mapping[str, Any]], reply_follows: bool) -> str:
        """The text of a chat by the tokenizer's own template.

        Args:
            messages: each with `role` and `content`.
            reply_follows: end with what opens the assistant's next message.

        Raises:
            ConfigError: there is no template, it refuses these messages, or `transformers` is missing.
        """
        template = self.files.get("chat_template.jinja", b"").decode() or self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((each.get("template") for each in template if each.get("name") == "default"), None)
        if not isinstance(template, str):
            raise ConfigError(f"tokenizer: {self._name}: has no chat template (chat_template in tokenizer_config.json)")
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError:
            raise ConfigError("messages: chat templates need a package: pip install transformers") from None
        specials: dict[str, Any] = {
            key: self._special(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        try:
            texts, _ = render_jinja_template(
                [list(map(dict, messages))], chat_template=template, add_generation_prompt=reply_follows, **specials
            )
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"the tokenizer's chat template refuses the messages: {error}") from None
        return texts[0]


Tokenizer = ByteTokenizer | FileTokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> bytes:
    """A tokenizer.json: byte-level BPE as GPT-2's, of `vocab_size` tokens (fewer where the text yields no more)."""
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(texts, trainer)
    return encoder.to_str().encode()


@oserror_as_config_error
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that the setting `tokenizer` names: bytes, a file, a folder, or one of the Hugging Face hub.

    Raises:
        ConfigError: it is nowhere to be found, or cannot be used.
    """
    if name == "bytes":
        return ByteTokenizer()
    place = Path(name).expanduser()
    if place.is_dir():
        return tokenizer_of(place)
    if place.is_file():
        beside = read_files(place.parent) if place.name == FILE else {}
        return FileTokenizer(beside | {FILE: place.read_bytes()}, name)
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise ConfigError(f"tokenizer: {name}: no such file or folder, seen from {Path.cwd()}")
    return FileTokenizer(_from_hub(name), name)


@oserror_as_config_error
def tokenizer_of(folder: Path) -> FileTokenizer:
    """The tokenizer whose files lie in `folder`, e.g. a checkpoint's.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    files = read_files(folder)
    if FILE not in files:
        raise ConfigError(f"tokenizer: {folder}: holds no {FILE}")
    return FileTokenizer(files, str(folder))


def read_files(folder: Path) -> dict[str, bytes]:
    """A tokenizer's files in `folder`, by name."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def _from_hub(name: str) -> dict[str, bytes]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what is wrong is said once, below
    files = {}
    for file in FILES:
        try:
            files[file] = Path(hf_hub_download(name, file)).read_bytes()
        except GatedRepoError:
            raise ConfigError(
                f"tokenizer: {name}: is gated; accept its terms on the hub, then log in with: hf auth login"
            ) from None
        except (LocalEntryNotFoundError, HFValidationError):
            if file == FILE:
                offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
                raise ConfigError(
                    f"tokenizer: {name}: no such file or folder, and not in the Hugging Face cache{offline}; on a"
                    f" machine with network: hf download {name} {' '.join(FILES[:2])}"
                ) from None
        except EntryNotFoundError as error:
            if file == FILE:
                raise ConfigError(f"tokenizer: {name}: cannot be had from the hub: {error}") from None
        except OSError as error:  # no repository of that name, or the hub does not answer
            raise ConfigError(f"tokenizer: {name}: cannot be had from the hub: {error}") from None
    return files
