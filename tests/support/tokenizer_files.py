"""Small tokenizers and a chat template, as files in the formats of Hugging Face."""

from __future__ import annotations

import json

from lm.data.tokenizer.loading import train_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'cat' %}{{ raise_exception('no such role: cat') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

_WORDS = (
    "To be, or not to be, that is the question: [user] hi [assistant] ho "
    "abcdefghijklmnopqrstuvwxyz0123456789"
)


def byte_level_tokenizer(vocab_size: int = 300) -> bytes:
    """Return the `tokenizer.json` of a small tokenizer like GPT-2's.

    It is byte-level BPE, with <|endoftext|> after texts.
    """
    return train_tokenizer(iter([_WORDS] * 3), vocab_size)


def llama_tokenizer() -> bytes:
    """Return the `tokenizer.json` of a small tokenizer like Llama's.

    It is BPE with Metaspace and a BOS token, <s>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([_WORDS] * 3, trainer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return tokenizer.to_str().encode()


def llama2_tokenizer(*, newer: bool = False) -> bytes:
    """Return `llama_tokenizer` without word splitting and with byte fallback, as Llama 2's.

    Args:
        newer: in the format of newer versions of `transformers`: Metaspace pre-tokenizer instead of
            a normalizer.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    content = json.loads(llama_tokenizer())
    size = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    content["model"] |= {"byte_fallback": True, "fuse_unk": True}
    spaced = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    plain = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    if newer:
        metaspace = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = metaspace  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokenizer.normalizer = spaced  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(plain)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.to_str().encode()
