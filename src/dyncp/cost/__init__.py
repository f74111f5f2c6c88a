"""Seconds of tiles, kernel calls, copies, per-token work outside attention, and whole samples."""

from dyncp.cost.cost_model import BACKWARD_FLOPS, CostModel
from dyncp.cost.model import MODELS, ModelConfig, find_model, model_shape
from dyncp.cost.profile import (
    DEFAULT_PROFILE,
    POOR_FIT,
    PROFILES,
    Profile,
    find_profile,
    load_profile,
    profile_for_device,
    save_profile,
    tell_profile,
)
from dyncp.cost.sample_time import sample_seconds
