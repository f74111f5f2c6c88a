"""Policy-gradient steps on rollouts that every rank holds: what an RL trainer needs from dyncp.

    python examples/policy_gradient.py                              one process
    torchrun --nproc-per-node 4 examples/policy_gradient.py         the same numbers on 4 ranks

The trainer keeps its own batches. `step.shard` cuts any per-token tensor to this rank's rows,
`step.gather` brings per-token results back to whole sequences, with gradients.
"""

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoModelForCausalLM, LlamaConfig

from dyncp import Batch, DCPExecutor, Topology, make_local_data, masks, plan_batch, sum_gradients
from dyncp.integrations.transformers import attach

STEPS, CLIP, LENGTHS = 4, 0.2, (700, 90, 310, 40, 25, 160)
SIZES = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def rollouts() -> tuple[list[dict], list[torch.Tensor]]:
    """Random sequences with an advantage for every token, in place of a trainer's rollouts."""
    generator = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(64, (n,), generator=generator)} for n in LENGTHS]
    rewards = torch.rand(len(LENGTHS), generator=generator)
    advantages = [(r - rewards.mean()).repeat(n) for r, n in zip(rewards, LENGTHS, strict=True)]
    return samples, advantages


def main() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SIZES)
    attached, executor = attach(model), DCPExecutor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    samples, advantages = rollouts()
    batch = Batch.of([attached.masks(masks.causal)(sample) for sample in samples])
    plan = plan_batch(batch, Topology(1, executor.num_ranks), attached.shape())
    step = executor.prepare(plan)
    data = make_local_data(samples, batch, step.plan)
    inputs = {name: data[name] for name in ("input_ids", "position_ids", "batch_fingerprint")}
    targets, advantage = data["shift_labels"][0], step.shard(advantages)
    old = None
    for number in range(STEPS):
        logits = model(**inputs, dyncp_step=step).logits[0]
        chosen = logits.log_softmax(-1).gather(1, targets.clamp_min(0)[:, None])[:, 0]
        log_prob = chosen * (targets >= 0)
        old = log_prob.detach() if old is None else old

        # By token, on this rank's rows alone: sums over ranks are the loss and its gradients.
        ratio = (log_prob - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = -(gain * (targets >= 0)).sum() / data["num_items_in_batch"]
        # By sequence: every rank gets all log-probabilities and computes the same penalty.
        change = torch.stack([x.mean() for x in step.gather(log_prob - old, loss="replicated")])
        penalty = change.square().mean()

        optimizer.zero_grad()
        (loss + penalty).backward()
        sum_gradients(model)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {total:.6f}, penalty {penalty:.6e}")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        address = f"tcp://127.0.0.1:{get_free_port()}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    main()
    dist.destroy_process_group()
