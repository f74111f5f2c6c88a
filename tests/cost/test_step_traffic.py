"""Gradients, weights and tensor parallelism are priced on the links that attention uses."""

from dataclasses import replace

import numpy as np
import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, masks
from dyncp.blocks import Direction
from dyncp.cost import (
    CostModel,
    StepTraffic,
    find_model,
    find_profile,
    model_shape,
    usual_decoder,
)
from dyncp.planner import Task, choose, plan_batch, tell_usual_decoder
from dyncp.samplers import sample_lengths
from dyncp.simulate import simulate_plan
from dyncp.topology import Link, Topology, preset

WEIGHTS, LINK = 1e9, Link(0.0, 10e9)
NODES = Topology(2, 8, Link(0.0, 100e9), LINK, 4)


@pytest.mark.parametrize(
    ("traffic", "seconds"),
    [
        (StepTraffic(), 0.0),
        (StepTraffic("sharded"), 15 / 16 * 4 / 10),
        (StepTraffic("reduced"), 2 * 15 / 16 * 4 / 10),
        (StepTraffic("sharded", batches=4), 15 / 16 / 10),
        (StepTraffic("sharded", gradient_dtype="bf16"), 15 / 16 * 2 / 10),
        (StepTraffic("none", "step"), 15 / 16 * 2 / 10),
        (StepTraffic("none", "step", batches=2), 15 / 16 / 10),
        (StepTraffic("none", "layer", batches=2), 2 * 15 / 16 * 2 / 10),
    ],
)
def test_rings_send_every_byte_once_per_border(traffic: StepTraffic, seconds: float) -> None:
    assert traffic.seconds(WEIGHTS, NODES) == pytest.approx(seconds)


