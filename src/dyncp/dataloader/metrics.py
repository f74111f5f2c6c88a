"""LoaderMetrics: planning times, how long training waited, the plans, and skipped samples."""

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyncp.plan import RankPlan

logger = logging.getLogger(__name__)

KEPT = 1000  # batches that percentiles are taken over
LOGGED = 3  # skipped samples of each kind that are named in a warning


class Skipped:
    """Counts skipped samples by reason; the first of each are logged."""

    def __init__(self, logged: int = LOGGED) -> None:
        self.counts: Counter[str] = Counter()
        self._logged = logged
        self._lock = threading.Lock()

    def add(self, reason: str, index: int, text: object) -> None:
        with self._lock:
            self.counts[reason] += 1
            count = self.counts[reason]
        if count <= self._logged:
            more = "; further ones are only counted" if count == self._logged else ""
            logger.warning("sample %s is skipped (%s): %s%s", index, reason, text, more)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. `plan_seconds` is the planner's time, `stall_seconds` how long training waited,
    `queue_depth` how many batches were ready when it asked. `moved_bytes` are those of one
    attention layer, all masks, forward and backward, all ranks."""

    plan_seconds: float
    part_bytes: int
    moved_bytes: int
    compute_imbalance: float
    token_imbalance: float
    solver: str
    static: bool  # the planner failed, and a static method replaced it
    stall_seconds: float = 0.0
    queue_depth: int = 0

    @staticmethod
    def of(part: RankPlan, plan_seconds: float, part_bytes: int, *, static: bool) -> "BatchRecord":
        moved = sum(sum(both) for both in part.declared_bytes.values())
        imbalances = part.balance.compute_max_over_mean, part.balance.tokens_max_over_mean
        return BatchRecord(plan_seconds, part_bytes, moved, *imbalances, part.solver, static)


class LoaderMetrics:
    """Counts since the loader was made; percentiles over the last 1,000 batches."""

    def __init__(self) -> None:
        self.batches = 0
        self.static_plans = 0  # batches whose planner failed
        self.restarts = 0  # planning processes that were replaced
        self.stall_seconds = 0.0
        self.solvers: Counter[str] = Counter()
        self.skipped = Skipped()
        self._records: deque[BatchRecord] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    @property
    def last(self) -> BatchRecord | None:
        """The latest batch that training took."""
        return self._records[-1] if self._records else None

    def record(self, record: BatchRecord) -> None:
        with self._lock:
            self.batches += 1
            self.static_plans += record.static
            self.stall_seconds += record.stall_seconds
            self.solvers[record.solver] += 1
            self._records.append(record)

    def count_restarts(self, number: int) -> None:
        with self._lock:  # several threads plan
            self.restarts += number

    def plan_times(self) -> list[float]:
        """Seconds of the latest plans, one per batch."""
        with self._lock:
            return [record.plan_seconds for record in self._records]

    def snapshot(self) -> dict[str, Any]:
        """All numbers by name, ready for a logger or JSON."""
        with self._lock:
            records, solvers = list(self._records), dict(self.solvers)
        counted = ("batches", "static_plans", "restarts", "stall_seconds")
        numbers: dict[str, Any] = {name: getattr(self, name) for name in counted}
        numbers |= {"solvers": solvers, "skipped": dict(self.skipped.counts)}
        for name in ("plan_seconds", "stall_seconds"):
            values = [getattr(record, name) for record in records] or [0.0]
            p50, p99 = np.percentile(values, [50, 99]).tolist()
            numbers |= {f"{name}_p50": p50, f"{name}_p99": p99}
        if records:
            shown = ("queue_depth", "moved_bytes", "compute_imbalance", "token_imbalance")
            numbers |= {name: getattr(records[-1], name) for name in shown}
            numbers["part_bytes"] = max(record.part_bytes for record in records)
        return numbers

    def line(self) -> str:
        """One line for the log."""
        now, last = self.snapshot(), self.last
        text = (
            f"plan {1e3 * now['plan_seconds_p50']:.0f} ms (p99 "
            f"{1e3 * now['plan_seconds_p99']:.0f}), stalled {now['stall_seconds']:.1f} s"
        )
        if last is not None:
            text += (
                f", {last.queue_depth} ready, {last.moved_bytes / 1e6:.1f} MB per layer, imbalance "
                f"{last.compute_imbalance:.2f} compute {last.token_imbalance:.2f} tokens, "
                f"{last.solver}"
            )
        return text
