"""The hyperparameters of training, and what follows from them, without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from lm.errors import ConfigError
from lm.fields import Config, Fixed, Logged, Needs, Unlogged, Varied, elsewhere
from lm.model_config import MAX_LAYERS, LinearLayers
from lm.transformers_config import AnyModelConfig, ExpertMatrices

NF4_BLOCK = 64
"""Weights per scale in NF4."""
FLOAT8_MULTIPLE = 16
"""The kernels need rows that are aligned to 16 bytes, which hold 16 numbers."""


# ---- adapters


T = TypeVar("T")
OfAdapters = Annotated[T, Needs("lora_rank")]


class LoraConfig(Config, frozen=True):
    """Low-rank adapters, trained instead of the weights of `init_from`."""

    lora_rank: Fixed[int | None] = Field(
        None,
        gt=0,
        description="rank of the adapters; null = train all weights",
        json_schema_extra=elsewhere("lora_r r"),
    )
    lora_alpha: OfAdapters[Fixed[float]] = Field(
        16.0, gt=0, description="the adapters' output is scaled by lora_alpha / lora_rank"
    )
    use_rslora: OfAdapters[Fixed[bool]] = Field(
        False,
        description="scale it by lora_alpha / sqrt(lora_rank) instead, for high ranks",
        json_schema_extra=elsewhere("peft_use_rslora"),
    )
    lora_dropout: OfAdapters[Fixed[float]] = Field(
        0.0, ge=0, lt=1, description="probability of zeroing an input of the adapters"
    )
    lora_targets: OfAdapters[Fixed[list[str] | Literal["all"] | None]] = Field(
        None,
        min_length=1,
        description="layers with adapters, e.g. [q_proj, experts.down_proj]; null = the blocks'"
        " linear layers that are as wide as the rank; all = also each expert's matrices",
        json_schema_extra=elsewhere(
            "target_modules lora_target_modules", {"alllinear": "did you mean null?"}
        ),
    )
    base_dtype: OfAdapters[Fixed[Literal["nf4", "mxfp4"] | None]] = Field(
        None,
        description="dtype of the blocks' frozen matrices; nf4 = 4.5 bits a weight, as in QLoRA;"
        " mxfp4 = experts as the files have them, 4.25 bits; null = the compute dtype",
        json_schema_extra=elsewhere("bnb_4bit_quant_type quantize"),
    )

    @property
    def lora_scale(self) -> float:
        """By which the adapters' output is multiplied."""
        assert self.lora_rank is not None
        if self.use_rslora:
            return self.lora_alpha / math.sqrt(self.lora_rank)
        return self.lora_alpha / self.lora_rank

    def adapts(self, kind: str, out: int, inner: int, *, of_experts: bool = False) -> bool:
        """Return whether the linear layers of a kind and shape have adapters.

        Without a list of `lora_targets` these are all that the rank does not exceed, so that a gate
        of one output has none.

        Args:
            of_experts: whether they are the matrices of experts.
        """
        if isinstance(self.lora_targets, list):
            return kind in self.lora_targets
        if of_experts and self.lora_targets is None:
            return False
        return self.lora_rank is not None and self.lora_rank <= min(out, inner)


def adaptable_layers(model: AnyModelConfig) -> list[LinearLayers]:
    """Return the linear layers of all blocks, and the matrices of experts that can be adapted."""
    layers = list(model.linear_layers)
    if model.examined.experts:
        layers += model.experts
    return layers


def adapted_layers(config: LoraConfig, model: AnyModelConfig) -> list[LinearLayers]:
    """Return those of all blocks that have adapters."""
    adapted: list[LinearLayers] = []
    for layers in adaptable_layers(model):
        of_experts = isinstance(layers, ExpertMatrices)
        if config.adapts(layers.kind, layers.out, layers.inner, of_experts=of_experts):
            adapted.append(layers)
    return adapted


