"""DCPDataLoader: batches, plans and this rank's part of the data."""

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dyncp.blocks import AttentionShape, Batch
from dyncp.dataloader.batching import IndexedSample, gather_batches, iterate_samples
from dyncp.dataloader.local_data import count_targets, local_data
from dyncp.dataloader.samples import masks_of
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

TOKENS_PER_RANK = 8192


class DCPDataLoader:
    """Yields `(local_data, plan)` for every batch of `dataset`.

    `dataset` has samples (dicts with `input_ids`) by index or by iteration; `mask_fn(sample)` gives
    the sample's mask, or several by name. Every rank of `group` (default: the world, or one rank)
    must use equal arguments. `tokens_per_batch` is the budget of all ranks together, by default
    8,192 per rank; `accumulation_steps` batches make one optimiser step, over which
    `num_items_in_batch` counts. `virtual_ranks=N` plans for N ranks in this process and yields the
    whole Plan with the data of all ranks.
    """

    def __init__(  # noqa: PLR0913 (keywords, all with defaults)
        self,
        dataset: Any,
        mask_fn: Any,
        *,
        model: AttentionShape | None = None,
        group: Any = None,
        virtual_ranks: int | None = None,
        tokens_per_batch: int | None = None,
        accumulation_steps: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        token_fields: Mapping[str, int] | None = None,
        planner: PlannerConfig | None = None,
    ) -> None:
        self.rank, num_ranks = _rank_and_size(group, virtual_ranks)
        self.topology = Topology(1, num_ranks)
        self.dataset, self.mask_fn = dataset, mask_fn
        self.shape, self.planner = model or AttentionShape.assumed(), planner or PlannerConfig()
        self.tokens_per_batch = tokens_per_batch or TOKENS_PER_RANK * num_ranks
        self.accumulation_steps = accumulation_steps
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.token_fields = dict(token_fields or {})
        for name in ("tokens_per_batch", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if model is None and not self.rank:
            logger.info(
                "no model= given: plans have one head group and assume 4 q heads per kv head; "
                "pass model=AttentionShape(q_heads, kv_heads, head_dim, dtype) for exact prices"
            )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], RankPlan | Plan]]:
        samples = iterate_samples(
            self.dataset, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch
        )
        batches = gather_batches(samples, self.tokens_per_batch)
        while step := list(islice(batches, self.accumulation_steps)):
            masked = [self._mask(batch) for batch in step]
            items = sum(
                count_targets([sample for _, sample in indexed], batch)
                for indexed, batch in zip(step, masked, strict=True)
            )
            for indexed, batch in zip(step, masked, strict=True):
                yield self._plan([sample for _, sample in indexed], batch, items)

    def _mask(self, indexed: list[IndexedSample]) -> Batch:
        masks = [masks_of(self.mask_fn, sample, index) for index, sample in indexed]
        return Batch.of(masks, [index for index, _ in indexed])

    def _plan(
        self, samples: list[Any], batch: Batch, items: int
    ) -> tuple[dict[str, Tensor], RankPlan | Plan]:
        whole = plan_batch(batch, self.topology, self.shape, self.planner)
        plan = whole if self.rank is None else whole.parts[self.rank]
        data = local_data(
            samples, batch, plan, token_fields=self.token_fields, num_items_in_batch=items
        )
        return data, plan


def _rank_and_size(group: Any, virtual_ranks: int | None) -> tuple[int | None, int]:
    """This process's rank in the group (None: all of them, virtually) and the number of ranks."""
    if virtual_ranks is not None:
        return None, virtual_ranks
    group = group.get_group() if hasattr(group, "get_group") else group
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
