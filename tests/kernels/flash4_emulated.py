"""Kernel `flash4` with flash-attn-4's kernels emulated in torch, for nodes without a GPU.

Only flash-attn-4's own kernels are emulated; lowering, merging and collecting are the real code.
"""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import torch


class Absent(ModuleType):
    """A module of a package that is not installed. Every name in it is a class that accepts any
    arguments; none of these classes is used."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None, "__class_getitem__": type})


ABSENT = ("cutlass", "cutlass.cute", "quack", "quack.layout_utils", "flash_attn", "flash_attn.cute")
OF_FLASH = ("utils", "block_sparsity", "interface", "mask", "tile_scheduler")
KERNELS = ("flash_fwd_sm90", "flash_bwd_sm90")


def import_flash4():
    """`dyncp.kernels.flash4_kernel`, with empty modules for the packages that it imports."""
    of_flash = [f"flash_attn.cute.{name}" for name in (*OF_FLASH, *KERNELS)]
    for name in (*ABSENT, *of_flash):
        parent, _, last = name.rpartition(".")
        module = sys.modules.setdefault(name, Absent(name))
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["cutlass.cute"].jit = lambda function: function
    sys.modules["flash_attn.cute.utils"].AuxData = SimpleNamespace
    from dyncp.kernels import flash4_kernel

    flash4_kernel.flash.attend = attend
    flash4_kernel.flash.attend_backward = attend_backward
    return flash4_kernel


def allowed_pairs(shape, num_rows, num_keys, *, backward):
    """bool[rows, keys] that the kernel computes."""
    rows, keys = torch.arange(num_rows), torch.arange(num_keys)
    if shape is None or hasattr(shape, "q_starts"):
        q_starts, k_starts = [0, num_rows], [0, num_keys]
        if shape is not None:
            q_starts, k_starts = (x.array.tolist() for x in (shape.q_starts, shape.k_starts))
        allowed = torch.zeros(num_rows, num_keys, dtype=torch.bool)
        for (a, b), (c, d) in zip(pairwise(q_starts), pairwise(k_starts), strict=True):
            last = d - (b - 1 - rows[a:b]) - 1
            allowed[a:b, c:d] = keys[c:d] <= last[:, None]
        return allowed
    tiles = torch.zeros(-(-num_rows // 128), -(-num_keys // 128), dtype=torch.int)
    for count, listed, state in (
        (shape.partial_count, shape.partial, 1),
        (shape.full_count, shape.full, 2),
    ):
        for i in range(len(count)):
            for j in listed.tensor[i, : count.tensor[i]].tolist():
                if backward:
                    tiles[j, i] = state
                else:
                    tiles[i, j] = state
    tiles = tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)[:num_rows, :num_keys]
    inside = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    ranges = shape.ranges.tensor
    for start, end in ranges.view(-1, 2, ranges.shape[1]):
        if backward:
            start, end = start[:num_keys], end[:num_keys]  # noqa: PLW2901
            inside |= (rows[:, None] >= start) & (rows[:, None] < end)
        else:
            start, end = start[:num_rows, None], end[:num_rows, None]  # noqa: PLW2901
            inside |= (keys >= start) & (keys < end)
    return (tiles == 2) | ((tiles == 1) & inside)


def read_rows(tensors, allowed, axis):
    """The tensors with 0 in all rows that the kernel does not read: these may hold anything."""
    tiles = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 128, 0, -len(allowed) % 128))
    tiles = tiles.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)
    read = tiles.any(axis).repeat_interleave(128)[: allowed.shape[1 - axis]]
    return [torch.where(read[:, None, None], x, 0.0) for x in tensors]


def attend(q, k, v, scale, shape, out, lse):
    allowed = allowed_pairs(shape, len(q), len(k), backward=False)
    k, v = read_rows((k, v), allowed, 0)
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    scores = scores.masked_fill(~allowed, -torch.inf)
    sums = scores.logsumexp(-1)
    weights = torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1))
    out.copy_(torch.einsum("hqk,khd->qhd", weights, values))
    lse.copy_(sums)


def attend_backward(inputs, dout, lse_log2, delta, scale, shape, sums):
    (q, k, v), (sums_q, sums_k, sums_v) = inputs, sums
    allowed = allowed_pairs(shape, len(q), len(k), backward=True)
    k, v = read_rows((k, v), allowed, 0)
    q, dout = read_rows((q, dout), allowed, 1)
    rows, keys_at = torch.arange(len(q)), torch.arange(len(k))
    if hasattr(shape, "q_starts"):
        side = 128 if q.shape[2] <= 64 else 64
        rows, keys_at = _places(shape.q_starts, side), _places(shape.k_starts, 128)
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    weights = torch.exp2(scores * 1.4426950408889634 - lse_log2[:, rows].unsqueeze(-1))
    weights = weights.masked_fill(~allowed, 0.0)
    dweights = torch.einsum("qhd,khd->hqk", dout.float(), values)
    dscores = weights * (dweights - delta[:, rows].unsqueeze(-1))
    _add(sums_q, torch.einsum("hqk,khd->hqd", dscores, keys), rows)
    for target, new in (
        (sums_k, torch.einsum("hqk,qhd->hkd", dscores, q.float())),
        (sums_v, torch.einsum("hqk,qhd->hkd", weights, dout.float())),
    ):
        new = new.view(k.shape[1], repeat, len(k), q.shape[2]).sum(1)  # noqa: PLW2901
        if target.ndim == 3:  # one q head per kv head: dk and dv are written, and dk is scaled
            target.copy_((new * (scale if target is sums_k else 1.0)).transpose(0, 1))
        else:
            _add(target, new, keys_at)


def _places(starts, side):
    rows = []
    for i, (a, b) in enumerate(pairwise(starts.array.tolist())):
        first = (a + i * side) // side * side
        rows += range(first, first + b - a)
    return torch.tensor(rows)


def _add(flat, rows, places):
    """Adds [heads, rows, dim] to panels. The place of every number is computed from the thread and
    register of flash-attn-4's matrix units that hold it."""
    dim = rows.shape[2]
    width = -(-dim // 16) * 16
    row, column = places[:, None], torch.arange(dim)[None, :]
    group, within = row // 64, row % 64
    thread = within // 16 * 32 + within % 8 * 4 + column % 8 // 2
    register = within // 8 % 2 * 2 + column % 2
    place = group * 64 * width + column // 8 * 512 + thread * 4 + register
    flat[:, place.flatten()] += rows.flatten(1)
