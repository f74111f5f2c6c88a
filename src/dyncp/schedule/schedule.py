"""Schedule: the order of tiles and transfers for one mask and one direction."""

from dataclasses import dataclass

from dyncp.arrays import Int32


@dataclass(frozen=True, eq=False)
class Transfers:
    """Payloads between ranks, int32[transfers] each, ordered by phase, source, target, kind,
    head group and block. Results are merged in this order, whatever arrives first."""

    phase: Int32
    source: Int32
    target: Int32
    kind: Int32
    head_group: Int32
    block: Int32

    def __len__(self) -> int:
        return len(self.phase)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Divisions and numbered phases of one direction.

    Phase p is launched after division `phase_after_division[p]` is computed (-1: at the start) and
    after phase `phase_after_phase[p]` has arrived (-1: none); what it brings is needed by division
    `phase_feeds[p]` (`num_divisions`: by the end). Two divisions behind the local one, forward:

        phase 0 (inputs of 1)   travels while division 0 computes
        phase 1 (inputs of 2)   travels while division 1 computes
        phase 2 (results of 1)  travels while division 2 computes
        phase 3 (results of 2)  travels at the end
    """

    num_divisions: int
    tile_division: Int32
    transfers: Transfers
    phase_after_division: Int32
    phase_after_phase: Int32
    phase_feeds: Int32

    @property
    def num_phases(self) -> int:
        return len(self.phase_feeds)
