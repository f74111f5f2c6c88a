"""Planners that go wrong, for the planning process to import: without torch."""

import os
import time

from dyncp.planner import plan_batch

UNLUCKY = 13  # a batch whose first sample has this length fails


def raising(batch, *args, **keywords):
    """Raises for batches that begin with an unlucky sample."""
    if batch.lengths[0] == UNLUCKY:
        raise ArithmeticError("an unlucky batch")
    return plan_batch(batch, *args, **keywords)


def dying(batch, *args, **keywords):
    """Takes the planning process down for such batches."""
    if batch.lengths[0] == UNLUCKY:
        os._exit(3)
    return plan_batch(batch, *args, **keywords)


def endless(batch, *args, **keywords):
    """Never answers for such batches."""
    while batch.lengths[0] == UNLUCKY:
        time.sleep(1)
    return plan_batch(batch, *args, **keywords)
