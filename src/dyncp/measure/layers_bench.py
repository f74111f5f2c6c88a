"""Single ranks of plans inside a stack of transformer layers, beside the same stack with plain
attention on whole documents and without attention.

All times are taken before the first kernel is profiled: profilers slow down the host, some of them
afterwards too."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dyncp.measure.implementation import Unavailable, first_line
from dyncp.measure.inputs import DTYPES
from dyncp.measure.layer_stack import LayerStack
from dyncp.measure.layers_summary import describe_case, summarise_ranks
from dyncp.measure.stack_cases import (
    ATTENTIONS,
    NONE,
    PLAIN,
    RankCase,
    StackSetting,
    attend_of,
    rank_cases,
    stack_run,
)
from dyncp.measure.steady import Kernels, has_profiler, profile_steady, time_steady
from dyncp.measure.timing import Repeats, Run
from dyncp.planner import Task, choose, lower_choice

logger = logging.getLogger(__name__)

# The first iterations capture graphs and take memory.
WARM_UP = 3

Tell = Callable[[str], None]
Found = TypeVar("Found")
Key = tuple[RankCase, str]


@dataclass(frozen=True, slots=True, eq=False)
class LayersSetting:
    """Whose plans run (`tasks`, by the names of sample and mask), inside what; `ranks` None means
    ranks that stand for all."""

    tasks: Mapping[tuple[str, str], Task]
    stack: StackSetting
    ranks: tuple[int, ...] | None = None
    repeats: Repeats = field(default_factory=lambda: Repeats(10, WARM_UP))


def bench_layers(setting: LayersSetting, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Every rank's stack with dyncp's attention, plain attention, and none; and a summary by sample
    and mask."""
    cases = _plan_all(setting, tell)
    bench = _Bench(setting, cases, tell)
    steady, reasons = bench.measure("time", time_steady)
    kernels: dict[Key, Kernels] = {}
    if has_profiler(setting.stack.device):
        kernels, failed = bench.measure("kernels", profile_steady, skip=reasons)
        reasons |= failed
    rows = [
        describe_case(
            case,
            setting.stack.device,
            {kind: steady.get((case, kind)) for kind in ATTENTIONS},
            {kind: kernels.get((case, kind)) for kind in ATTENTIONS},
            {kind: reasons.get((case, kind), "") for kind in ATTENTIONS},
        )
        for case in cases
    ]
    return {"rows": rows, "summary": summarise_ranks(rows)}


def _plan_all(setting: LayersSetting, tell: Tell) -> list[RankCase]:
    cases: list[RankCase] = []
    for names, task in setting.tasks.items():
        tell(f"{names[0]}, {names[1]}: planning ...")
        plan = lower_choice(task, choose(task))
        cases += rank_cases(names, task.batch, plan, task.cost, setting.ranks)
    return cases


class _Bench:
    """The stack, and what runs in it."""

    def __init__(self, setting: LayersSetting, cases: Sequence[RankCase], tell: Tell) -> None:
        self._setting, self._cases, self._tell = setting, cases, tell
        options = setting.stack
        dtype, device = DTYPES[options.shape.dtype], options.device
        self._stack = LayerStack(options.model, options.layers, dtype, device)
        if device.type == "cuda":
            tell("warming up ...")
            options.executor(0, 1).warm_up(options.shape)

    def measure(
        self,
        what: str,
        measure: Callable[[Run, torch.device, Repeats], Found],
        skip: Mapping[Key, str] | None = None,
    ) -> tuple[dict[Key, Found], dict[Key, str]]:
        """`measure` of every rank's stack, or why it could not be. Stacks without attention that
        have as many rows are measured once."""
        found: dict[Key, Found] = {}
        reasons: dict[Key, str] = {}
        without: dict[int, Found] = {}
        for case in self._cases:
            for kind in ATTENTIONS:
                if skip and (case, kind) in skip:
                    continue
                if kind == NONE and case.rows in without:
                    found[case, kind] = without[case.rows]
                    continue
                self._tell(f"{case.sample}, {case.mask}, rank {case.part.rank}: {kind}, {what} ...")
                try:
                    found[case, kind] = self._measure_one(case, kind, measure)
                except Exception as error:  # others' kernels fail in their own ways
                    if kind != PLAIN:
                        raise
                    logger.debug("%s failed", kind, exc_info=True)
                    plain = isinstance(error, Unavailable)
                    reasons[case, kind] = str(error) if plain else first_line(error)
            without.setdefault(case.rows, found[case, NONE])
        return found, reasons

    def _measure_one(
        self, case: RankCase, kind: str, measure: Callable[[Run, torch.device, Repeats], Found]
    ) -> Found:
        gc.collect()  # memory of the case before, and no pause for it in this one
        options = self._setting.stack
        run = stack_run(self._stack, case.positions, attend_of(case, kind, options))
        return measure(run, options.device, self._setting.repeats)
