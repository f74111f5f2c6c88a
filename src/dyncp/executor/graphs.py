"""Graphs: whether calls are replayed as CUDA graphs, and why not."""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from dyncp.kernels import Kernel

logger = logging.getLogger(__name__)

CHOICES = ("auto", True, False)


@dataclass(frozen=True, slots=True)
class Graphs:
    """`wanted` says whether calls are laid out for graphs, which want fixed addresses."""

    wanted: bool

    @staticmethod
    def choose(choice: bool | str, device: torch.device, kernel: Kernel) -> "Graphs":
        """Kernels say with `capturable` that their calls may be captured."""
        if choice not in CHOICES:
            raise ValueError(f"graphs is {choice!r}; choose one of 'auto', True, False")
        if device.type != "cuda":
            if choice is True:
                raise ValueError(
                    f"graphs=True needs a CUDA GPU; the device is {device}: leave it at 'auto'"
                )
            return Graphs(False)
        if choice is False:
            _log_once("graphs=False was asked for")
        elif not kernel.capturable:
            if choice is True:
                raise ValueError(
                    f"graphs=True, but calls of kernel {kernel.name!r} cannot be captured: leave "
                    "it at 'auto', or choose kernel triton or flash4"
                )
            _log_once(f"calls of kernel {kernel.name!r} cannot be captured")
            return Graphs(False)
        return Graphs(choice is not False)

    def replays(self, *, captured: bool) -> bool:
        """Whether the call that begins now may use graphs; `captured`: in one of the caller's."""
        if not self.wanted:
            return False
        if torch.is_anomaly_enabled():
            _log_once("autograd's anomaly mode is on")
            return False
        if captured:
            _log_once("the caller captures a graph of its own")
        return not captured


@cache
def _log_once(reason: str) -> None:
    logger.info("calls are launched kernel by kernel, not replayed as CUDA graphs: %s", reason)
