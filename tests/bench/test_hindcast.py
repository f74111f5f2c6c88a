"""Published measurements are predicted from their settings, as well as docs/simulate.md says."""

from pathlib import Path

import pytest
from benchmarks.hindcast import FOLDER, TABLES, Cell, draw, flash2, main, read, summarise

from dyncp.cost import find_profile


@pytest.fixture(scope="module")
def cells() -> dict[str, list[Cell]]:
    """The cells of every table, with one drawn batch each."""
    return {name: list(table(FOLDER, 1)) for name, table in TABLES.items()}


def test_rings_are_predicted_without_a_fit(cells: dict[str, list[Cell]]) -> None:
    times = [cell for cell in cells["ring_flash_attention_8gpu"] if cell.unit == "ms"]
    shares = [cell for cell in cells["ring_flash_attention_8gpu"] if cell.unit == "%"]
    assert len(times) == len(shares) == 8
    assert max(abs(cell.error) for cell in times) < 0.06
    assert max(abs(cell.predicted - cell.measured) for cell in shares) < 5


def test_tables_of_other_folders_are_predicted(tmp_path: Path) -> None:
    """H800s compute like H100s over less than half of the NVLink bandwidth."""
    table = "ring_flash_attention_8gpu.csv"
    text = (FOLDER / table).read_text(encoding="utf-8")
    found = {}
    for gpu in ("H100", "H800"):
        (tmp_path / table).write_text(text.replace(",A100,", f",{gpu},"), encoding="utf-8")
        cells = TABLES["ring_flash_attention_8gpu"](tmp_path, 1)
        found[gpu] = {cell.setting.split(" ", 1)[1]: cell.predicted for cell in cells}
    assert found["H100"]["batch ring fwd"] < 30
    assert all(found["H800"][k] >= v for k, v in found["H100"].items() if "share" not in k)


def test_times_grow_as_documents_shorten(cells: dict[str, list[Cell]]) -> None:
    """They hardly changed when costs per step and per sequence were not priced."""
    found = {cell.setting: cell.predicted for cell in cells["paper_attention"]}
    for method in ("loongtrain", "transformer_engine"):
        short, long = (found[f"ldc × {scale} {method} forward"] for scale in ("0.5", "4"))
        assert short > 1.5 * long


def test_fitted_tables_are_not_counted(cells: dict[str, list[Cell]]) -> None:
    assert not any(cell.counted for cell in cells["paper_attention"])
    assert summarise(cells["paper_attention"]).endswith("not counted")


def test_steps_of_a_whole_model_are_predicted(cells: dict[str, list[Cell]]) -> None:
    steps = [cell for cell in cells["paper_end_to_end"] if cell.counted]
    assert len(steps) == 2
    assert all(abs(cell.error) < 0.2 for cell in steps)


def test_kernel_rates_are_those_of_the_curve() -> None:
    """DistCA's longest document ran at 341 TFLOP/s."""
    fitted = flash2(find_profile("h100"), FOLDER)
    assert 320e12 < fitted.attention_forward < 380e12
    assert 0 < fitted.call_seconds < 40e-6
    assert fitted.attention_backward < fitted.attention_forward
    assert flash2(find_profile("a100"), FOLDER) == find_profile("a100")


def test_every_table_says_where_it_is_from() -> None:
    for path in FOLDER.glob("*.csv"):
        assert path.read_text(encoding="utf-8").startswith("# "), path.name
        assert read(path.stem, FOLDER)


def test_predictions_are_drawn_beside_measurements(
    cells: dict[str, list[Cell]], tmp_path: Path
) -> None:
    draw([cell for table in cells.values() for cell in table], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def test_a_table_that_is_not_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "unknown"])
    assert "names 'unknown'; choose from ring_flash_attention_8gpu" in capsys.readouterr().err
