"""`Plan`: the parts of all ranks, its description as text, and plan files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dyncp.arrays import Int64, ranges_of, starts_of
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch, Direction
from dyncp.placement import Balance
from dyncp.plan.buffers import KernelStyle, MemoryUse, measure_memory
from dyncp.plan.codec import (
    PlanDecodeError,
    decode_part,
    decode_plan_file,
    encode_part,
    encode_parts,
    encode_plan_file,
    join_parts,
    split_parts,
)
from dyncp.plan.format import RankPlan


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of all ranks: rank r runs `parts[r]`.

    `reasons` explains why the planner chose this plan. Only the process that planned knows it: it
    is not encoded, and neither equality nor the digest depend on it.
    """

    parts: tuple[RankPlan, ...]
    reasons: str = ""

    @staticmethod
    def of(parts: Sequence[RankPlan], reasons: str = "") -> "Plan":
        """Joins the parts, and stores the digest of the whole plan in each of them."""
        digest, encoded = encode_parts(parts)
        plan = Plan(tuple(replace(part, digest=digest) for part in parts), reasons)
        vars(plan)["encoded_parts"] = encoded
        return plan

    @cached_property
    def encoded_parts(self) -> tuple[bytes, ...]:
        """Every rank's part in binary form, encoded once."""
        return tuple(encode_part(part) for part in self.parts)

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
        """Like `RankPlan.filler`."""
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
        """Memory of every rank in an attention call of `shape` (default: the shape planned for)
        with a kernel of `style` (default: one that merges partial outputs itself)."""
        return measure_memory(self.parts, shape, style)

    def explain(self) -> str:
        """Describes the plan in a few lines: solver, sizes, traffic, balance, workspaces, and why
        it was chosen. Bytes and tiles are per mask and attention call."""
        first = self.parts[0]
        lines = [
            f"solver {first.solver} on {self.num_ranks} ranks: {int(first.lengths.sum()):,} tokens "
            f"of {len(first.lengths):,} sequences in {len(first.blocks):,} blocks, "
            f"{len(first.head_groups)} head group{'s' if len(first.head_groups) > 1 else ''}"
        ]
        for name in first.masks:
            tiles = sum(len(part.masks[name].tiles) for part in self.parts)
            lines.append(f"mask {name!r}: {tiles:,} tiles")
            lines += [_traffic_line(self.parts, name, direction) for direction in Direction]
        lines += _balance_lines(first.balance)
        lines.append(_memory_line(self.memory(), first))
        if self.reasons:
            lines += ["chosen because:", *(f"  {line}" for line in self.reasons.splitlines())]
        return "\n".join(lines)

    def gather(self, parts: Sequence[Any]) -> list[Any]:
        """Gathers per-token results of all ranks into samples: see `gather_samples`."""
        return gather_samples(self.parts[0], parts)

    def draw(self, name: str = DEFAULT_MASK, width: int = 64, height: int | None = None) -> str:
        """Draws query tokens × key tokens of the batch, in at most `height` (default: width / 2) ×
        `width` cells.

        The letter of a cell is the rank that computes the tile at its centre (of head group 0), `·`
        means that there is no tile. The letter before the bar is the rank that owns the row.

            A|A···       two causal sequences of two blocks; rank B owns the second block of the
            B|AB··       first one, but its tile with the first block is computed on rank A
            B|··B·
            B|··BB
        """
        sides = (height or -(-width // 2), width)
        q_block, k_block = (_middle_blocks(self.parts[0], cells) for cells in sides)
        computes = _tile_ranks(self.parts, name)[np.ix_(q_block, k_block)]
        owners = self.parts[0].blocks.owner[q_block]
        rows = [
            f"{_letter(int(owner))}|" + "".join(_letter(int(rank)) for rank in row)
            for owner, row in zip(owners, computes, strict=True)
        ]
        return "\n".join(rows)

    def encode(self) -> bytes:
        return join_parts(self.encoded_parts)

    @staticmethod
    def decode(data: bytes) -> "Plan":
        """Decodes what `encode` returned; raises PlanDecodeError for any other bytes."""
        parts = tuple(decode_part(part) for part in split_parts(data))
        if [part.rank for part in parts] != list(range(parts[0].num_ranks)):
            raise PlanDecodeError(
                f"parts are of ranks {[part.rank for part in parts]}; expected one part of each of "
                f"{parts[0].num_ranks} ranks, in order"
            )
        if len({part.digest for part in parts}) != 1:
            raise PlanDecodeError("parts belong to different plans: their digests differ")
        return Plan(parts)


def batch_order(plan: RankPlan) -> Int64:
    """Row of every token of the batch in the concatenated local rows of all ranks.

    If blocks A, B and C of one token each are owned by ranks 1, 0 and 0, the rows of all ranks are
    B C A, and the tokens of the batch are in rows 2, 0, 1."""
    tokens, owner = plan.blocks.tokens.astype(np.int64), plan.blocks.owner
    order = np.lexsort((np.arange(len(owner)), owner))
    padding = plan.rows_per_rank - plan.tokens_per_rank
    before = (np.cumsum(padding) - padding)[owner]
    row = np.empty(len(owner), np.int64)
    row[order] = starts_of(tokens[order])[:-1]
    return ranges_of(row + before, tokens)


def gather_samples(plan: RankPlan, parts: Sequence[Any]) -> list[Any]:
    """Returns one array (or tensor) per sample. `parts` has the `[local_rows, ...]` of every rank,
    in rank order."""
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


def save_plan(path: str | Path, plan: Plan, batch: Batch) -> None:
    """Writes the plan and its batch to a file, for `load_plan`."""
    data = encode_plan_file(plan.encode(), batch)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ValueError(f"plan file {path} cannot be written: {error.strerror}") from error


def load_plan(path: str | Path) -> tuple[Plan, Batch]:
    """Reads the plan and the batch of a file. Raises a ValueError with the path and the fault if
    it is not a plan file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"plan file {path} cannot be read: {error.strerror}") from error
    try:
        encoded, batch = decode_plan_file(data)
        return Plan.decode(encoded), batch
    except ValueError as error:
        raise PlanDecodeError(f"plan file {path}: {error}") from error


def _traffic_line(parts: Sequence[RankPlan], name: str, direction: Direction) -> str:
    if direction is Direction.BACKWARD and parts[0].masks[name].backward is None:
        return "  backward: none, planned for evaluation"
    programs = [part.masks[name].program(direction) for part in parts]
    num_bytes = [
        [part.payload_bytes(messages, part.shape).sum() for messages in (p.sends, p.receives)]
        for part, p in zip(parts, programs, strict=True)
    ]
    sent, received = np.transpose(num_bytes)
    divisions = max(int(p.tile_division.max(initial=-1)) + 1 for p in programs)
    phases = len(np.unique(np.concatenate([p.sends.phase for p in programs])))
    return (
        f"  {direction.name.lower()}: {divisions} divisions, {phases} phases, "
        f"{_megabytes(sent.sum())} moved; a rank sends up to {_most(sent)} and receives up to "
        f"{_most(received)}"
    )


def _balance_lines(balance: Balance) -> Iterator[str]:
    measured = (
        ("compute", balance.compute_max_over_mean, balance.limits.compute_tolerance),
        ("tokens", balance.tokens_max_over_mean, balance.limits.token_tolerance),
    )
    limits = (
        f"{what} max/mean {value:.3f} "
        + ("(no limit)" if tolerance is None else f"(limit {1 + tolerance:.3f})")
        for what, value, tolerance in measured
    )
    yield f"balance: {', '.join(limits)}"
    if balance.reason:
        yield f"  {balance.reason}"


def _memory_line(memory: MemoryUse, part: RankPlan) -> str:
    assumed = "" if part.shape.exact else ", for the head counts that the plan assumes"
    forward, backward = _most(memory.forward, " forward"), _most(memory.backward, " backward")
    return f"workspace: up to {forward} and {backward}{assumed}"


def _most(num_bytes: Int64, what: str = "") -> str:
    """The most bytes of a rank, and which rank that is."""
    return f"{_megabytes(num_bytes.max())}{what} (rank {num_bytes.argmax()})"


def _megabytes(num_bytes: np.integer) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _middle_blocks(part: RankPlan, cells: int) -> Int64:
    """Index of the block at the centre of each of `cells` equal pieces of the batch."""
    tokens = int(part.lengths.sum())
    cells = min(cells, tokens)
    middle = (np.arange(cells) * 2 + 1) * tokens // (2 * cells)
    return np.searchsorted(part.block_coordinate, middle, side="right") - 1


def _tile_ranks(parts: Sequence[RankPlan], name: str) -> Int64:
    """Rank that computes each (query block, key block) of head group 0; -1 if it is no tile."""
    num_blocks = len(parts[0].blocks)
    ranks = np.full((num_blocks, num_blocks), -1, np.int64)
    for part in parts:
        tiles = part.mask_plan(name).tiles
        chosen = tiles.head_group == 0
        ranks[tiles.q_block[chosen], tiles.k_block[chosen]] = part.rank
    return ranks


def _letter(rank: int) -> str:
    return "·" if rank < 0 else _LETTERS[rank % len(_LETTERS)]
