"""Trains a Llama on long documents with PyTorch, Transformers and dyncp. Copy it, and change it.

    torchrun --nproc-per-node 4 examples/train_llama.py
    torchrun --nproc-per-node 8 examples/train_llama.py --model meta-llama/Llama-3.2-1B \
        --data texts/ --tokens-per-batch 131072 --steps 1000 --checkpoint runs/llama
    torchrun --nproc-per-node 2 examples/train_llama.py --checkpoint runs/llama --resume

Runs on GPUs over NCCL, or on CPUs over gloo. Documents of any length are trained on together: each
attends only itself, and long ones are split over ranks. Without --model it is a small model that
reads bytes; without --data it reads the source files of Python.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from dyncp import DCPExecutor, masks, sum_over_ranks, undo_gradient_average
from dyncp.integrations.transformers import attach

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=2**16,
)  # fmt: skip


class Texts(torch.utils.data.Dataset):
    """Text files as samples {"input_ids": tokens}: one token per byte, or by a tokenizer."""

    def __init__(self, folder: Path, suffix: str, max_length: int, tokenizer: Any) -> None:
        self.files = sorted(f for f in folder.rglob(f"*{suffix}") if f.stat().st_size > 1)
        self.max_length, self.tokenizer = max_length, tokenizer

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.files[index].read_bytes()
        if self.tokenizer is not None:
            ids = self.tokenizer(text.decode(errors="replace"))["input_ids"]
        else:
            ids = list(text)
        return {"input_ids": torch.tensor(ids[: self.max_length])}


def open_texts(args: argparse.Namespace) -> Texts:
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    if args.data is not None:
        return Texts(args.data, args.suffix, args.max_length, tokenizer)
    folder = Path(sysconfig.get_path("stdlib")) / "email"
    return Texts(folder, ".py", args.max_length, tokenizer)


def make_model(args: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(args.seed)  # the same weights on all ranks
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(SMALL)
    return model.to(device).train()


def shard_weights(model: Any, device: torch.device) -> None:
    """FSDP2: every layer by itself, activations recomputed in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Checkpoint:
    """Weights, optimiser, loader and number of steps, through torch.distributed.checkpoint."""

    def __init__(self, model: Any, optimizer: Any, loader: Any) -> None:
        self.model, self.optimizer, self.loader, self.steps = model, optimizer, loader, 0

    def state_dict(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": optimizer,
            "loader": self.loader.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.loader.load_state_dict(state["loader"])
        self.steps = state["steps"]


def train(args: argparse.Namespace, device: torch.device) -> None:
    model = make_model(args, device)
    attached = attach(model)
    shard_weights(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    executor = DCPExecutor(device=device)
    loader = attached.loader(
        open_texts(args),
        masks.by_name(args.mask),
        tokens_per_batch=args.tokens_per_batch,
        accumulation_steps=args.accumulation,
        too_long="truncate",
        shuffle=True,
        seed=args.seed,
        epochs=None,
    )
    run = Checkpoint(model, optimizer, loader)
    if args.resume:
        dcp.load({"run": run}, checkpoint_id=args.checkpoint)
    batches = iter(loader)
    while run.steps < args.steps:
        start, sent, loss, tokens, stall = (
            perf_counter(),
            executor.transport.bytes_sent,
            0.0,
            0,
            0.0,
        )
        for micro in range(args.accumulation):
            data, plan = next(batches)
            data = {name: value.to(device, non_blocking=True) for name, value in data.items()}
            model.set_requires_gradient_sync(micro + 1 == args.accumulation)
            part = model(**data, dyncp_step=executor.prepare(plan)).loss
            undo_gradient_average(part).backward()
            loss, tokens = loss + part.detach(), tokens + int(plan.lengths.sum())
            stall += loader.metrics.last.stall_seconds
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.steps += 1
        sent = executor.transport.bytes_sent - sent
        totals = sum_over_ranks(torch.tensor([float(loss), float(sent)], device=device)).tolist()
        if dist.get_rank() == 0:
            seconds = perf_counter() - start
            print(
                f"step {run.steps:>4}  loss {totals[0]:.6f}  {tokens / seconds:>9,.0f} tokens/s  "
                f"{totals[1] / 1e6:>8.2f} MB moved  imbalance "
                f"{plan.balance.compute_max_over_mean:.2f}  waited {stall:.2f} s",
                flush=True,
            )
        if args.checkpoint is not None and run.steps in (args.steps, args.save_after):
            dcp.save({"run": run}, checkpoint_id=args.checkpoint)
    loader.close()
    executor.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="name or folder of a Transformers model")
    parser.add_argument("--data", type=Path, help="folder of text files")
    parser.add_argument("--suffix", default=".txt", help="of the text files")
    parser.add_argument(
        "--mask", default="causal", help="of documents, as `dyncp masks` lists them"
    )
    parser.add_argument("--max-length", type=int, default=16384, help="tokens of a document")
    parser.add_argument("--tokens-per-batch", type=int, default=16384)
    parser.add_argument("--accumulation", type=int, default=1, help="batches per optimiser step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder; saved after the last step")
    parser.add_argument("--save-after", type=int, help="also save after so many steps")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint")
    return parser.parse_args()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    try:
        train(parse(), device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
