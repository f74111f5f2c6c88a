"""Runs `dyncp` on several processes: starts them with torchrun, or is one of them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp.calibrate.calls import World

GRACE_SECONDS = 40  # torchrun itself gives its workers 30 before it kills them
COPY_SECONDS = 5  # for the last lines of ranks that are gone
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
TIMEOUT = timedelta(minutes=10)


def launch(words: Sequence[str], num_ranks: int, *, to_stderr: bool = False) -> int:
    """The exit code of `torchrun --nproc-per-node num_ranks WORDS`.

    With `to_stderr`, what the ranks print on stdout goes to this process's stderr.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    with _stopping_on_signals():
        # A session of its own: Ctrl-C reaches only us, and torchrun stops its workers in order.
        process = subprocess.Popen(
            [*torchrun, *options, *words],
            env=_environment(num_ranks),
            stdout=sys.stderr.fileno() if to_stderr else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stopping = threading.Event()
        copier = threading.Thread(target=_copy_errors, args=(process.stderr, stopping), daemon=True)
        copier.start()
        try:
            return process.wait()
        except BaseException:
            stopping.set()
            raise
        finally:
            _stop(process)
            copier.join(COPY_SECONDS)


def threads_per_rank(num_ranks: int) -> int:
    """The cores this process may use, shared out among the ranks of the machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def _environment(num_ranks: int) -> dict[str, str]:
    """What torchrun, OpenMP and gloo read; what the user has set stays."""
    defaults = {"OMP_NUM_THREADS": str(threads_per_rank(num_ranks))}
    if sys.platform in LOOPBACK:
        defaults["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    return defaults | os.environ


def _copy_errors(source: IO[bytes], stopping: threading.Event) -> None:
    """Passes on what the ranks complain about, but not that they are being stopped."""
    for line in source:
        if not stopping.is_set():
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through `finally` blocks, as Ctrl-C does."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut this short
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    signal.signal(signal.SIGINT, before)


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def open_world(device_name: str | None) -> "Iterator[World]":
    """The world of torchrun's ranks, or of this process alone."""
    import torch
    import torch.distributed as dist

    from dyncp.calibrate.calls import World, open_device

    if not under_torchrun():
        yield World.alone(open_device(device_name))
        return
    local_rank, local = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = open_device(device_name, local_rank)
    torch.set_num_threads(threads_per_rank(local))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local, device)
    finally:
        dist.destroy_process_group()
