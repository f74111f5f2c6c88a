"""Seconds of tiles, kernel calls, copies, per-token work outside attention, and whole samples."""

from dyncp.cost.cost_model import BACKWARD_FLOPS, CostModel
from dyncp.cost.model_shape import model_shape
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
from dyncp.cost.sample_time import sample_seconds
