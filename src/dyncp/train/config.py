"""What to train and how, checked when it is built. Needs no torch."""

from dataclasses import dataclass
from typing import Any

from dyncp import masks
from dyncp.blocks import AttentionShape
from dyncp.planner import PlannerConfig

DEFAULT_SOLVER = PlannerConfig().solver
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder; `ffn` is the width of the SwiGLU layers."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def attention_shape(self, dtype: str | Any = "fp32") -> AttentionShape:
        """The shape of its attention layers, for the planner."""
        return AttentionShape(self.q_heads, self.kv_heads, self.head_dim, dtype)

    @property
    def kv_values(self) -> int:
        """Numbers that K and V of one token have, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim


SIZES = {
    "tiny": DecoderConfig(layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=352),
    "small": DecoderConfig(layers=6, hidden=384, q_heads=6, kv_heads=2, head_dim=64, ffn=1024),
}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. Runs with equal configs see equal batches, whatever their ranks.

    `corpus` is a folder of text files (None: the Python standard library), read as bytes; documents
    are cut to `max_length` tokens. `tokens_per_batch` counts all ranks together (None: twice
    `max_length`).
    """

    model: str = "tiny"
    corpus: str | None = None
    max_length: int = 16_384
    tokens_per_batch: int | None = None
    mask: str = "causal"
    steps: int = 8
    learning_rate: float = 2e-3
    seed: int = 0
    solver: str = DEFAULT_SOLVER
    kernel: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.model not in SIZES:
            raise ValueError(f"model is {self.model!r}; choose one of {', '.join(SIZES)}")
        for field, least in (("steps", 1), ("max_length", 2)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} is {getattr(self, field)}; at least {least} is needed")
        if self.batch_tokens < self.max_length:
            raise ValueError(
                f"tokens_per_batch is {self.tokens_per_batch}, less than the longest document "
                f"(max_length={self.max_length}); raise the one or lower the other"
            )
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; choose one of {', '.join(DEVICES)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it has to be above 0")
        masks.by_name(self.mask)
        PlannerConfig(solver=self.solver)

    @property
    def decoder(self) -> DecoderConfig:
        return SIZES[self.model]

    @property
    def batch_tokens(self) -> int:
        return 2 * self.max_length if self.tokens_per_batch is None else self.tokens_per_batch
