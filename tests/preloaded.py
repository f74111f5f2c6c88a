"""What test ranks have in memory when they are forked: libraries, frameworks, the compiled planner.

The server that ranks are forked from imports this module once. It starts no threads: a forked
process would miss them.
"""

import warnings
from contextlib import suppress
from importlib import import_module

from dyncp import Batch, PlannerConfig, Topology, masks, plan_batch

NAMES = (
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "pytest",
    "dyncp.cli",
    "dyncp.dataloader",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "benchmarks.parity_models",
    "dyncp.integrations.transformers",
    "dyncp.integrations.megatron",
    "dyncp.integrations.torchtitan",
    "torchtitan.models.llama3.parallelize",
)
with warnings.catch_warnings(action="ignore"):  # of frameworks, about what is not installed
    for name in NAMES:
        with suppress(ImportError):  # frameworks are optional
            import_module(name)

batch = Batch.of([masks.causal(900), masks.lambda_shaped(500), masks.causal(60)])
for solver in ("auto", "bisection", "random", "zigzag"):
    plan_batch(batch, Topology(1, 2), planner=PlannerConfig(solver))
