"""Plans a batch: chains the planning stages and searches for the shortest simulated step."""

from dyncp.planner.choice import Choice
from dyncp.planner.config import AUTO, EFFORTS, OBJECTIVES, PlannerConfig
from dyncp.planner.plan_batch import (
    assemble_choice,
    choose,
    plan_batch,
    plan_with,
    tell_usual_decoder,
)
from dyncp.planner.robustness import PERTURBATIONS, surviving
from dyncp.planner.search import search, search_divisions
from dyncp.planner.task import Candidate, Placed, Task
