"""How the ranks of a loader share plans and agree on them, before any collective.

For every batch one member plans and publishes. The *decision*, set once and by whoever is first,
says which plan all ranks use: the published one, or (if the planner failed, or nobody heard of it
in time) the static one, which every rank makes itself. Then each rank adds the targets of its own
tokens to those of the optimiser step; the sum is only there when every rank has agreed.

    r0/b7/decision   planned or static, with the fingerprint of the batch that was planned
    r0/b7/part/2     rank 2's encoded part (and part/2/1, ... if it is large)
    r0/b7/static     digest of the static plan
    r0/b7/sample/3   what the first rank read of sample 3, which several ranks have tokens of
    r0/b7/left       how many members need none of these any more; the last one deletes them
    s7/items, s7/total, s7/left     targets of step 7: how many so far, of all, taken by
    s7/dealt                        fingerprint of the batches of all replicas
    end, ended, all_ended           number of batches, and how many ranks have come to the end
    at/2                            where process 2 is (see peers.py)
    error                           a failed rank's message
    leaving, closed, closed/2       how many are leaving, how many have left; as which one, and when
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dyncp.dataloader.batching import SelectedStep, Selection
from dyncp.dataloader.decision import Decision, SampleMark, first_difference, read_json
from dyncp.dataloader.errors import BatchMismatch, Closed, PeerError, StoreError
from dyncp.dataloader.peers import Peers, Place
from dyncp.dataloader.plan_store import (
    Store,
    chunk_keys,
    delete_quietly,
    get_chunks,
    linger,
    put_chunks,
    wait_for,
)
from dyncp.dataloader.plan_worker import PlanReply
from dyncp.dataloader.ranks import LoaderRanks

logger = logging.getLogger(__name__)

AGREED = 1 << 40  # one rank's agreement, added together with its number of targets
STEP_KEYS = ("items", "total", "left", "dealt")
ENDED = 1 << 62  # in place of a step: the end of the epoch
GRACE_SECONDS = 10.0  # for the planning rank to give up first


@dataclass(frozen=True)
class Waiting:
    """How a wait may end early: `closing()` says that the iteration is, `stalled()` for how many
    seconds training has been waiting (only then does time count: other ranks may have a reason to
    be late, such as writing a checkpoint)."""

    closing: Callable[[], bool]
    stalled: Callable[[], float]
    plan_timeout: float
    store_timeout: float
    asked: Callable[[], int] = lambda: 0  # batches that training has taken or waits for


class Exchange:
    """One iteration's use of the store. The planning thread publishes, the delivering thread does
    the rest."""

    def __init__(
        self, store: Store, ranks: LoaderRanks, waiting: Waiting, places: Sequence[Place] = ()
    ) -> None:
        self._store, self._ranks, self._waiting = store, ranks, waiting
        self._own = ranks.name()
        self._agreed, self._agreed_batches = -1, 0  # last step that it agreed on; of the next one
        self._publishing = threading.Lock()
        self._told = False  # the others why this rank failed
        self._settled = -1  # the last batch that this member left
        self._peers = Peers(store, ranks, self._status, places)

    def start(self) -> None:
        """From now on, others see signs of life."""
        self._peers.start()

    # Decisions

    def publish(
        self,
        selection: Selection,
        reply: PlanReply,
        samples: Sequence[SampleMark] = (),
    ) -> None:
        with self._publishing:
            if selection.number <= self._settled:
                return  # too late: decided otherwise, used and deleted
            keys: list[str] = []
            for rank, part in enumerate(reply.parts):
                keys += put_chunks(self._store, self._key(selection, f"part/{rank}"), part)
            decision = Decision(
                static=False,
                rank=self._own,
                selection=selection.fingerprint,
                batch=reply.fingerprint,
                digest=reply.digest,
                solver=reply.solver,
                seconds=reply.seconds,
                sizes=tuple(map(len, reply.parts)),
                samples=tuple(samples),
            )
            if self._decide(selection, decision) != decision:
                delete_quietly(self._store, keys)

    def decide_static(self, selection: Selection, reason: str) -> None:
        with self._publishing:
            if selection.number > self._settled:
                decision = Decision(True, self._own, selection.fingerprint, reason=reason)
                self._decide(selection, decision)

    def _decide(self, selection: Selection, decision: Decision) -> Decision:
        key = self._key(selection, "decision")
        return Decision.decode(self._store.compare_set(key, decision.encode()))

    def decision(self, step: int, selection: Selection) -> Decision:
        """Waits for the decision; makes it if nobody else does within the bound."""
        key = self._key(selection, "decision")

        def still_waiting() -> None:
            self._look_around(selection.number, step, f"the plan of batch {selection.number}")
            bound = self._waiting.plan_timeout + GRACE_SECONDS
            if self._waiting.stalled() > bound:
                reason = f"rank {self._own} heard nothing of a plan for {bound:g} s"
                self.decide_static(selection, reason)

        wait_for(self._store, key, still_waiting)
        decision = Decision.decode(self._store.get(key))
        if decision.selection != selection.fingerprint:
            self._disagree(selection, decision, decision.selection, selection.fingerprint)
        return decision

    def part(self, selection: Selection, decision: Decision, rank: int) -> bytes:
        """The encoded part of a rank."""
        key = self._key(selection, f"part/{rank}")
        return get_chunks(self._store, key, decision.sizes[rank])

    def check_batch(self, selection: Selection, decision: Decision, fingerprint: str) -> None:
        """Compares the batch that was planned with this rank's own."""
        if decision.batch and decision.batch != fingerprint:
            self._disagree(selection, decision, decision.batch, fingerprint)

    def check_samples(
        self, selection: Selection, decision: Decision, mine: Mapping[int, SampleMark]
    ) -> None:
        """Compares what this rank knows of samples with what the deciding rank does."""
        found = first_difference(decision.samples, mine)
        if found is not None:
            number, what = found
            theirs = getattr(decision.samples[number], what)
            self._differ(selection, number, what, decision.rank, theirs, mine[number])

    def compare_shared(self, selection: Selection, mine: Mapping[int, SampleMark]) -> None:
        """Compares what was read of samples that other ranks have tokens of as well."""
        for number, mark in mine.items():
            key = self._key(selection, f"sample/{number}")
            said = f"{self._own} {mark.content}"
            rank, _, content = self._store.compare_set(key, said.encode()).decode().partition(" ")
            if content != mark.content:
                self._differ(selection, number, "content", int(rank), content, mark)

    def agree_on_static(self, selection: Selection, digest: str) -> None:
        """Compares the static plan that this rank made with that of the first rank."""
        key = self._key(selection, "static")
        first = self._store.compare_set(key, digest.encode()).decode()
        if first != digest:
            self._fail(
                BatchMismatch(
                    f"ranks made different static plans of batch {selection.number}: the first "
                    f"has digest {first}, rank {self._own} {digest}"
                )
            )

    def leave(self, selection: Selection, decision: Decision, shared: Sequence[int] = ()) -> None:
        """This member needs the batch's keys no more; the last one deletes them."""
        with self._publishing:
            self._settled = selection.number
        if self._store.add(self._key(selection, "left"), 1) < self._ranks.num_members:
            return
        names = ["decision", "left", *(["static"] if decision.static else [])]
        names += [f"sample/{number}" for number in shared]
        for rank, size in enumerate(decision.sizes):
            names += chunk_keys(f"part/{rank}", size)
        for name in names:
            self._store.delete(self._key(selection, name))

    # Targets of a step

    def add_targets(self, step: SelectedStep, targets: int) -> None:
        """Says that this rank agrees on one batch of the step, and has so many targets in it."""
        key = f"s{step.number}/items"
        if self._ranks.num_replicas > 1:
            self._check_dealing(step)
        total = self._store.add(key, AGREED + targets)
        self._agreed_batches += 1
        if self._agreed_batches == len(step.selections):
            self._agreed, self._agreed_batches = step.number, 0
        if total // AGREED == self._expected(step):
            self._store.set(f"s{step.number}/total", str(total % AGREED).encode())

    def total_targets(self, step: SelectedStep) -> int:
        """Waits until all ranks of all replicas have agreed on all batches of the step."""

        def still_waiting() -> None:
            what = f"all ranks to agree on step {step.number}"
            self._look_around(step.selections[-1].number, step.number, what)
            self._check_patience(what, step.number)

        key = f"s{step.number}/total"
        wait_for(self._store, key, still_waiting)
        total = int(self._store.get(key))
        if self._store.add(f"s{step.number}/left", 1) == self._ranks.num_processes:
            for name in STEP_KEYS:
                self._store.delete(f"s{step.number}/{name}")
        return total

    def _check_dealing(self, step: SelectedStep) -> None:
        """All replicas have to deal the same batches, or samples are lost or trained on twice."""
        key = f"s{step.number}/dealt"
        first = self._store.compare_set(key, step.fingerprint.encode()).decode()
        if first != step.fingerprint:
            self._fail(
                BatchMismatch(
                    f"replicas dealt the batches of step {step.number} differently: the first has "
                    f"{first}, rank {self._own} of replica {self._ranks.replica} "
                    f"{step.fingerprint}; every rank needs the same dataset, seed, epoch, budget, "
                    "mask function, model= and cost="
                )
            )

    def _expected(self, step: SelectedStep) -> int:
        return self._ranks.num_processes * len(step.selections)

    # Ends

    def finish(self, num_batches: int) -> None:
        """This rank's epoch ends after so many batches; others' must too."""
        found = int(self._store.compare_set("end", str(num_batches).encode()))
        if found != num_batches:
            self._fail(
                BatchMismatch(
                    f"ranks disagree on the epoch: rank {self._own} has {num_batches} batches, "
                    f"another rank {found}; every rank needs the same dataset, lengths and options"
                )
            )
        self._agreed = ENDED
        if self._store.add("ended", 1) == self._ranks.num_processes:
            self._store.set("all_ended", b"1")

    def wait_for_all_ends(self) -> None:
        """Returns when all ranks have come to the same end."""

        def still_waiting() -> None:
            what = "all ranks to end the epoch"
            self._look_around(-1, ENDED, what)
            self._check_patience(what, ENDED)

        wait_for(self._store, "all_ended", still_waiting)

    def tell_failure(self, error: BaseException) -> None:
        """Lets the other ranks know why this one prepares no more batches."""
        if not isinstance(error, PeerError | StoreError | Closed):
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        self._told = True
        kinds = {"mismatch": BatchMismatch, "peer": PeerError}
        kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "own")
        told = {"rank": self._own, "kind": kind, "text": str(error)}
        self._store.compare_set("error", json.dumps(told).encode())

    def close(self) -> None:
        """The last rank deletes what is left in the store. Ranks whose processes have ended are not
        waited for. Never raises."""
        self._peers.close()
        try:
            report = {"taken": self._waiting.asked(), "order": self._store.add("leaving", 1)}
            self._store.set(f"closed/{self._ranks.process}", json.dumps(report).encode())
            ended = len(self._peers.ended())  # before the last one can delete what it reads
            if self._store.add("closed", 1) + ended < self._ranks.num_processes:
                if self._told:
                    linger(self._store, "closed")
                return
            for key in self._store.list_keys():
                self._store.delete(key)
        except StoreError as error:
            logger.debug("closing: %s", error)

    def _look_around(self, number: int, step: int, what: str) -> None:
        """Raises if the iteration is closing, or another rank has failed, has left or has no such
        batch."""
        if self._waiting.closing():
            raise Closed
        if self._store.has("error"):
            told = read_json(self._store.get("error"))
            if told["kind"] == "mismatch":
                raise BatchMismatch(told["text"])
            own = "" if told["kind"] == "peer" else f"rank {told['rank']} failed: "
            raise PeerError(own + told["text"])
        self._check_left(what)
        try:
            self._peers.look(self._waiting.stalled(), what, step)
        except PeerError as error:
            self._fail(error)
        if self._store.has("end"):
            end = int(self._store.get("end"))
            if end <= number:
                self._fail(
                    BatchMismatch(
                        f"ranks disagree on the epoch: rank {self._own} is at batch {number}, "
                        f"another rank has {end} batches; every rank needs the same dataset, "
                        "lengths and options"
                    )
                )

    def _check_left(self, what: str) -> None:
        """Raises if a rank has left the iteration, which this one waits in. One that ended without
        a word comes first: others may have left because of it."""
        if not self._store.has("closed"):
            return
        for ended in self._peers.ended().items():
            self._fail(self._peers.in_vain(*ended))
        left = {}
        for process in range(self._ranks.num_processes):
            key = f"closed/{process}"
            if self._store.has(key):
                left[process] = read_json(self._store.get(key))
        if left:
            first, *others = sorted(left, key=lambda process: int(left[process]["order"]))
            then = "".join(f", then rank {self._ranks.name(process)}" for process in others)
            raise PeerError(
                f"rank {self._ranks.name(first)} left this iteration after {left[first]['taken']} "
                f"batches (break, an exception or close()){then}, while rank {self._own} waits for "
                f"{what}; all ranks have to take equally many batches"
            )

    def _check_patience(self, what: str, step: int) -> None:
        """Raises when training has been waiting for the other ranks for longer than the bound."""
        bound = self._waiting.plan_timeout + self._waiting.store_timeout
        if self._waiting.stalled() > bound:
            where = self._peers.describe(step)
            self._fail(PeerError(f"rank {self._own} waited {bound:g} s for {what}: {where}"))

    def _status(self) -> dict[str, object]:
        waits = self._waiting.stalled() > 0
        return {"asked": self._waiting.asked(), "waiting": waits, "agreed": self._agreed}

    def _differ(
        self, selection: Selection, number: int, what: str, rank: int, theirs: str, mine: SampleMark
    ) -> None:
        self._fail(
            BatchMismatch(
                f"ranks disagree on sample {mine.index} (number {number} of batch "
                f"{selection.number}): rank {rank} has {what} {theirs}, rank {self._own} "
                f"{getattr(mine, what)}; every rank has to read the same "
                "tokens and make the same masks: a dataset that shuffles or augments at random "
                "needs a seed that all ranks share, or torch's own generator"
            )
        )

    def _disagree(self, selection: Selection, decision: Decision, theirs: str, mine: str) -> None:
        pairs = zip(decision.samples, selection.entries, strict=False)
        other = [(a, b) for a, b in pairs if (a.index, a.length) != (b.index, b.length)]
        first = ""
        if other:
            a, b = other[0]
            first = f" (first, sample {a.index} of {a.length} tokens where this rank has sample "
            first += f"{b.index} of {b.length})"
        self._fail(
            BatchMismatch(
                f"ranks disagree on batch {selection.number}: rank {decision.rank} planned batch "
                f"{theirs}{first}, rank {self._own} has batch {mine}; every rank needs the same "
                "dataset, seed, epoch, budget, mask function and loaded state"
            )
        )

    def _fail(self, error: Exception) -> None:
        self._tell(error)
        raise error

    def _key(self, selection: Selection, name: str) -> str:
        return f"r{self._ranks.replica}/b{selection.number}/{name}"
