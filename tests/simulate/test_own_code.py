"""Static methods priced as their own code runs: eager, step by step, with padded sequences."""

from dataclasses import replace

import numpy as np
import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks
from dyncp.blocks import Direction
from dyncp.cost import IMPLEMENTATIONS, CostModel, Implementation, find_profile
from dyncp.placement import STATIC_SOLVERS, with_degree
from dyncp.plan import Op
from dyncp.planner import Task
from dyncp.simulate import simulate_plan
from dyncp.topology import Link
from kernels_only import KERNELS_ONLY

SHAPE = AttentionShape(4, 2, 64)
CODE = Implementation("code", (10.0, 20.0), (0.5, 2.0), 1.0, (0.0, 0.0))
FAST = Topology(1, 4, Link(0.0, 1e18), Link(0.0, 1e18), 4)


def run(code, lengths=(512,), profile=KERNELS_ONLY, method="zigzag", topology=FAST):
    """The simulated layer of a ring of 4 under this code."""
    batch = Batch.of([masks.causal(n) for n in lengths])
    cost = CostModel(profile, SHAPE, implementation=code)
    config = PlannerConfig(attention_only=True)
    task = Task.of(batch, topology, SHAPE, config, cost)
    return task, task.follow(task.place(with_degree(method, 4)))


def test_the_host_issues_steps_sequences_and_messages_one_after_another():
    """Four steps of two sequences: four attention calls, three launches and three waits."""
    _, candidate = run(CODE, (512, 256))
    forward, backward = candidate.simulated.attention["default"]
    for times, step, each in ((forward, 10.0, 0.5), (backward, 20.0, 2.0)):
        programs = times.flow.programs
        first = programs.rank == 0
        counts = [int((programs.op[first] == op).sum()) for op in Op]
        messages = counts[Op.LAUNCH] + counts[Op.WAIT]
        assert counts[Op.COMPUTE] == 4
        assert messages == (6 if times is forward else 12)
        host = 4 * (step + 2 * each) + messages
        assert times.flow.issued[first][-1] == pytest.approx(host)
        assert times.seconds == pytest.approx(host, abs=0.01)  # kernels take microseconds


def test_lengths_that_are_read_from_the_device_keep_it_waiting():
    ahead = replace(CODE, step_host=(0.0, 0.0), message_host=0.0)
    _, candidate = run(replace(ahead, reads_lengths=True), (512, 256))
    work = candidate.simulated.attention["default"][0].flow.call_seconds
    assert work == pytest.approx(np.full(4, 4 * 2 * 0.5), abs=0.01)


@pytest.mark.parametrize("direction", Direction)
def test_every_step_merges_its_rows(direction):
    """One sequence of 512 tokens: a step of a ring has the 128 query rows of its rank, and 128 key
    rows. The first output has nothing to merge with."""
    merged = (18.0, 0.0) if direction is Direction.FORWARD else (0.0, 12.0)
    free = Implementation("free", (0.0, 0.0), (0.0, 0.0), 0.0, (0.0, 0.0))
    slow = replace(KERNELS_ONLY, copy=1e6)
    plain, with_merges = (
        run(code, profile=slow, method="ring")[1].simulated.attention["default"][direction]
        for code in (free, replace(free, merged=merged))
    )
    more = with_merges.flow.call_seconds - plain.flow.call_seconds
    values = 128 * 4 * 64 if direction is Direction.FORWARD else 128 * (4 + 2 * 2) * 64
    steps = np.array([0, 1, 2, 3]) + (direction is Direction.BACKWARD)  # causal: rank r has r + 1
    assert more == pytest.approx(steps * values * merged[direction] / 2e6)


def test_sequences_do_not_share_kernel_tiles():
    """64 sequences of 8 rows on each rank take as long as 64 of 128 rows with as many keys."""
    free = Implementation("free", (0.0, 0.0), (0.0, 0.0), 0.0, (0.0, 0.0))
    profile = replace(KERNELS_ONLY, call_seconds=0.0)
    short, own = (
        run(code, [32] * 64, profile)[1].simulated.attention["default"][0].compute_seconds
        for code in (None, free)
    )
    assert own > 8 * short


@pytest.mark.parametrize(
    ("length", "contexts", "padded"), [(100, 4, 104), (128, 8, 128), (1, 2, 4)]
)
def test_sequences_are_padded_to_two_chunks_per_rank(length, contexts, padded):
    assert CODE.padded((length,), contexts) == (padded,)
    assert replace(CODE, pads=False).padded((length,), contexts) == (length,)


def test_a_plan_and_its_schedule_cost_the_same():
    task, candidate = run(IMPLEMENTATIONS["zigzag"], (700, 90), find_profile("a100"))
    plan = candidate.assemble(task.config.layout)
    simulated = simulate_plan(plan, task.topology, task.cost)
    assert simulated.layer_seconds == pytest.approx(candidate.simulated.layer_seconds)


def test_own_code_is_slower_than_dyncps_executor_would_run_it():
    for name, code in IMPLEMENTATIONS.items():
        assert name in {solver.name for solver in STATIC_SOLVERS}
        assert min(*code.step_host, code.message_host) > 0
    for method in ("ring", "zigzag", "all_gather"):
        lengths, profile = (4000, 900, 30), find_profile("a100")
        theirs = run(IMPLEMENTATIONS[method], lengths, profile, method)[1].simulated
        ours = run(None, lengths, profile, method)[1].simulated
        assert theirs.layer_seconds > ours.layer_seconds
