"""Chains the planning stages."""

from dyncp.planner.candidate import Candidate, make_candidate
from dyncp.planner.config import PlannerConfig
from dyncp.planner.plan_batch import plan_batch, plan_with

__all__ = ["Candidate", "PlannerConfig", "make_candidate", "plan_batch", "plan_with"]
