"""`verify_plan`: runs all static checks of a plan, and returns the violations.

This file has the checks of what a plan declares: balance (invariant 5), bytes (7), batch
fingerprint and plan digest (8)."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import ITEM_BYTES, K_KINDS, Q_KINDS, Batch, Direction, Payload
from dyncp.checks import instance_of
from dyncp.plan import OwnedBlocks, PartError, Plan, RankPlan, stretches_of
from dyncp.plan.check import check_part
from dyncp.verify.coverage import (
    AllTiles,
    IntArray,
    ListedKernelTiles,
    check_batch,
    check_rows,
    check_tiles,
    collect_tiles,
    compare_pairs,
    find_misplaced,
    pairs_of_kernel_tiles,
    pairs_of_tiles,
)
from dyncp.verify.programs import Fault
from dyncp.verify.symbolic import check_programs

INVARIANTS = {
    1: "every allowed (query, key, head) pair is computed exactly once",
    2: "every tile's inputs are on its rank by its division; no slot is reused while needed",
    3: "every send has one receive of the same payload and phase; phases order without cycles",
    4: "every partial result reaches its owner and is merged exactly once, in a fixed order",
    5: "balance limits hold, or the plan says which could not and why",
    6: "the pairs of a kernel call's listed kernel tiles are the pairs of its tiles",
    7: "declared bytes equal the sum of the transfers and respect the hypergraph's bound",
    8: "batch fingerprint and plan digest match",
}
# Kernel calls (6) are not part of a plan.
OF_PLANS = frozenset(INVARIANTS) - {6}

# One fault can show in thousands of places. Of sentences that differ only in numbers, the first few
# are enough.
MAX_ALIKE = 8
_NUMBERS = re.compile(r"\d+(, \d+)*")


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: its number in `INVARIANTS`, and a sentence that says where and how."""

    invariant: int
    sentence: str

    def __str__(self) -> str:
        return f"[invariant {self.invariant}] {self.sentence}"


class PlanError(ValueError):
    """A plan violates its invariants; the message lists all violations."""

    @staticmethod
    def of(violations: Iterable[Violation]) -> "PlanError":
        return PlanError("the plan must not be run:\n" + "\n".join(f"  {v}" for v in violations))


@dataclass(frozen=True, slots=True)
class Verified:
    """The violations, and which invariants were checked completely: a fault may prevent later
    checks."""

    violations: tuple[Violation, ...]
    checked: frozenset[int]

    def of(self, invariant: int) -> list[Violation]:
        return [violation for violation in self.violations if violation.invariant == invariant]


def verify_plan(plan: Plan, batch: Batch) -> list[Violation]:
    """All violations of the plan's invariants; an empty list if the plan is right.

    A malformed plan gives violations, never an exception; anything but a Plan raises ValueError.
    Invariant 6 is about kernel calls, which are not part of a plan: see `check_kernel_call`.
    """
    return list(examine_plan(plan, batch).violations)


def examine_plan(plan: Plan, batch: Batch) -> Verified:
    """Like `verify_plan`, but also says which invariants were checked."""
    instance_of("the plan to verify", plan, Plan, "a Plan with the parts of all ranks")
    instance_of("its batch", batch, Batch, "the Batch that the plan was made for")
    unsafe = check_parts(plan)
    if unsafe:
        return Verified(tuple(unsafe), frozenset())
    found, checked = [(8, sentence) for sentence in _check_identity(plan, batch)], frozenset({8})
    foreign = [(1, sentence) for sentence in check_batch(plan, batch)]
    found += foreign
    if not foreign:
        checked = OF_PLANS
        found += [(5, sentence) for sentence in _check_balance(plan)]
        for name in plan.parts[0].masks:
            found += _check_mask(plan, batch, name)
    return Verified(tuple(_violations(found)), checked)


def check_plan(plan: Plan, batch: Batch) -> None:
    """Raises PlanError with all violations, if there are any."""
    violations = verify_plan(plan, batch)
    if violations:
        raise PlanError.of(violations)


def check_kernel_call(
    batch: Batch,
    mask_name: str,
    blocks: OwnedBlocks,
    q_block: IntArray,
    k_block: IntArray,
    listed: ListedKernelTiles,
) -> list[Violation]:
    """Compares the pairs of the tiles (q_block[i], k_block[i]) with those of the kernel tiles.

    Builds matrices of all (query, key) of the batch, so it is for small batches only.
    """
    sentences = list(find_misplaced(batch, listed))
    if not sentences:
        wanted = pairs_of_tiles(batch, mask_name, blocks, q_block, k_block)
        sentences += compare_pairs(wanted, *pairs_of_kernel_tiles(batch, listed))
    return _violations((6, f"mask {mask_name!r}: {sentence}") for sentence in sentences)


