"""Plan.explain prints the plan's own numbers."""

import re
from dataclasses import replace

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.placement import Limits
from dyncp.plan import Direction

SHAPE = AttentionShape(4, 2, 64)


def planned(**options) -> Plan:
    batch = Batch.of([masks.causal(n) for n in (3000, 700, 500, 300)])
    return plan_batch(batch, Topology(1, 4), SHAPE, PlannerConfig(**options))


def test_it_says_sizes_traffic_balance_and_workspace():
    plan = planned(solver="bisection", limits=Limits(0.1, 0.2))
    text = plan.explain()
    part = plan.parts[0]
    tiles = sum(len(p.masks["default"].tiles) for p in plan.parts)
    assert f"solver bisection on 4 ranks: 4,500 tokens of 4 sequences in {len(part.blocks)}" in text
    assert f"mask 'default': {tiles:,} tiles" in text
    for direction in Direction:
        total = plan.total_bytes("default", direction, SHAPE)
        most = max(p.sent_bytes("default", direction, SHAPE) for p in plan.parts)
        line = next(x for x in text.splitlines() if f"{direction.name.lower()}:" in x)
        assert f"{total / 1e6:,.1f} MB moved; a rank sends up to {most / 1e6:,.1f} MB" in line
    balance = part.balance
    assert f"compute max/mean {balance.compute_max_over_mean:.3f} (limit 1.100)" in text
    assert f"tokens max/mean {balance.tokens_max_over_mean:.3f} (limit 1.200)" in text
    memory = plan.memory()
    assert f"{memory.forward.max() / 1e6:,.1f} MB forward (rank {memory.forward.argmax()})" in text
    assert "chosen because" not in text


def test_a_limit_that_is_not_met_comes_with_its_reason():
    plan = planned(solver="ring", limits=Limits(0.01))
    lines = plan.explain().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("balance:"))
    assert "tokens max/mean" in lines[at]
    assert "(no limit)" in lines[at]
    assert re.search(r"over the limit of 1\.010", lines[at + 1])


def test_every_mask_has_its_own_lines_and_evaluation_no_backward():
    batch = Batch.of([{"full": masks.causal(200), "local": masks.sliding_window(200, window=9)}])
    plan = plan_batch(batch, Topology(1, 2), SHAPE, PlannerConfig(forward_only=True))
    text = plan.explain()
    assert text.count("backward: none, planned for evaluation") == 2
    assert "mask 'full'" in text
    assert "mask 'local'" in text


def test_reasons_are_shown_and_stay_in_the_process():
    plan = planned(solver="bisection")
    told = replace(plan, reasons="zigzag would take 2.0 ms\nring 3.0 ms")
    assert told.explain() == "\n".join(
        [plan.explain(), "chosen because:", "  zigzag would take 2.0 ms", "  ring 3.0 ms"]
    )
    assert told == plan
    assert told.digest == plan.digest
    assert told.encode() == plan.encode()
    assert Plan.decode(told.encode()).reasons == ""
