"""Plan: the parts of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyncp.arrays import Int64, ranges_of, starts_of
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Direction
from dyncp.plan.buffers import MemoryUse, measure_memory
from dyncp.plan.codec import (
    PlanDecodeError,
    decode_part,
    encode_part,
    encode_parts,
    join_parts,
    split_parts,
)
from dyncp.plan.format import RankPlan
from dyncp.plan.text import draw_parts, explain_parts
from dyncp.plan.workspace import KernelStyle


@dataclass(frozen=True, eq=False)
class Plan:
    """One plan for all ranks: `parts[r]` is what rank r runs.

    `reasons` says why this plan was chosen. Only the process that planned knows it: it is neither
    encoded nor part of the digest, and equal plans may differ in it.
    """

    parts: tuple[RankPlan, ...]
    reasons: str = ""

    @staticmethod
    def of(parts: Sequence[RankPlan]) -> "Plan":
        """Joins the parts and writes the digest of the whole plan into each."""
        return Plan(encode_parts(parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_ranks(self) -> int:
        return len(self.parts)

    @property
    def digest(self) -> str:
        return self.parts[0].digest

    @property
    def filler(self) -> bool:
        """As `RankPlan.filler`."""
        return self.parts[0].filler

    @property
    def fingerprint(self) -> str:
        return self.parts[0].fingerprint

    def total_bytes(self, name: str, direction: Direction, shape: AttentionShape) -> int:
        """Bytes that all ranks together send in one attention call of `shape`."""
        return sum(part.sent_bytes(name, direction, shape) for part in self.parts)

    def memory(
        self, shape: AttentionShape | None = None, style: KernelStyle | None = None
    ) -> MemoryUse:
        """Bytes that every rank takes in a call of `shape` (default: the one planned for), with a
        kernel of `style` (default: one that merges inside)."""
        return measure_memory(self.parts, shape, style)

    def explain(self) -> str:
        """What the plan does and costs, in a few lines: see `explain_parts`."""
        return explain_parts(self.parts, self.reasons)

    def gather(self, parts: Sequence[Any]) -> list[Any]:
        """Per-token results of all ranks, back in samples: see `gather_samples`."""
        return gather_samples(self.parts[0], parts)

    def draw(self, name: str = DEFAULT_MASK, width: int = 64, height: int | None = None) -> str:
        """A text map of who owns and who computes what, half as high as wide: see `draw_parts`."""
        return draw_parts(self.parts, name, width, height or -(-width // 2))

    def encode(self) -> bytes:
        return join_parts([encode_part(part) for part in self.parts])

    @staticmethod
    def decode(data: bytes) -> "Plan":
        """The plan of `encode`; raises PlanDecodeError for anything else."""
        parts = tuple(decode_part(part) for part in split_parts(data))
        if [part.rank for part in parts] != list(range(parts[0].num_ranks)):
            raise PlanDecodeError(f"parts are of ranks {[part.rank for part in parts]}")
        if len({part.digest for part in parts}) != 1:
            raise PlanDecodeError("parts belong to different plans: their digests differ")
        return Plan(parts)


def batch_order(plan: RankPlan) -> Int64:
    """Row of every token of the batch in the rows of all ranks put below each other.

    Blocks A B | C owned by ranks 1, 0 | 0 lie as B C A: the batch's rows are at 2, 0, 1 (for blocks
    of one token)."""
    tokens, owner = plan.blocks.tokens.astype(np.int64), plan.blocks.owner
    order = np.lexsort((np.arange(len(owner)), owner))
    padding = plan.rows_per_rank - plan.tokens_per_rank
    before = (np.cumsum(padding) - padding)[owner]
    row = np.empty(len(owner), np.int64)
    row[order] = starts_of(tokens[order])[:-1]
    return ranges_of(row + before, tokens)


def gather_samples(plan: RankPlan, parts: Sequence[Any]) -> list[Any]:
    """One array (or tensor) per sample from every rank's `[local_rows, ...]`, in rank order."""
    if len(parts) != plan.num_ranks:
        raise ValueError(f"gather got {len(parts)} parts; the plan has {plan.num_ranks} ranks")
    rows = _concatenate(parts)
    order = batch_order(plan)
    expected = int(plan.rows_per_rank.sum())
    if len(rows) != expected:
        raise ValueError(
            f"gather got {len(rows)} rows over all ranks; the plan's rows add up to {expected}"
        )
    bounds = starts_of(plan.lengths)
    return [rows[order[bounds[i] : bounds[i + 1]]] for i in range(len(plan.lengths))]


def _concatenate(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))
