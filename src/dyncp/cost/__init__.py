"""Seconds of tiles, kernel calls, copies, and per-token work outside attention."""

from dyncp.cost.cost_model import BACKWARD_FLOPS, CostModel
from dyncp.cost.profile import (
    DEFAULT_PROFILE,
    MODELS,
    PROFILES,
    ModelConfig,
    Profile,
    find_model,
    find_profile,
    from_transformers_config,
    load_profile,
    profile_for_device,
    save_profile,
    tell_profile,
)
