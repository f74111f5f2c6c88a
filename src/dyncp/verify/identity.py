"""Invariant 8: every part is of this batch and of this plan."""

from dyncp.blocks import Batch
from dyncp.plan import Plan
from dyncp.verify.violation import Findings


def check_identity(plan: Plan, batch: Batch, findings: Findings) -> None:
    """Fingerprints are the batch's, digests those of the plan as it is."""
    digest = _digest(plan)
    for part in plan.parts:
        if part.fingerprint != batch.fingerprint:
            findings.add(
                8,
                f"rank {part.rank}: the part's batch fingerprint is {part.fingerprint}, the "
                f"batch's is {batch.fingerprint}",
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
