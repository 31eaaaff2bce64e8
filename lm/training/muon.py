"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized, by sharded ranks.

A matrix can only be orthogonalized as a whole, and FSDP gives each rank some of its rows. So each
matrix has an owner, a rank that receives the rows of all, orthogonalizes the matrix, and sends each
rank the rows of the result. Owners take turns: in a round each owns one matrix. The ranks exchange
the rows of the matrices of a round, or of several with small ones, in one all-to-all, and those of
the results in another.

What the owner computes depends on the gradients only, not on the number of ranks: equal gradients
give equal weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lm.shards import rows_of_shard, to_local
from lm.training.transfer import Scale

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's: of the odd polynomial that raises small singular values fastest, and whose iteration
ends between 0.7 and 1.2 instead of at 1"""
ADAMW_RMS = 0.2
"""The root mean square of AdamW's updates, over the learning rate, is 0.2 to 0.4 (Liu et al.,
"Muon is Scalable for LLM Training", 2025)."""

EXCHANGED_VALUES = 1 << 20
"""Most values of the matrices of several rounds that are exchanged together: enough that the time
of an all-to-all is more than its latency, and little memory."""


def orthogonalization_dtype(compute_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of `orthogonalize` in a run that computes in `compute_dtype`.

    bfloat16 suffices for directions, but a run in float32 is to be one: rounding to bfloat16 makes
    a difference of the last bit in the gradients one of 1 % in single values of an update.
    """
    if compute_dtype == torch.bfloat16:
        return torch.bfloat16
    return torch.float32


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U V^T of the singular value decomposition U S V^T of `matrix`, in its dtype."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    n_rows, n_columns = matrix.shape
    x = matrix / (matrix.norm() + 1e-7)  # so that no singular value is above 1
    if n_rows > n_columns:
        x = x.T  # whose products are smaller
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    if n_rows > n_columns:
        x = x.T
    return x


def orthogonalization_flops(shape: Sequence[int]) -> int:
    """Return the floating-point operations of `orthogonalize`."""
    short, long = sorted(shape)
    gram = 2 * short * short * long
    polynomial = 2 * short * short * short
    product = 2 * short * short * long
    return NEWTON_SCHULZ_STEPS * (gram + polynomial + product)


def plan_exchanges(
    shapes: Sequence[Sequence[int]], n_ranks: int, most_values: int
) -> list[list[list[int]]]:
    """Return the exchanges: of each, the matrices that every rank owns, as indices into `shapes`.

    In a round, each rank gets one matrix of nearly equal time, so that no rank waits long for
    another. The heaviest goes to the rank that has had the least to do.

    Args:
        most_values: in an exchange of several rounds.
    """
    flops = [orthogonalization_flops(shape) for shape in shapes]
    by_flops = sorted(range(len(shapes)), key=lambda matrix: -flops[matrix])
    flops_of_rank = [0] * n_ranks
    exchanges: list[list[list[int]]] = []
    n_values = 0  # of the last exchange
    for start in range(0, len(shapes), n_ranks):
        matrices = by_flops[start : start + n_ranks]
        n_own_values = sum(math.prod(shapes[matrix]) for matrix in matrices)
        n_values += n_own_values
        if not exchanges or n_values > most_values:
            exchanges.append([[] for _ in range(n_ranks)])
            n_values = n_own_values
        owners = sorted(range(n_ranks), key=lambda rank: flops_of_rank[rank])
        for owner, matrix in zip(owners, matrices, strict=False):  # the last round has fewer
            exchanges[-1][owner].append(matrix)
            flops_of_rank[owner] += flops[matrix]
    return exchanges


class RowShards(NamedTuple):
    """How FSDP divides the rows of every parameter among the ranks.

    Ranks are numbered replica by replica, as in `World.device_mesh`.
    """

    n_ranks: int
    n_shards: int
    """of each replica"""

    @classmethod
    def of(cls, parameter: Tensor) -> RowShards:
        """Return those of `parameter`, which is on this rank only if it is no DTensor."""
        if not isinstance(parameter, DTensor):
            return cls(1, 1)
        mesh = parameter.device_mesh
        n_shards = 1
        for mesh_dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                n_shards = mesh.size(mesh_dim)
        return cls(mesh.size(), n_shards)

    def same_replica(self, rank: int, other: int) -> bool:
        return rank // self.n_shards == other // self.n_shards

    def rows(self, parameter: Tensor, rank: int) -> range:
        """Return which rows of `parameter` are on `rank`."""
        return rows_of_shard(len(parameter), self.n_shards, rank % self.n_shards)

    def n_values(self, parameter: Tensor, rank: int) -> int:
        """Return how many values of the matrix `parameter` are on `rank`."""
        return len(self.rows(parameter, rank)) * parameter.shape[1]


