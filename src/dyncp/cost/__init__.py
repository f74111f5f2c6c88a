"""Seconds of tiles, kernel calls, copies, per-token work outside attention, and whole samples."""

from dyncp.cost.cost_model import BACKWARD_FLOPS, CostModel
from dyncp.cost.implementation import IMPLEMENTATIONS, Implementation
from dyncp.cost.model import ModelConfig, model_shape
from dyncp.cost.models import MODELS, find_model, usual_decoder
from dyncp.cost.presets import (
    ALIASES,
    CPU,
    DEFAULT_PROFILE,
    PROFILES,
    find_profile,
    profile_for_device,
    tell_profile,
)
from dyncp.cost.profile import POOR_FIT, Profile, load_profile, save_profile
from dyncp.cost.sample_time import sample_seconds
from dyncp.cost.step_traffic import StepTraffic
