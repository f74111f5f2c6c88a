"""The machines and ranks a plan is made for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Machines with equally many ranks; rank r runs on machine r // ranks_per_machine."""

    machines: int = 1
    ranks_per_machine: int = 1

    def __post_init__(self) -> None:
        for field in ("machines", "ranks_per_machine"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"Topology.{field} is {getattr(self, field)}; at least 1 is needed"
                )

    @property
    def num_ranks(self) -> int:
        return self.machines * self.ranks_per_machine
