"""Chains the planning stages."""

from dyncp.planner.candidate import Candidate, Placed, make_candidate, place_batch
from dyncp.planner.config import AUTO, PlannerConfig
from dyncp.planner.plan_batch import plan_batch, plan_with
from dyncp.planner.search import Choice, search

__all__ = [
    "AUTO",
    "Candidate",
    "Choice",
    "Placed",
    "PlannerConfig",
    "make_candidate",
    "place_batch",
    "plan_batch",
    "plan_with",
    "search",
]
