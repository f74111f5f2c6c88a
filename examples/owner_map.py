"""Prints the picture of the README: the same batch under zigzag and under dyncp."""

from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks, plan_batch

batch = Batch.of([masks.causal(length) for length in (1500, 380, 300, 240, 200)])
shape = AttentionShape(q_heads=8, kv_heads=2, head_dim=128, dtype="bf16")
columns = []
for solver in ("zigzag", "auto"):
    plan = plan_batch(batch, Topology(1, 4), shape, PlannerConfig(solver))
    forward, _ = plan.parts[0].declared_bytes["default"]
    columns.append([*plan.draw(width=28).split("\n"), "", f"{forward / 1e6:.1f} MB sent forward"])
for left, right in zip(*columns, strict=True):
    print(f"    {left:<42}{right}")
