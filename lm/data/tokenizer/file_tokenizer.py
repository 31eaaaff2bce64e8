"""A tokenizer by its files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.chat_template import ChatTemplate, RenderedChat
from lm.data.tokenizer.byte_tokenizer import TokenizedText, advise_size
from lm.data.tokenizer.files import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    as_list,
    parse_object,
)
from lm.data.tokenizer.library import Library
from lm.data.tokenizer.text_bytes import TextBytes
from lm.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
_EOS_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_SPLIT_SPECIAL = "split_special_tokens"
_PIECE_SIZE = 2**17
"""Characters of a longer text that are encoded at a time; the library takes 200 bytes for each."""
_SEAM = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
"""before the space between two words, where most tokenizers split a text"""
_SEAM_CONTEXT = 500
_SEAMS_TRIED = 5
_MARKED_REPLY = "x7q"
"""content that no chat template writes itself"""


class FileTokenizer:
    """A tokenizer that transformers reads, with a `tokenizer.json`.

    Args:
        files: contents of `tokenizer.json` and of the optional `TOKENIZER_FILES`, by name.
        name: name of the tokenizer in errors.
        chat_template: replaces that of the files.
        class_settings: see `read_class_settings`; None = of files that were kept.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        name: str,
        chat_template: ChatTemplate | None = None,
        class_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self.files = dict(files)
        """of `TOKENIZER_FILES`"""
        if chat_template is not None:
            self.files[CHAT_TEMPLATE] = chat_template.text.encode()
        self._set_template = chat_template
        config = self._read_object(TOKENIZER_CONFIG)
        self._generation = self._read_object(GENERATION_CONFIG)
        self._library = Library(self.files, name, class_settings or {})
        self._check_declared_ids(config)
        self._check_settings(config)
        if class_settings:
            self._keep_class(config)
        self.template_kwargs: Mapping[str, Any] = {}
        """variables of the chat template; see `ChatTemplate.render`"""
        vocabulary = self._library.encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        digest = hashlib.sha256(self._library.encoder.to_str().encode())
        self.identity = f"{self.vocab_size} tokens, sha256 {digest.hexdigest()}"
        self.eos_id: int = self._find_eos_id(vocabulary)
        self.bos_id: int | None = self._library.tokenizer.bos_token_id
        self.n_model_ids = self.vocab_size
        """ids that texts may have"""
        text_bytes = TextBytes(self._library, self.vocab_size, self._special_tokens)
        self.count_bytes = text_bytes.count
        self.tells_bytes = text_bytes.tells

    def _read_object(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, {} if there is none."""
        return parse_object(self.files.get(name, b"{}"), f"{self._name}: {name}")

    def _find_eos_id(self, vocabulary: Mapping[str, int]) -> int:
        if self._library.tokenizer.eos_token_id is not None:
            return self._library.tokenizer.eos_token_id
        for token in _EOS_TOKENS:  # of a tokenizer.json alone
            if token in vocabulary:
                return vocabulary[token]
        advice = f"set eos_token in a {TOKENIZER_CONFIG} in the same directory"
        raise self._library.error(f"it has no end-of-text token; {advice}")

    def _check_declared_ids(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError for a token that the library gives another id than is declared."""
        with self._library.errors():
            tokens = config.get("added_tokens_decoder", {}).items()
            declared = {token["content"]: int(i) for i, token in tokens}
        for text, i in declared.items():
            found = self._library.encoder.token_to_id(text)
            if found != i:
                problem = f"{json.dumps(text)} is id {i}, but {found} in {TOKENIZER_JSON}"
                raise self._library.error(
                    f"{TOKENIZER_CONFIG}: {problem}; correct added_tokens_decoder"
                )

    def _check_settings(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if the tokens of a text are random, or those in texts are text."""
        dropout = getattr(self._library.encoder.model, "dropout", None)
        if dropout:
            problem = f"model.dropout is {dropout:g}, with which the tokens of a text are random"
            raise self._library.error(f"{TOKENIZER_JSON}: {problem}; set it to null")
        if config.get(_SPLIT_SPECIAL):
            problem = f"{_SPLIT_SPECIAL} is true, with which special tokens in texts are text"
            raise self._library.error(f"{TOKENIZER_CONFIG}: {problem}; set it to false")

    def _keep_class(self, config: dict[str, Any]) -> None:
        """Name the class of transformers, which the model's config.json may have decided."""
        found = type(self._library.tokenizer).__name__
        if config.get("tokenizer_class") in (found, f"{found}Fast"):
            return
        config["tokenizer_class"] = found
        self.files[TOKENIZER_CONFIG] = json.dumps(config, indent=2).encode()

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
            raise self._library.error(f"{problem}; {advice}, or {advise_size(self.eos_id + 1)}")
        if self.bos_id is not None and self.bos_id >= n_ids:
            self.bos_id = None  # no text of this model starts with it

    def _describe_id(self, token: int) -> str:
        text = json.dumps(self._library.encoder.id_to_token(token), ensure_ascii=False)
        return f"{text} is id {token}, which the model, with {self.n_model_ids} ids, does not have"

    def _check_ids(self, ids: Sequence[int] | NDArray[np.uint32]) -> None:
        """Raise ConfigError for ids that the model does not have."""
        if self.vocab_size <= self.n_model_ids:
            return
        highest = int(max(ids, default=0))
        if highest >= self.n_model_ids:
            problem = self._describe_id(highest)
            raise self._library.error(
                f"{problem}; remove it from the text, or {advise_size(highest + 1)}"
            )

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated text: end of text, and those of generation_config.json."""
        generation_eos = as_list(self._generation.get("eos_token_id"))
        if not all(type(each) is int for each in generation_eos):
            shown = json.dumps(self._generation["eos_token_id"])[:60]
            problem = f"{GENERATION_CONFIG}: eos_token_id is {shown}"
            raise self._library.error(f"{problem}, not an integer or a list of integers")
        return frozenset([self.eos_id, *generation_eos])

    @functools.cached_property
    def chat_stop_ids(self) -> frozenset[int]:
        """Ids that end a reply: `stop_ids`, and the chat template's end of turn."""
        try:
            return self.stop_ids | self._end_of_turn_ids()
        except ConfigError:  # a template that rejects such a chat
            return self.stop_ids

    def _end_of_turn_ids(self) -> set[int]:
        """Return the first special token that the chat template writes after a reply, if any."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKED_REPLY}]
        rendered = self.render(chat)
        _, _, after_reply = rendered.text.rpartition(_MARKED_REPLY)
        for token in self._library.encode(after_reply):
            if token in self._special_tokens:
                return {token}
        return set()

    @functools.cached_property
    def _special_tokens(self) -> Mapping[int, str]:
        """Tokens that are no text, by id: those declared special, and the end of text."""
        added_tokens = self._library.encoder.get_added_tokens_decoder()
        special = {i: token.content for i, token in added_tokens.items() if token.special}
        return special | {self.eos_id: self._library.encoder.id_to_token(self.eos_id)}

    @functools.cached_property
    def _start_ids(self) -> list[int]:
        """Ids that the tokenizer writes before any text; some append an end of text, too."""
        with self._library.errors():
            encoding = self._library.encoder.encode("a")
        is_written: list[int] = encoding.special_tokens_mask  # by the tokenizer, not in the text
        return encoding.ids[: sum(itertools.takewhile(bool, is_written))]

    def _add_start(self, ids: list[int]) -> list[int]:
        """Return the ids of a text with the start of a text, which the text may have itself."""
        start = self._start_ids
        if ids[: len(start)] == start:
            return ids
        return start + ids

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
        with self._library.errors():
            encodings = self._library.encoder.encode_batch_fast(
                [first for first, *_ in split], add_special_tokens=False
            )
        results: list[NDArray[np.uint32]] = []
        for encoding, (_, *others) in zip(encodings, split, strict=True):
            first = np.array(self._add_start(encoding.ids), np.uint32)
            self._check_ids(first)
            results.append(np.concatenate([first, *map(self.encode_piece, others)]))
        return results

    def encode_piece(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a chat, or of a piece that is not the first of its text."""
        ids = np.array(self._library.encode(text), np.uint32)
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
        yield text

    def _find_seam(self, text: str, first: int) -> int | None:
        """Return where a text can be cut, from its character `first` on; None = nowhere near."""
        encode = self._library.encode
        found = _SEAM.finditer(text, first, first + _PIECE_SIZE)
        for match in itertools.islice(found, _SEAMS_TRIED):
            seam = match.start()
            before = text[seam - _SEAM_CONTEXT : seam]
            after = text[seam : seam + _SEAM_CONTEXT]
            if encode(before + after) == encode(before) + encode(after):
                return seam
        return None

    def encode_with_ends(self, text: str, *, with_start: bool) -> TokenizedText:
        """Return the ids of a text and their ends.

        Args:
            with_start: False for a text from `render`, which has what precedes it.
        """
        with self._library.errors():
            encoding = self._library.encoder.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        ends = [end for _, end in encoding.offsets]
        if with_start:
            ids = self._add_start(ids)
        self._check_ids(ids)
        ends = [0] * (len(ids) - len(ends)) + ends
        return TokenizedText(np.array(ids, np.uint32), np.array(ends, np.int64))

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
        while self._library.decode(prefix).endswith("\ufffd"):
            prefix.pop()  # an incomplete character makes DecodeStream repeat the prefix
        decoder = DecodeStream(ids=prefix, skip_special_tokens=True)
        pending: list[int] = []
        for token in ids:
            if token == self.eos_id:
                yield self._library.decode(pending) + "\n\n"
                decoder = DecodeStream(skip_special_tokens=True)
                pending = []
                continue
            pending.append(token)
            try:
                with self._library.errors():
                    piece = decoder.step(self._library.encoder, token)
            except ConfigError:  # invalid UTF-8 after valid bytes
                piece = self._library.decode(pending)
                decoder = DecodeStream(ids=pending, skip_special_tokens=True)
            if piece is not None:
                pending = []
                yield piece
        yield self._library.decode(pending)

    def find_template(self, tools: Any = None) -> ChatTemplate:
        """Return the chat template for a chat, as transformers chooses it."""
        if self._set_template is not None:
            return self._set_template
        text: Any = None
        with contextlib.suppress(ValueError):
            text = self._library.tokenizer.get_chat_template(tools=tools)
        if not isinstance(text, str):
            problem = "has no chat template (chat_template in tokenizer_config.json)"
            remedy = "use that of a chat model, or set chat_template to a file or a name in TRL"
            raise self._library.error(f"{problem}; {remedy}")
        return ChatTemplate(text, f"tokenizer: {self._name}: its chat template")

    @property
    def template_text(self) -> str | None:
        """The chat templates of all chats as one text; None = there is none."""
        try:
            texts = [self.find_template(tools).text for tools in (None, [])]
        except ConfigError:
            return None
        return "\n".join(dict.fromkeys(texts))

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
        found = {"eos_token": self._library.encoder.id_to_token(self.eos_id)}
        variables = found | self._library.tokenizer.special_tokens_map | self.template_kwargs
        return self.find_template(tools).render(
            messages, tools, variables, add_generation_prompt=add_generation_prompt
        )
