"""Invariant 7: declared bytes are those of the transfers, and those the hypergraph asks for."""

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import ITEM_BYTES, Direction, Payload
from dyncp.plan import Plan, RankPlan
from dyncp.verify.coverage import collect_tiles
from dyncp.verify.violation import Findings

# What a query block and a key block send out and get back, per direction.
_Q_KINDS = {
    Direction.FORWARD: (Payload.Q, Payload.OUT),
    Direction.BACKWARD: (Payload.Q_DOUT, Payload.DQ),
}
_K_KINDS = {Direction.FORWARD: (Payload.KV,), Direction.BACKWARD: (Payload.KV, Payload.DKV)}


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
    for side, kinds in ((tiles.q_block, _Q_KINDS), (tiles.k_block, _K_KINDS)):
        touched = np.zeros((len(part.head_groups), len(blocks), len(plan.parts)), np.bool_)
        touched[tiles.head_group, side, tiles.rank] = True
        touched[:, np.arange(len(blocks)), blocks.owner] = True
        travels = touched.sum(axis=2) - 1
        size = sum(sizes[kind] for kind in kinds[direction])
        total += int((travels * np.asarray(size)[:, None] * (blocks.end - blocks.start)).sum())
    return total
