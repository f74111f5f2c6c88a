"""Cuts a call into jobs that torch's CPU flash kernels can run without waste.

A rectangle in which everything is allowed, or which is causal from its first row, is one job. Any
other is cut into pieces of 256 × 256; empty pieces are dropped, neighbouring full ones are joined,
and only the pieces on the mask's edges carry a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from dyncp.arrays import Int64
from dyncp.kernels.call import Held, KernelCall

PIECE = 256


class Shape(Enum):
    FULL = "every query sees every key"
    CAUSAL = "query i sees keys 0..i"
    MASKED = "as the ranges say"


@dataclass(frozen=True, eq=False)
class Job:
    """Query rows × key rows of a workspace. `ranges` are relative to the first key row (MASKED);
    `first` says that the rows' sums are still empty, so that nothing needs merging."""

    rows: slice
    keys: slice
    shape: Shape
    ranges: Int64 | None = None
    first: bool = False


def cut_into_jobs(call: KernelCall) -> list[Job]:
    jobs: list[Job] = []
    for q0, q1, k0, k1 in call.rectangles.tolist():
        relative = call.ranges[q0:q1] - call.k_coordinates[k0]
        for job in _cut_rectangle(relative.clip(0, k1 - k0), q0, k0, k1 - k0):
            _append(jobs, job)
    return _mark_first(jobs, call)


def _mark_first(jobs: list[Job], call: KernelCall) -> list[Job]:
    empty, marked = call.q_states.before == Held.NOTHING, []
    for job in jobs:
        marked.append(replace(job, first=bool(empty[job.rows].all())))
        empty[job.rows] = False
    return marked


def _cut_rectangle(ranges: Int64, row: int, key: int, num_keys: int) -> Iterator[Job]:
    shape = _shape(ranges, num_keys)
    if shape is not Shape.MASKED:
        yield _job(ranges, row, key, 0, num_keys, shape)
        return
    for first in range(0, len(ranges), PIECE):
        part = ranges[first : first + PIECE]
        for k0, k1 in _key_pieces(part, num_keys):
            inside = part.clip(k0, k1) - k0
            yield _job(inside, row + first, key, k0, k1, _shape(inside, k1 - k0))


def _key_pieces(ranges: Int64, num_keys: int) -> Iterator[tuple[int, int]]:
    """Key pieces that some row attends; runs of pieces that all rows attend fully are joined."""
    edges = np.append(np.arange(0, num_keys, PIECE), num_keys)
    below = np.minimum(ranges[:, :, 1, None], edges) - np.minimum(ranges[:, :, 0, None], edges)
    allowed = np.diff(below.sum(axis=(0, 1)))
    full = allowed == len(ranges) * np.diff(edges)
    start = 0
    for i in range(len(allowed)):
        if i + 1 < len(allowed) and full[i] and full[i + 1]:
            continue
        if allowed[i]:
            yield int(edges[start]), int(edges[i + 1])
        start = i + 1


def _shape(ranges: Int64, num_keys: int) -> Shape:
    count = (ranges[:, :, 1] - ranges[:, :, 0]).sum(axis=1)
    if (count == num_keys).all():
        return Shape.FULL
    causal = np.minimum(np.arange(1, len(ranges) + 1), num_keys)
    within = np.where(ranges[:, :, 1] > ranges[:, :, 0], ranges[:, :, 1], 0).max(axis=1) <= causal
    return Shape.CAUSAL if (count == causal).all() and within.all() else Shape.MASKED


def _job(ranges: Int64, row: int, key: int, k0: int, k1: int, shape: Shape) -> Job:
    kept = ranges if shape is Shape.MASKED else None
    return Job(slice(row, row + len(ranges)), slice(key + k0, key + k1), shape, kept)


def _append(jobs: list[Job], job: Job) -> None:
    """Joins a full job to the one before it when it continues its keys."""
    if jobs and job.shape is Shape.FULL:
        last = jobs[-1]
        if last.shape is Shape.FULL and last.rows == job.rows and last.keys.stop == job.keys.start:
            jobs[-1] = Job(job.rows, slice(last.keys.start, job.keys.stop), Shape.FULL)
            return
    jobs.append(job)
