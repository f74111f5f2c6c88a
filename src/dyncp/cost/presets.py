"""Profiles by name, one for every preset of `dyncp.topology`."""

from dataclasses import replace

from dyncp.cost.profile import Profile
from dyncp.topology import preset

# Where nothing says what plans are for.
DEFAULT_PROFILE = "p4de"


def _profile(
    name: str, attention: tuple[float, float], dense: float, copy: float, call: float, tile: int
) -> Profile:
    machine = preset(name)
    return Profile(
        name=name,
        attention_forward=attention[0],
        attention_backward=attention[1],
        dense=dense,
        copy=copy,
        call_seconds=call,
        kernel_tile=tile,
        ranks_per_machine=machine.ranks_per_machine,
        intra=machine.intra,
        inter=machine.inter,
        nics=machine.nics,
        ordered_phases=machine.ordered_phases,
    )


def _with_launches(profile: Profile) -> Profile:
    """About 1.5 µs lie between kernels of a graph that follow each other. Replaying the graph of a
    whole attention call cost the host 17 to 71 µs on an H200; an instruction that is a graph or a
    group of messages is assumed to take 15. Launched from Python, calls of 15 to 60 instructions
    took the host 2 to 8 ms there."""
    return replace(profile, launch_seconds=1.5e-6, host_seconds=15e-6, host_seconds_eager=120e-6)


# Copying reads and writes: about 0.4 of the memory's vendor figure.
PROFILES = {
    profile.name: profile
    for profile in (
        # Estimates: 0.6 and 0.5 of the 312 TFLOP/s vendor figure for attention, 0.65 for linear
        # layers; 2.0 TB/s memory.
        _profile("p4de", (190e12, 150e12), 200e12, 0.8e12, 20e-6, 128),
        # What `dyncp calibrate --kernel flash4:fast` measured on one H200, rounded. Linear layers:
        # an estimate below the 803 TFLOP/s measured for one large matrix product. Host time: that
        # of a fast host; inside a model it runs ahead of the GPU.
        replace(
            _with_launches(_profile("h200", (845e12, 713e12), 650e12, 1.35e12, 0.0, 128)),
            edge_forward=1.21,
            edge_backward=1.39,
            row_forward=530.0,
            row_backward=300.0,
            lanes=132,
            launch_seconds=0.25e-6,
            overlap_slowdown=1.07,
        ),
        # Estimates: the H200's shares of the vendor figure (989 TFLOP/s), applied to 2,500; 8 TB/s.
        _with_launches(_profile("gb200_nvl72", (1400e12, 1100e12), 1600e12, 3.2e12, 4e-6, 128)),
        # Estimates for one core of a server CPU in fp32.
        _profile("cpu_gloo", (50e9, 40e9), 60e9, 4e9, 100e-6, 32),
    )
}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ValueError(f"profile is {name!r}; choose one of {', '.join(PROFILES)}")
    return PROFILES[name]
