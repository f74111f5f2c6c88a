"""How all ranks agree on the plan of a batch: `PlanExchange` publishes plans through the store.

One member of a replica plans a batch and publishes each rank's part. The *decision* is set once, by
the first rank to decide, and names the plan that all ranks use: the published plan, or the static
plan if the planner failed or did not answer in time. Each rank makes the static plan itself. Once a
rank has agreed on all batches of an optimiser step, it adds its own number of targets to the step's
total. The total is complete only when all ranks have agreed, so a mismatch is raised before any
collective.

    r0/b7/decision   replica 0, batch 7: planned or static, with the batch's fingerprint
    r0/b7/part/2     rank 2's encoded part (further chunks in part/2/1, ...)
    r0/b7/static     digest of the static plan
    r0/b7/sample/3   digest of sample 3 from the first rank that read it, if several ranks read it
    r0/b7/left       number of members that are done with these keys; the last one deletes them
    s7/items         targets of step 7 so far, and how many ranks have agreed on the step
    s7/total         targets of step 7 on all ranks
    s7/left          number of ranks that have read the total; the last one deletes the step's keys
    s7/dealt         fingerprint of the batches of all replicas

peers.py lists the other keys: heartbeats, errors, and the end of an epoch.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dyncp.dataloader import patience
from dyncp.dataloader.batching import SelectedBatch, SelectedStep
from dyncp.dataloader.peers import Peers
from dyncp.dataloader.ranks import PeerError, StoreError, chunk_keys
from dyncp.planner.process import PlanReply

AGREED = 1 << 40  # each rank adds this and its targets to one counter, which so counts the ranks


class SampleDigests(NamedTuple):
    """Digests of a sample's masks and of its content, to compare with other ranks; "" if this rank
    has not made the masks or not read the sample."""

    sample: int  # its index in the dataset
    length: int
    masks: str = ""
    content: str = ""


@dataclass(frozen=True)
class Decision:
    """The plan that a batch gets. `selection` and `batch` are the fingerprints of the SelectedBatch
    and of the planned batch, on the rank that decides."""

    static: bool
    rank: int
    selection: str
    batch: str = ""
    digest: str = ""
    seconds: float = 0.0
    sizes: tuple[int, ...] = ()  # bytes of every rank's part
    samples: tuple[SampleDigests, ...] = ()
    reason: str = ""

    @staticmethod
    def read(values: Any) -> "Decision":
        """Parses the fields that a rank wrote to the store."""
        try:
            samples = tuple(SampleDigests(*sample) for sample in values["samples"])
            sizes = tuple(map(int, values["sizes"]))
            return Decision(**values | {"sizes": sizes, "samples": samples})
        except (TypeError, KeyError, ValueError) as error:
            raise PeerError(f"the store has a decision that cannot be read: {error}") from error


class PlanExchange:
    """The plans of one iteration in the store. Planning threads publish plans; the delivering
    thread calls everything else."""

    def __init__(self, peers: Peers) -> None:
        self._store, self._ranks, self._peers = peers.store, peers.ranks, peers
        self._rank = peers.ranks.name()
        self._deciding = threading.Lock()
        self._last_left = -1  # number of the last batch that this member is done with

    # Deciding

    def publish(
        self, selection: SelectedBatch, reply: PlanReply, samples: Sequence[SampleDigests] = ()
    ) -> None:
        """Publishes a plan and decides for it, unless a decision has been made."""
        decision = Decision(
            static=False,
            rank=self._rank,
            selection=selection.fingerprint,
            batch=reply.fingerprint,
            digest=reply.digest,
            seconds=reply.seconds,
            sizes=tuple(map(len, reply.parts)),
            samples=tuple(samples),
        )
        self._decide(selection, decision, reply.parts)

    def decide_static(self, selection: SelectedBatch, reason: str) -> None:
        """Decides for the static plan, unless a decision has been made."""
        decision = Decision(True, self._rank, selection.fingerprint, reason=reason)
        self._decide(selection, decision)

    def _decide(
        self, selection: SelectedBatch, decision: Decision, parts: Sequence[bytes] = ()
    ) -> None:
        with self._deciding:
            if selection.number <= self._last_left:
                return  # too late: this rank uses another plan, and the keys may be deleted
            for rank, part in enumerate(parts):
                self._store.set_bytes(self._key(selection, f"part/{rank}"), part)
            found = self._store.first(self._key(selection, "decision"), vars(decision))
            if Decision.read(found) != decision:
                with suppress(StoreError):
                    self._store.delete(self._part_keys(selection, decision))

    def decision(self, step: int, selection: SelectedBatch) -> Decision:
        """Waits for the decision; decides for the static plan if no rank decides in time."""
        key, number = self._key(selection, "decision"), selection.number
        bound = self._peers.plan_timeout + patience.PLAN_GRACE
        reason = f"rank {self._rank} got no plan within {bound:g} s"
        found = self._peers.wait_for(
            key,
            f"the plan of batch {number}",
            step,
            number,
            bound=bound,
            overdue=lambda: self.decide_static(selection, reason),
        )
        decision = Decision.read(found)
        self._check_fingerprint(selection, decision, decision.selection, selection.fingerprint)
        return decision

    def part(self, selection: SelectedBatch, decision: Decision, rank: int) -> bytes:
        """The encoded part of one rank."""
        return self._store.get_bytes(self._key(selection, f"part/{rank}"), decision.sizes[rank])

    def leave(
        self, selection: SelectedBatch, decision: Decision, shared: Sequence[int] = ()
    ) -> None:
        """Marks this member as done with the batch's keys; the last member deletes them. `shared`
        are the samples that `check_samples` compared."""
        with self._deciding:
            self._last_left = selection.number
        if self._store.add(self._key(selection, "left"), 1) < self._ranks.num_members:
            return
        names = ["decision", "left", *(["static"] if decision.static else [])]
        names += [f"sample/{number}" for number in shared]
        self._store.delete(self._key(selection, name) for name in names)
        self._store.delete(self._part_keys(selection, decision))

    # Agreeing

    def check_samples(
        self,
        selection: SelectedBatch,
        decision: Decision,
        mine: Sequence[SampleDigests],
        shared: Sequence[int],
        fingerprint: str,
    ) -> None:
        """Compares this rank's digests of the samples and its batch's fingerprint ("": unknown)
        with those of the rank that planned. Compares the content of the samples that several ranks
        have tokens of (`shared`) with the first rank that read them."""
        for number, (theirs, own) in enumerate(zip(decision.samples, mine, strict=False)):
            self._check_sample(selection, number, own, decision.rank, theirs)
        if decision.batch and fingerprint:
            self._check_fingerprint(selection, decision, decision.batch, fingerprint)
        for number in shared:
            own = mine[number]
            if own.content:
                key = self._key(selection, f"sample/{number}")
                rank, content = self._store.first(key, [self._rank, own.content])
                theirs = SampleDigests(own.sample, own.length, content=content)
                self._check_sample(selection, number, own, rank, theirs)

    def check_static(self, selection: SelectedBatch, digest: str) -> None:
        """Compares the digest of this rank's static plan with that of the first rank."""
        first = self._store.first(self._key(selection, "static"), digest)
        if first != digest:
            self._peers.mismatch(
                f"ranks made different static plans of batch {selection.number}: the first "
                f"has digest {first}, rank {self._rank} has {digest}"
            )

    def add_targets(self, step: SelectedStep, targets: int) -> None:
        """Agrees on the batches of a step, in which this rank has `targets` targets."""
        if self._ranks.num_replicas > 1:
            self._check_dealing(step)
        total = self._store.add(f"s{step.number}/items", AGREED + targets)
        self._peers.agreed_step = step.number
        if total // AGREED == self._ranks.num_processes:
            self._store.set(f"s{step.number}/total", total % AGREED)

    def total_targets(self, step: SelectedStep) -> int:
        """Waits until all ranks of all replicas have agreed on the step; returns its targets."""
        key, last = f"s{step.number}/total", step.selections[-1].number
        what = f"all ranks to agree on step {step.number}"
        total = int(self._peers.wait_for(key, what, step.number, last))
        if self._store.add(f"s{step.number}/left", 1) == self._ranks.num_processes:
            names = ("items", "total", "left", "dealt")
            self._store.delete(f"s{step.number}/{name}" for name in names)
        return total

    def _check_dealing(self, step: SelectedStep) -> None:
        """Checks that all replicas deal the same batches: otherwise samples would be lost, or
        trained on twice."""
        first = self._store.first(f"s{step.number}/dealt", step.fingerprint)
        if first != step.fingerprint:
            self._peers.mismatch(
                f"replicas dealt the batches of step {step.number} differently: the first has "
                f"{first}, rank {self._rank} of replica {self._ranks.replica} has "
                f"{step.fingerprint}; every rank needs the same dataset, seed, epoch, budget, "
                "mask function, model= and cost="
            )

    def _check_sample(
        self,
        selection: SelectedBatch,
        number: int,
        mine: SampleDigests,
        rank: int,
        theirs: SampleDigests,
    ) -> None:
        """Compares those digests that both ranks know."""
        for what, my_digest, their_digest in (
            ("masks", mine.masks, theirs.masks),
            ("content", mine.content, theirs.content),
        ):
            if my_digest and their_digest and my_digest != their_digest:
                self._peers.mismatch(
                    f"ranks disagree on sample {mine.sample} (number {number} of batch "
                    f"{selection.number}): rank {rank} has {what} {their_digest}, rank "
                    f"{self._rank} has {my_digest}; every rank must read the same tokens and make "
                    "the same masks: a dataset that shuffles or augments at random needs a seed "
                    "that all ranks share, or torch's own generator"
                )

    def _check_fingerprint(
        self, selection: SelectedBatch, decision: Decision, theirs: str, mine: str
    ) -> None:
        if theirs == mine:
            return
        differences = [
            f" (it has sample {a.sample} of {a.length} tokens where this rank has sample {b.index} "
            f"of {b.length})"
            for a, b in zip(decision.samples, selection.entries, strict=False)
            if (a.sample, a.length) != (b.index, b.length)
        ]
        self._peers.mismatch(
            f"ranks disagree on batch {selection.number}: rank {decision.rank} planned batch "
            f"{theirs}{''.join(differences[:1])}, rank {self._rank} has batch {mine}; every rank "
            "needs the same dataset, seed, epoch, budget, mask function and loaded state"
        )

    def _key(self, selection: SelectedBatch, name: str) -> str:
        return f"r{self._ranks.replica}/b{selection.number}/{name}"

    def _part_keys(self, selection: SelectedBatch, decision: Decision) -> Iterator[str]:
        for rank, size in enumerate(decision.sizes):
            yield from chunk_keys(self._key(selection, f"part/{rank}"), size)
