"""Seconds for tiles, copies and the per-token work outside attention."""

from dyncp.cost.cost_model import BACKWARD_FLOPS, CostModel
from dyncp.cost.model_config import MODELS, ModelConfig, find_model
from dyncp.cost.presets import PROFILES, find_profile
from dyncp.cost.profile import Profile
from dyncp.cost.profile_file import load_profile, save_profile
from dyncp.cost.transformers_config import from_transformers_config

__all__ = [
    "BACKWARD_FLOPS",
    "MODELS",
    "PROFILES",
    "CostModel",
    "ModelConfig",
    "Profile",
    "find_model",
    "find_profile",
    "from_transformers_config",
    "load_profile",
    "save_profile",
]
