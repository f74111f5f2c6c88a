"""Policy-gradient steps on rollouts that every rank holds: what an RL trainer needs from dyncp.

    python examples/policy_gradient.py                              one process
    torchrun --nproc-per-node 4 examples/policy_gradient.py         the same numbers on 4 ranks

The trainer keeps its own batches. All answers to a prompt are one sample, a prefix tree, so the
prompt is stored and computed once. What belongs to a token that is predicted (its advantage, its
old log-probability) goes by target, not by row: the last token of a prompt predicts the first token
of every answer.
"""

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoModelForCausalLM, LlamaConfig

from dyncp import (
    Batch,
    DCPExecutor,
    Topology,
    make_local_data,
    masks,
    plan_batch,
    sum_gradients,
    target_log_probs,
)
from dyncp.integrations.transformers import attach

STEPS, CLIP = 4, 0.2
# Tokens of each prompt and of its answers.
GROUPS = ((300, (120, 200, 80)), (40, (25, 25)), (160, (90, 10, 45, 300)), (70, (33,)))
SIZES = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def rollouts() -> tuple[list[dict], list[torch.Tensor]]:
    """One sample per prompt, with its answers as branches, and an advantage for every token, in
    place of a trainer's rollouts. Only tokens of answers are trained on."""
    generator = torch.Generator().manual_seed(0)
    samples, advantages = [], []
    for prompt, answers in GROUPS:
        ids = torch.randint(64, (prompt + sum(answers),), generator=generator)
        rewards = torch.rand(len(answers), generator=generator)
        gains = (rewards - rewards.mean()).repeat_interleave(torch.tensor(answers))
        samples.append(
            {
                "input_ids": ids,
                "labels": torch.cat([torch.full((prompt,), -100), ids[prompt:]]),
                "parents": [-1] + [0] * len(answers),
                "node_lengths": [prompt, *answers],
            }
        )
        advantages.append(torch.cat([torch.zeros(prompt), gains]))
    return samples, advantages


def main() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SIZES)
    attached, executor = attach(model), DCPExecutor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    samples, advantages = rollouts()
    batch = Batch.of([attached.masks(masks.prefix_tree)(sample) for sample in samples])
    plan = plan_batch(batch, Topology(1, executor.num_ranks), attached.shape())
    step = executor.prepare(plan)
    data = make_local_data(samples, batch, step.plan, list_targets=True)
    inputs = {name: data[name] for name in ("input_ids", "position_ids", "batch_fingerprint")}
    advantage = step.shard_targets(advantages, data)
    old = None
    for number in range(STEPS):
        log_prob = target_log_probs(model(**inputs, dyncp_step=step).logits, data)
        old = log_prob.detach() if old is None else old

        # By target, of this rank's rows alone: sums over ranks are the loss and its gradients.
        ratio = (log_prob - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = -gain.sum() / data["num_items_in_batch"]
        # By answer: every rank gets all log-probabilities and computes the same penalty.
        changes = step.gather_targets(log_prob - old, data, loss="replicated")
        nodes = zip(changes, samples, strict=True)
        answers = [x for change, s in nodes for x in change.split(s["node_lengths"])[1:]]
        penalty = torch.stack([x.mean() for x in answers]).square().mean()

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
