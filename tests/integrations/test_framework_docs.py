"""The code on the pages of frameworks and meshes runs, in one process."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from processes import free_port

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module", autouse=True)
def world():
    """Frameworks need process groups, even for one process."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def run_page(page):
    """Runs all code of a page, and returns its variables."""
    torch.manual_seed(0)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), names)
    names["loader"].close()
    return names


def check_gradients(model):
    for name, parameter in model.named_parameters():
        gradient = (
            parameter.grad.full_tensor()
            if hasattr(parameter.grad, "full_tensor")
            else parameter.grad
        )
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


def test_the_page_of_meshes_runs():
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    names = run_page("parallelism.md")
    assert 5 < names["loss"] < 6  # near the loss of random weights
    check_gradients(names["model"])


def test_the_page_of_torchtitan_runs(monkeypatch):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.distributed import parallel_dims

    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    check_gradients(run_page("torchtitan.md")["model"])


def test_the_page_of_megatron_runs():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    check_gradients(run_page("megatron.md")["model"])
    parallel_state.destroy_model_parallel()
