"""The two runs that `dyncp train` compares: a small Llama of Transformers in one process, and on
ranks under dyncp.

Both start from the same weights and see the same batches. The one process runs Transformers' own
attention, document by document; nothing but its batches comes from dyncp.
"""

import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from dyncp import masks
from dyncp.dataloader import DCPDataLoader, next_token_loss, sum_gradients, sum_over_ranks
from dyncp.executor import DCPExecutor
from dyncp.integrations.transformers import attach
from dyncp.kernels import choose_kernel
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
KV_VALUES = SIZES["num_hidden_layers"] * 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"]
LEARNING_RATE = 2e-3

Row = dict[str, Any]  # what is known of one optimiser step of all ranks
LossOf = Callable[[dict[str, Tensor], Plan | RankPlan], Tensor]


class TextCorpus:
    """Text files in the order of their paths, a token per byte: samples {"input_ids": tokens}.

    Without a folder, the modules of Python's standard library: long-tailed, and always there.
    Hidden files are left out, and so are files that are not text.
    """

    def __init__(self, folder: str | None, max_length: int) -> None:
        self.max_length = max_length
        root = Path(folder or sysconfig.get_path("stdlib"))
        if not root.is_dir():
            raise ValueError(f"--corpus is {folder!r}, which is not a folder")
        found = root.rglob("[!.]*") if folder else root.glob("*.py")
        visible = (f for f in found if not any(x[0] == "." for x in f.relative_to(root).parts))
        self.files = sorted(file for file in visible if file.is_file() and _is_text(file))
        if not self.files:
            raise ValueError(f"--corpus is {folder!r}, which has no text files of 2 bytes or more")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with self.files[index].open("rb") as file:
            return {"input_ids": torch.tensor(list(file.read(self.max_length)))}


def _is_text(path: Path) -> bool:
    """At least one byte to read and one to predict, and no zero near the start."""
    with path.open("rb") as file:
        start = file.read(1024)
    return len(start) > 1 and b"\0" not in start


def check_hardware(args: Namespace, processes: int) -> None:
    """Raises ValueError for a kernel or device that `processes` ranks here cannot get."""
    if args.device == "cuda" and torch.cuda.device_count() < processes:
        raise ValueError(
            f"--device is cuda, for one GPU per process; torch sees {torch.cuda.device_count()} "
            f"here, and {processes} are needed (--virtual-ranks runs all ranks on one)"
        )
    choose_kernel(args.kernel, torch.device(args.device))


def train_plain(args: Namespace) -> Iterator[Row]:
    """In one process, without dyncp's attention."""
    corpus, model, mask_fn = *_start(args), masks.by_name(args.mask)
    loader = DCPDataLoader(corpus, mask_fn, model=model, virtual_ranks=1, **_options(args))

    def loss_of(data: dict[str, Tensor], plan: Plan | RankPlan) -> Tensor:
        lengths = _part(plan).lengths.tolist()
        documents = torch.split(data["input_ids"], lengths, dim=1)
        positions = torch.split(data["position_ids"], lengths, dim=1)
        logits = []
        for tokens, places in zip(documents, positions, strict=True):
            bias = _bias(mask_fn({"input_ids": tokens[0].cpu()}), tokens.device)
            given = {"input_ids": tokens, "position_ids": places, "attention_mask": bias}
            logits.append(model(**given, use_cache=False).logits)
        return next_token_loss(torch.cat(logits, dim=1), data)

    return _train(args, model, loader, loss_of, lambda: 0)


def train_on_ranks(args: Namespace, virtual_ranks: int | None = None) -> Iterator[Row]:
    """Under dyncp, on the ranks of the process group or `virtual_ranks` in this process. All ranks
    of the group iterate it together and get the same rows."""
    corpus, model = _start(args)
    attached = attach(model)
    executor = DCPExecutor(virtual_ranks=virtual_ranks, kernel=args.kernel, device=model.device)
    if executor.device.type == "cuda":
        executor.warm_up(attached.shape())
    mask_fn = masks.by_name(args.mask)
    ranks = {"virtual_ranks": virtual_ranks, "executor": executor}
    loader = attached.loader(corpus, mask_fn, **ranks, **_options(args))

    def loss_of(data: dict[str, Tensor], plan: Plan | RankPlan) -> Tensor:
        loss: Tensor = model(**data, dyncp_step=executor.prepare(plan)).loss
        return loss

    return _train(args, model, loader, loss_of, lambda: executor.transport.bytes_sent)


def ring_bytes(tokens: int, num_ranks: int) -> int:
    """Bytes that ring attention moves in a step: K and V of all tokens visit all other ranks, in
    backward once more, together with their gradients."""
    return 3 * (num_ranks - 1) * tokens * KV_VALUES * torch.float32.itemsize


def _start(args: Namespace) -> tuple[TextCorpus, Any]:
    corpus = TextCorpus(args.corpus, args.max_length)
    torch.manual_seed(args.seed)
    config = LlamaConfig(**SIZES, max_position_embeddings=args.max_length)
    device = "cpu" if args.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    return corpus, AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()


def _options(args: Namespace) -> dict[str, Any]:
    return {
        "tokens_per_batch": args.tokens_per_batch or 2 * args.max_length,
        "shuffle": True,
        "epochs": None,
        "seed": args.seed,
        "planner": PlannerConfig(args.solver, seed=args.seed),
    }


def _bias(mask: masks.Mask, device: torch.device) -> Tensor | None:
    """What Transformers adds to the scores; nothing for its own causal mask."""
    if mask == masks.causal(mask.length):
        return None
    allowed = torch.from_numpy(mask.dense()).to(device)
    return torch.zeros(allowed.shape, device=device).masked_fill(~allowed, -torch.inf)[None, None]


def _train(
    args: Namespace, model: Any, loader: DCPDataLoader, loss_of: LossOf, sent: Callable[[], int]
) -> Iterator[Row]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with loader:
        batches = iter(loader)
        for number in range(1, args.steps + 1):
            started, before = perf_counter(), sent()
            data, plan = next(batches)
            data = {name: value.to(model.device) for name, value in data.items()}
            loss = loss_of(data, plan)
            loss.backward()  # type: ignore[no-untyped-call]
            sum_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            own = torch.tensor([loss.item(), sent() - before], dtype=torch.float64)
            total, moved = sum_over_ranks(own).tolist()
            row = {"step": number, "loss": total, "moved_bytes": int(moved)}
            yield row | _facts(_part(plan), loader) | {"seconds": perf_counter() - started}


def _facts(plan: RankPlan, loader: DCPDataLoader) -> Row:
    last, tokens = loader.metrics.last, int(plan.lengths.sum())
    assert last is not None
    return {
        "tokens": tokens,
        "documents": len(plan.lengths),
        "longest": int(plan.lengths.max()),
        "ring_bytes": ring_bytes(tokens, plan.num_ranks),
        "compute_imbalance": plan.balance.compute_max_over_mean,
        "token_imbalance": plan.balance.tokens_max_over_mean,
        "stall_seconds": last.stall_seconds,
        "plan_seconds": last.plan_seconds,
        "planned_by": last.solver,
    }


def _part(plan: Plan | RankPlan) -> RankPlan:
    return plan.parts[0] if isinstance(plan, Plan) else plan
