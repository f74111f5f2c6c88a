"""Implementation: what static methods cost in their own code, where that differs from dyncp's
executor.

Their own code runs eagerly, step by step: a step is one attention call of every rank, with its
messages. Every step merges its outputs into an accumulator right away, and every sequence costs the
host some operations, because lists of sequences are handled in Python. Sequences are padded so that
they can be cut into equal chunks.
"""

from dataclasses import dataclass, replace

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


# Merging an output value reads the accumulator (fp32) and the new output (bf16), writes the latter
# as fp32, reads both, and writes the accumulator: 4 + 2 + 4 + 4 + 4 bytes.
# Backward adds bf16 to fp32 (4 + 2 + 4), and converts what it sends.
RING_FLASH = Implementation(
    "ring-flash-attention",
    step_host=(300e-6, 400e-6),
    sequence_host=(20e-6, 40e-6),
    message_host=60e-6,
    merged=(18.0, 12.0),
    partial_dtype="fp32",
    reads_lengths=True,
    pads=False,
)
# Half of the zigzag's steps change half of the rows, which are gathered from the fp32 accumulator
# and scattered back: 16 bytes more, 8 on average.
ZIGZAG = replace(RING_FLASH, merged=(26.0, 20.0))
# Host seconds of the following two are fitted to the published attention benchmark of the DCP
# paper (benchmarks/data/hindcast/paper_attention.csv), on nodes with A100s.
LOONGTRAIN = Implementation(
    "LoongTrain",
    step_host=(300e-6, 950e-6),
    sequence_host=(19e-6, 38e-6),
    message_host=60e-6,
    merged=(18.0, 12.0),
    partial_dtype="fp32",
)
TRANSFORMER_ENGINE = Implementation(
    "TransformerEngine",
    step_host=(430e-6, 650e-6),
    sequence_host=(24e-6, 24e-6),
    message_host=60e-6,
    merged=(10.0, 8.0),
)
# Torch's context_parallel computes step by step, and merges by separate kernels, which is
# assumed to move 56 bytes per value.
TORCH = Implementation(
    "torch context_parallel",
    step_host=(500e-6, 800e-6),
    sequence_host=(0.0, 0.0),
    message_host=60e-6,
    merged=(56.0, 20.0),
    partial_dtype="fp32",
)
# One attention call between two collectives, without merges.
COLLECTIVES = Implementation(
    "all-to-all",
    step_host=(300e-6, 400e-6),
    sequence_host=(0.0, 0.0),
    message_host=120e-6,
    merged=(0.0, 10.0),
    pads=True,
)
# By static method; others have not been modelled.
IMPLEMENTATIONS = {
    "ring": RING_FLASH,
    "zigzag": ZIGZAG,
    "loongtrain": LOONGTRAIN,
    "transformer_engine": TRANSFORMER_ENGINE,
    "megatron_hybrid": TRANSFORMER_ENGINE,
    "ulysses": COLLECTIVES,
    "all_gather": TORCH,
    "ptrr": TORCH,
}
