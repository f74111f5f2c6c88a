"""Sizes of the pieces that programs work on, by device, head dim and dtype."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pieces:
    """Query rows and key rows of a piece, warps per program and stages of the load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How the three kernels are launched; pieces of `keys` are at most 64 × 64."""

    forward: Pieces
    queries: Pieces
    keys: Pieces


# Shared memory per program is about (rows + stages × 2 × keys) × head dim × item bytes.
_HOPPER = {
    64: Launch(Pieces(128, 128, 8, 3), Pieces(128, 128, 8, 2), Pieces(64, 64, 4, 2)),
    128: Launch(Pieces(128, 128, 8, 3), Pieces(128, 128, 8, 2), Pieces(64, 64, 4, 2)),
    256: Launch(Pieces(128, 64, 8, 2), Pieces(64, 32, 4, 2), Pieces(32, 64, 4, 2)),
}
_AMPERE = {
    64: Launch(Pieces(128, 64, 4, 3), Pieces(64, 64, 4, 2), Pieces(64, 64, 4, 2)),
    128: Launch(Pieces(128, 32, 4, 2), Pieces(64, 32, 4, 2), Pieces(32, 64, 4, 2)),
    256: Launch(Pieces(64, 32, 4, 1), Pieces(32, 32, 4, 1), Pieces(32, 32, 4, 1)),
}
_FP32 = {
    64: Launch(Pieces(64, 32, 4, 2), Pieces(32, 32, 4, 1), Pieces(32, 32, 4, 1)),
    128: Launch(Pieces(32, 32, 4, 2), Pieces(32, 32, 4, 1), Pieces(32, 32, 4, 1)),
    256: Launch(Pieces(32, 16, 4, 1), Pieces(16, 16, 4, 1), Pieces(16, 16, 4, 1)),
}


def choose_launch(device: torch.device, padded_dim: int, dtype: torch.dtype) -> Launch:
    if dtype == torch.float32:
        return _FP32[padded_dim]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (_HOPPER if hopper else _AMPERE)[padded_dim]
