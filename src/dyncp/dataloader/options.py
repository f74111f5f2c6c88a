"""The options of DCPDataLoader: defaults, and the checks that are made with the loader."""

import hashlib
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from dyncp.checks import instance_of, usable_cores, whole_number
from dyncp.planner import PlannerConfig, plan_batch

TOKENS_PER_RANK = 8192
# Chosen with benchmarks/fill.py, by how full batches and how balanced replicas are.
FILL_WINDOW, DEAL_WINDOW, DEAL_WINDOW_READ = 32, 16, 4
# Fields that the loader itself puts into the local data.
PLAIN_FIELDS = ("input_ids", "position_ids", "labels", "shift_labels")
TARGET_FIELDS = ("target_rows", "target_labels", "target_weights", "target_tokens")
OTHER_FIELDS = ("sample_ids", "num_items_in_batch", "batch_fingerprint")
TOO_LONG = ("error", "truncate", "drop", "split")
# These options may differ between ranks, or their contents are compared elsewhere.
NOT_COMPARED = {"compared": False}
MAX_PLANNERS = 4  # default limit of planning processes per rank
SCHEDULE_BATCHES = 1024  # a schedule's digest has every budget up to this batch, then fewer

Budget = int | Callable[[int], int]
Collate = Callable[[dict[str, Any], list[Any]], Mapping[str, Any]]


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
    bad_samples: str = field(default="error", metadata={"choices": ("error", "drop")})
    empty_samples: str = field(default="error", metadata={"choices": ("error", "drop")})
    drop_last: bool = False
    window: int | None = field(default=None, metadata={"least": 1})
    epochs: int | None = field(default=1, metadata={"least": 1})
    evaluation: bool = False
    max_tokens_per_rank: int | None = field(default=None, metadata={"least": 1})
    local_multiple: int = field(default=1, metadata={"least": 1})
    look_ahead: int = field(default=4, metadata={"least": 0} | NOT_COMPARED)
    num_planners: int | None = field(default=None, metadata={"least": 0} | NOT_COMPARED)
    plan_timeout: float = field(default=300.0, metadata=NOT_COMPARED)
    store_timeout: float = field(default=300.0, metadata=NOT_COMPARED)
    plan_function: Callable[..., Any] = plan_batch
    token_fields: Mapping[str, int] = field(default_factory=dict)
    sample_fields: Sequence[str] = field(default=(), metadata=NOT_COMPARED)
    sample_ids: bool = field(default=False, metadata=NOT_COMPARED)
    collate: Collate | None = field(default=None, metadata=NOT_COMPARED)
    num_workers: int = field(default=0, metadata={"least": 0} | NOT_COMPARED)
    pin_memory: bool | None = field(default=None, metadata=NOT_COMPARED)
    log_every: int | None = field(default=None, metadata={"least": 1} | NOT_COMPARED)

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "LoaderConfig":
        """Picks the options out of all arguments of DCPDataLoader."""
        options = {field.name: arguments[field.name] for field in fields(LoaderConfig)}
        return LoaderConfig(**options | {"token_fields": options["token_fields"] or {}})

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value, rules = option.name, getattr(self, option.name), option.metadata
            least, choices = rules.get("least"), rules.get("choices")
            if least is not None and value is not None and not callable(value):
                object.__setattr__(self, name, integer_option(name, value, least))
            if choices and value not in choices:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        for name in ("plan_timeout", "store_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; must be positive (seconds)")
        if self.bad_samples == "drop" and self.lengths is not None:
            raise ValueError(
                "bad_samples='drop' must read every sample before batches are made; with lengths= "
                "batches are made first. Omit lengths=, or give bad samples the length 0 and pass "
                "empty_samples='drop'"
            )
        if self.num_planners != 0:
            _check_plan_function(self.plan_function)
        self._check_order()
        self._check_fields()

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

    def _check_fields(self) -> None:
        if isinstance(self.sample_fields, str):
            raise ValueError(
                f"sample_fields is {self.sample_fields!r}; expected a list of names, such as "
                f"[{self.sample_fields!r}]"
            )
        made = {*PLAIN_FIELDS, *TARGET_FIELDS, *OTHER_FIELDS, *self.token_fields} & set(
            self.sample_fields
        )
        if made:
            raise ValueError(
                f"sample_fields has {', '.join(sorted(made))}, which the local data already has "
                "for every token; remove it"
            )
        if self.collate is not None:
            expected = "a function of the local data and the samples"
            instance_of("collate", self.collate, Callable, expected)

    def windows(self, *, knows_lengths: bool) -> tuple[int, int]:
        """The windows for filling a batch and for dealing a round, in batches (per replica)."""
        if self.window is not None:
            return self.window, self.window
        if self.evaluation:
            return 1, 1
        return FILL_WINDOW, DEAL_WINDOW if knows_lengths else DEAL_WINDOW_READ

    def planning_processes(self, members: int) -> int:
        """Number of planning processes of one rank if `members` ranks take turns in planning."""
        if self.num_planners is not None:
            return self.num_planners
        share = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own_batches = -(-self.look_ahead // members)
        return max(1, min(own_batches, share, MAX_PLANNERS))

    def planner_config(self, config: PlannerConfig) -> PlannerConfig:
        """The planner's config with the loader's options applied."""
        layout = config.layout
        if self.local_multiple > 1:
            layout = replace(layout, local_multiple=self.local_multiple)
        limits = [self.max_tokens_per_rank, config.max_tokens_per_rank]
        return replace(
            config,
            layout=layout,
            forward_only=config.forward_only or self.evaluation,
            max_tokens_per_rank=min((n for n in limits if n is not None), default=None),
        )

    def shared_settings(self) -> dict[str, str]:
        """Options that must be equal on all ranks, as strings."""
        names = [option.name for option in fields(self) if option.metadata.get("compared", True)]
        budget = self.tokens_per_batch
        function = self.plan_function
        named = function if hasattr(function, "__qualname__") else type(function)
        return {name: repr(getattr(self, name)) for name in names} | {
            "tokens_per_batch": "a function" if callable(budget) else repr(budget),
            "token_fields": repr(sorted(self.token_fields.items())),
            "plan_function": f"{named.__module__}.{named.__qualname__}",
        }

    @property
    def order(self) -> Iterable[Any] | None:
        """The sampler, or the batch sampler."""
        return self.batch_sampler if self.sampler is None else self.sampler

    def budget(self, num_ranks: int) -> Budget | None:
        """Token budget of a plan for `num_ranks` ranks; None if a batch sampler makes batches."""
        if self.tokens_per_batch is not None or self.batch_sampler is not None:
            return self.tokens_per_batch
        per_rank = TOKENS_PER_RANK
        if self.max_tokens_per_rank is not None:
            per_rank = min(per_rank, self.max_tokens_per_rank)
        return per_rank * num_ranks


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


def digest_of(what: object, size: int = 8) -> str:
    """Hexadecimal digest of bytes, or of an object's repr."""
    data = what if isinstance(what, bytes) else repr(what).encode()
    return hashlib.blake2b(data, digest_size=size).hexdigest()


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
