"""Process groups outlive the transports that open them, on real gloo processes."""

from typing import Any

import pytest
import torch.distributed as dist

from dyncp import Distributed
from processes import run_ranks


def _group_of(transport: Distributed) -> Any:
    return transport.communicators[-1].group


def _closes_and_opens(rank: int, ended: bool) -> tuple[bool, int]:
    first = Distributed(timeout=30)
    group = _group_of(first)
    (channel,) = first.open()
    if ended:
        channel.finish()
    first.close()
    second = Distributed(timeout=30)
    return _group_of(second) is group, len(second.agree(bytes([rank])))


@pytest.mark.parametrize("ended", [True, False])
def test_groups_are_used_again_unless_a_call_on_them_failed(ended):
    assert run_ranks(_closes_and_opens, 2, ended) == [(ended, 2)] * 2


def _opens_two(rank: int) -> list[bytes]:
    first, second = Distributed(timeout=30), Distributed(timeout=30)
    assert _group_of(first) is not _group_of(second)
    first.close()
    return second.agree(bytes([rank]))


def test_transports_that_are_open_at_once_have_groups_of_their_own():
    assert run_ranks(_opens_two, 2) == [[b"\0", b"\1"]] * 2


def _starts_the_world_again(rank: int, folder: str) -> list[bytes]:
    Distributed(timeout=30).close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/again", rank=rank, world_size=2)
    return Distributed(timeout=30).agree(bytes([rank]))


def test_groups_of_a_destroyed_world_are_forgotten(tmp_path):
    assert run_ranks(_starts_the_world_again, 2, str(tmp_path)) == [[b"\0", b"\1"]] * 2
