"""interpret: runs a plan's programs on all ranks in fp64 numpy, from the plan alone.

It needs no batch and no mask: which pairs are allowed comes from the plan's own row ranges. So it
says what the plan means, apart from any executor, and a test can compare that with dense attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Float64
from dyncp.blocks import Direction, HeadGroup
from dyncp.plan import Plan
from dyncp.verify.drive import drive
from dyncp.verify.mail import entries_by_phase
from dyncp.verify.numeric import NumericRank
from dyncp.verify.slots import fits
from dyncp.verify.structure import check_structure
from dyncp.verify.violation import PlanError


@dataclass(frozen=True, eq=False)
class Interpreted:
    """Results in batch order, fp64: `out` like q, `lse` [tokens, q heads], and the gradients where
    an output gradient was given."""

    out: Float64
    lse: Float64
    dq: Float64 | None = None
    dk: Float64 | None = None
    dv: Float64 | None = None


def interpret(
    plan: Plan,
    mask_name: str,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    dout: npt.ArrayLike | None = None,
    scale: float | None = None,
) -> Interpreted:
    """Attention of a whole batch (and its gradients, with `dout`) as the plan computes it.

    `q` and `dout` are [tokens, q_heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim], tokens
    in batch order; `scale` defaults to 1/√head_dim. A plan that gets stuck, or reads what is not
    there, raises PlanError. Small batches only: every score is written out.
    """
    malformed = check_structure(plan)
    if malformed:
        raise PlanError.of(malformed)
    inputs = {name: np.asarray(x, np.float64) for name, x in (("q", q), ("k", k), ("v", v))}
    groups = _check_inputs(plan, mask_name, inputs)
    factor = float(inputs["q"].shape[2] ** -0.5) if scale is None else scale
    no_keys = np.full(inputs["q"].shape[:2], -np.inf)
    start = {**inputs, "out": np.zeros_like(inputs["q"]), "lse": no_keys}
    forward = _run(plan, mask_name, Direction.FORWARD, groups, start, factor)
    out, lse = forward["out"], forward["lse"]
    if dout is None:
        return Interpreted(out, lse)
    gradient = np.asarray(dout, np.float64)
    start = {**inputs, "dout": gradient, "lse": lse, "delta": (gradient * out).sum(axis=2)}
    start |= {f"d{name}": np.zeros_like(x) for name, x in inputs.items()}
    backward = _run(plan, mask_name, Direction.BACKWARD, groups, start, factor)
    return Interpreted(out, lse, backward["dq"], backward["dk"], backward["dv"])


def _check_inputs(
    plan: Plan, mask_name: str, inputs: Mapping[str, Float64]
) -> tuple[HeadGroup, ...]:
    part, q, k = plan.parts[0], inputs["q"], inputs["k"]
    part.mask_plan(mask_name)
    tokens = int(part.lengths.sum())
    if k.shape != inputs["v"].shape or len(q) != tokens or len(k) != tokens:
        raise ValueError(
            f"q, k and v have shapes {[x.shape for x in inputs.values()]}; the plan is for "
            f"{tokens} tokens, and k and v must be alike"
        )
    if not part.shape.exact:
        return (HeadGroup(0, k.shape[1]),)
    if (q.shape[1], k.shape[1]) != (part.shape.q_heads, part.shape.kv_heads):
        raise ValueError(
            f"q and k have {q.shape[1]} and {k.shape[1]} heads; the plan was made for "
            f"{part.shape.q_heads} and {part.shape.kv_heads}"
        )
    return part.head_groups


def _run(
    plan: Plan,
    name: str,
    direction: Direction,
    groups: tuple[HeadGroup, ...],
    start: Mapping[str, Float64],
    scale: float,
) -> dict[str, Float64]:
    """All fields at the end, in batch order."""
    for part in plan.parts:
        if not fits(part, part.masks[name].program(direction)):
            raise PlanError(f"rank {part.rank}: its slots do not fit into its workspaces")
    ranks = [NumericRank(part, part.masks[name], direction, groups, start) for part in plan.parts]
    stuck = drive([rank.program for rank in ranks], _NumericMachine(ranks, scale))
    if stuck:
        raise PlanError(
            f"the plan is stuck ({direction.name.lower()}): {'; '.join(map(str, stuck))}"
        )
    end = {field: np.full_like(rows, np.nan) for field, rows in start.items()}
    for rank in ranks:
        for field, rows in end.items():
            rows[rank.coordinates] = rank.own(field)
    return end


class _NumericMachine:
    """Instructions on real numbers; messages are flat arrays in a mailbox."""

    def __init__(self, ranks: list[NumericRank], scale: float) -> None:
        self._ranks, self._scale = ranks, scale
        self._sends = [entries_by_phase(rank.program.sends) for rank in ranks]
        self._receives = [entries_by_phase(rank.program.receives) for rank in ranks]
        self._mailbox: dict[tuple[int, int, int], Float64] = {}

    def launch(self, rank: int, phase: int, at: int) -> None:  # noqa: ARG002
        for peer, entries in self._sends[rank].get(phase, {}).items():
            if (rank, peer, phase) in self._mailbox:
                raise PlanError(f"rank {rank} launches phase {phase} while it is on its way")
            self._mailbox[rank, peer, phase] = self._ranks[rank].pack(entries)

    def wait(self, rank: int, phase: int, at: int) -> None:  # noqa: ARG002
        for peer, entries in self._receives[rank].get(phase, {}).items():
            message = self._mailbox.pop((peer, rank, phase), None)
            if message is None:
                raise PlanError(
                    f"rank {rank} waits in phase {phase} for a message that rank {peer} does "
                    "not send"
                )
            self._ranks[rank].unpack(entries, message)

    def compute(self, rank: int, division: int, at: int) -> None:
        self._ranks[rank].compute(division, at, self._scale)
