"""Choice: the best candidate, and what it was chosen from."""

from dataclasses import dataclass

from dyncp.planner.candidate import Candidate
from dyncp.simulate import Simulated


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate: seconds of its simulated step, or (pruned) a lower bound; `missed` says by how
    much it misses the limits asked for. Those `left_out` were not looked at."""

    name: str
    seconds: float
    missed: float = 0.0
    pruned: bool = False
    left_out: bool = False


@dataclass(frozen=True, eq=False)
class Choice:
    """The best candidate, its simulation, and all that it was chosen from."""

    candidate: Candidate
    simulated: Simulated
    tried: tuple[Tried, ...]

    def better(self, other: "Choice") -> "Choice":
        """The better of two choices for the same batch; it knows of all candidates."""
        best = min(
            (self, other),
            key=lambda one: (one.candidate.balance.missed, one.simulated.step_seconds),
        )
        return Choice(best.candidate, best.simulated, self.tried + other.tried)

    def explain(self, most: int = 5) -> str:
        """The fastest candidates, and how many were simulated and pruned."""
        simulated = sorted((t for t in self.tried if not t.pruned), key=lambda t: t.seconds)
        lines = [
            f"{1e3 * t.seconds:10.3f} ms  {t.name}" + (" (over a limit)" if t.missed else "")
            for t in simulated[:most]
        ]
        left_out = sum(t.left_out for t in self.tried)
        pruned = len(self.tried) - len(simulated) - left_out
        lines.append(f"{len(simulated)} candidates simulated, {pruned} ruled out by their bounds")
        if left_out:
            lines.append(f"{left_out} not looked at, since the batch has so many tiles")
        return "\n".join(lines)
