"""Trains in many short segments on changing numbers of ranks while things go wrong.

    python -m benchmarks.soak_resume                          1,000 batches
    python -m benchmarks.soak_resume --batches 60 --samples 80 --seed 1 --only stream

Every segment resumes from the last checkpoint (loader, model, optimiser), on a random number of
processes (up to 4), with random saves and faults: a planning process is killed or stopped, the
planner raises, reading is slow. Other faults end the segment: a rank reads other tokens, cannot
read a sample, raises in its loop, or is killed. Checks that

1. all ranks get an error that names the rank at fault, within 60 s if it left or was killed
   (torch's own error, without a name, if the loader had prepared the whole epoch)
2. no thread, child process, open file, temporary file or key of the store is left
3. over all segments, counting only batches that a checkpoint covers, every sample was trained on
   once per epoch
4. losses equal those of an undisturbed run: bit for bit if the number of ranks never changes,
   otherwise up to the order of sums
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.soak_rank import (
    FATAL,
    PLANNER_FAULTS,
    SEGMENT_SECONDS,
    Event,
    Reading,
    Scenario,
    Segment,
    run_rank,
    wait_until_empty,
)

ANY = ((1, 1), (1, 2), (1, 4))
SCENARIOS = (
    Scenario("always 4 ranks", "lengths", ((1, 4),)),
    Scenario("1, 2 or 4 ranks, steps of 2 batches", "read", ANY, accumulation=2),
    Scenario("stream", "stream", ANY, planner_raises=True),
    Scenario("replicas", "lengths", ((1, 2), (2, 1), (2, 2), (4, 1), (1, 4)), workers=1),
)
TOLERANCE = 1e-9
NAMED_SECONDS = 60
LEAVING = ("raises", "killed")
MARK = "DYNCP_SOAK"  # in the environment of all processes of a run


class Soak:
    """One scenario: runs with faults until enough batches are kept, then without faults."""

    def __init__(
        self, scenario: Scenario, samples: int, seed: int, folder: Path, *, hurry: bool = False
    ) -> None:
        self.scenario, self.samples, self.folder = scenario, samples, folder
        self.hurry = hurry
        self.draw = random.Random(f"{scenario.name} {seed}")
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0  # seconds until a rank that left or was killed was named

    def run(self, batches: int) -> None:
        kept = 0
        while kept < batches and not self.wrong:
            segment = self.draw_segment()
            self.run_segment(segment)
            kept = batches_of(self.checkpoint())
            fault = segment.fatal.kind if segment.fatal else "ends"
            layout = f"{segment.replicas} × {segment.ranks} ranks"
            say(f"  segment {self.counts['segments']}: {layout}, {fault}; {kept} batches kept")
        if not self.wrong:
            log = self.checkpoint()["log"]
            self.check_samples(log)
            self.check_losses(log)

    def checkpoint(self) -> dict[str, Any]:
        path = self.folder / "checkpoint.pt"
        return torch.load(path, weights_only=False) if path.exists() else {}

    def draw_segment(self) -> Segment:
        draw = self.draw
        replicas, ranks = draw.choice(allowed(self.scenario, self.checkpoint()))
        rounds = draw.randint(4, 30)
        events = [
            Event(draw.choice(PLANNER_FAULTS), draw.randrange(replicas * ranks), at)
            for at in range(rounds)
            if draw.random() < 0.1
        ]
        if draw.random() < 0.4:
            events.append(Event("slow reads", draw.randrange(replicas * ranks), draw.randrange(4)))
        saves = [at for at in range(1, rounds + 1) if at == rounds or draw.random() < 0.2]
        if replicas * ranks > 1 and draw.random() < 0.5:
            kinds = FATAL if ranks > 1 and self.scenario.dataset != "lengths" else FATAL[1:]
            fault = Event(draw.choice(kinds), draw.randrange(replicas * ranks), rounds - 1)
            events = [*(event for event in events if event.at < rounds - 1), fault]
            saves, rounds = saves[:-1], rounds + 100
        save_ends = draw.random() < 0.5 and rounds < 100
        return Segment(
            self.scenario,
            self.samples,
            self.folder,
            replicas,
            ranks,
            rounds,
            tuple(saves),
            tuple(events),
            save_ends,
            self.hurry,
        )

    def run_segment(self, segment: Segment) -> None:
        """Runs a segment, and checks what its ranks report and leave open."""
        for old in [*segment.folder.glob("result-*"), *segment.folder.glob("fault")]:
            old.unlink()
        for rank in range(4):
            shutil.rmtree(segment.folder / f"faults-{rank}", ignore_errors=True)
        before, known = marked_processes(), temporary_files()
        ran: list[Any] = []
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        results = run_processes(segment, store.port, ran)
        self.counts.update(["segments", *(event.kind for event in segment.events)])
        for rank, result in results.items():
            self.check_rank(segment, rank, result, ran[rank])
        keys = [key for key in store.list_keys() if "dyncp" in key]
        orphans = wait_until_empty(lambda: sorted(marked_processes() - before), 10)
        expected = {"checkpoint.pt", "fault"}
        expected |= {f"result-{rank}.json" for rank in results} | {f"faults-{r}" for r in results}
        files = {path.name for path in segment.folder.iterdir()} - expected
        files |= temporary_files() - known
        for what, found in (
            ("keys", keys),
            ("processes", orphans),
            ("files", sorted(files)),
            ("shared memory", shared_memory(ran)),
        ):
            if found:
                self.tell(segment, f"{what} left: {found}")

    def check_rank(
        self, segment: Segment, rank: int, result: dict[str, Any] | None, process: Any
    ) -> None:
        fault = segment.fatal
        victim = fault is not None and fault.rank == rank
        if result is None:
            if fault is None or not victim or fault.kind != "killed":
                self.tell(segment, f"rank {rank} ended with {process.exitcode} and no result")
            return
        self.counts["planning processes replaced"] += result["restarts"]
        self.counts["static plans"] += result["static"] if not rank else 0
        if result["left"]:
            self.tell(segment, f"rank {rank} left {result['left']}")
        if process.exitcode:
            self.tell(segment, f"rank {rank} ended with {process.exitcode}")
        wanted = expected_error(fault, victim=victim)
        found = result["error"] or "no error"
        if result["all_prepared"] and fault is not None and fault.kind in LEAVING:
            self.counts["heard by torch alone, of a prepared epoch"] += 1
        elif not re.match(wanted, found):
            self.tell(segment, f"rank {rank} got {found!r} (first {result['first']!r}); {wanted!r}")
        if fault is not None and fault.kind in LEAVING and not victim:
            seconds = result["at"] - float((segment.folder / "fault").read_text())
            self.slowest = max(self.slowest, seconds)
            if seconds > NAMED_SECONDS:
                self.tell(segment, f"rank {rank} heard of it after {seconds:.0f} s")

    def check_samples(self, log: list[dict[str, Any]]) -> None:
        """Checks that every sample occurs once in every finished epoch, and at most once in the
        last."""
        lengths = Reading(self.samples).lengths
        last = log[-1]["epoch"]
        for epoch, rounds in groupby(log, key=lambda record: record["epoch"]):
            seen: Counter[int] = Counter()
            for record in rounds:
                seen.update({int(i): n for i, n in record["tokens"].items()})
            missing = [
                i for i, n in enumerate(lengths) if seen[i] not in ((n, 0), (n,))[epoch < last]
            ]
            if missing:
                self.wrong.append(f"epoch {epoch}: samples {missing} were not trained on once")
        epochs = [epoch for epoch, _ in groupby(log, key=lambda record: record["epoch"])]
        if epochs != list(range(last + 1)):
            self.wrong.append(f"epochs came in the order {epochs}")
        self.counts["epochs"] = last

    def check_losses(self, log: list[dict[str, Any]]) -> None:
        """Compares losses with a run on 4 processes without faults, which changes the number of
        replicas at the same batches."""
        self.folder = self.folder / "undisturbed"
        self.folder.mkdir()
        for replicas, rounds in groupby(log, key=lambda record: record["replicas"]):
            number, ranks = len(list(rounds)), 4 // replicas
            self.run_segment(
                Segment(
                    self.scenario, self.samples, self.folder, replicas, ranks, number, (number,)
                )
            )
        plain = [record["loss"] for record in self.checkpoint()["log"]]
        losses = [record["loss"] for record in log]
        if len(plain) != len(losses):
            self.wrong.append(f"{len(losses)} rounds, undisturbed {len(plain)}")
            return
        difference = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        equal = sum(a == b for a, b in zip(losses, plain, strict=True))
        self.counts["losses"], self.counts["of equal bits"] = len(losses), equal
        say(f"  losses: {len(losses)}, {equal} of equal bits, difference {difference:.1e}")
        if difference > TOLERANCE or (self.scenario.exact and equal < len(losses)):
            self.wrong.append(f"losses differ by up to {difference:.1e}")

    def tell(self, segment: Segment, text: str) -> None:
        where = f"segment {self.counts['segments']}, {segment.replicas} × {segment.ranks} ranks"
        self.wrong.append(f"{where}, {segment.fatal}: {text}")


def allowed(scenario: Scenario, checkpoint: dict[str, Any]) -> list[tuple[int, int]]:
    """Layouts that a checkpoint can be resumed on. The number of replicas may change only where a
    step ends in both layouts."""
    if not checkpoint:
        return list(scenario.layouts)
    batches, old = checkpoint["loader"]["position"]["batches"], checkpoint["replicas"]

    def fits(replicas: int) -> bool:
        ends = all(batches % (n * scenario.accumulation) == 0 for n in (old, replicas))
        return replicas == old or (ends and not checkpoint["pending"])

    return [layout for layout in scenario.layouts if fits(layout[0])]


def expected_error(fault: Event | None, *, victim: bool) -> str:
    """A pattern of the error that a rank must get."""
    if fault is None:
        return "no error$"
    rank = rf"\brank {fault.rank}\b"
    return {
        "other tokens": rf"BatchMismatch: ranks disagree on sample \d+ .*{rank}",
        "bad sample": "SampleError: reading of sample" if victim else f"PeerError: {rank} failed: ",
        "raises": "ArithmeticError" if victim else f"PeerError: {rank} left",
        "killed": rf"PeerError: .*{rank} \(process \d+ on .*\) has ended",
    }[fault.kind]


def start_server(folder: str) -> None:
    """Starts the server that ranks are forked from before the first rank starts. Ranks create
    temporary files in `folder`."""
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    os.environ["TMPDIR"] = folder
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "dyncp", "dyncp.dataloader", "benchmarks.soak_rank"]
    )
    process = context.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()


def run_processes(segment: Segment, port: int, ran: list[Any]) -> dict[int, dict[str, Any] | None]:
    """The results of the ranks, None for a rank without one. The processes are added to `ran`."""
    context = multiprocessing.get_context("forkserver")
    for rank in range(segment.processes):
        ran.append(context.Process(target=run_rank, args=(rank, segment, port)))
        ran[-1].start()
    end = time.monotonic() + SEGMENT_SECONDS
    for process in ran:
        process.join(max(0.0, end - time.monotonic()))
    for process in ran:
        process.kill()
        process.join()
    paths = {rank: segment.folder / f"result-{rank}.json" for rank in range(segment.processes)}
    return {rank: read(path) for rank, path in paths.items()}


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def batches_of(checkpoint: dict[str, Any]) -> int:
    return checkpoint["loader"]["position"]["total"] if checkpoint else 0


def marked_processes() -> set[int]:
    """Processes of this run, also of ranks that have ended: all inherit its mark."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def temporary_files() -> set[str]:
    """Temporary files, except torch's own cache."""
    names = os.listdir(os.environ["TMPDIR"])
    return {name for name in names if not name.startswith("torchinductor")}


