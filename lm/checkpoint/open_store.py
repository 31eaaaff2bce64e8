"""The store of a run's checkpoints, chosen by where the run is."""

from __future__ import annotations

import determined as det
from determined import core

from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import CheckpointStore, ClusterCheckpoints, LocalCheckpoints
from lm.determined import master
from lm.errors import error_prefix
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World


def open_store(
    context: core.CheckpointContext,
    trial: det.ClusterInfo | None,
    run_dir: RunDir | None,
    world: World,
) -> CheckpointStore:
    """Return where checkpoints are: in a cluster's storage, in a bucket, on a disk.

    Args:
        trial: on a cluster.
        run_dir: off the cluster.
    """
    if trial is not None:
        in_place = master.storage_is_file_system(trial)
        return ClusterCheckpoints(context, trial.latest_checkpoint, writes_in_place=in_place)
    assert run_dir is not None
    if run_dir.url is None:
        return LocalCheckpoints(run_dir.checkpoints, context)
    with error_prefix("checkpoint_storage"), world.all_or_none():
        return BucketCheckpoints(run_dir.url, run_dir.path)
