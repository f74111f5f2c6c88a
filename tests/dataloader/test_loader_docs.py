"""The code in docs/dataloader.md runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "dataloader.md"


def test_the_page_runs_on_one_rank():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    names["loader"].close()
    names["resumed"].close()