def test_inside_a_node_the_links_of_ranks_carry_it() -> None:
    node = replace(NODES, nodes=1)
    assert StepTraffic("sharded").seconds(WEIGHTS, node) == pytest.approx(7 / 8 * 4 / 100)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"gradients": "summed"}, "gradients is 'summed'; choose one of none, reduced, sharded"),
        ({"gathered": "never"}, "gathered is 'never'; choose one of none, step, layer"),
        ({"batches": 0}, "batches is 0; at least 1"),
        ({"weight_dtype": "int4"}, "weight_dtype is 'int4'; choose one of fp64"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StepTraffic(**wrong)  # type: ignore[arg-type]


def simulated(traffic: StepTraffic | None, topology: Topology | None = None) -> float:
    """The simulated step of a small batch of a model whose traffic takes long."""
    topology = topology or preset("p4de", 2, 4)
    model = replace(find_model("llama3.2-1b"), traffic=traffic)
    batch = Batch.of([masks.causal(n) for n in (3000, 900, 100)])
    cost = CostModel(find_profile("p4de"), model.attention_shape())
    config = PlannerConfig(solver="zigzag")
    plan = plan_batch(batch, topology, model, config, cost=cost)
    return simulate_plan(plan, topology, cost, model=model).step_seconds


def test_what_the_step_does_not_hide_is_added_to_it() -> None:
    topology = preset("p4de", 2, 4)
    model, alone = find_model("llama3_2_1b"), simulated(None)
    serial = StepTraffic("sharded", "step", overlaps=False)
    seconds = replace(model, traffic=serial).traffic_seconds(topology)
    assert seconds > alone > 0
    assert simulated(serial) == pytest.approx(alone + seconds)
    beside = simulated(replace(serial, overlaps=True))
    # Attention's messages use the links too, so the step hides less than its own time.
    assert seconds < beside < alone + seconds
    idle = simulated(replace(serial, overlaps=True, batches=10_000))
    assert idle == pytest.approx(alone)


def test_the_planner_counts_it_as_the_simulator_does() -> None:
    topology, traffic = preset("p4de", 2, 4), StepTraffic("reduced", "layer")
    model = replace(find_model("llama3_2_1b"), traffic=traffic)
    batch = Batch.of([masks.causal(n) for n in (3000, 900, 100)])
    cost = CostModel(find_profile("p4de"), model.attention_shape())
    task = Task.of(batch, topology, cost.shape, PlannerConfig(solver="zigzag"), cost, model)
    chosen = choose(task).candidate.simulated
    assert chosen.traffic_seconds > 0
    assert chosen.step_seconds == pytest.approx(simulated(traffic))


def test_tensor_parallel_ranks_sum_activations_and_share_nics() -> None:
    profile, whole = find_profile("p4de"), find_model("llama3_8b")
    shared = whole.divided(4)
    for direction in Direction:
        computed = shared.flops_per_token(direction) / profile.dense
        # Two whole sums per layer: each sends 2 × 3 / 4 of 4096 values of 2 bytes.
        summed = 32 * 2 * (2 * 3 / 4 * 4096 * 2) / profile.intra.bandwidth
        assert shared.seconds_per_token(profile, direction) == pytest.approx(computed + summed)
        assert whole.seconds_per_token(profile, direction) == pytest.approx(
            whole.flops_per_token(direction) / profile.dense
        )


@pytest.mark.parametrize(
    ("per_node", "nics", "tp", "bandwidth", "own"),
    [
        (8, 4, 1, 45e9, 4),  # as it was
        (2, 4, 4, 45e9 / 4, 2),  # 8 GPUs on 4 NICs: a rank has half a NIC
        (4, 4, 2, 45e9 / 2, 4),  # two GPUs share a NIC, both of the same rank
        (1, 8, 8, 45e9 / 8, 1),  # every GPU has a NIC of its own
        (4, 8, 2, 45e9 / 2, 4),
        (4, 1, 2, 45e9 / 2, 1),  # all GPUs share one NIC
    ],
)
def test_ranks_of_several_gpus_share_the_nics_of_their_node(
    per_node: int, nics: int, tp: int, bandwidth: float, own: int
) -> None:
    sliced = Topology(2, per_node, LINK, Link(1e-6, 45e9), nics).slice(tp)
    assert sliced.inter.bandwidth == pytest.approx(bandwidth)
    assert sliced.nics == own
    # All GPUs of a node together have the bandwidth of its NICs.
    assert tp * sliced.inter.bandwidth == pytest.approx(45e9)


def test_a_model_divided_among_other_ranks_than_the_mesh_is_refused() -> None:
    divided = find_model("llama3_8b").divided(4)
    assert model_shape(divided, 4)[1] == divided
    with pytest.raises(ValueError, match="divided among 4 tensor-parallel ranks; the mesh has 2"):
        model_shape(divided, 2)


@pytest.mark.parametrize("name", ["llama3_8b", "llama3-8b", "Llama3-8B"])
def test_models_are_found_in_any_spelling(name: str) -> None:
    assert find_model(name).hidden == 4096


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3_8b", 8.03),
        ("llama3_70b", 70.6),
        ("llama3_405b", 405.9),
        ("llama3.2-1b", 1.50),
        ("llama3.2-3b", 3.61),
        ("mistral-7b", 7.25),
        ("qwen3-0.6b", 0.75),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("gpt_8b", 7.39),
    ],
)
def test_known_models_have_their_published_number_of_weights(name: str, billions: float) -> None:
    """With an embedding and a head of their own; small models tie the two."""
    model = find_model(name)
    weights = model.layers * model.layer_weights + 2 * model.hidden * model.vocab
    assert weights / 1e9 == pytest.approx(billions, rel=0.005)


def test_without_sizes_tokens_are_balanced_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell_usual_decoder.cache_clear()
    caplog.set_level("INFO", logger="dyncp.planner")
    topology = preset("p4de", 4)
    batch = Batch.of([masks.causal(n) for n in sample_lengths("ldc", 131_072, 2)])
    for model in (None, AttentionShape(32, 8, 128)):
        tokens = plan_batch(batch, topology, model).parts[0].tokens_per_rank
        assert tokens.max() <= 1.02 * tokens.mean()
    assert len([r for r in caplog.records if "usual decoder" in r.getMessage()]) == 1
    caplog.clear()
    alone = plan_batch(batch, topology, None, PlannerConfig(attention_only=True)).parts[0]
    assert not caplog.records
    assert alone.tokens_per_rank.max() > 1.1 * alone.tokens_per_rank.mean()


def test_a_usual_decoder_has_the_given_heads() -> None:
    shape = AttentionShape(16, 4, 64, "fp16")
    usual = usual_decoder(shape)
    assert usual.attention_shape() == shape
    assert usual.hidden == 16 * 64
    ratio = usual.layer_weights / find_model("llama3_8b").layer_weights
    assert np.sqrt(ratio) == pytest.approx(1024 / 4096, rel=0.01)
