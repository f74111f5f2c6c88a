"""Devices get the profile of their kind, and the log says which and why."""

import logging

import pytest

from dyncp import AttentionShape, Batch, Topology, masks, plan_batch
from dyncp.cost import profile_for_device, tell_profile


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "p4de"),
        ("NVIDIA B200", "gb200_nvl72"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("cpu", "cpu_gloo"),
        ("Tesla T4", "p4de"),
        (None, "p4de"),
    ],
)
def test_a_device_gets_the_profile_of_its_kind(device: str | None, preset: str) -> None:
    assert profile_for_device(device).name == preset


@pytest.fixture
def fresh_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    tell_profile.cache_clear()
    caplog.set_level(logging.INFO, logger="dyncp.cost.presets")
    return caplog


def test_the_log_says_once_which_profile_why_and_what_to_pass(
    fresh_log: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        tell_profile("NVIDIA H200", "pass topology= for another")
        tell_profile("Tesla T4", "pass topology= for another")
    assert fresh_log.messages == [
        "planning for h200: the device is NVIDIA H200; pass topology= for another",
        "planning for p4de: the device is Tesla T4, which has no preset; pass topology= for "
        "another",
    ]


def test_planning_for_a_bare_topology_says_what_it_assumes(
    fresh_log: pytest.LogCaptureFixture,
) -> None:
    batch, shape = Batch.of([masks.causal(100)]), AttentionShape()
    plan_batch(batch, Topology(1, 1), shape)  # one rank: nothing to choose
    assert not fresh_log.messages
    plan_batch(batch, Topology(1, 2), shape)
    assert fresh_log.messages[0].startswith("planning for p4de: no device is known here; pass")
