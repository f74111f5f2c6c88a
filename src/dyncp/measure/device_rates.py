"""Rates of a device besides attention: matrix products and copies."""

import torch

from dyncp.measure.inputs import DTYPES
from dyncp.measure.timing import Repeats, time_call

# Tokens, hidden and MLP size of the product, and bytes of a copy, by kind of device.
PRODUCTS = {"cpu": (512, 1024, 2048), "cuda": (8192, 4096, 14336)}
COPY_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


def dense_rate(device: torch.device, dtype: str, repeats: Repeats) -> float:
    """FLOP/s of a linear layer, as wide as those of a decoder."""
    tokens, hidden, ffn = PRODUCTS[device.type]
    x = torch.randn(tokens, hidden, device=device, dtype=DTYPES[dtype])
    weight = torch.randn(ffn, hidden, device=device, dtype=DTYPES[dtype])
    timed = time_call(lambda: torch.nn.functional.linear(x, weight), device, repeats)
    return 2.0 * tokens * hidden * ffn / timed.seconds


def copy_rate(device: torch.device, repeats: Repeats) -> float:
    """Bytes per second of copying on the device, as packing does; read and write count once."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = time_call(lambda: target.copy_(source), device, repeats)
    return source.nbytes / timed.seconds


def num_lanes(device: torch.device) -> int:
    """Rows of kernel tiles that run at a time: one on every processor of a GPU; 0 on CPUs, where
    that is not modelled."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
