"""Parts that pass their checks can be run: wrong ones are refused, or verify finds them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_any_change import broken_plans
from verify_edits import BACKWARD, FORWARD, NAME, program_of, ranks_of, steps_of, with_steps
from verify_plans import DIM, rich_batch, rich_plan

from dyncp import DCPExecutor, Plan, attention
from dyncp.plan import Op, RankPlan
from dyncp.plan.check import MOST_STEPS
from dyncp.plan.codec import decode_part, encode_part
from dyncp.transport.distributed import TransportError
from dyncp.verify import verify_plan
from sizes import draws

PLAN, BATCH = rich_plan(), rich_batch()
PROGRAMS = st.tuples(st.sampled_from(list(ranks_of(PLAN))), st.sampled_from([FORWARD, BACKWARD]))


def run(plan: Plan) -> list[torch.Tensor]:
    """Output and gradients of every token, in batch order."""
    shape, tokens = plan.parts[0].shape, BATCH.num_tokens
    rng = np.random.default_rng(0)
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    *qkv, dout = (torch.from_numpy(rng.normal(size=(tokens, n, DIM))) for n in heads)
    step = DCPExecutor(virtual_ranks=plan.num_ranks, kernel="reference").prepare(plan)
    token = torch.from_numpy(np.concatenate([part.row_coordinates for part in plan.parts]))
    held = token >= 0
    inputs = [(x[token] * held[:, None, None]).requires_grad_() for x in qkv]
    out = attention(step, *inputs)
    grads = torch.autograd.grad(out, inputs, dout[token] * held[:, None, None])
    return [x[held][torch.argsort(token[held])] for x in (out.detach(), *grads)]


EXPECTED = run(PLAN)


def sent(parts: Any) -> Plan:
    """The plan after its parts were sent to the ranks, which checks them."""
    return Plan.of([decode_part(encode_part(part)) for part in parts])


def is_noticed(plan: Plan) -> bool:
    """Whether a part is refused, the run ends in an error with a sentence, or verify finds a
    fault."""
    try:
        plan = sent(plan.parts)
        results = run(plan)
    except (ValueError, TransportError):
        return True
    same = all(a.shape == b.shape for a, b in zip(results, EXPECTED, strict=True))
    if same and all(torch.allclose(a, b) for a, b in zip(results, EXPECTED, strict=True)):
        return True
    return bool(verify_plan(plan, BATCH))


@st.composite
def edited_programs(draw: Any) -> Plan:
    """The plan with one instruction of one rank added, dropped, moved or doubled."""
    rank, direction = draw(PROGRAMS)
    steps = steps_of(PLAN, rank, direction)
    place, other = (draw(st.integers(0, len(steps) - 1)) for _ in range(2))
    edit = draw(st.sampled_from(["add", "drop", "move", "double"]))
    step = steps[place]
    if edit == "add":
        step = draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 2, 5, 50, 2**31 - 1]))
    if edit in {"drop", "move"}:
        steps.pop(place)
    if edit != "drop":
        steps.insert(other, step)
    return with_steps(PLAN, rank, direction, steps)


@draws(60)
@given(st.one_of(edited_programs(), broken_plans()))
def test_a_changed_part_is_refused_or_runs_or_is_found_by_verify(plan: Plan) -> None:
    assert is_noticed(plan)


def first(steps: list[tuple[int, int]], op: Op) -> tuple[int, int]:
    return next(step for step in steps if step[0] == op)


def a_division_without_tiles(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*steps, (Op.COMPUTE, 99)]


def a_wait_for_a_phase_never_launched(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*steps, (Op.WAIT, 99)]


def a_wait_before_its_launch(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    wait = first(steps, Op.WAIT)
    return [wait, *(step for step in steps if step != wait)]


def a_huge_argument(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*steps, (Op.LAUNCH, MOST_STEPS)]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (a_division_without_tiles, "division 99 is computed, but has no tiles"),
        (a_wait_for_a_phase_never_launched, "waits for phase 99, in which it receives nothing"),
        (a_wait_before_its_launch, r"waits for phase \d+ before launching it"),
        (a_huge_argument, r"an instruction's argument is not in \[0, 1048576\)"),
    ],
)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_instructions_that_cannot_run_are_refused(edit, sentence, direction):
    steps = edit(steps_of(PLAN, 0, direction))
    with pytest.raises(ValueError, match=sentence):
        sent(with_steps(PLAN, 0, direction, steps).parts)


def test_a_division_with_a_number_that_no_table_can_have_is_refused():
    """Tiles and instruction agree on it."""
    program = program_of(PLAN, 0, FORWARD)
    last = int(program.tile_division.max())
    steps = [(op, 2**31 - 1 if (op, x) == (Op.COMPUTE, last) else x) for op, x in
             steps_of(PLAN, 0, FORWARD)]  # fmt: skip
    division = np.where(program.tile_division == last, 2**31 - 1, program.tile_division)
    changed = replace(
        program,
        tile_division=division.astype(np.int32),
        instructions=np.asarray(steps, np.int32),
    )
    part: RankPlan = PLAN.parts[0]
    mask = replace(part.masks[NAME], forward=changed)
    with pytest.raises(ValueError, match="an instruction's argument is not in"):
        sent([replace(part, masks={**part.masks, NAME: mask})])
