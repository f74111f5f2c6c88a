"""SolverError: a solver could not run."""


class SolverError(RuntimeError):
    """The solver gave no placement, for a reason that lies outside the batch."""

    def __init__(self, solver: str, reason: str) -> None:
        super().__init__(f"solver {solver!r} gave no placement: {reason}")
