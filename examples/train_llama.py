"""Trains a Llama on long documents with PyTorch, Transformers and dyncp. Copy it, and change it.

    torchrun --nproc-per-node 4 examples/train_llama.py
    torchrun --nproc-per-node 8 examples/train_llama.py --model meta-llama/Llama-3.2-1B \
        --data 'texts/**/*.txt' --tokens-per-batch 131072 --steps 1000 --checkpoint runs/llama
    torchrun --nproc-per-node 2 examples/train_llama.py --resume runs/llama/step-1000 --steps 2000

Runs on GPUs over NCCL, or on CPUs over gloo. A document attends only itself; long ones are split
over ranks. Without --model and --data a small model reads source files of Python, byte by byte.
"""

import argparse
import json
import os
import sysconfig
from glob import glob
from itertools import chain, repeat
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

from dyncp import DCPExecutor, masks, sum_gradients, sum_over_ranks
from dyncp.integrations.transformers import attach

SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2**16,
}  # fmt: skip
PYTHON = str(Path(sysconfig.get_path("stdlib"), "email/**/*.py"))


class Texts(torch.utils.data.Dataset):
    """Text files as samples {"input_ids": tokens}: one token per byte, or by a tokenizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.files = sorted(f for f in glob(args.data, recursive=True) if os.path.getsize(f) > 1)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
        self.max_length = args.max_length
        if not self.files:
            raise SystemExit(f"--data: no files match {args.data}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = Path(self.files[index]).read_bytes()
        if self.tokenizer is not None:
            text = self.tokenizer(text.decode(errors="replace"))["input_ids"]
        return {"input_ids": torch.tensor(list(text[: self.max_length]))}


def make_model(args: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(args.seed)  # the same weights on all ranks
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    return model.to(device).train()


def shard_weights(model: Any, device: torch.device) -> None:
    """Applies FSDP2 to every layer, and recomputes activations in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)


class Checkpoint:
    """Weights, optimiser, loader and number of steps, through torch.distributed.checkpoint."""

    def __init__(self, model: Any, optimizer: Any, loader: Any) -> None:
        self.model, self.optimizer, self.loader, self.steps = model, optimizer, loader, 0

    def state_dict(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        loader = self.loader.state_dict()
        return {"model": weights, "optimizer": optimizer, "loader": loader, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **weights)
        self.loader.load_state_dict(state["loader"])
        self.steps = state["steps"]


def train(args: argparse.Namespace, device: torch.device) -> None:
    model = make_model(args, device)
    attached = attach(model)
    shard_weights(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    executor = DCPExecutor(device=device)
    loader = attached.loader(
        Texts(args), masks.by_name(args.mask), executor=executor, sample_ids=True, shuffle=True,
        tokens_per_batch=args.tokens_per_batch, accumulation_steps=args.accumulate, seed=args.seed,
    )  # fmt: skip
    run = Checkpoint(model, optimizer, loader)
    if args.resume is not None:
        dcp.load({"run": run}, checkpoint_id=args.resume)
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    while run.steps < args.steps:
        start, sent, log = perf_counter(), executor.transport.bytes_sent, StepLog()
        for local_data, plan in batches:
            data = {name: x.to(device, non_blocking=True) for name, x in local_data.items()}
            ids, step = data.pop("sample_ids"), executor.prepare(plan)
            model.set_requires_gradient_sync(loader.completes_update)
            loss = model(**data, dyncp_step=step).loss  # this rank's share
            loss.backward()
            log.add(loss.item(), step.gather(ids[0]), plan, loader.metrics.last.stall_seconds)
            if loader.completes_update:
                break
        sum_gradients(model)
        norm = clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        run.steps += 1
        own = torch.tensor([log.loss, executor.transport.bytes_sent - sent], dtype=torch.float64)
        loss, moved = sum_over_ranks(own.to(device)).tolist()
        if dist.get_rank() == 0:
            measured = {"step": run.steps, "loss": loss, "norm": norm, "moved_bytes": moved}
            log.write(measured | {"seconds": perf_counter() - start}, args.log_file)
        if args.checkpoint and (run.steps == args.steps or run.steps % args.save_every == 0):
            dcp.save({"run": run}, checkpoint_id=args.checkpoint / f"step-{run.steps}")
    loader.close()
    executor.close()


class StepLog:
    """Logs one optimiser step: a line on the screen, and a line of JSON in a file."""

    def __init__(self) -> None:
        self.loss, self.stall, self.imbalance = 0.0, 0.0, 1.0
        self.documents, self.tokens, self.pieces = [], 0, 0

    def add(self, loss: float, ids: list[torch.Tensor], plan: Any, stall: float) -> None:
        self.loss, self.stall = self.loss + loss, self.stall + stall
        self.imbalance = max(self.imbalance, plan.balance.compute_max_over_mean)
        self.documents += [int(of_tokens[0]) for of_tokens in ids]
        self.tokens += int(plan.lengths.sum())
        self.pieces += len(set(plan.blocks.sequence * plan.num_ranks + plan.blocks.owner))

    def write(self, measured: dict[str, float], path: Path | None) -> None:
        row = vars(self) | measured
        rate, moved = row["tokens"] / row["seconds"], row["moved_bytes"] / 1e6
        print(
            f"step {row['step']:>4}  loss {row['loss']:.6f}  norm {row['norm']:.4f}  "
            f"{rate:>7,.0f} tokens/s  {moved:>7.2f} MB moved  imbalance {row['imbalance']:.2f}  "
            f"waited {row['stall']:.2f} s",
            flush=True,
        )
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="name or folder of a Transformers model")
    parser.add_argument("--data", default=PYTHON, help="text files (default %(default)s)")
    parser.add_argument("--mask", default="causal", help="a name that `dyncp masks` lists")
    parser.add_argument("--max-length", type=int, default=8192, help="maximum tokens of a document")
    parser.add_argument("--tokens-per-batch", type=int, default=16384, help="over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimiser step")
    parser.add_argument("--steps", type=int, default=6, help="optimiser steps, from the start")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder that checkpoints are saved in")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint folder step-N")
    parser.add_argument("--log-file", type=Path, help="file that gets a line of JSON per step")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it with torchrun --nproc-per-node N")
    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if 0 < gpus < processes:
        raise SystemExit(f"{processes} processes, {gpus} GPUs; CUDA_VISIBLE_DEVICES= uses the CPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
