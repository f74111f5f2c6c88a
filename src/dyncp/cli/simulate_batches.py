"""The batches of `dyncp simulate`: drawn, or packed from a file of lengths."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dyncp.cli.options import check_tokens
from dyncp.samplers import parse_sample, read_lengths, sample_lengths


@dataclass(frozen=True, slots=True)
class Lengths:
    """The sequence lengths of every batch, and in words where they come from."""

    batches: tuple[tuple[int, ...], ...]
    origin: str

    @property
    def text(self) -> str:
        sizes = [sum(lengths) for lengths in self.batches]
        low, high = min(sizes), max(sizes)
        tokens = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        count = f"{len(sizes)} batch{'es' if len(sizes) > 1 else ''}"
        return f"{count} of {tokens} tokens ({self.origin})"


def find_lengths(args: Namespace) -> Lengths:
    tokens, count = check_tokens(args), args.batches
    if count < 1:
        raise ValueError(f"--batches is {count}; at least 1 is needed")
    if args.sample is not None:
        return _draw(args.sample, tokens, count)
    packed = pack_documents(read_lengths(args.lengths_file), tokens, args.lengths_file)
    origin = f"{args.lengths_file}, {'the first ' if len(packed) > count else 'all '}"
    origin += f"{min(count, len(packed))} of {len(packed)}"
    return Lengths(tuple(map(tuple, packed[:count])), origin)


def _draw(sample: str, tokens: int, count: int) -> Lengths:
    name, seed = parse_sample(sample)
    drawn = [sample_lengths(name, tokens, seed + i) for i in range(count)]
    last = f" to {seed + count - 1}" if count > 1 else ""
    return Lengths(tuple(map(tuple, drawn)), f"{name}, seed {seed}{last}")


def pack_documents(lengths: Sequence[int], tokens: int, path: Path) -> list[list[int]]:
    """Batches of at most `tokens` tokens, documents in file order.

    Lengths 5 3 4 4 with 8 tokens give [5, 3] [4, 4]; 5 4 3 4 gives [5] [4, 3] [4].
    """
    batches: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths, start=1):
        if length > tokens:
            raise ValueError(
                f"lengths file {path}: document {number} has {length:,} tokens, a batch at most "
                f"{tokens:,}; raise --tokens, or cut long documents"
            )
        if length > room:
            batches.append([])
            room = tokens
        batches[-1].append(length)
        room -= length
    return batches
