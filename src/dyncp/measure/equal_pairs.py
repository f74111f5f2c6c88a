"""Whole causal documents with as many tokens and pairs as a rank of a plan has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WholeDocuments:
    """Causal documents. Where `before` is not 0 there is one, and its rows come after so many
    tokens that are only keys: a rank's rows may attend more keys than it has tokens."""

    lengths: tuple[int, ...]
    before: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Of one head."""
        return _pairs(self.lengths) + self.before * self.tokens

    def __str__(self) -> str:
        """ "3 × 100 + 20", or "4,096 after 9,000"."""
        if self.before:
            return f"{self.tokens:,} after {self.before:,}"
        longest = self.lengths[0]
        count = self.lengths.count(longest)
        rest = f" + {self.lengths[-1]:,}" if count < len(self.lengths) else ""
        return f"{count} × {longest:,}{rest}"


def equal_pairs(tokens: int, pairs: int) -> WholeDocuments:
    """Documents of one length, the last one shorter, whose pairs are as near to `pairs` as they can
    be; one document after other keys where whole ones have too few.

    8 tokens and 24 pairs give 6 + 2 (21 + 3); 8 tokens have 36 pairs at most, so 52 pairs give 8
    tokens after 2 others (36 + 8 × 2)."""
    if tokens < 1 or pairs < 0:
        raise ValueError(f"tokens are {tokens} and pairs {pairs}; at least 1 and 0 are needed")
    whole = _pairs((tokens,))
    if pairs >= whole:
        return WholeDocuments((tokens,), round((pairs - whole) / tokens))
    # Longer documents always have more pairs: the border is between `short` and `short + 1`.
    short, long = 1, tokens
    while long - short > 1:
        middle = (short + long) // 2
        if _pairs(_cut(tokens, middle)) <= pairs:
            short = middle
        else:
            long = middle
    nearest = min((short, long), key=lambda length: abs(_pairs(_cut(tokens, length)) - pairs))
    return WholeDocuments(_cut(tokens, nearest))


def _cut(tokens: int, length: int) -> tuple[int, ...]:
    rest = tokens % length
    return (length,) * (tokens // length) + ((rest,) if rest else ())


def _pairs(lengths: tuple[int, ...]) -> int:
    return sum(length * (length + 1) // 2 for length in lengths)
