"""Documents to train on: the text files of a folder, one token per byte."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
SHORTEST = 2  # bytes: one to read and one to predict
SNIFFED = 1024


class TextCorpus:
    """The text files below `folder`, ordered by path: samples `{"input_ids": int64[tokens]}`.

    A document is the first `max_length` bytes of a file. Hidden files, tests and installed packages
    are left out, and so are files with a zero byte near their start, which are not text.
    """

    def __init__(self, folder: Path | str, max_length: int, suffix: str = "") -> None:
        self.folder, self.max_length = Path(folder), max_length
        if not self.folder.is_dir():
            raise ValueError(f"corpus {str(folder)!r} is not a folder")
        self.files = sorted(file for file in _walk(self.folder, suffix) if _is_text(file))
        if not self.files:
            raise ValueError(
                f"corpus {str(folder)!r} has no text files of {SHORTEST} bytes or more"
            )

    @staticmethod
    def standard_library(max_length: int) -> "TextCorpus":
        """The source files of the Python that runs: long-tailed, and always there."""
        return TextCorpus(sysconfig.get_path("stdlib"), max_length, ".py")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with self.files[index].open("rb") as file:
            text = file.read(self.max_length)
        return {"input_ids": torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))}


def _walk(folder: Path, suffix: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")
        ]
        yield from (
            Path(parent, name)
            for name in names
            if name.endswith(suffix) and not name.startswith(".")
        )


def _is_text(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size < SHORTEST:
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(SNIFFED)
