"""Loaders and their options for tests, with those of LoaderTuning beside the others."""

from dataclasses import fields
from typing import Any

from dyncp.dataloader import DCPDataLoader, LoaderConfig, LoaderTuning


def make_loader(dataset: Any, mask_fn: Any, **options: Any) -> DCPDataLoader:
    return DCPDataLoader(dataset, mask_fn, **_tuned(options))


def make_config(**options: Any) -> LoaderConfig:
    return LoaderConfig(**_tuned(options))


def _tuned(options: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(LoaderTuning)} & set(options)
    if not names:
        return options
    tuning = LoaderTuning(**{name: options.pop(name) for name in names})
    return options | {"tuning": tuning}
