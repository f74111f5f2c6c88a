"""Layout: how a rank's rows lie in its workspaces."""

from dataclasses import dataclass

from dyncp.checks import whole_number


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are laid out: slots start on multiples of `slot_alignment` (the kernel-tile border),
    a rank's local rows are padded to `local_multiple`. Above 1, a rank without tokens has so many
    rows, too: models that cannot take none run everywhere."""

    slot_alignment: int = 128
    local_multiple: int = 1

    def __post_init__(self) -> None:
        for field in ("slot_alignment", "local_multiple"):
            object.__setattr__(self, field, whole_number(field, getattr(self, field), 1, 2**16))

    def pad_local(self, tokens: int) -> int:
        """Rows of a rank with `tokens` local tokens."""
        tokens = max(tokens, int(self.local_multiple > 1))
        return -(-tokens // self.local_multiple) * self.local_multiple
