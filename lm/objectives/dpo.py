"""Direct preference optimization: of two replies to a prompt, the chosen one becomes more likely.

With pi the model, ref its initial weights, and the reward of a reply y to a prompt x

    r(x, y) = beta log(pi(y | x) / ref(y | x))

the term of a pair is -log sigmoid(r(x, chosen) - r(x, rejected)) (Rafailov et al., 2023), with
`label_smoothing` e (1 - e) times that and e times the same of the pair with its replies exchanged
(Mitchell, 2023). IPO's is (d - 1 / (2 beta))^2, where d is the difference of the log-ratios per
token (Azar et al., 2023). With `sft_weight`, each pair adds -log pi(chosen | x) per token (Pang et
al., 2024).

log ref is computed once, before the first step, by the model that is trained: it needs no second
model, and the same kernels compute both. It is part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.any_model import AnyModel
from lm.data.loader import Loader, MicroBatch, PairBatch
from lm.data.progress import progress_bar
from lm.errors import ConfigError, RunError
from lm.objectives.config import ObjectiveConfig
from lm.objectives.objective import Losses, Objective
from lm.runtime.world import World

_UNKNOWN = 1.0
"""Of replies that are not computed yet: no log-probability is positive."""


class DPO(Objective):
    """Terms are pairs; the difference of their rewards is to grow.

    Args:
        n_replies: of all pairs of the run's data.
    """

    statistics = (
        "reward_accuracy",
        "reward_margin",
        "reward_chosen",
        "reward_rejected",
        "log_prob_chosen",
        "log_prob_rejected",
        "length_chosen",
        "length_rejected",
    )

    def __init__(self, config: ObjectiveConfig, n_replies: int, device: torch.device) -> None:
        self._config = config
        self.reference = torch.full((n_replies,), _UNKNOWN, dtype=torch.float64, device=device)
        """log ref of each reply, in nats"""
        self._has_reference_weights = False
        """whether the model still is its reference"""

    def state_dict(self) -> dict[str, Tensor]:
        return {"log_probs": self.reference}

    @property
    def n_missing(self) -> int:
        """Replies whose log ref is unknown."""
        return int((self.reference > 0).sum())

    def begin_session(self, step: int, *, has_updated: bool) -> bool:
        """Note whether the weights are the initial ones. Return whether a log ref is missing.

        Raises:
            ConfigError: one is missing after steps.
        """
        self._has_reference_weights = not has_updated
        if self.n_missing == 0:
            return False
        if step > 0:
            problem = f"the checkpoint of step {step} lacks {self.n_missing:,} log-probabilities"
            remedy = "use another checkpoint, or resume=fresh"
            raise ConfigError(f"objective: dpo: {problem} under the initial weights; {remedy}")
        return True

    def prepare(
        self, model: AnyModel, loader: Loader, world: World, log: Callable[[str], None]
    ) -> Iterator[int]:
        """Compute log ref of all replies, unless a checkpoint has it.

        Raises:
            RunError: the model computes others at each call.
        """
        n_replies = len(self.reference)
        what = f"log-probabilities of {n_replies:,} replies under the initial weights"
        missing = ""
        if self.n_missing < n_replies:
            missing = f", of which {self.n_missing:,} are missing in the checkpoint"
        log(f"computing the {what}{missing}")
        n_computed = 0
        bar = progress_bar("reference", loader.n_pair_batches, "batch", hidden=world.rank != 0)
        with bar:
            for pairs in loader.all_pairs():
                is_missing = bool((self.reference[pairs.replies] > 0).any())
                if world.any_rank(is_missing):
                    if n_computed == 0:
                        with world.all_or_none():
                            check_repeatable(model, pairs)
                    self.compute_reference(model, pairs)
                    n_computed += 1
                    yield n_computed
                bar.update()
        self.exchange(world)
        log(f"computed the {what}")

    @torch.no_grad()
    def compute_reference(self, model: AnyModel, pairs: PairBatch) -> None:
        """Compute log ref of these replies with `model`, which is in train mode, as in a step."""
        self.reference[pairs.replies] = score_replies(model, pairs)

    def exchange(self, world: World) -> None:
        self.reference.copy_(world.minimum(self.reference))

    def check_before_update(
        self,
        losses: Losses,
        n_terms: int,
        world: World,
        compute_dtype: torch.dtype | None,
        log: Callable[[str], None],
    ) -> None:
        """Check that the model equals its reference before the first update.

        Raises:
            RunError: it does not.
        """
        if not self._has_reference_weights:
            return
        self._has_reference_weights = False  # after this update
        sums_of_rank = torch.cat([losses.loss_sum.double()[None], losses.statistics])
        loss, *means = (world.all_gather(sums_of_rank).sum(dim=0) / n_terms).tolist()
        tolerance = 1e-4
        if compute_dtype is not None:
            tolerance = 0.5
        margin = means[self.statistics.index("reward_margin")]
        found = "objective: dpo: before the first update, the mean margin of rewards is"
        found += f" {margin:.1e} (0 is expected)"
        is_equal = abs(margin) <= tolerance
        if not self._config.sft_weight:  # whose part of the loss is unknown
            expected = math.log(2)
            if self._config.dpo_loss == "ipo":
                expected = 1 / (4 * self._config.dpo_beta**2)
            found += f", the loss {loss:.6f} ({expected:.6f})"
            # Also wrong where the margins of pairs cancel out.
            is_equal &= abs(loss - expected) <= tolerance * expected
        if not is_equal:
            cause = "the model differs from its reference, or computes inf or NaN"
            raise RunError(f"{found}: {cause}; use resume=fresh, or amp_dtype: null")
        log(found)

    def losses(self, model: AnyModel, micro_batch: MicroBatch | PairBatch) -> Losses:
        assert isinstance(micro_batch, PairBatch)
        log_probs = score_replies(model, micro_batch)
        rewards = self._config.dpo_beta * (log_probs - self.reference[micro_batch.replies])
        lengths = micro_batch.lengths_on_device.double()
        losses = self._losses_of_pairs(rewards, lengths)
        if self._config.sft_weight:
            losses = losses - self._config.sft_weight * (log_probs / lengths)[0::2]

        chosen, rejected = rewards.detach()[0::2], rewards.detach()[1::2]
        of_pairs = [
            chosen > rejected,
            chosen - rejected,
            chosen,
            rejected,
            log_probs.detach()[0::2],
            log_probs.detach()[1::2],
            lengths[0::2],
            lengths[1::2],
        ]
        statistics = torch.stack([values.double().sum() for values in of_pairs])
        if not micro_batch.is_counted:
            return Losses(0.0 * losses.sum(), 0.0 * statistics)
        return Losses(losses.sum(), statistics)

    def _losses_of_pairs(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of each pair, `(R / 2,)`, from what each of R replies has."""
        beta = self._config.dpo_beta
        if self._config.dpo_loss == "ipo":
            log_ratios = rewards / (beta * lengths)  # per token
            return (log_ratios[0::2] - log_ratios[1::2] - 1 / (2 * beta)) ** 2
        margins = rewards[0::2] - rewards[1::2]
        smoothing = self._config.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


@torch.no_grad()
def check_repeatable(model: AnyModel, pairs: PairBatch) -> None:
    """Raise RunError if `model` scores the same replies otherwise when it is called again."""
    if not torch.equal(score_replies(model, pairs), score_replies(model, pairs)):
        problem = "the model computes other log-probabilities of the same replies at each call"
        raise RunError(f"objective: dpo: {problem}, so it has no reference; use another init_from")


def score_replies(model: AnyModel, pairs: PairBatch) -> Tensor:
    """Return the log-probability of each reply after its prompt in nats, `(R,)` float64."""
    log_probs, _ = model(
        pairs.inputs,
        pairs.targets,
        document_ids=pairs.document_ids,
        queries=pairs.queries,
        part=pairs.part,
    )
    sums = [of_reply.sum() for of_reply in log_probs.double().split(pairs.lengths)]
    if not sums:  # of padding
        return log_probs.double()
    if pairs.part is not None:
        return pairs.part.sum(torch.stack(sums))
    return torch.stack(sums)