def adapter_problems(config: LoraConfig, model: AnyModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values do not fit the model, with the reason and the remedy."""
    widths = {layers.inner for layers in model.linear_layers}
    if config.base_dtype == "nf4" and all(inner % NF4_BLOCK for inner in widths):
        problem = f"no linear layer of the blocks has a multiple of {NF4_BLOCK} inputs"
        yield "base_dtype", f"nf4: {problem}; remove base_dtype"
    if config.base_dtype == "mxfp4":
        if model.quantized_as != "mxfp4":
            problem = "the weights of init_from are not in MXFP4 (quantization_config)"
            yield "base_dtype", f"mxfp4: {problem}; use nf4, or remove base_dtype"
        elif not model.examined.experts:
            problem = f"experts of {model.name} do not compute what their weights do"
            yield "base_dtype", f"mxfp4: {problem}; remove base_dtype"
    adaptable = adaptable_layers(model)
    kinds = list(dict.fromkeys(layers.kind for layers in adaptable))
    if isinstance(config.lora_targets, list):
        for name in dict.fromkeys(config.lora_targets):
            if name not in kinds:
                problem = f"this model has no layer {name}"
                if "experts" in name:
                    problem += " that can be adapted"
                yield "lora_targets", f"{problem}; choose from {', '.join(kinds)}"
    if config.lora_rank is None:
        return
    sides = {layers: min(layers.out, layers.inner) for layers in adaptable}
    adapted = adapted_layers(config, model)
    narrowest = min(adapted, key=sides.__getitem__, default=None)
    if not isinstance(config.lora_targets, list) and not adapted:
        narrowest = max(sides, key=sides.__getitem__, default=None)
    if narrowest is not None and config.lora_rank > sides[narrowest]:
        side = f"the smaller side of {narrowest.kind} ({narrowest.out} x {narrowest.inner})"
        yield "lora_rank", f"{config.lora_rank} exceeds {side}; use at most {sides[narrowest]}"
    of_experts = [layers.kind for layers in adapted if isinstance(layers, ExpertMatrices)]
    if of_experts and config.lora_dropout > 0:
        problem = (
            f"{config.lora_dropout} is not defined for adapters of {of_experts[0]}, as in PEFT"
        )
        yield "lora_dropout", f"{problem}; use 0"


def n_trained_parameters(config: LoraConfig, model: AnyModelConfig) -> int:
    """Return the number of trained parameters: those of the adapters, or all."""
    if config.lora_rank is None:
        return model.n_parameters
    n_per_rank = 0
    for layers in adapted_layers(config, model):
        # An adapter of a matrix (out, in) has A (rank, in) and B (out, rank).
        of_each = layers.out + layers.inner
        if isinstance(layers, ExpertMatrices):
            of_each *= layers.n_experts
        n_per_rank += layers.count * of_each
    return config.lora_rank * n_per_rank


# ---- optimizer


DECAYING = ("linear", "cosine", "wsd")
"""schedules whose learning rate decays"""


class OptimConfig(Config, frozen=True):
    """The optimizer, its learning rate schedule, and clipping."""

    optimizer: Fixed[Literal["adamw", "muon"]] = Field(
        "adamw",
        description="optimizer; muon = Muon for the matrices of the blocks, AdamW for embeddings,"
        " head, norms and biases",
        json_schema_extra=elsewhere(
            "optim optimizer.name optimizer.type",
            {"adam adamwhf adamwtorch adamwtorchfused": "did you mean adamw?"},
        ),
    )
    lr: Varied[Logged[float]] = Field(
        1.0e-4,
        gt=0,
        description="peak learning rate",
        json_schema_extra=elsewhere("learning_rate"),
    )
    lr_schedule: Varied[Logged[Literal["constant", "linear", "cosine", "wsd"]]] = Field(
        "constant",
        description="decay after warm-up; wsd = constant, then linear over the last decay_steps",
        json_schema_extra=elsewhere(
            "lr_scheduler_type lr_scheduler scheduler scheduler.type",
            {
                "constantwithwarmup": "set constant, and warmup_steps",
                "cosinewithminlr": "set cosine, and min_lr_ratio",
                "none": "did you mean constant?",
                "trapezoidal warmupstabledecay": "did you mean wsd?",
            },
        ),
    )
    warmup_steps: Varied[Logged[float]] = Field(
        0,
        ge=0,
        description="linear warm-up (steps; below 1 a fraction of the run)",
        json_schema_extra=elsewhere(
            "lr_warmup_steps num_warmup_steps warmup warmup_fraction warmup_iters warmup_ratio"
        ),
    )
    decay_steps: Annotated[Logged[float], Needs("lr_schedule", ("wsd",))] = Field(
        0.2,
        gt=0,
        description="length of wsd's decay (steps; below 1 a fraction of the run)",
        json_schema_extra=elsewhere("decay_fraction decay_ratio warmdown_ratio"),
    )
    min_lr_ratio: Annotated[Logged[float], Needs("lr_schedule", DECAYING)] = Field(
        0.0,
        ge=0,
        le=1,
        description="final learning rate as a fraction of lr",
        json_schema_extra=elsewhere("cosine_min_lr_ratio final_lr_frac lr_min_ratio min_lr_factor"),
    )
    weight_decay: Varied[Logged[float]] = Field(
        0.01,
        ge=0,
        description="decoupled decay of matrices; norms and biases have none",
        json_schema_extra=elsewhere("wd"),
    )
    beta1: Logged[float] = Field(
        0.9,
        ge=0,
        lt=1,
        description="decay of AdamW's mean of gradients",
        json_schema_extra=elsewhere("adam_beta1"),
    )
    beta2: Logged[float] = Field(
        0.999,
        ge=0,
        lt=1,
        description="decay of AdamW's mean of squared gradients",
        json_schema_extra=elsewhere("adam_beta2"),
    )
    adam_eps: Logged[float] = Field(
        1e-8,
        gt=0,
        description="AdamW adds it to the root of the mean of squared gradients; 1e-5 in Llama 2",
        json_schema_extra=elsewhere("adam_epsilon epsilon eps"),
    )
    muon_momentum: Annotated[Logged[float], Needs("optimizer", ("muon",))] = Field(
        0.95, ge=0, lt=1, description="decay of Muon's mean of gradients"
    )
    grad_clip: Logged[float | None] = Field(
        None,
        gt=0,
        description="maximum gradient norm; larger gradients are scaled down",
        json_schema_extra=elsewhere(
            "clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_grad_norm"
            " max_norm"
        ),
    )
    optim_dtype: Fixed[Literal["float32", "bfloat16"]] = Field(
        "float32",
        description="dtype of AdamW's two moments and of Muon's one; bfloat16 saves 2 bytes each,"
        " for beta2 <= 0.99",
        json_schema_extra=elsewhere(
            "", {"bf16": "did you mean bfloat16?", "fp32": "did you mean float32?"}
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        for key in ("warmup_steps", "decay_steps"):
            steps = getattr(self, key)
            if steps >= 1 and steps != int(steps):
                problem = f"{steps} is neither an integer nor a fraction below 1"
                raise ValueError(f"{key}: {problem}")
        # A step lowers the mean of squares by at most 1 - beta2 of it, and bfloat16, with 8
        # significant bits, rounds away changes below 1/512 to 1/256: the mean could never fall.
        if self.optim_dtype == "bfloat16" and self.beta2 > 0.99:
            problem = f"bfloat16 cannot hold changes as small as those of beta2 {self.beta2:g}"
            raise ValueError(f"optim_dtype: {problem}; use beta2 up to 0.99, e.g. 0.95, or float32")
        return self


class TransferConfig(Config, frozen=True):
    """The size at which hyperparameters were tuned, from which they are scaled to the model's."""

    base_width: Fixed[int | None] = Field(
        None,
        gt=0,
        le=2**20,
        description="d_model at which lr, weight_decay and initial weights were tuned, which are"
        " scaled from it to d_model; null = not scaled",
    )
    base_depth: Fixed[int | None] = Field(
        None,
        gt=0,
        le=MAX_LAYERS,
        description="n_layers at which they were tuned; null = not scaled",
    )


WINDOW = 128
"""Steps whose losses and gradient norms a step is compared with."""

StepNumber = Annotated[int, Field(strict=True, ge=1)]
StepRange = tuple[StepNumber, StepNumber]
"""The first and the last step, as reports number them: a run's first step is 1."""


class SkipConfig(Config, frozen=True):
    """Which steps are skipped, so that they change neither weights nor moments."""

    skip_nonfinite: Logged[int] = Field(
        10,
        gt=0,
        description="steps with inf or NaN gradients are skipped; abort after this many consecutive"
        " steps that were skipped for these or as spikes (checked at reports)",
    )
    skip_spikes: Logged[float | None] = Field(
        None,
        gt=0,
        description="skip steps whose loss or gradient norm is more than this many standard"
        f" deviations above its mean over the last {WINDOW} steps that were not skipped, e.g. 6;"
        " null = none",
        json_schema_extra=elsewhere("sigma_factor"),
    )
    skip_steps: Logged[list[StepRange] | None] = Field(
        None,
        description="[first, last] steps whose batches are read but not trained on, e.g."
        " [[150, 160]]; a run's first step is 1",
        json_schema_extra=elsewhere("steps_to_skip"),
    )

    @field_validator("skip_steps")
    @classmethod
    def _check_order(cls, ranges: list[StepRange] | None) -> list[StepRange] | None:
        end = 0
        for first, last in ranges or ():
            if last < first:
                raise ValueError(f"[{first}, {last}] ends before it starts")
            if first <= end:
                problem = f"[{first}, {last}] starts before the end of the range before it, {end}"
                raise ValueError(f"{problem}; sort the ranges, and merge those that overlap")
            end = last
        return ranges

    def check_last_step(self, max_steps: int) -> None:
        """Raise ConfigError if `skip_steps` goes beyond the last step."""
        if not self.skip_steps:
            return
        first, last = self.skip_steps[-1]
        if last > max_steps:
            problem = f"[{first}, {last}] goes beyond the last step, {max_steps}"
            raise ConfigError(f"skip_steps: {problem}; end it earlier, or raise max_steps")

    def lists_step(self, step: int) -> bool:
        """Return whether `skip_steps` contains `step`, of which a run's first is 1."""
        return any(first <= step <= last for first, last in self.skip_steps or ())


# ---- machine


class PrecisionConfig(Config, frozen=True):
    """Compute dtype."""

    amp_dtype: Logged[Literal["auto", "bfloat16", "float16"] | None] = Field(
        "auto",
        description="compute dtype; auto = bfloat16 on GPUs since Ampere and on CPUs with AMX or"
        " Arm's bfloat16, float16 on older GPUs, else null = float32",
        json_schema_extra=elsewhere(
            "dtype mixed_precision mixed_precision_param precision torch_dtype",
            {
                "bf16 bf16mixed bf16true": "did you mean bfloat16?",
                "fp16 16mixed half": "did you mean float16?",
                "float32 fp32": "did you mean null?",
                "fp8": "set float8",
            },
        ),
    )
    float8: Logged[Literal["tensorwise", "rowwise"] | None] = Field(
        None,
        description="float8 recipe for the blocks' matrix products, with scales per tensor or per"
        " row (needs torchao)",
        json_schema_extra=elsewhere("fp8 fp8_recipe float8_recipe float8.recipe_name"),
    )


HYBRID = ("hybrid-full-shard", "hybrid-grad-shard")


def count_groups(key: str, size: int, n_ranks: int) -> int:
    """Return how many groups of `size` ranks there are.

    Raises:
        ConfigError: the ranks cannot be divided into groups; names the sizes that `key` can have.
    """
    if n_ranks % size:
        divisors = [divisor for divisor in range(1, n_ranks + 1) if n_ranks % divisor == 0]
        problem = f"{n_ranks} ranks cannot be divided into groups of {size}"
        raise ConfigError(f"{key}: {problem}; use one of {divisors}")
    return n_ranks // size


class ParallelConfig(Config, frozen=True):
    """Sharding, recomputation, offload, compilation and determinism."""

    sharding: Logged[
        Literal["full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard"]
    ] = Field(
        "full-shard",
        description="sharding of parameters, gradients and optimizer state over ranks",
        json_schema_extra=elsewhere(
            "sharding_strategy fsdp_sharding_strategy fsdp fsdp_type",
            {
                "ddp": "did you mean no-shard?",
                "fsdp fullyshard zero3": "did you mean full-shard?",
                "hsdp hybridshard": "did you mean hybrid-full-shard?",
                "hybridshardzero2": "did you mean hybrid-grad-shard?",
                "shardgradop zero1 zero2": "did you mean grad-shard?",
            },
        ),
    )
    shard_group_size: Annotated[Logged[int | None], Needs("sharding", HYBRID)] = Field(
        None,
        gt=0,
        description="ranks per replica for hybrid strategies; null = the ranks of a node",
    )
    context_parallel: Logged[int] = Field(
        1,
        gt=0,
        description="ranks that divide the tokens of each sequence among them, for long ones; the"
        " other ranks are as many groups of data parallelism",
        json_schema_extra=elsewhere(
            "context_parallel_size context_parallel_degree cp_size cp sequence_parallel_size"
            " sequence_parallel_degree ulysses_sequence_parallel_size"
        ),
    )
    layer_wrap: Logged[bool] = Field(
        True,
        description="all-gather layer by layer; false = the model as one FSDP unit",
        json_schema_extra=elsewhere("auto_wrap_policy fsdp_auto_wrap_policy"),
    )
    reduce_dtype: Logged[Literal["float32", "bfloat16"]] = Field(
        "float32",
        description="dtype in which ranks reduce gradients; with bfloat16 also of accumulated"
        " gradients",
        json_schema_extra=elsewhere(
            "mixed_precision_reduce",
            {"bf16": "did you mean bfloat16?", "fp32": "did you mean float32?"},
        ),
    )
    cpu_offload: Logged[bool] = Field(
        False,
        description="keep parameters, gradients and optimizer state in host memory",
        json_schema_extra=elsewhere("offload_params fsdp_offload_params enable_cpu_offload"),
    )
    activation_checkpointing: Logged[Literal["none", "selective", "full"]] = Field(
        "none",
        description="recompute in backward: nothing, all but attention and matrix products, or full"
        " blocks",
        json_schema_extra=elsewhere(
            "activation_checkpoint activation_checkpoint.mode fsdp_activation_checkpointing"
            " gradient_checkpointing selective_activation_checkpointing",
            {"true": "did you mean full?", "false": "did you mean none?"},
        ),
    )
    activation_offload: Logged[bool] = Field(
        False,
        description="keep what blocks save for backward in host memory",
        json_schema_extra=elsewhere("offload_activations activation_offloading"),
    )
    sync_each_micro_step: Logged[bool] = Field(
        False,
        description="reduce-scatter in every micro-step, so that a rank accumulates gradients of"
        " its shard only",
    )
    compile: Logged[Literal["auto"] | bool] = Field(
        "auto",
        description="compile the blocks and the loss; auto = on GPUs and for float8",
        json_schema_extra=elsewhere("torch_compile compile.enable"),
    )
    attn_implementation: Logged[str | None] = Field(
        None,
        description="kernels that compute the attention of a model of transformers, by the name"
        " that it has there: sdpa, eager, or on GPUs flex_attention, flash_attention_2, ...; null ="
        " those of this project",
    )
    deterministic: Logged[bool] = Field(
        False,
        description="use only deterministic kernels, so that runs on GPUs are bit-identical; slower"
        " attention",
        json_schema_extra=elsewhere("full_determinism"),
    )

    @property
    def reshard_after_forward(self) -> bool:
        """Whether parameters are resharded after forward and all-gathered again in backward."""
        return self.sharding.endswith("full-shard")

    def dp_size(self, n_ranks: int) -> int:
        """Return how many groups of `context_parallel` ranks there are, each with its own batches.

        Raises:
            ConfigError: the ranks cannot be divided into groups.
        """
        return count_groups("context_parallel", self.context_parallel, n_ranks)

    def own_length(self, length: int) -> int:
        """Return how many tokens of sequences of `length` a rank has, padding included."""
        if self.context_parallel == 1:
            return length
        return 2 * math.ceil(length / (2 * self.context_parallel))

    def compiles(self, on_gpu: bool, float8: str | None) -> bool:
        """Return whether the blocks and the loss are compiled."""
        if self.compile == "auto":
            return on_gpu or float8 is not None
        return self.compile


TorchProfilerSteps = Annotated[Unlogged[tuple[int, int, int]], Needs("torch_profiler")]


class ProfilingConfig(Config, frozen=True):
    """Profilers of Core API and PyTorch."""

    core_api_profiler: Unlogged[bool] = Field(
        False, description="report GPU, CPU, memory, disk and network use to the Web UI"
    )
    torch_profiler: Unlogged[bool] = Field(
        False,
        description="write PyTorch traces for TensorBoard, one file per rank",
        json_schema_extra=elsewhere("enable_profiling"),
    )
    torch_profiler_steps: TorchProfilerSteps = Field(
        (1, 1, 2),
        description="steps to wait, to warm up and to trace, once, counted from the first step of"
        " the process",
    )
    memory_snapshot: Unlogged[bool] = Field(
        False,
        description="write a snapshot of GPU memory per rank at the end, also after running out of"
        " memory",
        json_schema_extra=elsewhere("enable_memory_snapshot"),
    )

    @field_validator("torch_profiler_steps")
    @classmethod
    def _check_steps(cls, steps: tuple[int, int, int]) -> tuple[int, int, int]:
        wait, warmup, active = steps
        if wait < 0 or warmup < 0 or active < 1:
            problem = "wait and warm-up must be at least 0, traced steps at least 1"
            raise ValueError(f"{list(steps)}: {problem}")
        return steps
