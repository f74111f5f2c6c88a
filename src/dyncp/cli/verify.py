"""`dyncp verify`: checks a saved plan, invariant by invariant."""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyncp.blocks import Batch
from dyncp.cli.arguments import Progress, add_json_option, show
from dyncp.plan import MaskPlan, Plan, RankPlan, load_plan
from dyncp.verify import (
    INVARIANTS,
    ListedKernelTiles,
    PlanError,
    Verified,
    Violation,
    check_kernel_call,
    compare_with_dense,
    examine_plan,
    num_scores,
)

if TYPE_CHECKING:
    from dyncp.kernels import KernelCall
    from dyncp.kernels.tile_lists import TileLists

VIOLATED = 1
KERNEL_CALLS = 6
# Limits of --numeric: one sequence of 2,048 tokens with 8 q heads on 16 ranks took 18 s (most of it
# for kernel calls) and 1.1 GB.
MOST_SCORES, MOST_TOKENS = 2**25, 2048

EXAMPLES = (
    "dyncp plan --lengths 700,300,200 --nodes 1 --ranks-per-node 4 --save batch.plan",
    "dyncp verify batch.plan --numeric",
)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="written by `dyncp plan --save`")
    parser.add_argument(
        "--numeric",
        action="store_true",
        help="also run the plan in fp64 numpy, compare outputs and gradients with dense attention, "
        "and check the kernel calls (invariant 6); small batches only",
    )
    add_json_option(parser)


def run(args: Namespace) -> int:
    plan, batch = load_plan(args.plan)
    progress = Progress()
    progress.say(f"verifying {batch.num_tokens:,} tokens on {plan.num_ranks} ranks ...")
    verified = examine_plan(plan, batch)
    invariants = {str(number): _state(verified, number) for number in INVARIANTS}
    numeric = None
    if args.numeric:
        progress.show("comparing it with dense attention ...")
        numeric = _numeric(plan, batch, verified)
        progress.show("checking its kernel calls ...")
        invariants[str(KERNEL_CALLS)] = _kernel_calls(plan, batch, verified)
        progress.clear()
    states = [entry["state"] for entry in (*invariants.values(), numeric) if entry]
    about = {
        "solver": plan.parts[0].solver,
        "num_ranks": plan.num_ranks,
        "num_tokens": batch.num_tokens,
        "num_sequences": len(batch.lengths),
        "masks": list(plan.parts[0].masks),
        "digest": plan.digest,
    }
    result = {"ok": "violated" not in states, "plan": about}
    result |= {"invariants": invariants, "numeric": numeric}
    show(args, result, _lines(result))
    return 0 if result["ok"] else VIOLATED


def _entry(state: str, *sentences: str) -> dict[str, Any]:
    return {"state": state, "sentences": list(sentences)}


def _state(verified: Verified, number: int) -> dict[str, Any]:
    sentences = [violation.sentence for violation in verified.of(number)]
    if sentences:
        return _entry("violated", *sentences)
    if number == KERNEL_CALLS:
        return _entry("unchecked", "a plan file has no kernel calls; --numeric makes them")
    if number not in verified.checked:
        return _entry("unchecked", "cannot be checked because of a violation above")
    return _entry("ok")


def _kernel_calls(plan: Plan, batch: Batch, verified: Verified) -> dict[str, Any]:
    if verified.violations:
        return _entry("unchecked", "only checked if the plan keeps all other invariants")
    if batch.num_tokens > MOST_TOKENS:
        size = f"{batch.num_tokens:,} tokens, at most {MOST_TOKENS:,}"
        return _entry("unchecked", f"too large: {size}")
    sentences = [violation.sentence for violation in check_kernel_calls(plan, batch)]
    return _entry("violated" if sentences else "ok", *sentences)


def _numeric(plan: Plan, batch: Batch, verified: Verified) -> dict[str, Any]:
    scores = num_scores(plan, batch)
    if not verified.checked - {8}:
        return _entry("unchecked", "the plan cannot be run, see above")
    if scores > MOST_SCORES:
        size = f"{scores:,} scores (q heads × Σ length²), at most {MOST_SCORES:,}"
        return _entry("unchecked", f"too large: {size}")
    errors, wrong = {}, []
    for name in plan.parts[0].masks:
        try:
            comparison = compare_with_dense(plan, batch, name)
        except PlanError as error:
            wrong.append(f"mask {name!r} cannot be run: {error}")
            continue
        found = comparison.errors.items()
        errors[name] = {field: None if math.isnan(error) else error for field, error in found}
        if not comparison.agrees:
            worst = ", ".join(f"{field} {error:.1e}" for field, error in found)
            wrong.append(f"mask {name!r} differs from dense attention: {worst}")
    return _entry("violated" if wrong else "ok", *wrong) | {"errors": errors}


