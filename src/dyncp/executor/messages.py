"""Packs payloads into messages and unpacks them: one contiguous byte tensor per phase and peer.

A message holds the widest items first (log-sum-exps and row sums before bf16 rows), so that every
section is aligned without padding and the bytes are exactly those of the payloads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.executor.lowering import Entry
from dyncp.executor.workspace import Workspace
from dyncp.plan import Payload

# What a payload consists of, by the names of the workspace's tensors.
FIELDS = {
    Payload.Q: ("q",),
    Payload.KV: ("k", "v"),
    Payload.OUT: ("lse", "out"),
    Payload.Q_DOUT: ("lse", "delta", "q", "dout"),
    Payload.DQ: ("dq",),
    Payload.DKV: ("dk", "dv"),
}
# Accumulators travel rounded to the partial dtype; all other fields as they are.
PARTIAL_FIELDS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Piece:
    """One field of one payload, as a view into a message."""

    entry: Entry
    field: str
    view: Tensor


def allocate(entries: list[Entry], workspaces: list[Workspace]) -> tuple[Tensor, list[Piece]]:
    """An empty message for `entries`, and views of its pieces."""
    layout = sorted(
        ((entry, field) for entry in entries for field in FIELDS[entry.kind]),
        key=lambda item: -_dtype(workspaces[item[0].head_group], item[1]).itemsize,
    )
    sizes = [_bytes(entry, field, workspaces[entry.head_group]) for entry, field in layout]
    device = workspaces[0].device
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    return message, list(_views(message, layout, sizes, workspaces))


def _views(
    message: Tensor, layout: list[tuple[Entry, str]], sizes: list[int], workspaces: list[Workspace]
) -> Iterator[Piece]:
    for (entry, field), section in zip(layout, message.split_with_sizes(sizes), strict=True):
        workspace = workspaces[entry.head_group]
        shape = (entry.tokens, *workspace.tensors[field].shape[1:])
        yield Piece(entry, field, section.view(_dtype(workspace, field)).view(shape))


def _dtype(workspace: Workspace, field: str) -> torch.dtype:
    partial = field in PARTIAL_FIELDS
    return workspace.partial_dtype if partial else workspace.tensors[field].dtype


def _bytes(entry: Entry, field: str, workspace: Workspace) -> int:
    row = workspace.tensors[field].shape[1:].numel()
    return entry.tokens * row * _dtype(workspace, field).itemsize


def pack(entries: list[Entry], workspaces: list[Workspace]) -> Tensor:
    message, pieces = allocate(entries, workspaces)
    for piece in pieces:
        workspace = workspaces[piece.entry.head_group]
        piece.view.copy_(workspace.tensors[piece.field][piece.entry.rows])
    return message


def unpack(entries: list[Entry], pieces: list[Piece], workspaces: list[Workspace]) -> None:
    """Puts inputs into their slots and merges results into their rows, in the plan's order."""
    views = {(id(piece.entry), piece.field): piece.view for piece in pieces}
    for entry in entries:
        fields = {field: views[id(entry), field] for field in FIELDS[entry.kind]}
        workspaces[entry.head_group].accept(entry.kind, entry.rows, fields)