def shared_memory(processes: list[Any]) -> list[str]:
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [name for name in names if any(f"_{process.pid}_" in name for process in processes)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def soak(
    scenarios: list[Scenario], batches: int, samples: int, seed: int, *, hurry: bool
) -> list[str]:
    wrong = []
    for scenario in scenarios:
        start = time.monotonic()
        say(f"{scenario.name}: {batches} batches")
        with tempfile.TemporaryDirectory(prefix="dyncp-soak-") as folder:
            run = Soak(scenario, samples, seed, Path(folder), hurry=hurry)
            run.run(batches)
        wrong += [f"{scenario.name}: {text}" for text in run.wrong]
        seconds = time.monotonic() - start
        print(f"{scenario.name}: {seconds:.0f} s, named within {run.slowest:.1f} s at most")
        for what, number in sorted(run.counts.items()):
            print(f"  {what:<42}{number:>6}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000, help="to keep, of all scenarios")
    parser.add_argument("--samples", type=int, default=400, help="of an epoch (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--only", default="", help="scenarios whose name has this text")
    parser.add_argument("--hurry", action="store_true", help="notice dead ranks ten times sooner")
    args = parser.parse_args()
    scenarios = [scenario for scenario in SCENARIOS if args.only in scenario.name]
    with tempfile.TemporaryDirectory(prefix="dyncp-soak-") as folder:
        start_server(folder)
        wrong = soak(
            scenarios, -(-args.batches // len(scenarios)), args.samples, args.seed, hurry=args.hurry
        )
    print("\n" + ("\n".join(wrong) if wrong else "All is well."))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