def _violations(found: Iterable[Fault]) -> list[Violation]:
    """Violations ordered by invariant. Of those that differ only in numbers, `MAX_ALIKE` are kept,
    and one sentence counts the rest."""
    kept: dict[Fault, list[Violation]] = defaultdict(list)
    left_out: Counter[Fault] = Counter()
    for invariant, sentence in found:
        alike = (invariant, _NUMBERS.sub("#", sentence))
        if len(kept[alike]) < MAX_ALIKE:
            kept[alike].append(Violation(invariant, sentence))
        else:
            left_out[alike] += 1
    violations = [violation for alike in kept.values() for violation in alike]
    for (invariant, kind), count in left_out.items():
        violations.append(Violation(invariant, f"{count} more like this: {kind}"))
    return sorted(violations, key=lambda violation: violation.invariant)


def _check_mask(plan: Plan, batch: Batch, name: str) -> Iterator[Fault]:
    tiles = collect_tiles(plan, name)
    for sentence in check_tiles(tiles, plan.parts[0], batch, name):
        yield 1, f"mask {name!r}: {sentence}"
    for part in plan.parts:
        for sentence in check_rows(part, batch, name):
            yield 1, f"rank {part.rank}, mask {name!r}: {sentence}"
    for direction in Direction:
        for sentence in _check_traffic(plan, tiles, name, direction):
            yield 7, f"mask {name!r}, {direction.name.lower()}{sentence}"
    for direction, _ in plan.parts[0].masks[name].programs():
        yield from check_programs(plan, name, direction)


def check_parts(plan: Plan) -> list[Violation]:
    """The first fault of each part that makes it unsafe to run (`plan/check`), or else differences
    between parts."""
    if not plan.parts:
        return [Violation(8, "the plan has no parts")]
    found = [v for index, part in enumerate(plan.parts) for v in _faults(plan, index, part)]
    return found or [Violation(1, sentence) for sentence in _differences(plan)]


def _faults(plan: Plan, index: int, part: RankPlan) -> list[Violation]:
    try:
        if part.rank != index:
            raise PartError(8, f"the part in this place is of rank {part.rank}")
        if part.num_ranks != len(plan.parts):
            raise PartError(
                8, f"the part is of {part.num_ranks} ranks, the plan of {len(plan.parts)}"
            )
        _check_dtypes(part, "part")
        check_part(part)
    except PartError as fault:
        return [Violation(fault.invariant, f"rank {index}: {fault}")]
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        return [Violation(1, f"rank {index}: the part is malformed: {error!r}")]
    return []


def _check_dtypes(item: Any, name: str) -> None:
    """Raises PartError unless all arrays are int32 or int64; the codec ensures it for decoded
    parts."""
    if isinstance(item, np.ndarray):
        if item.dtype not in (np.int32, np.int64):
            raise PartError(1, f"{name} holds {item.dtype}")
    elif is_dataclass(item):
        for entry in fields(item):
            _check_dtypes(getattr(item, entry.name), f"{name}.{entry.name}")
    elif isinstance(item, dict):
        for key, value in item.items():
            _check_dtypes(value, f"{name}[{key!r}]")


def _differences(plan: Plan) -> Iterator[str]:
    """One sentence for each difference between parts in fields that must be equal on all ranks."""
    first = plan.parts[0]
    for part in plan.parts[1:]:
        alike = {
            "shape": part.shape == first.shape,
            "head groups": part.head_groups == first.head_groups,
            "local multiple": part.local_multiple == first.local_multiple,
            "sequence lengths": np.array_equal(part.lengths, first.lengths),
            "masks": part.masks.keys() == first.masks.keys(),
        }
        for column in ("sequence", "start", "end", "owner"):
            same = np.array_equal(getattr(part.blocks, column), getattr(first.blocks, column))
            alike[f"block table (column {column})"] = same
        for name in part.masks.keys() & first.masks.keys():
            same = (part.masks[name].backward is None) == (first.masks[name].backward is None)
            alike[f"backward program of mask {name!r}"] = same
        for what, same in alike.items():
            if not same:
                yield f"rank {part.rank}: its {what} differs from that of rank 0"


def _check_identity(plan: Plan, batch: Batch) -> Iterator[str]:
    """Compares fingerprints and stretches with the batch, and digests with the plan's content."""
    digest, stretches = _digest(plan), stretches_of(batch)
    for part in plan.parts:
        for what, given, true in (
            ("batch fingerprint", part.fingerprint, batch.fingerprint),
            ("plan digest", part.digest, digest),
        ):
            if given != true:
                yield f"rank {part.rank}: the part's {what} is {given}; expected {true}"
        if not all(map(np.array_equal, part.stretches.columns(), stretches.columns())):
            yield (
                f"rank {part.rank}: the part's stretches (which token comes before which) are not "
                "the batch's"
            )


