"""The host's time per attention call, in layers that follow one another as in a model: what
autograd takes to start and end a pass is shared by all of them."""

import statistics
import time

import torch
from torch import Tensor

from dyncp.blocks import Direction
from dyncp.measure.implementation import Attend
from dyncp.measure.inputs import Inputs
from dyncp.measure.timing import Repeats, wait_for

LAYERS = 8


def host_seconds_per_call(
    attend: Attend, inputs: Inputs, device: torch.device, repeats: Repeats, *, backward: bool
) -> dict[Direction, float]:
    """Until a call is queued on a device that idles before the first one: medians."""
    kv = [tuple(x.detach().clone().requires_grad_() for x in inputs.qkv[1:]) for _ in range(LAYERS)]
    leaves = [inputs.q, *(x for pair in kv for x in pair)]
    seconds: dict[Direction, list[float]] = {Direction.FORWARD: [], Direction.BACKWARD: []}
    for _ in range(repeats.warm_up + repeats.timed):
        out: Tensor = inputs.q
        wait_for(device)
        start = time.perf_counter()
        for k, v in kv:
            out = attend(out, k, v)
        seconds[Direction.FORWARD].append(time.perf_counter() - start)
        if backward:
            wait_for(device)
            start = time.perf_counter()
            torch.autograd.grad(out, leaves, inputs.dout)
            seconds[Direction.BACKWARD].append(time.perf_counter() - start)
    wait_for(device)
    return {
        direction: statistics.median(found[repeats.warm_up :]) / LAYERS
        for direction, found in seconds.items()
        if found
    }
