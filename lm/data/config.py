"""The hyperparameters of the data."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator

from lm.data.named_fields import check_fields
from lm.errors import ConfigError
from lm.fields import Config, Fixed, Logged, Needs, Varied, elsewhere
from lm.units import format_count

MAX_BATCH_SIZE = 2**24
"""Sequences; the order of a global batch is drawn in memory."""
LENGTHS = 8
"""How many lengths rows of one sample can have: each is compiled."""
_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


T = TypeVar("T")
OfFiles = Annotated[T, Needs("dataset", ("text", "tokens", "jsonl", "hf"))]
OfRecords = Annotated[T, Needs("dataset", ("jsonl", "hf"))]
OfJsonLines = Annotated[T, Needs("dataset", ("jsonl",))]
OfTokens = Annotated[T, Needs("dataset", ("text", "tokens"))]
OfStreams = Annotated[T, Needs("dataset", ("hf",))]


class DataConfig(Config, frozen=True):
    """Hyperparameters of the data."""

    dataset: Fixed[Literal["synthetic", "text", "tokens", "jsonl", "hf"]] = Field(
        "synthetic",
        description="random tokens, UTF-8 text, token files (`python -m lm.prepare`), JSON Lines or"
        " a streamed dataset",
        json_schema_extra=elsewhere(
            "", {"json": "did you mean jsonl?", "txt": "did you mean text?"}
        ),
    )
    train_data: OfFiles[Fixed[str | dict[str, Annotated[float, Field(gt=0)]] | None]] = Field(
        None,
        description="a file, directory or glob; text: null = the Python standard library's source;"
        " tokens: a directory, or several with weights; jsonl: also a directory of `python -m"
        " lm.prepare --config`; hf: also a dataset on the hub",
        json_schema_extra=elsewhere(
            "data_dir data_path dataset_path root_dir sources train_dataset train_file"
        ),
    )
    val_data: OfFiles[Logged[str | dict[str, str] | None]] = Field(
        None,
        description="a file, directory or glob, or several by name ({wiki: PATH, code: PATH}), each"
        " with its loss; null = held out of train_data: 5 % (text, jsonl), the directory's"
        " validation part (tokens); hf: also a split,"
        " null = `validation`",
        json_schema_extra=elsewhere(
            "eval_data eval_dataset test_datasets validation.dataset validation_file"
        ),
    )
    tokenizer: OfFiles[Fixed[str | None]] = Field(
        None,
        description="`bytes` (257 ids), a tokenizer.json, its directory, or a Hugging Face name;"
        " null = that of the token files (tokens), else bytes",
        json_schema_extra=elsewhere(
            "hf_assets_path tokenizer_dir tokenizer_name tokenizer_name_or_path tokenizer_path"
        ),
    )
    fields: OfRecords[Fixed[dict[str, str] | None]] = Field(
        None,
        description="what the keys of records hold, e.g. {user: question, assistant: answer} or"
        ' {text: "{title}\\n{body}"}; other keys are left out; null = records have the keys of'
        " docs/data.md (jsonl, hf)",
        json_schema_extra=elsewhere("column_mapping field_mapping"),
    )
    loss_on: OfJsonLines[Logged[Literal["all", "completion"]]] = Field(
        "all",
        description="tokens that are targets (jsonl)",
        json_schema_extra=elsewhere(
            "completion_only_loss assistant_only_loss mask_prompt",
            {"assistant true": "did you mean completion?", "false": "did you mean all?"},
        ),
    )
    chat_template: OfJsonLines[Fixed[str | None]] = Field(
        None,
        description="a Jinja file, or the name of a template in TRL's package, e.g. qwen3_training;"
        " null = the tokenizer's (jsonl)",
        json_schema_extra=elsewhere("chat_template_path"),
    )
    chat_template_kwargs: OfJsonLines[Logged[dict[str, Any] | None]] = Field(
        None,
        description="variables of the chat template, e.g. {enable_thinking: false}; today's date is"
        " always 2024-07-26 (jsonl)",
    )
    packing: OfJsonLines[Logged[bool]] = Field(
        True,
        description="several samples in a sequence, each in one piece; false = one sample (jsonl)",
        json_schema_extra=elsewhere("sample_packing"),
    )
    data_workers: OfStreams[Logged[int]] = Field(
        1,
        gt=0,
        description="processes per rank that read and tokenize (hf)",
        json_schema_extra=elsewhere("dataloader_num_workers num_workers"),
    )
    hf_config: OfStreams[Logged[str | None]] = Field(
        None,
        description="configuration of the dataset on the hub, e.g. en for C4 (hf)",
        json_schema_extra=elsewhere("dataset_config dataset_config_name"),
    )
    attend_across_documents: OfTokens[Fixed[bool]] = Field(
        True,
        description="attend to earlier documents of a sequence; false = each document by itself,"
        " without a target after its end (text, tokens)",
    )
    shuffle: Fixed[bool] = Field(True, description="shuffle the samples in each epoch, by the seed")
    batch_size: Varied[Logged[int]] = Field(
        1,
        gt=0,
        le=MAX_BATCH_SIZE,
        description="sequences per device in a micro-batch",
        json_schema_extra=elsewhere(
            "device_batch_size local_batch_size micro_batch_size per_device_train_batch_size"
            " train_micro_batch_size_per_gpu"
        ),
    )
    total_batch_size: Varied[Fixed[int | None]] = Field(
        None,
        gt=0,
        le=MAX_BATCH_SIZE,
        description="sequences per optimizer step over all ranks; null = batch_size x ranks",
        json_schema_extra=elsewhere("global_batch_size train_batch_size"),
    )
    validation_batches: Logged[int] = Field(
        10,
        gt=0,
        description="batches of total_batch_size in a validation, of each set of val_data",
        json_schema_extra=elsewhere("eval_iters eval.max_iters limit_val_batches validation.steps"),
    )

    @field_validator("val_data")
    @classmethod
    def _check_names(cls, val_data: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if not isinstance(val_data, dict):
            return val_data
        if not val_data:
            raise ValueError("{} names no data; use NAME: PATH, or null")
        for name in val_data:
            if not _SET_NAME.fullmatch(name):
                rule = "use up to 40 letters, digits, - and _"
                raise ValueError(f"{name[:60]!r} cannot be part of a metric's name; {rule}")
        return val_data

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: dict[str, str] | None) -> dict[str, str] | None:
        if fields is not None:
            check_fields(fields)
        return fields

    @property
    def text_source(self) -> str:
        """The key of a text in records that are streamed, or a template of keys."""
        return (self.fields or {}).get("text", "text")

    @property
    def named_val_data(self) -> dict[str | None, str]:
        """The value of `val_data` by the names of its sets, None for one without."""
        if isinstance(self.val_data, dict):
            return {**self.val_data}
        if self.val_data is None:
            return {}
        return {None: self.val_data}

    def row_lengths(self, seq_len: int) -> list[int]:
        """Return the tokens that the rows of a micro-batch can have, the fewest first.

        With `packing: false`, they are as few of these as its longest row needs.
        """
        if self.packing:
            return [seq_len]
        unit = math.ceil(seq_len / LENGTHS)
        return [min(seq_len, unit * number) for number in range(1, LENGTHS + 1)]


def derive_global_batch_size(config: DataConfig, dp_size: int) -> int:
    """Return the sequences per optimizer step over all ranks.

    Raises:
        ConfigError: it is not a multiple of batch_size * dp_size; names the nearest ones.
    """
    n_per_micro_step = config.batch_size * dp_size
    total = config.total_batch_size or n_per_micro_step
    if total % n_per_micro_step != 0:
        below = total // n_per_micro_step * n_per_micro_step
        nearest = f"{below + n_per_micro_step}"
        if below > 0:
            nearest = f"{below} or {nearest}"
        unit = f"batch_size {config.batch_size} x {format_count(dp_size, 'data-parallel rank')}"
        problem = f"{total} is not a multiple of {unit}"
        raise ConfigError(f"total_batch_size: {problem}; use {nearest}")
    return total
