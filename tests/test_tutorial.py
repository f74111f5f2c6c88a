"""The code in docs/tutorial.md runs, and prints the drawings that the page shows."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"


def test_the_page_runs_and_shows_what_it_prints(capsys):
    names = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
        printed = capsys.readouterr().out
        assert printed in PAGE.read_text(), printed
    assert names["step"].transport.bytes_sent == 200
