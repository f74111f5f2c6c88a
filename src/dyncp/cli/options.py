"""Options that several commands have: lengths, masks, cluster, attention shape, model, limits."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from dyncp import masks
from dyncp.blocks import ITEM_BYTES, AttentionShape, Batch
from dyncp.cost import MODELS, CostModel, ModelConfig, find_model, find_profile
from dyncp.cost import from_transformers_config as read_model
from dyncp.placement import Limits
from dyncp.planner import PlannerConfig
from dyncp.samplers import NAMES
from dyncp.topology import PRESETS, Topology, preset

COMPUTE_TOLERANCE, TOKEN_TOLERANCE = 0.1, 0.2
# The rank with most tokens sets the time of all per-token work, most of an 8B model's step.
MODEL_TOKEN_TOLERANCE = 0.05


def add_lengths_options(parser: ArgumentParser, *, listed: bool) -> None:
    """Where sequence lengths come from; with `listed`, also the command line itself."""
    lengths = parser.add_mutually_exclusive_group(required=True)
    if listed:
        lengths.add_argument("--lengths", help="sequence lengths, as in 4096,512,512")
    lengths.add_argument("--lengths-file", type=Path, help="one length per line, or a JSON list")
    lengths.add_argument(
        "--sample",
        metavar="NAME:SEED",
        help=f"a length distribution, as in ldc:0; NAME is one of {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--mask",
        default="causal",
        help="NAME[:key=value,...]; `dyncp masks` lists them (default %(default)s)",
    )


def add_cluster_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        default="p4de",
        metavar="PRESET",
        help=f"kind of cluster: {', '.join(PRESETS)} (default %(default)s)",
    )
    for name, default in (("machines", 4), ("ranks-per-machine", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")


def add_attention_options(parser: ArgumentParser) -> None:
    for name, default in (("q-heads", 8), ("kv-heads", 2), ("head-dim", 128)):
        parser.add_argument(
            f"--{name}", type=int, default=default, help="of one layer (default %(default)s)"
        )
    parser.add_argument(
        "--dtype", default="bf16", help=f"{', '.join(ITEM_BYTES)} (default %(default)s)"
    )
    parser.add_argument("--model", help="llama3-8b or a config.json: adds the per-token work")


def add_solver_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--solver",
        default=PlannerConfig().solver,
        help="a name, a static method with degrees (zigzag/cp8), or auto: the shortest simulated "
        "step of all (default %(default)s)",
    )


def add_limit_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--compute-tolerance",
        type=float,
        default=COMPUTE_TOLERANCE,
        help="share by which the fullest rank may exceed the mean (default %(default)s)",
    )
    parser.add_argument(
        "--token-tolerance",
        type=float,
        help=f"the same for tokens: default {MODEL_TOKEN_TOLERANCE} with --model, where tokens "
        f"cost time; else {TOKEN_TOLERANCE}",
    )


def topology_of(args: Namespace) -> Topology:
    return preset(args.topology, args.machines, args.ranks_per_machine)


def cost_of(args: Namespace) -> CostModel:
    shape = AttentionShape(args.q_heads, args.kv_heads, args.head_dim, args.dtype)
    return CostModel(find_profile(args.topology), shape)


def limits_of(args: Namespace) -> Limits:
    tokens = args.token_tolerance
    if tokens is None:
        tokens = TOKEN_TOLERANCE if args.model is None else MODEL_TOKEN_TOLERANCE
    return Limits(args.compute_tolerance, tokens)


def model_of(args: Namespace) -> ModelConfig | None:
    name: str | None = args.model
    if name is None:
        return None
    if name.endswith(".json"):
        return read_model(name)
    written = name.replace("-", "_")
    return find_model(written if written in MODELS else name)


def make_batch(args: Namespace, lengths: Sequence[int]) -> Batch:
    """One sequence of each length, all with the mask asked for."""
    mask = masks.by_name(args.mask)
    return Batch.of([mask(length) for length in lengths])


def check_tokens(args: Namespace) -> int:
    tokens: int = args.tokens
    if tokens < 1:
        raise ValueError(f"--tokens is {tokens}; a batch needs at least 1")
    return tokens
