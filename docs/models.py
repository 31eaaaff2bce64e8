"""Examine every class of the installed transformers that generates text, and write docs/models.md.

    python -m docs.models

A class is examined with the default sizes of its config, which the examination cuts, and as a
decoder (`is_decoder`) if it is an encoder by default. Each has a process, killed after five
minutes. It takes about a quarter of an hour on one core.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from lm.errors import RunError
from lm.hf.examine import FROM_FLOAT32, Examination, examine
from lm.transformers_model import text_config

PAGE = Path(__file__).with_name("models.md")
LIMIT = 300
"""seconds of a class"""
_INDEXED = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
TYPICAL: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000.0, "clip_qkv": 8}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}
"""Values of published models, by model type, without which the defaults of a class fail."""

_HEAD = """# Models of transformers

`init_from` takes every causal language model that transformers can build, with transformers' own
modeling code. Before the first step, a small random
model of the class is [examined](transformers.md#the-examination): what does not
hold is turned off in a line, and a class that would be trained wrongly is refused.

    python -m lm.hf examine DIRECTORY|OWNER/MODEL|MODEL_TYPE

`python -m docs.models` writes this page. It was tested with transformers {transformers} and PyTorch
{torch}, on a CPU without kernels of other packages. On another machine, the examination there
decides.

{counts} An examination takes {median:.1f} s of a core
in the median, {most:.0f} s at most (`{slowest}`).

"Rows up to" names the key of `config.json` that `max_seq_len` must not exceed, as beyond it the
class computes nothing, or a text by the length of its row. The rope types longrope and dynamic,
which these defaults do not have, limit rows to the original context.

The fourth column is how far a run in bfloat16 is from float32, and in parentheses how far the class
itself in bfloat16 is: norms of the differences of all logits and of all gradients, relative to
those of float32.

"""


def examine_in_process(model_type: str) -> Examination | str:
    """Return the examination of a model type, or why there is none."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(model_type, sender))
    process.start()
    sender.close()
    found: Examination | str = f"no answer in {LIMIT} s"
    try:
        if receiver.poll(LIMIT):
            answer = receiver.recv()
            found = answer["problem"]
            if answer["examination"] is not None:
                found = Examination.model_validate_json(answer["examination"])
    except EOFError:
        found = "the process ended"
    process.kill()
    process.join()
    return found


def default_config(model_type: str) -> dict[str, Any]:
    """Return the complete values of the default config, as a decoder if it can be an encoder."""
    given = {"model_type": model_type, **TYPICAL.get(model_type, {})}
    values = text_config(given)
    if values.get("is_decoder") is False:
        values = text_config({**given, "is_decoder": True})
    return values


def _examine(model_type: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        values = default_config(model_type)
        sender.send({"examination": examine(values).model_dump_json(), "problem": ""})
    except RunError as error:
        sender.send({"examination": None, "problem": str(error)})


def main() -> None:
    """Write the page."""
    torch.compiler.reset()  # imports the compiler, once for all processes
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    rows: list[str] = []
    kinds: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for model_type in sorted(names):
        found = examine_in_process(model_type)
        if isinstance(found, Examination):
            seconds[model_type] = found.seconds
        kind, row = _describe(model_type, found)
        kinds[kind] += 1
        rows.append(row)
        print(row, flush=True)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    slowest = max(seconds, key=seconds.__getitem__)
    head = _HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        counts=f"Of {len(rows)} model types: {counts}.",
        median=statistics.median(seconds.values()),
        most=seconds[slowest],
        slowest=slowest,
    )
    columns = "| model_type | class | what of it holds | bfloat16 | s |"
    table = [columns, "|---|---|---|---|---|", *rows]
    PAGE.write_text(head + "\n".join(table) + "\n")


def _describe(model_type: str, found: Examination | str) -> tuple[str, str]:
    """Return how an examination ended, and the row of the model type."""
    if isinstance(found, str):
        text = found.replace("|", "/").replace("\n", " ")
        answer = f"not examined: {text[:160]}"
        return "not examined", f"| `{model_type}` | | {answer} | | |"
    kind = "in which all holds"
    answer = "all"
    details = [
        f"{question} ({finding.detail.partition(':')[0]})"
        for question, finding in found.findings.items()
        if not finding.holds
    ]
    if found.refusals():
        kind = "refused"
        answer = "refused: " + found.refusals()[0].removeprefix(f"{found.class_name}: ")
    elif details:
        kind = "trained with something off"
        answer = f"off: {'; '.join(details)}".replace("|", "/")
    if found.limits and not found.refusals():
        answer += f"; rows up to `{'`, `'.join(map(str, found.limits))}`"
    distance = ""
    if "bfloat16" in found.findings and found.findings["bfloat16"].holds:
        distance = found.findings["bfloat16"].detail.removeprefix(FROM_FLOAT32)
    row = f"| `{model_type}` | {found.class_name} | {answer} | {distance} | {found.seconds:.1f} |"
    return kind, row


if __name__ == "__main__":
    main()
