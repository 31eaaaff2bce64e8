"""Tokenizers: UTF-8 bytes, or those of transformers that have a `tokenizer.json`.

A tokenizer is defined by its `files` alone. Every checkpoint holds a copy of them, so that it can
generate text anywhere. `loading` makes a `ByteTokenizer` or a `FileTokenizer` of them.
"""
