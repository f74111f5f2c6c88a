"""Chains the planning stages."""

from dyncp.planner.candidate import Candidate, Cut, Placed, place_batch
from dyncp.planner.choice import Choice
from dyncp.planner.config import AUTO, EFFORTS, OBJECTIVES, PlannerConfig
from dyncp.planner.plan_batch import choose, lower_choice, plan_batch, plan_with
from dyncp.planner.search import search, search_divisions
from dyncp.planner.task import Task, default_cost

__all__ = [
    "AUTO",
    "EFFORTS",
    "OBJECTIVES",
    "Candidate",
    "Choice",
    "Cut",
    "Placed",
    "PlannerConfig",
    "Task",
    "choose",
    "default_cost",
    "lower_choice",
    "place_batch",
    "plan_batch",
    "plan_with",
    "search",
    "search_divisions",
]