def _lines(result: dict[str, Any]) -> Iterator[str]:
    plan = result["plan"]
    yield (
        f"plan {plan['digest']} by {plan['solver']}: {plan['num_tokens']:,} tokens of "
        f"{plan['num_sequences']:,} sequences on {plan['num_ranks']} ranks, masks "
        f"{', '.join(plan['masks'])}"
    )
    yield ""
    for number, entry in result["invariants"].items():
        yield from _entry_lines(number, INVARIANTS[int(number)], entry)
    if result["numeric"]:
        yield from _entry_lines("numeric", _numeric_title(result["numeric"]), result["numeric"])
    yield ""
    yield _conclusion(result)


def _entry_lines(label: str, title: str, entry: dict[str, Any]) -> Iterator[str]:
    state = "VIOLATED" if entry["state"] == "violated" else entry["state"]
    note = f" ({entry['sentences'][0]})" if entry["state"] == "unchecked" else ""
    yield f"{label:<9}{state:<11}{title}{note}"
    if entry["state"] == "violated":
        yield from (f"{'':<20}- {sentence}" for sentence in entry["sentences"])


def _numeric_title(entry: dict[str, Any]) -> str:
    title = "outputs and gradients equal dense attention"
    if entry["state"] != "ok":
        return title
    worst = max(error for fields in entry["errors"].values() for error in fields.values())
    return f"{title}, to {worst:.0e}"


def _conclusion(result: dict[str, Any]) -> str:
    states = [entry["state"] for entry in result["invariants"].values()]
    if result["ok"]:
        return "The plan is correct." if set(states) == {"ok"} else "No violation was found."
    broken = states.count("violated")
    if not broken:
        return "The plan must not be run: its results are wrong."
    return f"The plan must not be run: it breaks {broken} of {len(INVARIANTS)} invariants."


def check_kernel_calls(plan: Plan, batch: Batch) -> list[Violation]:
    """Violations in the tile lists that GPU kernels run, for all calls of all ranks. The plan must
    keep the other invariants, and the batch must be small: its pairs become dense matrices."""
    found = []
    for part in plan.parts:
        for name, mask in part.masks.items():
            for call, own in kernel_calls_of(part, mask):
                tiles = (mask.tiles.q_block[own], mask.tiles.k_block[own])
                for listed in gpu_kernel_tiles(call):
                    found += check_kernel_call(batch, name, part.blocks, *tiles, listed)
    return found


def kernel_calls_of(part: RankPlan, mask: MaskPlan) -> Iterator[tuple["KernelCall", np.ndarray]]:
    """The kernel calls of a mask on a rank, each with the indices of its tiles."""
    from dyncp.executor.kernel_calls import RankProgram  # late: torch takes seconds to import

    for direction, program in mask.programs():
        for division, calls in RankProgram(part, mask, direction).kernel_calls().items():
            mine = program.tile_division == division
            for call in calls:
                yield call, np.flatnonzero(mine & (mask.tiles.head_group == call.head_group))


def gpu_kernel_tiles(call: "KernelCall") -> Iterator[ListedKernelTiles]:
    """The tile lists of GPU kernels: by query tile, and for backward also by key tile of half
    size."""
    from dyncp.kernels.tile_lists import (
        HALF,
        SIDE,
        classify_tiles,
        list_tiles_of,
        map_kernel_tiles,
    )

    tiles = map_kernel_tiles(call)
    lists = [(SIDE, _entries(list_tiles_of(tiles.state, call.q_states.touched)))]
    if call.k_states.touched.any():
        halves = np.ascontiguousarray(classify_tiles(call, HALF).T)
        by_key = _entries(list_tiles_of(halves, call.k_states.touched, HALF))
        lists.append((HALF, by_key[:, [1, 0, 2]]))
    for side, entries in lists:
        yield ListedKernelTiles(
            side=side,
            q_tile=entries[:, 0],
            k_tile=entries[:, 1],
            full=entries[:, 2] > 0,
            ranges=np.moveaxis(tiles.ranges[:, :, : len(call.q_coordinates)], 2, 0),
            q_coordinates=call.q_coordinates,
            k_coordinates=call.k_coordinates,
        )


def _entries(lists: "TileLists") -> np.ndarray:
    """[entries, 3]: a tile, a tile of the other side that it meets, and whether it is full."""
    entries: list[tuple[int, int, int]] = []
    for tile, num_runs, num_partial, *others in lists.entries.tolist():
        partial = others[2 * lists.most_runs :][:num_partial]
        runs = zip(others[: 2 * num_runs : 2], others[1 : 2 * num_runs : 2], strict=True)
        entries += [(tile, other, 0) for other in partial]
        entries += [(tile, other, 1) for first, end in runs for other in range(first, end)]
    return np.array(entries, np.int64).reshape(-1, 3)
