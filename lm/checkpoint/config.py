"""The hyperparameters of saving and resuming."""

from __future__ import annotations

from pydantic import Field

from lm.fields import Config, Logged, Unlogged, elsewhere


class CheckpointConfig(Config, frozen=True):
    """Hyperparameters of saving and resuming."""

    checkpoint_rate: Logged[int] = Field(
        50,
        gt=0,
        description="steps between checkpoints; one more after the last step",
        json_schema_extra=elsewhere(
            "checkpoint.dump.every checkpoint.interval checkpoint_every checkpoint_interval"
            " checkpointing_steps save_every save_interval save_steps save_strategy"
        ),
    )
    keep_checkpoints: Logged[int | None] = Field(
        2,
        gt=0,
        description="newest checkpoints to keep, in addition to the one of lowest validation loss;"
        " null = all",
        json_schema_extra=elsewhere("save_total_limit keep_latest_k checkpoint.dump.keep"),
    )
    async_checkpoint: Logged[bool] = Field(
        True,
        description="continue training while a checkpoint is written",
        json_schema_extra=elsewhere("checkpoint.async_mode"),
    )
    checkpoint_storage: Logged[str | None] = Field(
        None,
        description="URL under which the run's checkpoints, metrics and report are stored, outside"
        " Determined, e.g. s3://bucket/prefix (also gs://, az://); null = in runs/",
    )
    resume: Unlogged[str] = Field(
        "auto",
        description="auto = newest complete checkpoint; fresh = start at step 0; or the path or URL"
        " of a checkpoint or run, or on a cluster a UUID",
        json_schema_extra=elsewhere("resume_from_checkpoint"),
    )
    init_from: Logged[str | None] = Field(
        None,
        description="weights to start with: a Hugging Face directory or OWNER/MODEL[@REVISION],"
        " which also supplies the model's keys and the tokenizer; or a checkpoint: its or its run's"
        " directory or URL, or on a cluster a UUID",
        json_schema_extra=elsewhere(
            "base_model checkpoint.initial_load_path checkpoint.init_ckpt_path hf_model"
            " init_ckpt_path initial_checkpoint_dir initial_load_path model_name_or_path"
        ),
    )

    @property
    def rerun(self) -> str:
        """What resumes the run; with another `resume`, the same command discards its progress."""
        return "rerun the same command" if self.resume == "auto" else "rerun with resume=auto"
