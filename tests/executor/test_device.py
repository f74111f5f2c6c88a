"""The default device of an executor: the GPU if its processes communicate over NCCL."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dyncp import Batch, DCPExecutor, Topology, attention, masks, plan_batch
from processes import run_ranks

PLAN = plan_batch(Batch.of([masks.causal(8)]), Topology())


def chosen(group=None, **options) -> str:
    """The device, or the error: there is no GPU here, even if torch is patched to report one."""
    try:
        with DCPExecutor(group, **options) as executor:
            return executor.device.type
    except ValueError as error:
        return str(error)


def _with_a_gpu(rank: int) -> dict[str, str]:
    """The chosen device for each kind of group, if torch reports a GPU."""
    nccl = patch.object(dist, "get_backend_config", lambda _=None: "cpu:gloo,cuda:nccl")
    with patch.object(torch.cuda, "is_available", lambda: True):
        found = {"gloo": chosen()}
        with nccl:
            found |= {
                "nccl": chosen(),
                "group": chosen(dist.group.WORLD),
                "mesh of CPUs": chosen(init_device_mesh("cpu", (1,))),
                "asked for": chosen(device="cpu"),
                "virtual": chosen(virtual_ranks=2),
            }
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_processes_that_talk_over_nccl_run_on_the_gpu():
    (found,) = run_ranks(_with_a_gpu, 1)
    assert all("device is 'cuda'" in found.pop(kind) for kind in ("nccl", "group"))
    assert set(found.values()) == {"cpu"}


def test_without_processes_it_is_the_cpu_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level("INFO", "dyncp.executor.executor"):
        assert chosen(virtual_ranks=2) == "cpu"
    assert "device 'cpu': the ranks are not processes; pass device= for another" in caplog.text


def test_inputs_on_another_device_are_refused_with_what_to_do():
    step = DCPExecutor().prepare(PLAN)
    q = torch.empty(8, 4, 8, device="meta")
    message = "q is on meta; .* for cpu: move q, k and v there, or .* with device='meta'"
    with pytest.raises(ValueError, match=message):
        attention(step, q, q, q)