class Muon:
    """Muon over sharded matrices, with Nesterov's momentum and decoupled weight decay.

    Args:
        scales: of the learning rate and the weight decay of each parameter.
        momentum: decay of the mean of gradients.
        weight_decay: per step, times the learning rate.
        state_dtype: of the mean.
        dtype: in which matrices are orthogonalized, and sent between ranks.
    """

    def __init__(
        self,
        scales: Mapping[nn.Parameter, Scale],
        momentum: float,
        weight_decay: float,
        state_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        parameters = list(scales)
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        self._experts = [parameter for parameter in parameters if parameter.ndim == 3]
        """matrices of experts, `(E, rows, columns)`, each of which is on one rank of a replica"""
        self._scales = scales
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._dtype = dtype
        self._nothing = torch.empty(0, dtype=dtype, device=parameters[0].device)
        self._shards = RowShards.of(parameters[0])
        self._rank = 0
        if self._shards.n_ranks > 1:
            self._rank = dist.get_rank()
        self._exchanges: list[list[list[nn.Parameter]]] = []
        """the parameters that each rank owns in an exchange, by rank"""
        shapes = [matrix.shape for matrix in matrices]
        for owned in plan_exchanges(shapes, self._shards.n_ranks, EXCHANGED_VALUES):
            self._exchanges.append([[matrices[i] for i in indices] for indices in owned])
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        for parameter in parameters:
            momentum_buffer = torch.zeros_like(parameter, dtype=state_dtype)
            self.state[parameter] = {"momentum_buffer": momentum_buffer}

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor | None, skipped: Tensor) -> None:
        """Update the parameters, without synchronizing with the device.

        Args:
            divisor: of the gradients; None = 1.
            skipped: a scalar on the device; 1.0 = change nothing.
        """
        is_skipped = skipped.bool()
        lr_or_0 = lr * (1 - skipped)
        for parameter in self._experts:
            direction = self._advance(parameter, divisor, is_skipped)
            of_experts = direction.view_as(to_local(parameter))
            if len(of_experts) > 0:
                update = torch.stack([orthogonalize(matrix) for matrix in of_experts])
                self._update(parameter, update, lr_or_0)
        for owned in self._exchanges:
            directions = [
                [self._advance(parameter, divisor, is_skipped) for parameter in parameters]
                for parameters in owned
            ]
            matrices = self._send_to_owners(owned, directions)
            del directions
            results = [orthogonalize(matrix) for matrix in matrices]
            updates = self._send_from_owners(owned, results)
            for parameter, update in updates.items():
                self._update(parameter, update, lr_or_0)

    def _advance(
        self, parameter: nn.Parameter, divisor: Tensor | None, is_skipped: Tensor
    ) -> Tensor:
        """Add the gradient to the momentum; return this rank's values of the direction, flat."""
        momentum = to_local(self.state[parameter]["momentum_buffer"])
        gradient = to_local(cast(Tensor, parameter.grad))
        if divisor is not None:
            gradient = gradient / divisor
        mean = momentum.float()
        # A skipped gradient may be inf or NaN; the mean of the mean and itself stays as it is.
        gradient = torch.where(is_skipped, mean, gradient)
        mean = torch.lerp(gradient, mean, self._momentum)
        momentum.copy_(mean)
        nesterov = torch.lerp(gradient, mean, self._momentum)
        return nesterov.to(self._dtype).flatten()

    def _send_to_owners(
        self, owned: list[list[nn.Parameter]], directions: list[list[Tensor]]
    ) -> list[Tensor]:
        """Send the owners this rank's values; return the whole matrices that this rank owns.

        Every replica has the values of all matrices, so owners receive them from their own replica.
        """
        mine = owned[self._rank]
        sent: list[list[Tensor]] = []
        sizes: list[int] = []  # of the pieces that arrive: of each rank in turn, one of each matrix
        sizes_by_rank: list[int] = []
        for rank in range(self._shards.n_ranks):
            if not self._shards.same_replica(self._rank, rank):
                sent.append([])
                sizes_by_rank.append(0)
                continue
            its_sizes = [self._shards.n_values(parameter, rank) for parameter in mine]
            sent.append(directions[rank])
            sizes += its_sizes
            sizes_by_rank.append(sum(its_sizes))
        received = self._exchange(sent, sizes_by_rank)
        if len(mine) == 1:  # the ranks of a replica have its rows in their order
            return [received.view(mine[0].shape)]
        pieces = received.split(sizes)
        matrices: list[Tensor] = []
        for number, parameter in enumerate(mine):
            rows = torch.cat(pieces[number :: len(mine)])
            matrices.append(rows.view(parameter.shape))
        return matrices

    def _send_from_owners(
        self, owned: list[list[nn.Parameter]], results: list[Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Send all ranks their rows of `results`; return this rank's values of each parameter."""
        sent: list[list[Tensor]] = []
        for rank in range(self._shards.n_ranks):
            its_rows: list[Tensor] = []
            for result in results:
                rows = self._shards.rows(result, rank)
                its_rows.append(result[rows.start : rows.stop].flatten())
            sent.append(its_rows)
        sizes: dict[nn.Parameter, int] = {}
        sizes_by_rank: list[int] = []
        for its_parameters in owned:
            its_sizes = {p: self._shards.n_values(p, self._rank) for p in its_parameters}
            sizes |= its_sizes
            sizes_by_rank.append(sum(its_sizes.values()))
        received = self._exchange(sent, sizes_by_rank)
        return dict(zip(sizes, received.split(list(sizes.values())), strict=True))

    def _exchange(self, sent: list[list[Tensor]], sizes: list[int]) -> Tensor:
        """Send `sent[rank]` to each rank; return what each has sent here, `sizes[rank]` values."""
        pieces = [piece for its_pieces in sent for piece in its_pieces]
        values = torch.cat([self._nothing, *pieces])
        if self._shards.n_ranks == 1:
            return values
        received = values.new_empty(sum(sizes))
        sent_sizes = [sum(map(len, its_pieces)) for its_pieces in sent]
        dist.all_to_all_single(received, values, sizes, sent_sizes)
        return received

    def _update(self, parameter: nn.Parameter, update: Tensor, lr: Tensor) -> None:
        rows = to_local(parameter)
        scale = self._scales[parameter]
        lr = lr * scale.lr
        rows.mul_(1 - lr * (self._weight_decay * scale.weight_decay))
        rms = ADAMW_RMS * math.sqrt(max(parameter.shape[-2:]))
        rows.sub_(update.float().view_as(rows) * (lr * rms))
