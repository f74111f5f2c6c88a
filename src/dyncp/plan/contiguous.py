"""Contiguous order: rows in which every token directly follows its predecessor in the document.

Layers with state (convolutions, linear attention, Mamba) need it; attention does not. Two orders:

`whole_documents`: every document is on one rank. Documents are assigned longest first, to the rank
with room that owns most of their tokens, or to the least loaded rank if none has room. A document
with branches has one line per branch, from its beginning to the branch's end.

`with_halo`: tokens stay on their ranks, and each piece is preceded by the `halo` tokens before it.

Tokens 0 1 2 3 4 5 | 6 7 of two documents, of which rank 0 owns 0 1 4 5 and rank 1 owns 2 3 6 7:

    whole documents    rank 0   0 1 2 3 4 5        rank 1   6 7
    halo of 1          rank 0   0 1 | (3) 4 5      rank 1   (1) 2 3 | 6 7

The result of a token is taken from one of its rows. Other rows of it (in parentheses) only provide
context to later tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp.arrays import Bool, Int64, ranges_of, starts_of
from dyncp.masks.positions import UNCLEAR
from dyncp.plan.format import RankPlan, pad_rows

# A rank has room up to this multiple of an equal share (or of the longest document). A little more
# than an equal share lets more documents stay with their owners, which moves fewer rows.
MOST_OVER_SHARE = 1.05


@dataclass(frozen=True, eq=False)
class ContiguousOrder:
    """Rows of all ranks, sorted by rank: rank r has rows row_bounds[r] to row_bounds[r + 1].

    `token` is the coordinate of each row, -1 for padding; `counts` says whether the token's result
    is taken from this row. Rows form pieces, of which rank r has piece_bounds[r] to
    piece_bounds[r + 1]. A piece has `piece_rows` consecutive rows of `document` (its number in the
    batch, -1 for padding), from index `start` in the document on.
    """

    token: Int64
    counts: Bool
    row_bounds: Int64
    piece_bounds: Int64
    piece_rows: Int64
    document: Int64
    start: Int64

    @cached_property
    def rows_per_rank(self) -> Int64:
        """Rows of every rank without padding."""
        filled = np.append(0, np.cumsum(self.token >= 0))
        return np.diff(filled[self.row_bounds])


@dataclass(frozen=True, eq=False)
class _Segments:
    """Consecutive tokens of a piece: `count` tokens from coordinate `first` on. Pieces are numbered
    from 0; `counts` is as in `ContiguousOrder`."""

    piece: Int64
    first: Int64
    count: Int64
    counts: Bool

    @property
    def tokens(self) -> Int64:
        return ranges_of(self.first, self.count)

    def rows_of_pieces(self, num_pieces: int) -> Int64:
        rows = np.bincount(self.piece, self.count, num_pieces)
        return rows.astype(np.int64)


def whole_documents(plan: RankPlan) -> ContiguousOrder:
    """Assigns every document, or every line of a document with branches, to one rank."""
    texts = _Texts.of(plan)
    lines = texts.lines()
    last = np.append(np.flatnonzero(np.diff(lines.piece)), len(lines.piece) - 1)
    document = texts.document[texts.stretch_of(lines.first[last])]
    owner = np.repeat(plan.blocks.owner, plan.blocks.tokens)
    pair = np.repeat(lines.piece, lines.count) * plan.num_ranks + owner[lines.tokens]
    owned = np.bincount(pair, minlength=len(last) * plan.num_ranks)
    rank = _assign(lines.rows_of_pieces(len(last)), owned.reshape(-1, plan.num_ranks))
    return _arrange(plan, lines, rank, document, np.zeros_like(document))


def _assign(tokens: Int64, owned: Int64) -> Int64:
    """The rank of every line. `owned` counts its tokens by owner, int64[lines, ranks]."""
    num_ranks = owned.shape[1]
    most = MOST_OVER_SHARE * max(tokens.sum() / num_ranks, tokens.max())
    load, rank = np.zeros(num_ranks, np.int64), np.empty(len(tokens), np.int64)
    for line in np.argsort(-tokens, kind="stable").tolist():
        fits = load + tokens[line] <= most
        wanted = np.where(fits, owned[line], -1)
        best = np.flatnonzero(wanted == wanted.max())  # all ranks if it fits nowhere
        rank[line] = chosen = best[np.argmin(load[best])]
        load[chosen] += tokens[line]
    return rank


def with_halo(plan: RankPlan, halo: int) -> ContiguousOrder:
    """Keeps tokens on their ranks, and puts up to `halo` preceding tokens before each piece."""
    texts, coordinate = _Texts.of(plan), plan.block_coordinate
    cuts = np.union1d(texts.start, coordinate)
    owner = plan.blocks.owner[np.searchsorted(coordinate, cuts, side="right") - 1]
    borders = np.isin(cuts, texts.start)
    borders[1:] |= owner[1:] != owner[:-1]
    first, rank = cuts[borders], owner[borders].astype(np.int64)
    count = np.diff(np.append(first, texts.total))
    stretch = texts.stretch_of(first)
    found = []
    for piece, (token, number) in enumerate(zip(first.tolist(), stretch.tolist(), strict=True)):
        before = texts.tokens_before(token, number, halo)
        found += [(piece, *segment, False) for segment in before]
        found.append((piece, token, int(count[piece]), True))
    segments = _Segments(*(np.asarray(column) for column in zip(*found, strict=True)))
    context = segments.rows_of_pieces(len(first)) - count
    place = texts.depth[stretch] + first - texts.start[stretch] - context
    return _arrange(plan, segments, rank, texts.document[stretch], place)


@dataclass(frozen=True, eq=False)
class _Texts:
    """The stretches of a batch: [start, end), the token before and its stretch (`parent`, -1 if
    none), the document, and the index of the first token in it (`depth`)."""

    start: Int64
    end: Int64
    before: Int64
    parent: Int64
    document: Int64
    depth: Int64

    @staticmethod
    def of(plan: RankPlan) -> "_Texts":
        start, before = (x.astype(np.int64) for x in (plan.stretches.start, plan.stretches.before))
        if (before == UNCLEAR).any():
            _refuse(plan, int(start[np.argmax(before == UNCLEAR)]))
        parent = np.searchsorted(start, before, side="right") - 1
        document, depth = np.cumsum(parent < 0) - 1, np.zeros(len(start), np.int64)
        for stretch in np.flatnonzero(parent >= 0).tolist():  # parents come first
            above = parent[stretch]
            document[stretch] = document[above]
            depth[stretch] = depth[above] + before[stretch] - start[above] + 1
        end = np.append(start[1:], plan.lengths.sum(dtype=np.int64))
        return _Texts(start, end, before, parent, document, depth)

    @property
    def total(self) -> int:
        return int(self.end[-1])

    def stretch_of(self, tokens: Int64) -> Int64:
        found: Int64 = np.searchsorted(self.start, tokens, side="right") - 1
        return found

    def tokens_before(self, token: int, stretch: int, most: int) -> list[tuple[int, int]]:
        """Up to `most` tokens before `token`, as segments (first, count) in text order."""
        found: list[tuple[int, int]] = []
        while most:
            count = min(most, token - int(self.start[stretch]))
            if count:
                found.append((token - count, count))
                most -= count
            if self.parent[stretch] < 0:
                break
            token, stretch = int(self.before[stretch]) + 1, int(self.parent[stretch])
        return found[::-1]

    def lines(self) -> _Segments:
        """Lines from the beginning of a document to the end of each stretch that no other stretch
        continues at its end. The first line with all of a stretch has the rows that count."""
        continued = self.parent[(self.parent >= 0) & (self.before + 1 == self.end[self.parent])]
        leaves = np.setdiff1d(np.arange(len(self.start)), continued)
        found: list[tuple[int, int, int, bool]] = []
        taken: set[int] = set()
        for line, leaf in enumerate(leaves.tolist()):
            for stretch, end in self._path(leaf):
                first = int(self.start[stretch])
                whole = end == self.end[stretch] and stretch not in taken
                found.append((line, first, end - first, whole))
                taken |= {stretch} if whole else set()
        return _Segments(*(np.asarray(column) for column in zip(*found, strict=True)))

    def _path(self, leaf: int) -> list[tuple[int, int]]:
        """Stretches from the beginning of a document to `leaf`, and where the path leaves each."""
        path, end = [], int(self.end[leaf])
        while leaf >= 0:
            path.append((leaf, end))
            leaf, end = int(self.parent[leaf]), int(self.before[leaf]) + 1
        return path[::-1]


def _refuse(plan: RankPlan, token: int) -> None:
    bounds = starts_of(plan.lengths)
    sequence = int(np.searchsorted(bounds, token, side="right")) - 1
    raise ValueError(
        f"layers with state need the token before token {token - bounds[sequence]} of sequence "
        f"{sequence}, which the masks leave unclear: it does not attend the row before it, its "
        "nearest key has not the position before its own, and it does not begin a document at "
        "position 0. Give the mask positions that start at 0 in every document and continue in "
        "branches, as masks.document_packed does"
    )


def _arrange(
    plan: RankPlan, segments: _Segments, rank: Int64, document: Int64, start: Int64
) -> ContiguousOrder:
    """Sorts pieces by rank and pads each rank's rows like its local rows. `rank`, `document` and
    `start` are by piece."""
    num_ranks, num_pieces = plan.num_ranks, len(rank)
    rows = segments.rows_of_pieces(num_pieces)
    filled = np.bincount(rank, rows, num_ranks).astype(np.int64)
    padding = pad_rows(filled, plan.local_multiple) - filled
    padded = np.flatnonzero(padding)  # ranks that get a piece of padding rows
    none = np.zeros_like(padded)
    rank, rows = np.append(rank, padded), np.append(rows, padding[padded])
    document, start = np.append(document, none - 1), np.append(start, none)
    of_piece = np.append(segments.piece, num_pieces + np.arange(len(padded)))
    first, count = np.append(segments.first, none), np.append(segments.count, padding[padded])
    counts = np.append(segments.counts, none > 0)

    order = np.argsort(rank[of_piece], kind="stable")
    count = count[order]
    real = document[of_piece[order]] >= 0
    token = np.where(np.repeat(real, count), ranges_of(first[order], count), -1)
    pieces = np.argsort(rank, kind="stable")
    return ContiguousOrder(
        token=token,
        counts=np.repeat(counts[order], count),
        row_bounds=starts_of(filled + padding),
        piece_bounds=starts_of(np.bincount(rank, minlength=num_ranks)),
        piece_rows=rows[pieces],
        document=document[pieces],
        start=start[pieces],
    )
