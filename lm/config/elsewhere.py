"""Keys of other trainers that are no other name of one key here, and what to set instead.

A key that only has another name elsewhere is an alias of its field (`lm.fields`).
"""

from __future__ import annotations

import re

_LAYERS = "adapters are trained alone, without complete layers next to them"
_DORA = "DoRA is not supported; it needs the norms of the merged weights at each step"
_ALL_WEIGHTS = "remove {key}, or train all weights with lora_rank: null"
_HELD_OUT = "null holds out a part of train_data"
KEYS_ELSEWHERE = {
    # batches and length
    "gradient_accumulation_steps grad_accumulation_steps grad_acc_steps grad_accum"
    " accumulate_grad_batches": "set total_batch_size to batch_size x ranks x accumulation steps",
    "per_device_eval_batch_size eval_batch_size": "validation uses batch_size; remove {key}",
    "max_tokens total_tokens": "set max_steps to tokens / (total_batch_size x max_seq_len)",
    "devices num_nodes num_processes num_machines gpus n_gpus gpu_ids world_size nproc"
    " nproc_per_node": "the launcher says how many ranks there are; remove {key}",
    # optimizer
    "betas adam_betas": "set beta1 and beta2",
    "min_lr lr_min min_learning_rate final_lr": "set min_lr_ratio to the final rate / lr",
    "lr_decay_iters": "the learning rate decays until max_steps; remove {key}",
    # data
    "datasets dataset_name pretraining_dataset training.dataset": "set train_data, and dataset to"
    " its format (text, tokens, jsonl, hf)",
    "val_split validation_split val_split_fraction val_set_size val_size": "set val_data to files,"
    f" or with dataset: hf to a split; {_HELD_OUT}",
    "text_field dataset_text_field text_column": "set fields: {{text: KEY}}",
    "field_messages": "set fields: {{messages: KEY}}",
    "train_on_inputs": "set loss_on: all if it is true, else completion",
    # memory and precision
    "bf16": "set amp_dtype: bfloat16",
    "fp16": "set amp_dtype: float16",
    "adapter finetuning_type use_peft": "set lora_rank, for QLoRA also base_dtype: nf4",
    "load_in_4bit quantization_bit": "set base_dtype: nf4",
    "load_in_8bit": "8 bits are not supported; set base_dtype: nf4, or remove {key}",
    "lora_target_linear": "lora_targets: null adapts all linear layers; remove {key}",
    "modules_to_save lora_modules_to_save": f"{_LAYERS}; {_ALL_WEIGHTS}",
    "use_dora peft_use_dora": f"{_DORA}; {_ALL_WEIGHTS}",
    "zero_stage zero_optimization deepspeed": "set sharding: full-shard for ZeRO-3, grad-shard for"
    " ZeRO-2",
    "fsdp_config": "set sharding, layer_wrap, cpu_offload, activation_checkpointing",
    "reshard_after_forward fsdp_reshard_after_forward": "set sharding: full-shard if it is true,"
    " else grad-shard",
    "offload_optimizer offload_param": "set cpu_offload: true, for parameters, gradients and"
    " optimizer state",
    "data_parallel_shard_degree data_parallel_replicate_degree dp_shard dp_shard_size dp_replicate"
    " dp_replicate_size": "set sharding: hybrid-full-shard, and shard_group_size to the ranks of a"
    " replica",
    # files
    "output_dir out_dir dump_dir dump_folder log_dir": "set run_name: its files are in"
    " runs/<run_name>/",
    "checkpoint_dir ckpt_dir save_dir checkpoint_path": "checkpoints are in runs/<run_name>/: set"
    " run_name, checkpoint_storage for a bucket, or init_from for weights to start with",
    "overwrite_output_dir": "set resume: fresh to start at step 0",
    "resume_from_step load_step": "set resume to a checkpoint; python -m lm.checkpoint list RUN"
    " names those of each step",
    "saves_per_epoch": "set checkpoint_rate, in steps",
    "evals_per_epoch": "set validation_rate, in steps",
    "model_name": "set init_from to a model of Hugging Face, or model to a preset",
    "trust_remote_code": "code next to weights is never run; remove {key}",
    # trackers
    "wandb wandb_log use_wandb enable_wandb": "set tracker: wandb",
    "wandb_project": "set tracker: wandb, and the environment variable WANDB_PROJECT",
    "tensorboard enable_tensorboard": "its files are always written, `make board` shows them",
}
"""Keys that mean the same, separated by spaces -> what to set instead."""
_MEANINGS = {key: meaning for keys, meaning in KEYS_ELSEWHERE.items() for key in keys.split()}

_OTHER_PARALLELISM = re.compile(
    "(tensor|pipeline|expert)(_model)?_parallel.*|sequence_parallel|(tp|pp|ep)(_size|_degree)?"
)
_NO_PARALLELISM = "tensor, pipeline and expert parallelism are not supported"

_SECTION = re.compile(
    "^(hyperparameters|job|train|training|data|model|optim|optimizer|lr_scheduler|parallelism"
    r"|distributed|metrics|profiling)\.((params|init_args)\.)?"
)


def without_section(key: str) -> str:
    """Return `key` without the section that other trainers write it in, e.g. `training.`."""
    return _SECTION.sub("", key)


def meaning_elsewhere(key: str) -> str | None:
    """Return what to set instead of `key`; None if no other trainer is known to have it."""
    bare = without_section(key)
    if _OTHER_PARALLELISM.fullmatch(bare):
        return f"{_NO_PARALLELISM}; remove {key}: sharding divides the model over ranks"
    for name in (key, bare, key.partition(".")[0]):
        if name in _MEANINGS:
            return _MEANINGS[name].format(key=key)
    return None
