"""Untested architectures, which attach compares with their own attention, and wrapped models."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity_models import NAMES, SIZES, config_of, make_model  # noqa: E402

from dyncp import DCPDataLoader, DCPExecutor, masks  # noqa: E402
from dyncp.integrations.transformers import attach, layer_masks  # noqa: E402
from dyncp.integrations.transformers.functions import Call, attend  # noqa: E402
from hf_cases import planned, samples_of, virtual  # noqa: E402
from processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("plans_here")

Llama = transformers.LlamaForCausalLM
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "cls_token_id": 0,
    "sep_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS = {
    "Qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "Mixtral": EXPERTS,
    "Llama4Text": EXPERTS | {"head_dim": 8, "attention_chunk_size": 24, "intermediate_size_mlp": 48}
    | {"layer_types": ["chunked_attention", "full_attention"]},
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "ModernBertDecoder": {"local_attention": 24, "num_key_value_heads": 4} | TOKENS,
}  # fmt: skip


def model_of(kind):
    config = getattr(transformers, f"{kind}Config")(**SIZES | OTHERS[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.15)
    return model


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_are_refused_until_compared_and_then_right(kind):
    model = model_of(kind)
    with pytest.raises(ValueError, match=r"has not been compared with one process; tested are"):
        attach(model)
    model.eval()
    samples = samples_of(0)
    with torch.no_grad():
        wanted = [model(input_ids=x["input_ids"][None], use_cache=False).logits for x in samples]
        attached = attach(model, untested=True)
        data, step = virtual(attached.config)
        found = step.gather(model(**data, dyncp_step=step).logits[0])
    for got, expected in zip(found, wanted, strict=True):
        assert (got - expected[0]).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_tested_models_give_what_their_own_masks_give(name):
    attach(make_model(name), untested=True)


class TokenShift(Llama):
    """Adds the preceding row to each row, as convolutions do."""

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda _, __, x: x + x.roll(1, dims=1))


class LocalPositions(Llama):
    """RoPE by the index of a row on its rank."""

    def forward(self, position_ids=None, **options):
        if position_ids is not None:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return super().forward(position_ids=position_ids, **options)


class MeanLoss(Llama):
    """A loss that differs if the model is called with shift_labels."""

    def forward(self, **options):
        output = super().forward(**options)
        if output.loss is not None and "shift_labels" in options:
            output.loss = output.loss * 1.01
        return output


class OwnRows(Llama):
    """A layer with a second attention that does not use Transformers' interface."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_hook(self.attend_too)

    @staticmethod
    def attend_too(_, __, output):
        rows = output[0]
        return (rows + torch.softmax(rows @ rows.mT, dim=-1) @ rows, *output[1:])


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (TokenShift, "the outputs of TokenShift under dyncp differ"),
        (
            LocalPositions,
            "LocalPositions computes with the numbers of a rank's rows",
        ),
        (OwnRows, "the outputs of OwnRows under dyncp differ"),
        (MeanLoss, "the losses of MeanLoss under dyncp differ"),
    ],
)
def test_a_model_of_the_users_that_mixes_rows_is_refused_and_left_as_it_was(kind, what):
    model = kind(config_of("llama"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"{kind.__name__} .llama. has not been compared"):
        attach(model)
    with pytest.raises(ValueError, match=what):
        attach(model, untested=True)
    assert model.config._attn_implementation == "sdpa"
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    ids = samples_of(0)[0]["input_ids"][None]
    assert torch.isfinite(model(input_ids=ids).logits).all()
    assert model.training
    with pytest.raises(ValueError, match="was detached, or attach refused it"):
        model(input_ids=ids, dyncp_step=object())


LIMIT = 4096


class Scaled(Llama):
    """A layer whose results are scaled by a factor, which depends on what is `of` the rows."""

    most = 4096

    def __init__(self, config):
        super().__init__(config)
        self.lengths = (1024, LIMIT)
        self.model.layers[0].mlp.register_forward_hook(
            lambda _, __, x: x * self.of(x, torch.ones(x.shape[:2], dtype=torch.long))
        )

    @staticmethod
    def after(number):
        return 1.0 if number < 1 else 1.5


class ByConfig(Scaled):
    def of(self, x, _):
        return self.after(x.shape[1] / self.config.max_position_embeddings)


class ByModule(Scaled):
    def of(self, x, _):
        return self.after(x.shape[1] / self.lengths[1])


class ByClass(Scaled):
    def of(self, x, _):
        return self.after(x.shape[1] / self.most)


class ByGlobal(Scaled):
    def of(self, x, _):
        return self.after(x.shape[1] / LIMIT)


class ByConstant(Scaled):
    def of(self, x, _):
        return 1.5 if x.shape[1] > 2000 else 1.0


class ByArange(Scaled):
    def of(self, x, _):
        return 1 + (torch.arange(x.shape[1]) // 1e9)[None, :, None]


class ByCumsum(Scaled):
    def of(self, _, ones):
        return 1 + ((ones.cumsum(1) - 1).float() // 1e9)[..., None]


class ByIndex(Scaled):
    """Indexes rows by their numbers, as mixtures of experts do."""

    def of(self, x, _):
        return 1.0 + 0 * x[:, torch.arange(x.shape[1])[:, None].reshape(-1)]


class ByBuffer(Scaled):
    stored = torch.arange(4000)

    def of(self, x, _):
        return 1 + self.stored[: x.shape[1]][None, :, None] // LIMIT


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ByConfig, "the outputs of ByConfig beyond max_position_embeddings=2048 under dyncp"),
        (ByModule, r"the outputs of ByModule beyond lengths=\(1024, 4096\) under dyncp differ"),
        (ByClass, "the outputs of ByClass beyond most=4096 under dyncp differ"),
        (ByGlobal, "the outputs of ByGlobal beyond LIMIT=4096 under dyncp differ"),
        (ByConstant, "the outputs of ByConstant beyond the constants in ByConstant.of under"),
        (ByArange, "ByArange computes with the numbers of a rank's rows .* in ByArange.of"),
        (ByCumsum, "ByCumsum computes with the numbers of a rank's rows .* in ByCumsum.of"),
        (ByBuffer, "ByBuffer computes with the numbers of a rank's rows .* in ByBuffer.of"),
    ],
)
def test_what_only_long_documents_show_is_found_in_small_ones(kind, what):
    model = kind(config_of("llama"))
    codes = [kind.of.__code__, vars(model.config).copy(), model.lengths, kind.most, LIMIT]
    with pytest.raises(ValueError, match=what):
        attach(model, untested=True)
    assert codes == [kind.of.__code__, vars(model.config), model.lengths, kind.most, LIMIT]


