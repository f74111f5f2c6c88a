"""The options of DCPDataLoader: defaults, and the checks that are made with the loader."""

import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from dyncp.checks import instance_of, usable_cores, whole_number
from dyncp.cost import CostModel
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.samples import SampleOptions, digest_of

TOKENS_PER_RANK = 8192
# Chosen with benchmarks/fill.py, by how full batches and how balanced replicas are.
FILL_WINDOW, DEAL_WINDOW, DEAL_WINDOW_READ = 32, 16, 4
TOO_LONG = ("error", "truncate", "drop", "split")
BAD_SAMPLES = ("error", "drop", "drop_empty")
# These options may differ between ranks, or their contents are compared elsewhere.
NOT_COMPARED = {"compared": False}
MAX_PLANNERS = 4  # default limit of planning processes per rank
SCHEDULE_BATCHES = 1024  # a schedule's digest has every budget up to this batch, then fewer

Budget = int | Callable[[int], int]
Collate = Callable[[dict[str, Any], list[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class LoaderTuning:
    """How the loader works, not what training gets; only `window` changes which samples a batch
    has.

    `look_ahead` batches are prepared in advance (0: on demand); if training has to wait, up to four
    times as many. `num_planners` processes make the plans, which do not depend on their number
    (None: one for each batch that this rank plans ahead, but at most 4, and at most this rank's
    share of the cores; 0: a thread of this process plans, for debugging). `num_workers` processes
    read samples ahead (0: the loader's own threads). A batch is filled from the samples of the next
    `window` batches, and a round of batches is dealt to the replicas from the next `window` batches
    per replica; 1 keeps the order (None: 32 to fill, 16 to deal, or 4 to deal if samples must be
    read first; 1 in evaluation). A batch without a plan after `plan_timeout` seconds gets a static
    plan. A call of the store may take `store_timeout` seconds. `pin_memory` puts local data in
    pinned memory (None: if CUDA is available). `cost` prices plans (None: by the topology's name,
    or the device). `plan_function` replaces `dyncp.plan_batch` and gets the same arguments;
    planning processes must be able to import it."""

    look_ahead: int = field(default=4, metadata={"least": 0} | NOT_COMPARED)
    num_planners: int | None = field(default=None, metadata={"least": 0} | NOT_COMPARED)
    num_workers: int = field(default=0, metadata={"least": 0} | NOT_COMPARED)
    window: int | None = field(default=None, metadata={"least": 1})
    plan_timeout: float = field(default=300.0, metadata=NOT_COMPARED)
    store_timeout: float = field(default=50.0, metadata=NOT_COMPARED)
    pin_memory: bool | None = field(default=None, metadata=NOT_COMPARED)
    cost: CostModel | None = field(default=None, metadata=NOT_COMPARED)
    plan_function: Callable[..., Any] = plan_batch

    def __post_init__(self) -> None:
        _check_numbers_and_choices(self)
        for name in ("plan_timeout", "store_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; must be positive (seconds)")
        if self.num_planners != 0:
            _check_plan_function(self.plan_function)


@dataclass(frozen=True)
class LoaderConfig:
    """The options and their defaults; `DCPDataLoader` explains them. In the metadata of a field,
    `least` is the minimum of an integer and `choices` are the allowed texts."""

    tokens_per_batch: Budget | None = field(default=None, metadata={"least": 1})
    accumulation_steps: int = field(default=1, metadata={"least": 1})
    shuffle: bool = False
    seed: int = field(default=0, metadata={"least": 0})
    sampler: Iterable[int] | None = field(default=None, metadata=NOT_COMPARED)
    batch_sampler: Iterable[Iterable[int]] | None = field(default=None, metadata=NOT_COMPARED)
    lengths: Any = field(default=None, metadata=NOT_COMPARED)
    max_length: int | None = field(default=None, metadata={"least": 1})
    too_long: str = field(default="error", metadata={"choices": TOO_LONG})
    bad_samples: str = field(default="error", metadata={"choices": BAD_SAMPLES})
    drop_last: bool = False
    evaluation: bool = False
    local_multiple: int = field(default=1, metadata={"least": 1})
    token_fields: Mapping[str, int] = field(default_factory=dict)
    sample_ids: bool = field(default=False, metadata=NOT_COMPARED)
    collate: Collate | None = field(default=None, metadata=NOT_COMPARED)
    tuning: LoaderTuning = field(default_factory=LoaderTuning, metadata=NOT_COMPARED)

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "LoaderConfig":
        """Picks the options out of all arguments of DCPDataLoader; None is the default of the last
        two."""
        options = {field.name: arguments[field.name] for field in fields(LoaderConfig)}
        defaults = {"token_fields": {}, "tuning": LoaderTuning()}
        missing = {name: value for name, value in defaults.items() if options[name] is None}
        return LoaderConfig(**options | missing)

    def __post_init__(self) -> None:
        instance_of("tuning", self.tuning, LoaderTuning, "a LoaderTuning")
        _check_numbers_and_choices(self)
        if self.bad_samples == "drop" and self.lengths is not None:
            raise ValueError(
                "bad_samples='drop' must read every sample before batches are made; with lengths= "
                "batches are made first. Omit lengths=, or give bad samples the length 0 and pass "
                "bad_samples='drop_empty'"
            )
        self._check_order()
        if self.collate is not None:
            expected = "a function of the local data and the samples"
            instance_of("collate", self.collate, Callable, expected)

    def _check_order(self) -> None:
        given = ["shuffle=True"] * bool(self.shuffle)
        samplers = ("sampler", "batch_sampler")
        given += [f"{name}=" for name in samplers if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the order; pass only one of them")
        if self.evaluation and self.shuffle:
            raise ValueError("evaluation=True keeps the dataset's order; do not pass shuffle=True")
        if self.batch_sampler is not None and self.tokens_per_batch is not None:
            raise ValueError(
                "batch_sampler= makes the batches; tokens_per_batch= would have no effect"
            )

    def windows(self, *, knows_lengths: bool) -> tuple[int, int]:
        """The windows for filling a batch and for dealing a round, in batches (per replica)."""
        if self.tuning.window is not None:
            return self.tuning.window, self.tuning.window
        if self.evaluation:
            return 1, 1
        return FILL_WINDOW, DEAL_WINDOW if knows_lengths else DEAL_WINDOW_READ

    def planning_processes(self, members: int) -> int:
        """Number of planning processes of one rank if `members` ranks take turns in planning."""
        if self.tuning.num_planners is not None:
            return self.tuning.num_planners
        share = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own_batches = -(-self.tuning.look_ahead // members)
        return max(1, min(own_batches, share, MAX_PLANNERS))

    def planner_config(self, given: PlannerConfig | None) -> PlannerConfig:
        """The planner's config with the loader's options applied."""
        config = given or PlannerConfig()
        instance_of("planner", config, PlannerConfig, "a PlannerConfig")
        layout = config.layout
        if self.local_multiple > 1:
            layout = replace(layout, local_multiple=self.local_multiple)
        forward_only = config.forward_only or self.evaluation
        return replace(config, layout=layout, forward_only=forward_only)

    def shared_settings(self) -> dict[str, str]:
        """Options that must be equal on all ranks, as strings."""
        function = self.tuning.plan_function
        named = function if hasattr(function, "__qualname__") else type(function)
        budget = self.tokens_per_batch
        return (
            _compared(self)
            | _compared(self.tuning)
            | {
                "tokens_per_batch": "a function" if callable(budget) else repr(budget),
                "token_fields": repr(sorted(self.token_fields.items())),
                "plan_function": f"{named.__module__}.{named.__qualname__}",
            }
        )

    @property
    def samples(self) -> SampleOptions:
        """The options that concern samples."""
        return SampleOptions(
            lengths=self.lengths,
            shuffle=self.shuffle,
            seed=self.seed,
            order=self.batch_sampler if self.sampler is None else self.sampler,
            bad_samples=self.bad_samples,
            token_fields=self.token_fields,
            num_workers=self.tuning.num_workers,
        )

    def budget(self, num_ranks: int, most_per_rank: int | None) -> Budget | None:
        """Token budget of a plan for `num_ranks` ranks; None if a batch sampler makes batches."""
        if self.tokens_per_batch is not None or self.batch_sampler is not None:
            return self.tokens_per_batch
        return num_ranks * min(TOKENS_PER_RANK, most_per_rank or TOKENS_PER_RANK)


def _check_numbers_and_choices(options: LoaderConfig | LoaderTuning) -> None:
    for option in fields(options):
        name, value, rules = option.name, getattr(options, option.name), option.metadata
        least, choices = rules.get("least"), rules.get("choices")
        if least is not None and value is not None and not callable(value):
            object.__setattr__(options, name, integer_option(name, value, least))
        if choices and value not in choices:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _compared(options: LoaderConfig | LoaderTuning) -> dict[str, str]:
    names = [option.name for option in fields(options) if option.metadata.get("compared", True)]
    return {name: repr(getattr(options, name)) for name in names}


def integer_option(name: str, value: Any, minimum: int) -> int:
    """The value of an option as an int; a float without a fraction, such as 1e5, is allowed."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return whole_number(name, value, minimum, sys.maxsize)


def budget_of(budget: Budget, number: int) -> int:
    """The budget of batch `number`: a constant, or the result of a schedule."""
    if not callable(budget):
        return budget
    tokens: Any = budget(number)
    whole = math.floor(tokens) if isinstance(tokens, float) and math.isfinite(tokens) else tokens
    return integer_option(f"tokens_per_batch of batch {number}", whole, 1)


def describe_schedule(budget: Budget | None) -> str:
    """Digest of a schedule's budgets: every early batch, then batches at growing distances."""
    if not callable(budget):
        return ""
    later = np.unique(np.geomspace(SCHEDULE_BATCHES, 1e7, SCHEDULE_BATCHES).astype(np.int64))
    numbers = [*range(SCHEDULE_BATCHES), *later.tolist()]
    budgets = [_budget_text(budget, number) for number in numbers]
    return digest_of(" ".join(budgets).encode())


def _budget_text(schedule: Callable[[int], int], number: int) -> str:
    try:
        return str(int(schedule(number)))
    except Exception as error:  # for example, the schedule indexes a list that is too short
        return type(error).__name__


def _check_plan_function(function: Any) -> None:
    """The planning process must be able to import the function: it does not run the main script."""
    try:
        pickled = pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"plan_function is {function!r}, which cannot be sent to the planning process "
            f"({error}); pass a function that is defined in a module, or num_planners=0"
        ) from None
    if b"__main__" in pickled:
        raise ValueError(
            f"plan_function is {function!r} of the main script, which the planning process does "
            "not run; move it to a module and import it, or pass num_planners=0"
        )
