"""Samples that can be trained on without an error, but not as they are meant: labels that are
shifted already, padding that nothing marks, tokens and positions that the model does not have.
What is certain is an error, what is likely a warning, once per loader."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dyncp.blocks import AttentionShape
from dyncp.cost import ModelConfig
from dyncp.samples.fields import NO_TARGET, input_ids_of, labels_of

logger = logging.getLogger(__name__)

RUN = 8  # equal tokens at an end of a sample that look like padding
SHIFTED = 4  # trained labels that all equal a neighbour's token, to say that they are shifted
# Columns that say which tokens are trained on, which dyncp takes from labels alone.
TARGET_COLUMNS = (
    "assistant_masks", "assistant_mask", "completion_mask", "label_mask", "loss_mask",
    "loss_weights", "prompt_mask", "target_mask",
)  # fmt: skip


class MixedLabels(RuntimeError):  # noqa: N818 (a kind of dataset)
    """Some samples have labels and others have none. Not dropped by `bad_samples`: which samples
    are the faulty ones is unknown."""


@dataclass(frozen=True)
class SampleLimits:
    """What a model can take: `vocab` token ids and `positions` (None: unknown). A `learned`
    position beyond them does not exist; rotary ones only were not trained."""

    vocab: int | None = None
    positions: int | None = None
    learned: bool = False

    @staticmethod
    def of(model: Any) -> "SampleLimits":
        """The limits of a loader's `model`, as far as it tells them."""
        if model is None or isinstance(model, AttentionShape):
            return SampleLimits()
        sizes = ModelConfig.of(model)
        return SampleLimits(sizes.vocab, sizes.positions, sizes.learned_positions)

    def check_ids(self, what: str, ids: Tensor, number: int) -> None:
        """Raises ValueError for ids (or labels) that the model does not have."""
        least, most = (int(bound) for bound in torch.aminmax(ids))
        if least >= 0 and (self.vocab is None or most < self.vocab):
            return
        wrong = ids < 0 if least < 0 else ids >= (self.vocab or 0)
        token = int(wrong.nonzero()[0, 0])
        most_allowed = "" if self.vocab is None else f" to {self.vocab - 1}, the model's vocabulary"
        hint = ", or -100 for a token that is not a target" if what == "labels" else ""
        raise ValueError(
            f"{what}[{token}] of sample {number} is {int(ids[token])}; allowed is 0"
            f"{most_allowed or ' and above'}{hint}"
        )


class SampleChecks:
    """The checks of one loader's samples, or those of one batch, without their padding."""

    def __init__(self, limits: SampleLimits, *, warns: bool = True) -> None:
        self._limits, self._warns = limits, warns
        self._told: set[str] = set()
        self._first: tuple[int, bool] | None = None  # number of a sample, and whether it has labels

    def check(self, sample: Mapping[str, Any], number: int, token_fields: Mapping[str, int]) -> int:
        """The sample's number of tokens; ValueError if it cannot be trained on as it is meant."""
        ids = input_ids_of(sample, number)
        self._limits.check_ids("input_ids", ids, number)
        _check_columns(sample, number, token_fields)
        trained = torch.ones(len(ids), dtype=torch.bool)
        if "labels" in sample and "labels" not in token_fields:
            labels = labels_of(sample, ids, number)
            trained = labels != NO_TARGET
            if trained.any():
                self._limits.check_ids("labels", labels.where(trained, 0), number)
            _check_shift(ids, labels, number)
        if sample.get("attention_mask") is None:
            self._look_for_padding(ids, trained, number)
        if "position_ids" in sample:
            self._look_for_documents(sample, number)
        return len(ids)

    def compare_labels(self, sample: Mapping[str, Any], number: int) -> None:
        """Raises MixedLabels if only some samples have labels."""
        has = "labels" in sample
        if self._first is None:
            self._first = number, has
        elif self._first[1] != has:
            pair = (number, self._first[0]) if has else (self._first[0], number)
            raise MixedLabels(
                f"sample {pair[0]} has labels and sample {pair[1]} has none, so all tokens of the "
                "latter would be trained on; give labels to all samples (a copy of input_ids, or "
                "-100 for tokens that are not targets) or to none"
            )

    def check_positions(self, positions: Tensor, number: int) -> None:
        """Raises ValueError, or warns once, if there are positions that the model does not have."""
        if not positions.numel():
            return
        least, most = (int(bound) for bound in torch.aminmax(positions))
        if least < 0:
            raise ValueError(f"sample {number} has position {least}; positions must be at least 0")
        allowed = self._limits.positions
        if allowed is None or most < allowed:
            return
        text = (
            f"sample {number} has position {most}; the model has positions 0 to {allowed - 1} "
            "(max_position_embeddings)"
        )
        if self._limits.learned:
            raise ValueError(f"{text}: cut samples with max_length= and too_long=")
        self._warn(
            "positions", f"{text} and was not trained beyond them, unless you scale its RoPE"
        )

    def _look_for_padding(self, ids: Tensor, trained: Tensor, number: int) -> None:
        for end, token in (("ends", ids[-1]), ("begins", ids[0])):
            same = ids == token
            run = int(same.sum())
            at_end = same[-run:] if end == "ends" else same[:run]
            targets = trained[-run:] if end == "ends" else trained[:run]
            if RUN <= run < len(ids) and at_end.all() and targets.any():
                self._warn(
                    "padding",
                    f"sample {number} {end} with {run} times token {int(token)}, which it has "
                    "nowhere else, and trains on them. If that is padding, pass attention_mask "
                    "(0: padding), or remove it",
                )

    def _look_for_documents(self, sample: Mapping[str, Any], number: int) -> None:
        positions = torch.as_tensor(sample["position_ids"])
        starts: Any = (positions[1:] == 0).nonzero().flatten() if positions.ndim == 1 else []
        if len(starts) and not any(name in sample for name in ("document_lengths", "parents")):
            self._warn(
                "documents",
                f"position_ids of sample {number} begin again at token {int(starts[0]) + 1}: if "
                "several documents are packed there, the mask must separate them "
                "(masks.document_packed with document_lengths); positions do not",
            )

    def _warn(self, kind: str, text: str) -> None:
        if self._warns and kind not in self._told:
            self._told.add(kind)
            logger.warning("%s. This warning is given once", text)


def _check_columns(sample: Mapping[str, Any], number: int, token_fields: Mapping[str, int]) -> None:
    if "shift_labels" in sample and "shift_labels" not in token_fields:
        raise ValueError(
            f"sample {number} has shift_labels, which dyncp makes from labels: pass labels, one "
            "per token and not shifted"
        )
    found = [name for name in TARGET_COLUMNS if name in sample and name not in token_fields]
    if found and "labels" not in sample:
        raise ValueError(
            f"sample {number} has {found[0]} but no labels, so all of its tokens would be trained "
            "on: pass labels that are -100 where a token is not a target, or declare "
            f"{found[0]} in token_fields, or leave it out"
        )


def _check_shift(ids: Tensor, labels: Tensor, number: int) -> None:
    """Raises ValueError if all labels are the token before or after their own."""
    trained = labels != NO_TARGET
    if (labels == ids)[trained].any():
        return
    for name, there, others in (
        ("next", trained[:-1], labels[:-1] == ids[1:]),
        ("previous", trained[1:], labels[1:] == ids[:-1]),
    ):
        if int(there.sum()) >= SHIFTED and others[there].all():
            raise ValueError(
                f"labels of sample {number} are shifted already: each is the {name} token. The "
                "loader shifts labels itself: pass labels[i] for input_ids[i], such as a copy of "
                "input_ids"
            )
