"""What it changes that the cost model knows whole calls: phases, divisions and simulated time.

    python -m benchmarks.whole_calls

h200, 4 machines × 8 ranks, 131,072 tokens, 32 q heads, 8 kv heads, head dim 128, bf16. Every batch
is planned twice: as if a call were its kernels (10 µs each on top) and messages, and by whole
calls. Both plans are simulated as whole calls, with graphs and without. Columns have the most
launches / waits / divisions of a rank, forward and backward, and the milliseconds of a layer.
"""

from dataclasses import replace

import numpy as np

from benchmarks.cases import MASKS, TOKENS
from dyncp import AttentionShape, Batch
from dyncp.cost import CostModel, find_profile
from dyncp.plan import Op
from dyncp.planner import Task, choose
from dyncp.samplers import parse_sample, sample_lengths
from dyncp.simulate import AttentionTimes, Simulated
from dyncp.topology import preset

SAMPLES = ("ldc:0", "training_documents:1", "ldc_x0.25:0")
SHAPE, TOPOLOGY, PROFILE = AttentionShape(32, 8, 128), preset("h200", 4), find_profile("h200")
# What presets said before whole calls were priced.
KERNELS = replace(
    PROFILE,
    launch_seconds=0.0,
    host_seconds=0.0,
    host_seconds_eager=0.0,
    overlap_slowdown=1.0,
    call_seconds=10e-6,
)


def most(times: AttentionTimes) -> str:
    programs = times.flow.programs
    counts = (np.add.reduceat(programs.op == op, programs.first[:-1]).max() for op in Op)
    return "/".join(str(int(count)) for count in counts)


def describe(simulated: Simulated) -> str:
    runs = ", ".join(most(times) for times in simulated.attention["default"] if times is not None)
    both = 1e3 * (simulated.forward_seconds + simulated.backward_seconds)
    return f"{runs:<22}{both:>6.2f}"


def main() -> None:
    print(f"{'batch, documents, mask':<40}{'host':<8}{'by kernels, ms':<30}by whole calls, ms")
    for sample in SAMPLES:
        name, seed = parse_sample(sample)
        lengths = sample_lengths(name, TOKENS, seed)
        for mask in ("causal", "lambda"):
            batch = Batch.of([MASKS[mask](length) for length in lengths])
            plain = choose(Task.of(batch, TOPOLOGY, SHAPE, None, CostModel(KERNELS, SHAPE)))
            for graphs in (True, False):
                cost = CostModel(PROFILE, SHAPE, graphs=graphs)
                task = Task.of(batch, TOPOLOGY, SHAPE, None, cost)
                found = [task.simulate(plain.candidate), choose(task).simulated]
                label = f"{sample}, {len(lengths)}, {mask}"
                columns = "  ".join(map(describe, found))
                print(f"{label:<40}{'graphs' if graphs else 'eager':<8}{columns}", flush=True)


if __name__ == "__main__":
    main()
