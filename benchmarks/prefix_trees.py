"""Measures what prefix trees save compared with their unrolled paths: tokens, pairs, bytes, time.

    python -m benchmarks.prefix_trees [--ranks 16]

Prompts with many answers, and conversations whose turns branch, planned for one node of p4de as
trees, and with every path from the root to a leaf as a separate sequence.
"""

import argparse
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from dyncp import (
    AttentionShape,
    Batch,
    CostModel,
    Plan,
    find_profile,
    masks,
    plan_batch,
    preset,
)
from dyncp.simulate import simulate_plan

SHAPE = AttentionShape(32, 8, 128, "bf16")
Tree = tuple[list[int], list[int]]  # parents and lengths


def answers(prompt: int, number: int, mean: int, rng: np.random.Generator) -> Tree:
    lengths = np.clip(rng.lognormal(np.log(mean), 0.5, number), 16, 8 * mean).astype(int)
    return [-1] + [0] * number, [prompt, *lengths.tolist()]


def turns(depth: int, branches: int, mean: int, rng: np.random.Generator) -> Tree:
    parents, lengths, level = [-1], [mean], [0]
    for _ in range(depth):
        below = []
        for node in level:
            for _ in range(branches):
                below.append(len(parents))
                parents.append(node)
                lengths.append(int(np.clip(rng.lognormal(np.log(mean), 0.5), 16, 8 * mean)))
        level = below
    return parents, lengths


def paths_of(tree: Tree) -> list[int]:
    """Tokens of every path from the root to a leaf."""
    parents, lengths = tree
    total = list(lengths)
    for node, parent in enumerate(parents):
        total[node] += total[parent] if parent >= 0 else 0
    return [total[node] for node in range(len(parents)) if node not in set(parents)]


def cases() -> dict[str, list[Tree]]:
    rng = np.random.default_rng(0)
    return {
        "8 prompts of 4,096, 16 answers of about 1,024": [
            answers(4096, 16, 1024, rng) for _ in range(8)
        ],
        "2 prompts of 32,768, 32 answers of about 1,024": [
            answers(32768, 32, 1024, rng) for _ in range(2)
        ],
        "4 conversations, 5 turns, 2 branches, about 1,024": [
            turns(5, 2, 1024, rng) for _ in range(4)
        ],
    }


def measure(batch: Batch, ranks: int) -> tuple[Plan, float, float]:
    topology = preset("p4de", 1, ranks)
    cost = CostModel(find_profile("p4de"), SHAPE)
    start = perf_counter()
    plan = plan_batch(batch, topology, SHAPE, cost=cost)
    seconds = perf_counter() - start
    simulated = simulate_plan(plan, topology, cost)
    return plan, simulated.forward_seconds + simulated.backward_seconds, seconds


def row(name: str, batch: Batch, ranks: int) -> Sequence[float]:
    plan, seconds, planning = measure(batch, ranks)
    pairs = sum(mask.num_pairs for mask in batch.masks["default"])
    moved = sum(plan.parts[0].declared_bytes["default"])
    print(
        f"  {name:<9} {batch.num_tokens:>9,} tokens {pairs / 1e6:>10,.0f} Mpairs "
        f"{moved / 1e6:>9,.1f} MB {1e3 * seconds:>8.2f} ms   planned in {1e3 * planning:,.0f} ms"
    )
    return batch.num_tokens, pairs, moved, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args().ranks
    for name, trees in cases().items():
        print(name)
        as_trees = row("trees", Batch.of([masks.prefix_tree(*tree) for tree in trees]), ranks)
        lengths = [n for tree in trees for n in paths_of(tree)]
        unrolled = row("unrolled", Batch.of([masks.causal(n) for n in lengths]), ranks)
        tokens, pairs, _, seconds = (
            b / a if a else 0 for a, b in zip(as_trees, unrolled, strict=True)
        )
        print(
            f"  unrolled / trees: tokens {tokens:.2f}, pairs {pairs:.2f}, attention {seconds:.2f}"
        )


if __name__ == "__main__":
    main()
