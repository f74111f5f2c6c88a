"""A planner that raises for some batches; the planning process imports it, so: no torch."""

from typing import Any

from dyncp.blocks import Batch
from dyncp.plan import Plan
from dyncp.planner import plan_batch

ONE_IN = 20


def raising(batch: Batch, *args: Any, **keywords: Any) -> Plan:
    """Raises for about one batch in 20: always the same ones."""
    if int(batch.fingerprint, 16) % ONE_IN == 0:
        raise RuntimeError("injected planner error")
    return plan_batch(batch, *args, **keywords)
