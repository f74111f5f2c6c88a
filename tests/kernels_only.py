"""A profile that prices only attention kernels and messages, for figures one can check by hand."""

from dataclasses import replace

from dyncp.cost import find_profile

KERNELS_ONLY = replace(
    find_profile("p4de"),
    name="kernels_only",
    call_seconds=20e-6,
    edge_forward=1.0,
    edge_backward=1.0,
    row_forward=0.0,
    row_backward=0.0,
    lanes=0,
    launch_seconds=0.0,
    host_seconds=0.0,
    host_seconds_eager=0.0,
    overlap_slowdown=1.0,
)
