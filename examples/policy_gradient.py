"""Policy-gradient steps on rollouts that every rank holds, without dyncp's loader.

    python examples/policy_gradient.py                              one process
    torchrun --nproc-per-node 4 examples/policy_gradient.py         the same numbers on 4 ranks

Every prompt has several answers, which share it: one prefix tree per prompt. Each rank computes
the log-probabilities of its own tokens; the ratio of every answer needs all of them.
"""

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoModelForCausalLM, LlamaConfig

from dyncp import Batch, DCPExecutor, Topology, local_data, masks, plan_batch, sum_gradients
from dyncp.integrations.transformers import attach

PROMPTS, ANSWERS, STEPS, CLIP = 3, 4, 4, 0.2
SIZES = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def rollouts() -> tuple[list[dict], list[torch.Tensor]]:
    """Prompts with their answers, and the reward of every answer: made up here."""
    generator = torch.Generator().manual_seed(0)
    samples, rewards = [], []
    for _ in range(PROMPTS):
        lengths = [int(torch.randint(20, 200, (), generator=generator)) for _ in range(ANSWERS + 1)]
        ids = torch.randint(64, (sum(lengths),), generator=generator)
        samples.append({"input_ids": ids, "parents": [-1] + [0] * ANSWERS, "node_lengths": lengths})
        rewards.append(torch.rand(ANSWERS, generator=generator))
    return samples, rewards


def answer_of_token(samples: list[dict]) -> torch.Tensor:
    """The answer that every token of the batch belongs to, -1 for prompts."""
    found, first = [], 0
    for sample in samples:
        prompt, *answers = sample["node_lengths"]
        numbers = torch.tensor([-1] + [first + i for i in range(len(answers))])
        found.append(numbers.repeat_interleave(torch.tensor([prompt, *answers])))
        first += len(answers)
    return torch.cat(found)


def main() -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SIZES).double()
    attached, executor = attach(model), DCPExecutor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    samples, rewards = rollouts()
    advantages = torch.cat([r - r.mean() for r in rewards]).double()
    batch = Batch.of([attached.masks(masks.prefix_tree)(sample) for sample in samples])
    plan = plan_batch(batch, Topology(1, ranks), attached.shape()).parts[rank]
    data = local_data(samples, batch, plan)
    step = executor.prepare(plan)

    answer = answer_of_token(samples)[data["target_tokens"][0]]
    old = None
    for number in range(STEPS):
        fields = {name: data[name] for name in ("input_ids", "position_ids", "batch_fingerprint")}
        logits = model(**fields, dyncp_step=step).logits[0]
        chosen = logits[data["target_rows"][0]].log_softmax(-1)
        log_probs = chosen.gather(1, data["target_labels"][0, :, None])[:, 0]
        # Sums over the tokens of every answer, of this rank and then of all ranks.
        trained = answer >= 0
        mine = torch.zeros(len(advantages), dtype=log_probs.dtype)
        mine = mine.index_add(0, answer[trained], log_probs[trained])
        total = mine.detach().clone()
        dist.all_reduce(total)
        old = total if old is None else old
        ratio = (total - old).exp()
        inside = (ratio * advantages <= ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).double()
        # d(ratio) = ratio · d(log-probability): every rank adds what its own tokens contribute.
        loss = -(inside * ratio * advantages * mine).sum() / len(advantages)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        if rank == 0:
            surrogate = torch.minimum(
                ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
            )
            print(f"step {number}: objective {surrogate.mean():.8f}, ratios {ratio.min():.4f} "
                  f"to {ratio.max():.4f}")  # fmt: skip


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        address = f"tcp://127.0.0.1:{get_free_port()}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
