"""Runs a function on real gloo ranks, each in its own process, always with a timeout."""

import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankError(AssertionError):
    pass


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """`function(rank, *args)` on every rank; its results by rank. A rank that dies without a result
    gives None."""
    # Forked from a process that has imported torch and runs nothing: 2 s of CPU less per rank.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hypothesis", "pytest", "dyncp", "dyncp.dataloader"])
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_main, args=(function, rank, num_ranks, port, results, args))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def stop(pid: int) -> None:
    """Stops a child process and waits until it has stopped: before, it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    collected: list[Any] = [None] * len(processes)
    missing = set(range(len(processes)))
    while missing:
        try:
            rank, value, failure = results.get(timeout=0.2)
        except queue.Empty:
            if time.monotonic() > deadline:
                raise RankError(f"ranks {sorted(missing)} did not finish in time") from None
            missing -= {r for r in missing if processes[r].exitcode not in (None, 0)}
            continue
        if failure:
            raise RankError(f"rank {rank} failed:\n{failure}")
        collected[rank] = value
        missing.discard(rank)
    return collected


def _main(
    function: Callable[..., Any], rank: int, num_ranks: int, port: int, results: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # a rank that ends while others still connect would fail them
        results.put((rank, function(rank, *args), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())
