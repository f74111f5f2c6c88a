"""The search: the shortest simulated step wins, dynamic or static."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, PlannerConfig, masks, plan_batch
from dyncp.cost import CostModel, find_model, find_profile
from dyncp.placement import (
    SOLVERS,
    Limits,
    Solver,
    StaticBounds,
    static_candidates,
    whole_rows,
)
from dyncp.planner import Task, choose, search
from dyncp.planner.bounds import part_seconds, per_token_seconds, static_seconds
from dyncp.planner.search import Search
from dyncp.samplers import sample_lengths
from dyncp.topology import Link, Topology, preset
from dyncp.verify import check_plan
from sizes import draws, pick

SHAPE = AttentionShape(8, 2, 128)
COST = CostModel(find_profile("p4de"), SHAPE)
LENGTHS = [(9000, 4000, 2500, 1200, 600, 300), (8192,), (1024,) * 8]
MASKS = ["causal", "lambda_shaped", "causal_blockwise", "shared_question", "full"]


def make_task(lengths, mask="causal", ranks=(2, 2), model=None, **options) -> Task:
    """`mask` may be several names with + between them: each is a mask of its own."""
    names = mask.split("+")
    made = [{name: masks.by_name(name)(n) for name in names} for n in lengths]
    batch = Batch.of(made if len(names) > 1 else [own[mask] for own in made])
    config = PlannerConfig(**options)
    return Task.of(batch, preset("p4de", *ranks), SHAPE, config, COST, model)


def static_times(task: Task) -> dict[str, float]:
    solvers = static_candidates(task.batch.lengths, SHAPE, task.topology)
    found = {solver.name: task.follow(task.place(solver)) for solver in solvers}
    return {name: candidate.simulated.step_seconds for name, candidate in found.items()}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("model", [None, "llama3_8b"])
def test_no_static_method_is_predicted_to_be_faster(lengths, model):
    task = make_task(lengths, "lambda_shaped", model=find_model(model) if model else None)
    seconds = search(task).simulated.step_seconds
    for name, other in static_times(task).items():
        assert seconds <= other * (1 + 1e-12), name


def test_all_masks_are_priced_by_their_layers():
    """The choice for few causal layers is not that for many, and each is the best for its own."""
    few, many = ({"causal": n, "lambda_shaped": 40 - n} for n in (1, 39))
    tasks = [make_task(LENGTHS[0], "causal+lambda_shaped", (2, 4), layers=n) for n in (few, many)]
    found = [search(task) for task in tasks]
    assert [dict(choice.simulated.layers) for choice in found] == [few, many]
    for task, other in zip(tasks, reversed(found), strict=True):
        mine = search(task).simulated.step_seconds
        assert mine <= task.simulate(other.candidate).step_seconds * (1 + 1e-12)
        assert all(mine <= seconds * (1 + 1e-12) for seconds in static_times(task).values())
    light, heavy = (
        sum(times.seconds for times in choice.simulated.attention["causal"]) for choice in found
    )
    assert heavy < light


def test_masks_have_equally_many_layers_where_none_are_given():
    task = make_task(LENGTHS[0], "causal+lambda_shaped")
    assert task.layers == {"causal": 1, "lambda_shaped": 1}
    model = find_model("llama3_8b")
    task = make_task(LENGTHS[0], "causal+lambda_shaped", model=model)
    assert task.layers == {"causal": 16, "lambda_shaped": 16}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"local": 1}, "layers names mask 'local'; the plan has causal, lambda_shaped"),
        ({"causal": 0}, "at least one layer is needed"),
        ({"causal": 1.5}, r"layers\['causal'\] is 1.5"),
        ([1, 2], "layers is .*; expected numbers of layers by mask name"),
    ],
)
def test_wrong_layers_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        search(make_task(LENGTHS[2], "causal+lambda_shaped", layers=layers))


def test_forward_only_plans_compare_forward_alone():
    task = make_task(LENGTHS[0], forward_only=True)
    seconds = search(task).simulated.step_seconds
    assert all(seconds <= other * (1 + 1e-12) for other in static_times(task).values())


@draws(25)
@given(
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=8),
    mask=st.sampled_from([*MASKS, "causal+lambda_shaped"]),
    ranks=st.sampled_from([(1, 4), (2, 2), (2, 4)]),
    model=st.sampled_from([None, "llama3_8b"]),
    some=st.sampled_from([0, 1, 5]),
)
@example(lengths=[64, 641], mask="causal", ranks=(2, 4), model=None, some=0)  # a short last chunk
def test_bounds_of_static_methods_are_never_above_what_is_simulated(
    lengths, mask, ranks, model, some
):
    layers = {"causal": some, "lambda_shaped": 2} if "+" in mask else None
    task = make_task(lengths, mask, ranks, find_model(model) if model else None, layers=layers)
    solvers = static_candidates(task.batch.lengths, SHAPE, task.topology)
    graph = task.place(SOLVERS["owner_computes"]).graph
    bounds = StaticBounds(graph, task.topology)
    pairs = {name: float(whole_rows(graph, name)[0].sum()) for name in graph.tiles}
    for solver in solvers:
        placed = task.place(solver)
        seconds = task.follow(placed).simulated.step_seconds
        bound = bounds.of(solver.degrees)
        assert static_seconds(task, bound, pairs) <= seconds * (1 + 1e-9), solver.name
        least = sum(part_seconds(task, placed).values()) + per_token_seconds(task, placed)
        assert least <= seconds * (1 + 1e-9), solver.name
        ranks_ = task.topology.num_ranks
        assert bound.tokens * ranks_ <= placed.balance.tokens_max_over_mean * (1 + 1e-9), (
            solver.name
        )


def test_pruned_candidates_could_not_have_won():
    choice = search(make_task(LENGTHS[0]))
    assert any(tried.pruned for tried in choice.tried)
    for tried in choice.tried:
        assert tried.seconds >= choice.simulated.step_seconds * (1 - 1e-12)


def test_limits_asked_for_come_before_time():
    task = make_task(LENGTHS[0], limits=Limits(0.1, 0.2))
    choice = search(task)
    assert choice.candidate.balance.missed == 0
    faster = [t for t in choice.tried if t.seconds < choice.simulated.step_seconds]
    assert all(t.missed > 0 or t.pruned for t in faster)


def test_limits_are_kept_at_little_cost_where_some_blocks_are_heavy():
    """Within 1.3 times the time without limits, in the mean."""
    costs = []
    heavy = ((1,) * 2000 + (65537,), (100003,) + (29,) * 1071)
    for lengths in pick(heavy[:1], heavy):
        for mask in ("lambda_shaped", "causal_blockwise"):
            free = search(make_task(lengths, mask, (4, 8)))
            limited = search(make_task(lengths, mask, (4, 8), limits=Limits(0.1, 0.2)))
            assert limited.candidate.balance.missed == 0
            costs.append(limited.simulated.step_seconds / free.simulated.step_seconds)
    assert np.mean(costs) <= 1.3
    assert max(costs) <= 1.6


def test_limits_that_cost_much_are_warned_of(caplog):
    task = make_task((1024,) * 9, limits=Limits(0.0123, 0.0123))
    with caplog.at_level(logging.WARNING, "dyncp.planner.search"):
        choices = [search(task) for _ in range(2)]
    assert choices[0].candidate.balance.missed == 0
    assert caplog.text.count("the limits (compute 0.0123, tokens 0.0123) make the step") == 1


def test_the_choice_is_explained_by_the_plan():
    task = make_task(LENGTHS[0], ranks=(1, 4))
    choice = search(task)
    fastest, *_, last = choice.explain().splitlines()
    assert f"{1e3 * choice.simulated.step_seconds:.3f} ms" in fastest
    assert last.endswith("ruled out by their bounds")
    alone = PlannerConfig(attention_only=True)
    plan = plan_batch(task.batch, task.topology, SHAPE, alone, cost=COST)
    assert fastest in plan.explain()


def test_auto_plans_pass_the_verifier_and_are_the_same_every_time():
    task = make_task(LENGTHS[0])
    plans = [plan_batch(task.batch, task.topology, SHAPE) for _ in range(2)]
    check_plan(plans[0], task.batch)
    assert plans[0] == plans[1]


def test_quality_is_never_slower_than_fast():
    fast, quality = (
        search(make_task(LENGTHS[0], effort=effort)).simulated.step_seconds
        for effort in ("fast", "quality")
    )
    assert quality <= fast * (1 + 1e-12)


def test_fast_is_as_good_as_quality_where_layers_take_long():
    """Planning takes less than a second here, a layer as long."""
    slow = Topology(4, 2, Link(1e-3, 48e6), Link(1e-3, 12e6), 1)
    profile = replace(COST.profile, attention_forward=1e11, attention_backward=1e11)
    cost = CostModel(profile, SHAPE)
    batch = make_task(sample_lengths("ldc_x0.25", 16384, 3), "shared_question").batch
    fast, quality = (
        search(Task.of(batch, slow, SHAPE, PlannerConfig(effort=effort), cost)).simulated
        for effort in ("fast", "quality")
    )
    assert fast.layer_seconds > 0.05
    assert fast.step_seconds <= quality.step_seconds * (1 + 1e-12)


def test_fewest_bytes_is_another_objective():
    def moved(choice):
        forward, backward = choice.candidate.schedules["default"]
        size = choice.candidate.graph.payload_bytes
        tokens = choice.candidate.graph.blocks.tokens
        return sum(
            int((size[t.kind, t.head_group] * tokens[t.block]).sum())
            for t in (forward.transfers, backward.transfers)
        )

    limits = Limits(0.1, 0.2)
    options = {"limits": limits, "ranks": (1, 4)}
    fewest = choose(make_task((12000,), objective="bytes", head_groups=None, **options))
    fastest = choose(make_task((12000,), **options))
    assert moved(fewest) < moved(fastest)
    assert fewest.candidate.balance.missed == 0


def test_max_tokens_per_rank_is_kept_or_refused():
    lengths = (9000, 4000, 2500, 1200, 600, 300)
    mean = sum(lengths) / 4
    choice = choose(make_task(lengths, max_tokens_per_rank=int(1.06 * mean)))
    held = np.bincount(
        choice.candidate.placement.block_rank, choice.candidate.graph.blocks.tokens, 4
    )
    assert held.max() <= 1.06 * mean
    with pytest.raises(ValueError, match=r"max_tokens_per_rank is 4000, but 17,600 tokens on 4"):
        make_task(lengths, max_tokens_per_rank=4000)
    with pytest.raises(ValueError, match="the best placement found has"):
        choose(make_task((1, 1, 1, 1, 1, 5000), block_size=5000, max_tokens_per_rank=1300))


# Links that are slow compared with the GPUs: 25 Gb/s everywhere, and PCIe with 100 Gb/s per node.
SLOW_NETWORKS = {
    "ethernet": Topology(8, 1, Link(3e-5, 3.1e9), Link(3e-5, 3.1e9), 1),
    "pcie": Topology(2, 4, Link(1e-5, 25e9), Link(2e-5, 12.5e9), 1),
}


def slow_task(network: str, lengths, mask: str, **options) -> Task:
    task = make_task(lengths, mask, **options)
    return Task.of(task.batch, SLOW_NETWORKS[network], SHAPE, task.config, COST)


@pytest.mark.parametrize("network", SLOW_NETWORKS)
@pytest.mark.parametrize("mask", ["lambda_shaped", "shared_question"])
def test_on_slow_networks_moves_find_what_no_method_has(network, mask):
    task = slow_task(network, (40_000, 16_000, 9_000, 3_000, 500), mask)
    found = search(task)
    assert found.candidate.placement.solver == "improved"
    best = min(static_times(task).values())
    assert found.simulated.step_seconds < 0.9 * best
    check_plan(found.candidate.assemble(task.config.layout), task.batch)


@pytest.mark.parametrize("network", SLOW_NETWORKS)
def test_on_slow_networks_limits_are_kept(network):
    limits = Limits(0.1, 0.2)
    found = search(slow_task(network, (9_000, 6_000, 3_000, 500), "causal", limits=limits))
    assert found.candidate.balance.missed == 0


@pytest.mark.parametrize("effort", ["fast", "quality"])
@pytest.mark.parametrize("limits", [Limits(), Limits(0.1, 0.2)], ids=["free", "limited"])
def test_masks_that_allow_nothing_are_planned(effort, limits):
    nothing = masks.Mask(np.zeros((138, 1, 2), np.int64))
    config = PlannerConfig(effort=effort, limits=limits)
    for topology in (preset("p4de", 2, 2), *SLOW_NETWORKS.values()):
        check_plan(plan_batch(Batch.of([nothing]), topology, SHAPE, config), Batch.of([nothing]))


def test_where_one_start_fails_others_are_improved(monkeypatch, caplog):
    monkeypatch.setitem(SOLVERS, "bisection", Solver("bisection", broken))
    with caplog.at_level(logging.WARNING, "dyncp.planner"):
        found = search(slow_task("ethernet", (40_000, 9_000, 3_000), "lambda_shaped"))
    assert found.candidate.placement.solver == "improved"
    assert "solver bisection failed (RuntimeError: no luck)" in caplog.text


def broken(*_args):
    raise RuntimeError("no luck")


def test_a_solver_that_fails_is_replaced_with_one_warning(monkeypatch, caplog):
    monkeypatch.setitem(SOLVERS, "owner_computes", Solver("owner_computes", broken))
    with caplog.at_level(logging.WARNING, "dyncp.planner"):
        choice = choose(make_task(LENGTHS[0], solver="owner_computes"))
    assert choice.candidate.placement.solver != "owner_computes"
    assert (
        "solver owner_computes failed (RuntimeError: no luck); planning continues with"
        in caplog.text
    )
    found = Search(make_task(LENGTHS[0]))
    with pytest.raises(RuntimeError, match="no solver could plan"):
        found.choice()


def test_a_solver_that_hangs_is_given_up(monkeypatch, caplog):
    release = threading.Event()
    monkeypatch.setitem(SOLVERS, "bisection", Solver("bisection", lambda *_: release.wait(30)))
    with caplog.at_level(logging.WARNING, "dyncp.planner"):
        choice = choose(make_task(LENGTHS[0], solver="bisection", solver_seconds=0.2))
    release.set()
    assert choice.candidate.placement.solver != "bisection"
    assert "took longer than 0.2 s" in caplog.text


def test_mistakes_of_the_caller_are_not_replaced():
    with pytest.raises(ValueError, match="does not divide 4 ranks"):
        choose(make_task(LENGTHS[0], solver="zigzag/cp3"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "nosuch"}, "solver is 'nosuch'; choose one of"),
        ({"effort": "slow"}, "effort is 'slow'; choose one of fast, quality"),
        ({"objective": "luck"}, "objective is 'luck'; choose one of time, bytes"),
        ({"block_size": 0}, "block_size is 0; at least 1 is needed"),
        ({"head_groups": 0}, "head_groups is 0; at least 1 is needed"),
        ({"divisions": 1}, "divisions is 1; at least 2 is needed"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0; at least 1"),
        ({"solver_seconds": 0}, "solver_seconds is 0; it must be positive"),
    ],
)
def test_wrong_choices_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**options)
