"""Doctor's check of grouped calls, on real gloo processes."""

import time
from pathlib import Path
from unittest import mock

import torch

from dyncp.calibrate import Finding, World, diagnosis
from dyncp.calibrate.diagnosis import check_groups
from dyncp.transport.distributed import Communicator
from processes import run_ranks


def world_of(rank: int, num_ranks: int) -> World:
    return World(rank, num_ranks, num_ranks, torch.device("cpu"))


def find(rank: int, num_ranks: int, hosts: str) -> Finding:
    with mock.patch("dyncp.transport.distributed.host_id", return_value=hosts[rank]):
        return check_groups(world_of(rank, num_ranks))[0]


def test_a_healthy_network_is_said_to_be_one():
    for finding in run_ranks(find, 4, 4, "aabb"):
        assert finding.passed
        assert "all 4 ranks sent to all over gloo, 4 phases" in finding.sentence
        assert "up to 4 operations in a grouped call, 128 are allowed" in finding.sentence
        assert "2 nodes, communicators (ranks): inside (2) and between (4)" in finding.sentence
    [finding, *_] = run_ranks(find, 3, 3, "aaa")
    assert "1 node, communicators (ranks): inside (3)" in finding.sentence


def spoil(rank: int) -> Finding:
    start = Communicator.start

    def swap(self, phase, sends, receives, call):
        """Phase 2 has the messages of two peers the wrong way round."""
        peers = list(sends)
        swapped = phase == 2 and rank == 1
        sends = {b: sends[a] for a, b in zip(peers, peers[::-1], strict=True)} if swapped else sends
        return start(self, phase, sends, receives, call)

    with mock.patch.object(Communicator, "start", swap):
        return check_groups(world_of(rank, 3))[0]


def test_messages_that_arrive_at_the_wrong_rank_are_found():
    first, second, third = run_ranks(spoil, 3)
    assert second.passed
    for finding in (first, third):
        assert not finding.passed
        assert "data from rank 1 arrived corrupted in phase 2" in finding.sentence


def stay_away(rank: int, folder: str) -> Finding:
    """Rank 1 sends nothing in phase 1 before the others have given up, or for 40 seconds."""
    start, others = Communicator.start, [Path(folder, name) for name in ("0", "2")]

    def start_late(self, phase, sends, receives, call):
        if rank == 1 and phase == 1:
            end = time.monotonic() + 40
            while not all(path.exists() for path in others) and time.monotonic() < end:
                time.sleep(0.1)
        return start(self, phase, sends, receives, call)

    with mock.patch.object(Communicator, "start", start_late):
        finding = check_groups(world_of(rank, 3), limit=3)[0]
    Path(folder, str(rank)).touch()
    return finding


def test_a_rank_that_does_not_answer_is_a_finding_within_the_limit(tmp_path):
    first, _, last = run_ranks(stay_away, 3, str(tmp_path))
    for finding in (first, last):
        assert not finding.passed
        assert "the all-to-all test failed: TransportError: rank" in finding.sentence
        assert "from rank 1 in phase 1" in finding.sentence


def diagnose_with_bad_groups(rank: int) -> list[Finding]:
    bad = Finding("groups", rank != 1, "broken")
    with (
        mock.patch.object(diagnosis, "check_groups", return_value=(bad, None)),
        mock.patch.object(diagnosis, "bandwidth_matrix", return_value=[[None, 1e9], [1e9, None]]),
    ):
        return diagnosis.diagnose(world_of(rank, 2)).findings


def test_no_plan_runs_where_a_rank_has_bad_groups():
    for findings in run_ranks(diagnose_with_bad_groups, 2):
        assert [one.name for one in findings] == ["versions", "links", "groups", "plan", "graphs"]
        assert findings[2].sentence == "rank 1: broken"
        assert findings[3].sentence.endswith("must work first")
