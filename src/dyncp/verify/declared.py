"""What a plan declares: balance (invariant 5), bytes (7), its batch and its own digest (8)."""

import math

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import ITEM_BYTES, K_KINDS, Q_KINDS, Batch, Direction, Payload
from dyncp.plan import Plan, RankPlan, stretches_of
from dyncp.verify.coverage import collect_tiles
from dyncp.verify.violation import Findings


def check_identity(plan: Plan, batch: Batch, findings: Findings) -> None:
    """Fingerprints and stretches are the batch's, digests those of the plan as it is."""
    digest, stretches = _digest(plan), stretches_of(batch)
    for part in plan.parts:
        if part.fingerprint != batch.fingerprint:
            findings.add(
                8,
                f"rank {part.rank}: the part's batch fingerprint is {part.fingerprint}, the "
                f"batch's is {batch.fingerprint}",
            )
        alike = np.array_equal(part.stretches.start, stretches.start)
        if not (alike and np.array_equal(part.stretches.before, stretches.before)):
            findings.add(
                8,
                f"rank {part.rank}: the part's stretches (which token comes before which) are not "
                "the batch's",
            )
        if part.digest != digest:
            findings.add(
                8,
                f"rank {part.rank}: the part's plan digest is {part.digest}, that of the plan as "
                f"it is {digest}",
            )


def _digest(plan: Plan) -> str:
    """Digest of the plan as it is; a plan that has no binary form has none."""
    try:
        return Plan.of(plan.parts).digest
    except (TypeError, ValueError, KeyError) as error:
        return f"none ({error!r})"


def check_balance(plan: Plan, findings: Findings) -> None:
    measured = {"compute": _fullest(_work(plan)), "tokens": _fullest(_tokens(plan))}
    for part in plan.parts:
        declared = part.balance
        limits = declared.limits
        for what, given, tolerance in (
            ("compute", declared.compute_max_over_mean, limits.compute_tolerance),
            ("tokens", declared.tokens_max_over_mean, limits.token_tolerance),
        ):
            true = measured[what]
            if not math.isclose(given, true, rel_tol=1e-9):
                findings.add(
                    5,
                    f"rank {part.rank}: declares {what} max/mean {given:.6g}; the tiles and blocks "
                    f"give {true:.6g}",
                )
            if (
                tolerance is not None
                and true > (1 + tolerance) * (1 + 1e-12)
                and not declared.reason
            ):
                findings.add(
                    5,
                    f"rank {part.rank}: {what} max/mean is {true:.6g}, over the limit of "
                    f"{1 + tolerance:.6g}, and the plan gives no reason",
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


def _tokens(plan: Plan) -> Int64:
    blocks = plan.parts[0].blocks
    tokens = np.zeros(len(plan.parts), np.int64)
    np.add.at(tokens, blocks.owner, blocks.end - blocks.start)
    return tokens


def _fullest(load: Int64) -> float:
    total = int(load.sum())
    return int(load.max()) * len(load) / total if total else 1.0


def check_traffic(plan: Plan, name: str, direction: Direction, findings: Findings) -> None:
    where = f"mask {name!r}, {direction.name.lower()}"
    present = plan.parts[0].masks[name].backward is not None or direction is Direction.FORWARD
    moved = _moved_bytes(plan, name, direction) if present else 0
    for part in plan.parts:
        declared = part.declared_bytes[name][direction]
        if declared != moved:
            findings.add(
                7,
                f"{where}, rank {part.rank}: declares {declared} bytes; the transfers have {moved}",
            )
    if not present:
        return
    needed, static = _needed_bytes(plan, name, direction), plan.parts[0].static
    if moved < needed:
        findings.add(7, f"{where}: {moved} bytes travel, below the hypergraph's {needed}")
    elif moved > needed and not static:
        findings.add(
            7,
            f"{where}: {moved} bytes travel; the hypergraph needs {needed}, and the plan is "
            "not static",
        )


def payload_sizes(part: RankPlan) -> Int64:
    """Bytes per token, int64[kinds, head groups], from the meaning of the payloads."""
    shape = part.shape
    item, partial = ITEM_BYTES[shape.dtype], ITEM_BYTES[shape.partial_dtype or shape.dtype]
    wide = 8 if shape.dtype == "fp64" else 4
    kv_heads = np.asarray([group.num_kv_heads for group in part.head_groups], np.int64)
    q_heads = kv_heads * (shape.q_heads // shape.kv_heads)
    q_row, kv_row = q_heads * shape.head_dim, 2 * kv_heads * shape.head_dim
    sizes = {
        Payload.Q: q_row * item,
        Payload.KV: kv_row * item,
        Payload.OUT: q_row * partial + q_heads * wide,  # and log-sum-exps
        Payload.Q_DOUT: 2 * q_row * item + 2 * q_heads * wide,  # and log-sum-exps and row sums
        Payload.DQ: q_row * partial,
        Payload.DKV: kv_row * partial,
    }
    return np.stack([sizes[kind] for kind in Payload])


def _moved_bytes(plan: Plan, name: str, direction: Direction) -> int:
    total = 0
    for part in plan.parts:
        sends, blocks = part.masks[name].program(direction).sends, part.blocks
        tokens = (blocks.end - blocks.start)[sends.block].astype(np.int64)
        total += int((payload_sizes(part)[sends.kind, sends.head_group] * tokens).sum())
    return total


def _needed_bytes(plan: Plan, name: str, direction: Direction) -> int:
    """Σ size × (ranks that a block's tiles and its owner are on − 1)."""
    part, tiles = plan.parts[0], collect_tiles(plan, name)
    sizes, blocks, total = payload_sizes(part), part.blocks, 0
    for side, kinds in ((tiles.q_block, Q_KINDS), (tiles.k_block, K_KINDS)):
        touched = np.zeros((len(part.head_groups), len(blocks), len(plan.parts)), np.bool_)
        touched[tiles.head_group, side, tiles.rank] = True
        touched[:, np.arange(len(blocks)), blocks.owner] = True
        travels = touched.sum(axis=2) - 1
        size = sum(sizes[kind] for kind in kinds[direction])
        total += int((travels * np.asarray(size)[:, None] * (blocks.end - blocks.start)).sum())
    return total
