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


def open_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1"), now the current one; by default a GPU
    where there is one. Without a number, rank `local_rank` of a machine has the GPU of that number.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA GPU here; choose cpu")
    device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    if kind == "cuda":
        _use_gpu(device)
    return device


def _use_gpu(device: torch.device) -> None:
    seen = torch.cuda.device_count()
    assert device.index is not None
    if device.index >= seen:
        raise ValueError(
            f"GPU {device.index} is asked for, but torch sees {seen}: start one rank per GPU, or "
            "look at CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(device)


def device_text(device: torch.device) -> str:
    """In words: the GPU's name, or how many threads the CPU has."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
