"""What of a class of transformers can be trained here, in words."""

from __future__ import annotations

from pathlib import Path

from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, error_prefix, without_prefix
from lm.hf import weights
from lm.hf.examine import examine
from lm.hf.quantization import quantization_of
from lm.transformers_model import text_config


@without_prefix("init_from")
def describe_examination(source: str) -> tuple[str, int]:
    """Return what of a class of transformers can be trained exactly here, and the exit code.

    Args:
        source: a directory, OWNER/MODEL, or a model_type of transformers, with its default sizes.
    """
    if weights.is_model(source):
        raw = weights.read_config(source)
    elif Path(source).exists():
        raise ConfigError(f"{source}: no directory of Hugging Face: it has no {MODEL_CONFIG}")
    else:
        raw = {"model_type": source}
    with error_prefix(source):
        quantization_of(raw)
        examination = examine(text_config(raw))
    lines = examination.describe()
    refusals = examination.refusals()
    code = 0
    if refusals:
        code = ConfigError.exit_code
        lines += [f"refused: {refusal}" for refusal in refusals]
    return "\n".join(lines), code