def test_rows_may_be_indexed_by_their_numbers():
    attach(ByIndex(config_of("llama")), untested=True)
    config = transformers.HunYuanMoEV1Config(**SIZES | {"head_dim": 8, "moe_topk": 1})
    attach(transformers.HunYuanMoEV1ForCausalLM(config), untested=True)


def test_a_scale_of_late_positions_that_counts_rows_is_refused():
    kind = "Llama4Text"
    config = transformers.Llama4TextConfig(**SIZES | OTHERS[kind] | {"no_rope_layers": [1, 0]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"numbers of a rank's rows \(modeling_llama4\.py"):
        attach(model, untested=True)


def test_scales_of_late_positions_by_position_ids_are_right():
    sizes = SIZES | {"num_attention_heads": 4, "head_dim": 8}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": 512}
    config = transformers.Ministral3Config(**sizes | {"rope_parameters": rope})
    attach(transformers.Ministral3ForCausalLM(config), untested=True)


def test_heads_of_single_layers_that_the_loader_would_not_plan_are_refused_at_attach():
    model = make_model("llama")
    model.model.layers[1].self_attn.head_dim = 16
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn of Llama.* head_dim of size 16"):
        attach(model)
    model = make_model("llama")
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(32, 32)
    with pytest.raises(ValueError, match=r"k_proj of size 32; .* it is 16 \(2 kv heads"):
        attach(model)
    config = transformers.JetMoeConfig(
        **SIZES | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    with pytest.raises(ValueError, match="cannot run under dyncp: q and kv have 4 q heads, 4 kv"):
        attach(transformers.JetMoeForCausalLM(config), untested=True)


WHY = {
    "Bart": ({"d_model": 32, "decoder_layers": 1}, "makes an attention_mask of its own"),
    "BioGpt": ({"num_key_value_heads": 4}, "makes an attention_mask of its own"),
    "Doge": ({}, "it may compute with its attention mask, which dyncp does not make"),
    "DeepseekV3": ({"kv_lora_rank": 16}, "multi-head latent attention, whose keys and values"),
}


@pytest.mark.parametrize("kind", WHY)
def test_models_that_cannot_run_are_refused_by_a_sentence_that_says_why(kind):
    options, why = WHY[kind]
    config = getattr(transformers, f"{kind}Config")(**SIZES | {"num_hidden_layers": 1} | options)
    with torch.device("meta" if kind == "DeepseekV3" else "cpu"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(ValueError, match=why):
        attach(model, untested=True)


def test_layers_whose_keys_and_values_differ_in_width_are_named():
    model = make_model("llama")
    attach(model)
    _, step = virtual(model.config)
    call = Call(step, layer_masks(model.config), step.num_rows, 0, {})
    query, key = torch.zeros(1, 4, 8, 8), torch.zeros(1, 2, 8, 8)
    layer = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="keys of LlamaAttention have head_dim 8 and its values 4"):
        attend(layer, query, key, key[..., :4], "dyncp None", dyncp_step=call)


def test_layers_that_do_not_pass_the_step_on_are_named():
    options = {name: value for name, value in SIZES.items() if name != "pad_token_id"}
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**options))
    with pytest.raises(ValueError, match=r"StableLm\w*Attention got no step.*do not pass keywords"):
        attach(model, untested=True)


