"""The GPU of this machine, for commands that plan without using it."""

from pathlib import Path

# Importing torch takes seconds; without one of these there is no GPU that it could see.
DRIVER_FILES = ("nvidiactl", "dxg")


def gpu_name() -> str | None:
    """As torch calls it; None where there is none, or no torch."""
    if not any((Path("/dev") / name).exists() for name in DRIVER_FILES):
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
