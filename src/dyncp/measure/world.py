"""World: the ranks that a measurement runs on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class World:
    """Rank `rank` of `num_ranks`, of which every machine has `ranks_per_machine`."""

    rank: int
    num_ranks: int
    ranks_per_machine: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device) -> "World":
        return World(0, 1, 1, device)

    @property
    def machines(self) -> int:
        return self.num_ranks // self.ranks_per_machine

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0


def device_named(name: str | None, local_rank: int = 0) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1"); by default a GPU where there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA GPU here; choose cpu")
    return torch.device(f"cuda:{local_rank}" if name == "cuda" else name)


def device_text(device: torch.device) -> str:
    """In words: the GPU's name, or how many threads the CPU has."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
