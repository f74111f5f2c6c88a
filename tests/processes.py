"""Runs functions and programs on real gloo ranks, in processes, always with a timeout."""

import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

import sizes
from dyncp.dataloader import LoaderConfig


class RankError(AssertionError):
    pass


def rank_context() -> Any:
    """Ranks are forked from a server that has imported and compiled what they need. It is started
    by the first call, which does not wait for it. CUDA cannot be used after a fork."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # the server gets no other
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        forkserver.ensure_running()
    return context


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 120,
    planners: bool = False,
) -> list[Any]:
    """`function(rank, *args)` on every rank; its results by rank. A rank that dies without a result
    gives None. In a small run, loaders plan in threads unless the test is about `planners`."""
    context = rank_context()
    results = context.Queue()
    port, planners = free_port(), planners or sizes.pick(False, True)
    processes = [
        context.Process(
            target=_main, args=(function, rank, num_ranks, port, results, planners, args)
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, time.monotonic() + timeout)
    finally:
        _kill(processes)


def run_program(
    words: list[str], num_ranks: int, script: str = "", timeout: float = 150
) -> "subprocess.CompletedProcess[str]":
    """Runs a `dyncp` command line, or a script, on ranks that find themselves where torchrun would
    have started them."""
    context, port = rank_context(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        processes = [
            context.Process(target=_program, args=(words, script, rank, num_ranks, port, outputs))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        try:
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            _kill(processes)
        texts = [output.read_text() if output.exists() else "" for output in outputs]
    if None in codes:
        raise RankError(f"ranks ended with {codes} in {timeout:g} s:\n{texts[1]}")
    return subprocess.CompletedProcess(words, max(codes, key=abs), *texts)


def tell(what: str) -> None:
    """Says something to all ranks."""
    distributed_c10d._get_default_store().set(what, "1")


def wait_for(what: str) -> None:
    """Waits until a rank has said something. Asks again and again: while a client of the store
    waits, other threads cannot use it."""
    store = distributed_c10d._get_default_store()
    assert wait_until(lambda: store.check([what]), 60), what


def end_together(*ranks: int) -> None:
    """Keeps the processes of these ranks until all have come here. Rank 0, which has the store,
    ends last."""
    own = dist.get_rank()
    tell(f"rank {own} has come")
    for rank in ranks:
        wait_for(f"rank {rank} has come")
    tell(f"rank {own} ends")
    for rank in ranks if own == 0 else ():
        wait_for(f"rank {rank} ends")


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


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    results: Any,
    planners: bool,
    args: Any,
) -> None:
    try:
        if not planners:
            plan_in_threads()
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


def plan_in_threads() -> None:
    """Starting a planning process takes a second of CPU. A number given by a test still counts."""
    LoaderConfig.planning_processes = planning_threads  # type: ignore[method-assign]


def planning_threads(config: LoaderConfig, members: int) -> int:
    return config.tuning.num_planners or 0


def _program(
    words: list[str], script: str, rank: int, num_ranks: int, port: int, outputs: list[Path]
) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    given |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    given |= {"TORCHELASTIC_RUN_ID": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    plan_in_threads()
    sys.argv = [script or "dyncp", *words]
    if not script:
        from dyncp.cli import main

        sys.exit(main(words))
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


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
