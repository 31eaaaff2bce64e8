"""Conversion of Hugging Face weights to a checkpoint, and back.

    python -m lm.hf import SOURCE OUT [--revision R]
    python -m lm.hf export CHECKPOINT OUT [--dtype float32|bfloat16|float16]

SOURCE is a directory with config.json and safetensors files, or a name on the Hugging Face Hub. An import writes a
checkpoint of step 0 to OUT: `init_from: OUT` starts a run with its weights. CHECKPOINT is a checkpoint or run
directory, written by any number of ranks; an export writes a directory to OUT that `from_pretrained` loads.

An import holds 256 MiB in memory, an export the largest tensor. Both write to a temporary directory
that is renamed when it is complete. No pickle is read from SOURCE.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tokenizers
import torch
from torch import Tensor
from tqdm import tqdm

from lm.checkpoint.checkpointer import find_tensors
from lm.checkpoint.manifest import FORMAT, FileRecord, Manifest, read_manifest, record, verify, write_manifest
from lm.checkpoint.resume import find_checkpoint
from lm.checkpoint.tensor_files import read_into, write_tensors
from lm.data.tokenizer import END_OF_TEXT, FILE, ByteTokenizer, FileTokenizer, Tokenizer, read_files, tokenizer_of
from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.fileio import write_durably
from lm.hf import families
from lm.hf.families import TensorSlice
from lm.hf.weights import DTYPES, Weights, find_source, open_files, read_json, write_rows
from model import ModelConfig, Transformer

CHUNK_BYTES = 8 << 20
"""Size of the rows that are compared at once."""
FILE_BYTES = 1 << 28
"""File size in an imported checkpoint. One file is in memory at a time."""


@oserror_as_config_error
def _refuse_used(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists and is not overwritten; use another directory")


@contextmanager
def _drafted(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary directory next to `out` that is renamed to `out` on success and deleted on failure.

    Raises:
        ConfigError: `out` cannot be created.
        RunError: the disk is full or fails.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be created: {error.strerror}") from None
    try:
        free = shutil.disk_usage(draft).free
        if free < needed:
            raise RunError(f"{out}: disk full: {needed:,} bytes are needed, {free:,} are free")
        yield draft
        draft.rename(out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _files(
    weights: Weights, slices: Mapping[str, tuple[TensorSlice, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, tuple[Tensor, tuple[int, ...]]]]:
    """Yield the content of each file: rows of our parameters in float32, and their offsets."""
    content: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    filled = 0
    for name, shape in shapes.items():
        row_bytes = 4 * torch.Size(shape[1:]).numel()
        step = max(1, FILE_BYTES // row_bytes)
        for first in range(0, shape[0], step):
            rows = torch.empty((min(step, shape[0] - first), *shape[1:]))
            for part in slices[name]:
                start, stop = max(first, part.start), min(first + len(rows), part.stop)
                if start < stop:
                    rows[start - first : stop - first] = weights.rows(part, start - part.start, stop - part.start)
            if not torch.isfinite(torch.stack(torch.aminmax(rows))).all():
                raise RunError(f"{name}: contains inf or NaN; download the weights again, or use others")
            if content and filled + rows.nbytes > FILE_BYTES:
                yield content
                content, filled = {}, 0
            content[name] = rows, (first, *(0 for _ in shape[1:]))
            filled += rows.nbytes
    yield content


def import_model(
    source: str, out: Path, revision: str | None = None, log: Callable[[str], None] = lambda _: None
) -> Manifest:
    """Convert the model `source` to the checkpoint `out` with float32 weights.

    Args:
        log: is called with notes about the tokenizer.

    Raises:
        ConfigError: `source` cannot be read or not be represented exactly, or `out` exists.
        RunError: a file is damaged, or `out` cannot be written.
    """
    _refuse_used(out)
    folder = find_source(source, revision)
    family, config = families.read_config(read_json(folder / "config.json"), str(folder / "config.json"))
    slices = families.layout(family, config)
    weights = Weights(folder, family.prefix)
    wanted = {part.name: part.shape for parts in slices.values() for part in parts}
    if config.tie_embeddings:
        _drop_tied_head(folder, weights, slices)
    weights.compare(folder, wanted)
    tokenizer = _find_tokenizer(folder, config.vocab_size, log)
    extra_files = tokenizer.files if tokenizer else {}
    total = 4 * config.n_parameters
    with _drafted(out, total) as draft, tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
        files: dict[str, FileRecord] = {}
        for number, content in enumerate(_files(weights, slices, _shapes(config))):
            path = draft / f"model-00000-{number:05}.safetensors"
            checksum = write_tensors(path, content)
            files[path.name] = FileRecord(bytes=path.stat().st_size, crc32c=checksum)
            progress.update(sum(rows.nbytes for rows, _ in content.values()))
        for name, extra in extra_files.items():
            write_durably(draft / name, extra)
            files[name] = record(draft / name)
        model = config.model_dump(mode="json")
        manifest = Manifest(
            format=FORMAT,
            step=0,
            time=time.time(),
            world_size=1,
            sharding="no-shard",
            total_batch_size=1,
            tokens=0,
            validation_loss=None,
            hyperparameters=model,
            model=model,
            tokenizer=tokenizer and tokenizer.identity,
            data={"train": f"weights of {source}, imported"},
            loss_scaled=False,
            trial_id=None,
            files=files,
        )
        write_manifest(draft, manifest)
    return manifest


def _find_tokenizer(folder: Path, vocab_size: int, log: Callable[[str], None]) -> FileTokenizer | None:
    if FILE not in read_files(folder):
        log(
            f"{folder}: no {FILE}, so the checkpoint has no tokenizer; to add one, load the tokenizer with"
            f" transformers and save_pretrained({str(folder)!r})"
        )
        return None
    tokenizer = tokenizer_of(folder)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}: remove the added"
            " tokens from the tokenizer, or load the model with transformers, resize_token_embeddings() and"
            " save_pretrained() it"
        )
    if tokenizer.vocab_size < vocab_size:
        log(f"vocab_size: keep {vocab_size}, of which the tokenizer uses {tokenizer.vocab_size}")
    return tokenizer


def _drop_tied_head(folder: Path, weights: Weights, slices: Mapping[str, tuple[TensorSlice, ...]]) -> None:
    """Drop a tied output matrix that the files contain although it is tied; it must equal the embedding."""
    head = weights.tensors.get("lm_head.weight")
    (tokens,) = slices["embedding.tokens.weight"]
    embedding = weights.tensors.get(tokens.name)
    if head is None or embedding is None:
        return
    step = max(1, CHUNK_BYTES // (4 * tokens.shape[1]))
    for start in range(0, tokens.stop, step):
        stop = min(start + step, tokens.stop)
        rows = weights.rows(tokens, start, stop)
        if head.shape != embedding.shape or not rows.equal(
            weights.rows(tokens._replace(name="lm_head.weight"), start, stop)
        ):
            raise ConfigError(
                f"{folder}: config.json ties lm_head.weight to {tokens.name}, but the file has a different one;"
                " set tie_word_embeddings: false in config.json to use it"
            )
    del weights.tensors["lm_head.weight"]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def export_model(where: Path, out: Path, dtype: str = "float32") -> int:
    """Convert a checkpoint to the directory `out` for transformers' `from_pretrained`.

    Args:
        where: a checkpoint or run directory.
        dtype: a key of `DTYPES`.

    Returns:
        Bytes of weights.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        ConfigError: no Hugging Face model has this structure (lists every key that differs), or `out` exists.
        RunError: `out` cannot be written, or a weight exceeds the range of float16.
    """
    _refuse_used(out)
    folder = find_checkpoint(where)
    manifest = read_manifest(folder)
    config = ModelConfig.model_validate(manifest.model)
    family = families.family_of(config)
    verify(folder, manifest)
    tokenizer = None
    if manifest.tokenizer:
        tokenizer = ByteTokenizer() if manifest.tokenizer == ByteTokenizer.identity else tokenizer_of(folder)
    specials = (tokenizer.eos_id, tokenizer.bos_id) if tokenizer else (None, None)
    raw = families.write_config(config, dtype, *specials)
    with torch.device("meta"):
        sources = find_tensors(folder, manifest, {"model": Transformer(config)})
    slices = families.layout(family, config)
    total = DTYPES[dtype][1].itemsize * config.n_parameters
    with _drafted(out, total) as draft, tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
        with ExitStack() as files:
            slots = open_files(draft, [part for parts in slices.values() for part in parts], dtype, files)
            for name, parts in slices.items():
                meta, source = sources[f"model.{name}"]
                tensor = torch.empty(meta.shape)
                read_into(tensor, source)
                for part in parts:
                    progress.update(write_rows(slots[part.name], part, 0, tensor, DTYPES[dtype][1]))
        (draft / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        for name, content in (_tokenizer_files(tokenizer) if tokenizer else {}).items():
            (draft / name).write_bytes(content)
    return total


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer` reads; the byte tokenizer becomes a byte-level BPE without merges."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        # Byte-level BPE represents a non-printing byte by a letter from U+0100 on.
        printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {byte: chr(byte) for byte in printed}
        letters |= {byte: chr(256 + at) for at, byte in enumerate(sorted(set(range(256)) - set(printed)))}
        encoder = tokenizers.Tokenizer(tokenizers.models.BPE({letters[byte]: byte for byte in range(256)}, []))
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.decoder = tokenizers.decoders.ByteLevel()
        encoder.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True)])
        files[FILE] = encoder.to_str(pretty=True).encode()
    end = tokenizers.Tokenizer.from_buffer(files[FILE]).id_to_token(tokenizer.eos_id)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    return {"tokenizer_config.json": json.dumps(settings, indent=2).encode()} | files
