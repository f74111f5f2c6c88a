"""ModelConfig: what a Transformer does per token outside attention."""

from dataclasses import dataclass
from typing import Any

from dyncp.blocks import AttentionShape, Direction
from dyncp.cost.profile import Profile


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder. `mlp_matrices` is 3 for gated MLPs and 2 for plain ones.

    `ffn` is the hidden size of the MLP that a token passes through in a layer: for mixtures of
    experts the sum over its experts, the shared ones included. `experts` is what the router chooses
    from (0: no router).
    """

    hidden: int
    layers: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_matrices: int = 3
    experts: int = 0

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "ffn", "vocab", "heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"ModelConfig.{field} is {getattr(self, field)}; at least 1 is needed"
                )
        if self.mlp_matrices not in (2, 3):
            raise ValueError(
                f"ModelConfig.mlp_matrices is {self.mlp_matrices}; allowed are 2 and 3"
            )

    @property
    def layer_weights(self) -> int:
        """Weights that multiply a token in one layer: projections, router and MLP."""
        q_and_out = 2 * self.hidden * self.heads * self.head_dim
        k_and_v = 2 * self.hidden * self.kv_heads * self.head_dim
        mlp = self.mlp_matrices * self.hidden * self.ffn
        return q_and_out + k_and_v + mlp + self.hidden * self.experts

    def flops_per_token(self, direction: Direction) -> float:
        """Of linear layers and output head; twice as many backward.

        The embedding is a lookup, and norms and activations are left out: Llama-3-8B has 8.03e9
        weights, of which 0.53e9 are embeddings, so a token takes 2 × 7.50e9 FLOPs forward.
        """
        forward = 2.0 * (self.layers * self.layer_weights + self.hidden * self.vocab)
        return 2 * forward if direction is Direction.BACKWARD else forward

    def seconds_per_token(self, profile: Profile, direction: Direction) -> float:
        return self.flops_per_token(direction) / profile.dense

    def attention_shape(self, dtype: str | Any = "bf16") -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, dtype)


MODELS = {"llama3_8b": ModelConfig(4096, 32, 14336, 128256, 32, 8, 128)}


def find_model(name: str) -> ModelConfig:
    if name not in MODELS:
        raise ValueError(
            f"model is {name!r}; choose one of {', '.join(MODELS)}, or give a config.json"
        )
    return MODELS[name]