def _digest(plan: Plan) -> str:
    """Digest of the plan's content, or "none" with the error if it cannot be encoded."""
    try:
        return Plan.of(plan.parts).digest
    except (TypeError, ValueError, KeyError) as error:
        return f"none ({error!r})"


def _check_balance(plan: Plan) -> Iterator[str]:
    compute, tokens = map(_fullest, (_work(plan), plan.parts[0].tokens_per_rank))
    for part in plan.parts:
        declared = part.balance
        limits = declared.limits
        for what, true, given, tolerance in (
            ("compute", compute, declared.compute_max_over_mean, limits.compute_tolerance),
            ("tokens", tokens, declared.tokens_max_over_mean, limits.token_tolerance),
        ):
            if not math.isclose(given, true, rel_tol=1e-9):
                yield (
                    f"rank {part.rank}: declares {what} max/mean {given:.6g}; the tiles and blocks "
                    f"give {true:.6g}"
                )
            limit = math.inf if tolerance is None else 1 + tolerance
            if true > limit * (1 + 1e-12) and not declared.reason:
                yield (
                    f"rank {part.rank}: {what} max/mean is {true:.6g}, over the limit of "
                    f"{limit:.6g}, and the plan gives no reason"
                )


def _work(plan: Plan) -> Int64:
    """Pairs × q heads of all masks, per rank."""
    work = np.zeros(len(plan.parts), np.int64)
    for rank, part in enumerate(plan.parts):
        heads = np.asarray([g.num_kv_heads for g in part.head_groups], np.int64)
        heads *= part.shape.q_heads // part.shape.kv_heads
        for mask in part.masks.values():
            work[rank] += int((mask.tiles.pairs * heads[mask.tiles.head_group]).sum())
    return work


def _fullest(load: Int64) -> float:
    total = int(load.sum())
    return int(load.max()) * len(load) / total if total else 1.0


def _check_traffic(plan: Plan, tiles: AllTiles, name: str, direction: Direction) -> Iterator[str]:
    first = plan.parts[0]
    present = first.masks[name].backward is not None or direction is Direction.FORWARD
    moved = _moved_bytes(plan, name, direction) if present else 0
    for part in plan.parts:
        declared = part.declared_bytes[name][direction]
        if declared != moved:
            yield f", rank {part.rank}: declares {declared} bytes; the transfers have {moved}"
    needed = _needed_bytes(first, tiles, direction) if present else 0
    if moved < needed:
        yield f": {moved} bytes travel, below the hypergraph's {needed}"
    elif moved > needed and not first.static:
        yield f": {moved} bytes travel; the hypergraph needs {needed}, and the plan is not static"


def _payload_sizes(part: RankPlan) -> Int64:
    """Bytes per token of every payload, int64[payloads, head groups], from their definitions."""
    shape = part.shape
    item, partial = ITEM_BYTES[shape.dtype], ITEM_BYTES[shape.partial_dtype or shape.dtype]
    wide = 8 if shape.dtype == "fp64" else 4
    kv_heads = np.asarray([group.num_kv_heads for group in part.head_groups], np.int64)
    q_heads = kv_heads * (shape.q_heads // shape.kv_heads)
    q_row, kv_row = q_heads * shape.head_dim, 2 * kv_heads * shape.head_dim
    sizes = {
        Payload.Q: q_row * item,
        Payload.KV: kv_row * item,
        Payload.OUT: q_row * partial + q_heads * wide,  # with log-sum-exps
        Payload.Q_DOUT: 2 * q_row * item + 2 * q_heads * wide,  # with log-sum-exps and row sums
        Payload.DQ: q_row * partial,
        Payload.DKV: kv_row * partial,
    }
    return np.stack([sizes[kind] for kind in Payload])


def _moved_bytes(plan: Plan, name: str, direction: Direction) -> int:
    total = 0
    for part in plan.parts:
        sends = part.masks[name].program(direction).sends
        sizes = _payload_sizes(part)[sends.kind, sends.head_group]
        total += int((sizes * part.blocks.tokens[sends.block]).sum())
    return total


def _needed_bytes(part: RankPlan, tiles: AllTiles, direction: Direction) -> int:
    """The hypergraph's bound: Σ block bytes × (number of ranks with the block's tiles or its owner
    − 1)."""
    sizes, blocks, total = _payload_sizes(part), part.blocks, 0
    for side, kinds in ((tiles.q_block, Q_KINDS), (tiles.k_block, K_KINDS)):
        touched = np.zeros((len(part.head_groups), len(blocks), part.num_ranks), np.bool_)
        touched[tiles.head_group, side, tiles.rank] = True
        touched[:, np.arange(len(blocks)), blocks.owner] = True
        travels = touched.sum(axis=2) - 1
        size = sum(sizes[kind] for kind in kinds[direction])
        total += int((travels * np.asarray(size)[:, None] * blocks.tokens).sum())
    return total
