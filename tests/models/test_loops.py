"""The loops of README and docs/training.md train as one process, whatever wraps the model."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity_models import documents, make_model  # noqa: E402

from dense_training import Trained, check, train_dense  # noqa: E402
from dyncp import sum_over_ranks  # noqa: E402
from fsdp_on_cpu import whole  # noqa: E402
from processes import run_ranks  # noqa: E402

ROOT = Path(__file__).parents[2]
EPOCHS = 10
WRAPPERS = {"plain": lambda model: model, "DDP": DistributedDataParallel, "FSDP2": fully_shard}
SAMPLES = documents(9, longest=150)


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def optimizer_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def readme(wrap):
    """Runs the loop once per epoch; the samples are one batch."""
    lines = blocks_of("README.md")[0].splitlines(keepends=True)
    text = "".join(x for x in lines if not x.startswith("dist."))  # ranks have their process group
    before, loop = text.split("for local_data, plan in loader:")
    names = {"model": make_model("llama").train(), "dataset": SAMPLES}
    exec(before, names)
    names["model"] = wrap(names["model"])
    names["optimizer"], losses = optimizer_of(names["model"])[0], []
    for _ in range(EPOCHS):
        exec("for local_data, plan in loader:" + loop, names)
        losses.append(sum_over_ranks(names["loss"].detach()).item())
    names["loader"].close()
    return Trained(losses, [whole(p) for p in names["model"].parameters()], [])


def training_page(name):
    """Norm and loss of the last step."""
    torch.manual_seed(0)
    model, loop = blocks_of("docs/training.md")[:2]
    wrapped = {"plain": "model", "DDP": "DistributedDataParallel(model)"}
    loop = loop.replace(wrapped["DDP"], wrapped.get(name, "fully_shard(model)"))
    names = {"fully_shard": fully_shard}
    exec(model, names)
    exec(loop, names)
    return float(whole(names["norm"])), sum_over_ranks(names["loss"].detach()).item()


def loops_of_rank(rank):
    return [(readme(wrap), training_page(name)) for name, wrap in WRAPPERS.items()]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(loops_of_rank, 2)


def test_the_loop_of_readme_trains_as_dense_attention_under_every_wrapper(ranks):
    wanted = train_dense("llama", SAMPLES, EPOCHS, 1, 1e9, optimizer_of)
    for found in ranks:
        for trained, _ in found:
            check(trained, wanted)


def test_the_loop_of_the_training_page_clips_as_one_process_under_every_wrapper(ranks):
    alone = training_page("plain")
    for found in ranks:
        for _, norm_and_loss in found:
            assert norm_and_loss == pytest.approx(alone, rel=1e-4)
