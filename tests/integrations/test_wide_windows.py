"""Mask functions that attend further than the windows of a model's layers are warned of, once."""

import logging

import pytest

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from dyncp import masks
from dyncp.integrations.transformers import layers, model_masks

WIDE = masks.sliding_window(window=64)
WIDER = {
    "a function": WIDE,
    "within": masks.within(masks.causal, window=64),
    "of samples": lambda sample: masks.sliding_window(sample, window=64),
    "by name": masks.named(default=masks.causal, window_32=WIDE),
    "of samples by name": lambda sample: dict.fromkeys(("default", "window_32"), WIDE(sample)),
    "no window by name": lambda sample: dict.fromkeys(
        ("default", "window_32"), masks.causal(sample)
    ),
}
NO_WIDER = {
    "causal": masks.causal,
    "as wide": masks.sliding_window(window=32),
    "of samples": lambda sample: masks.lambda_shaped(sample, window=32),
    "by name": masks.named(default=WIDE, window_32=masks.sliding_window(window=32)),
    "documents": lambda sample: masks.document_packed(sample, documents=[50, 50]),
}


def warnings_of_windows(mask_fn, caplog):
    layers._warn_of_window.cache_clear()
    caplog.clear()
    wanted = (layers.LayerMask(), layers.LayerMask("window_32", "window", 32))
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        found = model_masks(mask_fn, wanted)
        for _ in range(2):
            found({"input_ids": [0] * 100})
    return caplog.text.count("the mask function attends further than some layers")


def test_windows_wider_than_the_models_are_warned_of_once(caplog):
    for name, mask_fn in WIDER.items():
        assert warnings_of_windows(mask_fn, caplog) == 1, name
    for name, mask_fn in NO_WIDER.items():
        assert warnings_of_windows(mask_fn, caplog) == 0, name
