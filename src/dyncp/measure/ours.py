"""dyncp's own attention on one rank, by kernel."""

from dataclasses import dataclass
from typing import Any

import torch

from dyncp.blocks import AttentionShape, Batch
from dyncp.executor import DCPExecutor, Step
from dyncp.measure.implementation import Attend, Unavailable
from dyncp.planner import plan_batch
from dyncp.topology import Topology

# Whether sums have a fixed order, as a kernel's name may say.
ORDERS = {"deterministic": True, "fast": False}


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel by name. `deterministic` None leaves the executor's default."""

    kernel: str
    deterministic: bool | None = None

    @staticmethod
    def of(text: str) -> "KernelChoice":
        """ "flash4", "flash4:fast" and "flash4:deterministic" are allowed forms."""
        kernel, colon, order = text.strip().partition(":")
        if not kernel or (colon and order not in ORDERS):
            forms = " or ".join(["NAME", *(f"NAME:{order}" for order in ORDERS)])
            raise ValueError(f"kernel is {text!r}; write {forms}")
        return KernelChoice(kernel, ORDERS.get(order))

    @property
    def options(self) -> dict[str, Any]:
        """For DCPExecutor."""
        fixed = {} if self.deterministic is None else {"deterministic": self.deterministic}
        return {"kernel": self.kernel} | fixed

    def __str__(self) -> str:
        orders = {fixed: name for name, fixed in ORDERS.items()}
        return self.kernel + (
            f":{orders[self.deterministic]}" if self.deterministic is not None else ""
        )


def make_executor(choice: KernelChoice, device: torch.device, **options: Any) -> DCPExecutor:
    """An executor with this kernel; raises Unavailable with the reason where it cannot run here."""
    try:
        return DCPExecutor(device=device, **choice.options, **options)
    except (ImportError, ValueError) as error:
        raise Unavailable(str(error).splitlines()[0]) from error


def kernel_name(choice: KernelChoice, device: torch.device) -> str:
    """Of the kernel that "auto" stands for here, too."""
    return make_executor(choice, device, virtual_ranks=1).kernel.name


def one_rank_step(
    batch: Batch, shape: AttentionShape, choice: KernelChoice, device: torch.device
) -> Step:
    """The whole batch on one rank, tokens in batch order."""
    plan = plan_batch(batch, Topology(), shape)
    executor = make_executor(choice, device, virtual_ranks=1)
    order = plan.parts[0].local_coordinates
    assert (order == range(batch.num_tokens)).all(), "one rank keeps the batch's order"
    try:
        return executor.prepare(plan)
    except ValueError as error:  # the kernel cannot run on this device
        raise Unavailable(str(error)) from error


def ours(batch: Batch, shape: AttentionShape, choice: KernelChoice, device: torch.device) -> Attend:
    """The attention call of a one-rank plan of the batch."""
    from dyncp.executor import attention

    step = one_rank_step(batch, shape, choice, device)
    return lambda q, k, v: attention(step, q, k, v)
