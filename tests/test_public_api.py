"""What users see: names, keywords with their defaults, dtypes, and one attention function."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import dyncp
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPDataLoader,
    DCPExecutor,
    LoaderTuning,
    ModelConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.dataloader import LoaderConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*.py"))]
SOURCES = sorted(Path(dyncp.__file__).parent.rglob("*.py"))
PROTOCOLS = {"Kernel", "Transport"}  # for those who write one of their own
SAMPLES = [{"input_ids": [1, 2, 3]}]
PLAN = plan_batch(Batch.of([masks.causal(8)]), Topology(1, 2))


def test_every_public_name_is_there_and_listed():
    assert all(hasattr(dyncp, name) for name in dyncp.__all__)
    assert set(dyncp.__all__) <= set(dir(dyncp))


def test_what_needs_torch_is_loaded_on_first_use():
    code = "import sys, dyncp; sys.exit('torch' in sys.modules or 'dyncp.verify' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_what_errors_tell_users_to_build_is_exported():
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    errors = [node for node in nodes if isinstance(node, ast.Raise) or is_check(node)]
    errors = [node for node in errors if "AssertionError" not in ast.unparse(node)]
    texts = [
        text.value
        for error in errors
        for text in ast.walk(error)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]
    named = {name for text in texts for name in re.findall(r"\b[A-Z]\w+", text)} & classes
    assert {"Layout", "Limits", "Link", "ModelConfig"} <= named
    assert named - PROTOCOLS <= {*dyncp.__all__, *masks.__all__}


def is_check(node: ast.AST) -> bool:
    """`instance_of(name, value, kinds, expected)` raises what `expected` says."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "instance_of"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_public_names_from_dyncp(page):
    deeper = re.findall(r"^from dyncp\.\w[\w.]* import (.*)$", page.read_text(), re.MULTILINE)
    names = {name.strip() for line in deeper for name in line.split(",")}
    assert not names & set(dyncp.__all__)


def test_every_option_of_the_loader_is_a_keyword_with_its_default():
    parameters = inspect.signature(DCPDataLoader).parameters
    assert not [x for x in parameters.values() if x.kind is inspect.Parameter.VAR_KEYWORD]
    defaults = LoaderConfig()
    for field in fields(LoaderConfig):
        option = parameters[field.name]
        assert option.kind is inspect.Parameter.KEYWORD_ONLY
        assert option.annotation is not inspect.Parameter.empty
        optional = field.name in ("token_fields", "tuning")  # None: the default of the field
        assert option.default == (None if optional else getattr(defaults, field.name))


def test_every_option_of_the_loader_reaches_it():
    given = {
        "tokens_per_batch": 40, "accumulation_steps": 2, "seed": 3, "sampler": [0], "lengths": [3],
        "max_length": 30, "too_long": "split", "bad_samples": "drop_empty", "drop_last": True,
        "evaluation": True, "local_multiple": 4, "token_fields": {"labels": 0}, "sample_ids": True,
        "collate": lambda data, _: data, "tuning": LoaderTuning(window=5, num_planners=2),
    }  # fmt: skip
    with DCPDataLoader(SAMPLES, masks.causal, **given) as loader:
        assert {name: getattr(loader.config, name) for name in given} == given
    with DCPDataLoader(SAMPLES, masks.causal, shuffle=True, bad_samples="drop") as loader:
        assert loader.config.shuffle
        assert loader.config.bad_samples == "drop"
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokens'"):
        DCPDataLoader(SAMPLES, masks.causal, tokens=3)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "fp64"), (torch.float32, "fp32"), (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"), ("float16", "fp16"), ("fp16", "fp16"),
    ],
)  # fmt: skip
def test_torch_dtypes_are_taken_where_names_are(dtype, name):
    shape = AttentionShape(4, 2, 8, dtype, partial_dtype=dtype)
    assert shape == AttentionShape(4, 2, 8, name, partial_dtype=name)
    sizes = ModelConfig(32, 2, 64, 100, 4, 2, 8, dtype=dtype)
    assert sizes.attention_shape().dtype == ModelConfig.of(sizes).dtype == name
    for model in (AttentionShape(4, 2, 8, dtype), sizes):
        with DCPDataLoader(SAMPLES, masks.causal, model=model) as loader:
            assert loader.shape.dtype == name


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "half", 16, torch.Tensor])
def test_other_dtypes_are_refused_in_one_sentence(dtype):
    allowed = "choose one of fp64, fp32, bf16, fp16, or of torch's float64, float32, bfloat16"
    for call in (
        lambda: AttentionShape(dtype=dtype),
        lambda: AttentionShape(partial_dtype=dtype),
        lambda: ModelConfig(32, 2, 64, 100, 4, 2, 8, dtype=dtype),
    ):
        with pytest.raises(ValueError, match=allowed):
            call()


def test_attention_takes_k_and_v_packed_or_apart_and_has_an_alias():
    step = DCPExecutor(virtual_ranks=2).prepare(PLAN)
    q, kv = torch.randn(8, 4, 8), torch.randn(8, 2, 2, 8, requires_grad=True)
    outs = (attention(step, q, kv), attention(step, q, *kv.unbind(1)), DCPAttn.apply(step, q, kv))
    gradients = [torch.autograd.grad(out.sum(), kv)[0] for out in outs]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    scaled = attention(step, q, kv, scale=-0.5, sink=torch.zeros(4), mask="default")
    apart = attention(step, q, *kv.unbind(1), scale=-0.5, sink=torch.zeros(4))
    assert torch.equal(scaled, apart)
    with pytest.raises(ValueError, match=r"kv has shape \(8, 2, 8\); expected \[tokens, 2, kv_h"):
        attention(step, q, kv[:, 0])
