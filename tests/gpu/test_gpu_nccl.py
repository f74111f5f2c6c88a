"""Real NCCL: four processes on one GPU, over sockets.

NCCL refuses two ranks on one GPU of a host; here every rank poses as a separate host."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_cases import LENGTHS, MASKS, SHAPE, draw_rows, has_relays, plan_of, prepare, run

from dyncp import (
    Batch,
    DCPExecutor,
    Distributed,
)
from processes import run_ranks

RANKS, CALLS = 4, 4  # launched, captured, and replayed twice


def planned(mask: str, solver: str):
    return plan_of(Batch.of([MASKS[mask](length) for length in LENGTHS]), solver)


def rows_of_call(step, call: int):
    """The same inputs on virtual ranks and on processes."""
    torch.manual_seed(call)
    return draw_rows(step, SHAPE)


def run_rank(rank: int, cases, graphs, settings) -> list[list[np.ndarray]]:
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    transport = Distributed(timeout=60, device=device, **settings)
    executor = DCPExecutor(device=device, kernel="triton", transport=transport, graphs=graphs)
    results = []
    for case in cases:
        plan = planned(*case)
        step = executor.prepare(plan.parts[rank])
        counts = plan.parts[0].rows_per_rank.tolist()
        whole = prepare(plan, "triton")
        for call in range(CALLS):
            rows = [x.detach().split(counts)[rank] for x in rows_of_call(whole, call)]
            found = run(step, [*(x.requires_grad_() for x in rows[:3]), rows[3]])
            results.append([x.float().cpu().numpy() for x in found])
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize(
    ("graphs", "settings"),
    [
        (True, {}),
        (True, {"ranks_per_node": 2}),
        (True, {"ranks_per_node": 2, "grouped_operations": 2}),
        (False, {"ranks_per_node": 2}),
    ],
    ids=["graphs", "two-communicators", "cut-calls", "launched"],
)
def test_nccl_ranks_have_the_bits_of_virtual_ranks(graphs, settings):
    cases = [("causal", "random"), ("lambda", "owner_computes"), ("shared", "zigzag")]
    assert has_relays(planned(*cases[0]))
    by_rank = run_ranks(run_rank, RANKS, cases, graphs, settings, timeout=300)
    at = 0
    for case in cases:
        step = prepare(planned(*case), "triton")
        for call in range(CALLS):
            expected = run(step, rows_of_call(step, call))
            for i, whole in enumerate(expected):
                found = np.concatenate([results[at][i] for results in by_rank])
                assert np.array_equal(found, whole.float().cpu().numpy()), (case, call, i)
            at += 1


def default_devices(rank: int) -> list[str]:
    """The devices of executors over NCCL, over gloo, and with virtual ranks."""
    torch.cuda.set_device(0)
    made = [DCPExecutor(dist.new_group(backend=backend)) for backend in ("nccl", "gloo")]
    return [str(executor.device) for executor in (*made, DCPExecutor(virtual_ranks=2))]


def test_ranks_that_talk_over_nccl_run_on_their_gpu_unless_told_otherwise():
    assert run_ranks(default_devices, 1) == [["cuda:0", "cpu", "cpu"]]
