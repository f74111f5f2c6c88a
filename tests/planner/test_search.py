"""The search: the shortest simulated step wins, whoever made it."""

import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, masks, plan_batch
from dyncp.cost import CostModel, find_model, find_profile
from dyncp.placement import Limits, static_candidates
from dyncp.planner import make_candidate, search
from dyncp.simulate import simulate_schedules
from dyncp.topology import preset
from dyncp.verify import check_plan

SHAPE = AttentionShape(8, 2, 128)
COST = CostModel(find_profile("p4de"), SHAPE)
CONFIG = PlannerConfig(limits=Limits(0.1, 0.2))
LENGTHS = [(9000, 4000, 2500, 1200, 600, 300), (8192,), (1024,) * 8]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("model", [None, "llama3_8b"])
def test_no_static_method_is_predicted_to_be_faster(lengths, model):
    batch, topology = Batch.of([masks.lambda_shaped(n) for n in lengths]), preset("p4de", 2, 2)
    config = find_model(model) if model else None
    choice = search(batch, topology, SHAPE, CONFIG, COST, config)
    for solver in static_candidates(batch.lengths, SHAPE, topology):
        other = make_candidate(solver, batch, topology, SHAPE, CONFIG)
        simulated = simulate_schedules(
            other.graph, other.placement, other.schedules, topology, COST, model=config
        )
        assert choice.simulated.step_seconds <= simulated.step_seconds * (1 + 1e-12), solver.name


def test_pruned_candidates_could_not_have_won():
    batch, topology = Batch.of([masks.causal(n) for n in LENGTHS[0]]), preset("p4de", 2, 2)
    choice = search(batch, topology, SHAPE, CONFIG, COST)
    assert any(tried.pruned for tried in choice.tried)
    for tried in choice.tried:
        assert tried.seconds >= choice.simulated.step_seconds * (1 - 1e-12)


def test_the_choice_is_explained():
    batch, topology = Batch.of([masks.causal(n) for n in LENGTHS[0]]), preset("p4de", 1, 4)
    choice = search(batch, topology, SHAPE, CONFIG, COST)
    fastest, *_, last = choice.explain().splitlines()
    assert choice.candidate.placement.solver in fastest
    assert f"{1e3 * choice.simulated.step_seconds:.3f} ms" in fastest
    assert last.endswith("pruned by their compute")


def test_auto_plans_pass_the_verifier_and_are_the_same_every_time():
    batch, topology = Batch.of([masks.causal(n) for n in LENGTHS[0]]), preset("p4de", 2, 2)
    plans = [plan_batch(batch, topology, SHAPE, PlannerConfig("auto")) for _ in range(2)]
    check_plan(plans[0], batch)
    assert plans[0] == plans[1]


def test_forward_only_plans_are_pruned_by_forward_alone():
    batch, topology = Batch.of([masks.causal(n) for n in LENGTHS[0]]), preset("p4de", 2, 2)
    config = PlannerConfig(limits=Limits(0.1, 0.2), forward_only=True)
    choice = search(batch, topology, SHAPE, config, COST)
    for solver in static_candidates(batch.lengths, SHAPE, topology):
        other = make_candidate(solver, batch, topology, SHAPE, config)
        simulated = simulate_schedules(
            other.graph, other.placement, other.schedules, topology, COST
        )
        assert choice.simulated.step_seconds <= simulated.step_seconds * (1 + 1e-12), solver.name
