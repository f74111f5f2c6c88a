"""Implementation: what static methods cost in their own code, where that differs from dyncp's
executor.

Their own code runs eagerly, step by step: a step is one attention call of every rank, with its
messages. Every step merges its outputs into an accumulator right away, and every sequence costs the
host some operations, because lists of sequences are handled in Python. Sequences are padded so that
they can be cut into equal chunks.
"""

from dataclasses import dataclass

Both = tuple[float, float]  # forward, backward


@dataclass(frozen=True, slots=True)
class Implementation:
    """Prices of one direction of an attention layer, forward and backward.

    - `step_host`: host seconds to issue a step's attention, merges and bookkeeping.
    - `sequence_host`: further host seconds of a step for every sequence in it.
    - `message_host`: host seconds to issue, or to wait for, the messages of a step.
    - `merged`: bytes read and written by the merges of a step, per value of its query rows
      (backward: of its query, key and value rows).
    - `partial_dtype`: of gradients that travel (None: that of q).
    - `reads_lengths`: the host reads lengths of sequences from the device, which is idle meanwhile.
    - `pads`: sequences are padded to two chunks of equal length per rank of a ring.
    """

    name: str
    step_host: Both
    sequence_host: Both
    message_host: float
    merged: Both
    partial_dtype: str | None = None
    reads_lengths: bool = False
    pads: bool = True

    def padded(self, lengths: tuple[int, ...], contexts: int) -> tuple[int, ...]:
        """Lengths as this code cuts them for rings of `contexts` ranks."""
        multiple = 2 * contexts if self.pads else 1
        return tuple(-(-length // multiple) * multiple for length in lengths)
