"""Seconds for tiles, copies and the per-token work outside attention."""

from dyncp.cost.cost_model import BACKWARD_FLOPS, CostModel
from dyncp.cost.device_profiles import profile_for_device, tell_profile
from dyncp.cost.model_config import MODELS, ModelConfig, find_model
from dyncp.cost.presets import DEFAULT_PROFILE, PROFILES, find_profile
from dyncp.cost.profile import Profile
from dyncp.cost.profile_file import load_profile, save_profile
from dyncp.cost.transformers_config import from_transformers_config

__all__ = [
    "BACKWARD_FLOPS",
    "DEFAULT_PROFILE",
    "MODELS",
    "PROFILES",
    "CostModel",
    "ModelConfig",
    "Profile",
    "find_model",
    "find_profile",
    "from_transformers_config",
    "load_profile",
    "profile_for_device",
    "save_profile",
    "tell_profile",
]
