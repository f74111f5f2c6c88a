"""What can go wrong while batches are prepared ahead."""

from typing import Any


class StoreError(RuntimeError):
    """The store did not answer, or the connection to it is gone."""


class BatchMismatch(ValueError):  # noqa: N818 (a user's mistake: the ranks got different arguments)
    """Ranks disagree: on options, on what they read of a sample, or on its masks."""


class PeerError(RuntimeError):
    """Another rank failed while it prepared batches, left, or is gone."""


class SampleError(RuntimeError):
    """The dataset or the mask function raised for a sample; the cause is what it raised."""

    def __init__(self, index: int, doing: str, error: BaseException) -> None:
        super().__init__(f"{doing} of sample {index} raised {type(error).__name__}: {error}")
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its text; the cause stays where it was raised."""
        return _sample_error, (self.index, str(self))


class EmptySample(ValueError):  # noqa: N818 (what it is, not only that it is wrong)
    """A sample has no tokens."""


class PlanFailed(RuntimeError):  # noqa: N818 (not an error of the run: the batch gets a static plan)
    """The planner gave no plan for a batch; the text is the reason."""


class Closed(Exception):  # noqa: N818 (never leaves the loader)
    """The iteration is being closed: threads leave what they are waiting for."""


def _sample_error(index: int, text: str) -> SampleError:
    error = SampleError.__new__(SampleError, text)
    error.args, error.index = (text,), index
    return error
