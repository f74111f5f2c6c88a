"""Chains the planning stages."""

from dyncp.planner.config import PlannerConfig
from dyncp.planner.plan_batch import plan_batch

__all__ = ["PlannerConfig", "plan_batch"]