def test_convolutions_that_the_config_does_not_mention_are_named_with_their_path():
    model = make_model("llama")
    model.model.layers[1].mlp.add_module("mix", torch.nn.Conv1d(32, 32, 3))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.mix of Llama\w+ is Conv1d"):
        attach(model, untested=True)


def test_a_model_with_a_tower_for_images_is_not_its_text_model():
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=config_of("gemma3").to_dict(), vision_config=tower, mm_tokens_per_image=4
    )
    with pytest.raises(ValueError, match=r"\(gemma3\) has not been compared"):
        attach(transformers.Gemma3Model(config))


def test_a_model_without_weights_is_not_compared_and_says_so(caplog):
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    with caplog.at_level(logging.WARNING):
        attach(model, untested=True)
    assert "Qwen2ForCausalLM has no weights yet, so it was not compared" in caplog.text


def test_a_rope_that_only_a_module_knows_gets_the_largest_position_too():
    model = make_model("llama")
    assert not attach(model)._needs_largest
    model.model.rotary_emb.rope_type = "dynamic"
    assert attach(model)._needs_largest
    by_layer = {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}}
    other = make_model("llama")
    other.config.rope_parameters = by_layer
    assert attach(other)._needs_largest


def test_a_loss_of_the_users_is_refused():
    model = make_model("llama")
    model.loss_function = lambda logits, **_: logits.mean()
    with pytest.raises(ValueError, match="was given a loss_function of its own"):
        attach(model)


def test_scores_that_the_config_requests_are_refused():
    with pytest.raises(ValueError, match=r"attention scores among its outputs \(output_attentions"):
        attach(make_model("llama", attn_implementation="eager", output_attentions=True))


def test_a_softcap_by_any_name_is_refused_and_one_of_logits_is_not():
    attach(make_model("gemma3", final_logit_softcapping=30.0))
    model = make_model("llama")
    model.config.attention_softcap = 20.0
    with pytest.raises(ValueError, match=r"a softcap on attention scores \(attention_softcap=20.0"):
        attach(model)


class PastHooks(torch.nn.Module):
    """Calls forward directly, so that hooks do not run."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **options):
        return self.inner.forward(**options)


def test_wrappers_past_the_hooks_are_refused():
    model = make_model("llama")
    attach(model)
    data, step = virtual(model.config)
    with pytest.raises(ValueError, match=r"got no step.*bypass its hooks"):
        PastHooks(model)(**data, dyncp_step=step)
    with pytest.raises(ValueError, match="expected a Transformers model, before it is compiled"):
        attach(PastHooks(model))


def test_a_layer_that_looks_both_ways_is_refused():
    model = make_model("llama")
    attach(model)
    model.model.layers[1].self_attn.is_causal = False
    data, step = virtual(model.config)
    with pytest.raises(ValueError, match="LlamaAttention calls attention with is_causal=False"):
        model(**data, dyncp_step=step)


def _forgetful(rank):
    """The errors of two ranks that first forget to attach their model, and then attach it."""
    model, executor = make_model("llama"), DCPExecutor(timeout=60)
    samples = [{"input_ids": list(range(40))} for _ in range(20)]

    def train(loader):
        for data, plan in loader:
            model(**data, dyncp_step=executor.prepare(plan))
        return "trained"

    said = []
    for make in (DCPDataLoader, lambda *given, **options: attach(model).loader(*given, **options)):
        with make(samples, masks.causal, tokens_per_batch=40) as loader:
            try:
                said.append(train(loader))
            except ValueError as error:
                said.append(str(error))
        dist.barrier()
    return said


def test_a_forgotten_attach_is_noticed_after_a_few_steps():
    for without, after in run_ranks(_forgetful, 2):
        assert "16 steps in a row were prepared and dropped, and attention was called" in without
        assert "attach(model)" in without
        assert after == "trained"


def test_plans_may_be_prepared_for_another_purpose_than_attention():
    _, _, plan = planned(make_model("llama").config, 0, 2)
    executor = DCPExecutor(virtual_ranks=2)
    for _ in range(6):
        executor.prepare(plan)
