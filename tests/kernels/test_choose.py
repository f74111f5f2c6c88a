"""What "auto" chooses if flash-attn-4 is installed: working, broken, or in another version."""

import sys

import pytest
import torch

from dyncp.kernels import choose

GPU = torch.device("cuda", 0)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs fake packages flash-attn-4 and triton, for a Hopper GPU."""

    def made(source, version=choose.FLASH4_VERSION):
        package = tmp_path / "flash_attn" / "cute"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(source)
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").touch()
        if version:
            info = tmp_path / f"flash_attn_4-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: flash-attn-4\nVersion: {version}\n")

    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (choose.HOPPER, 0))
    choose._why_not_imported.cache_clear()
    yield made
    choose._why_not_imported.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "triton")]:
        del sys.modules[name]


def test_flash4_is_chosen_if_it_can_be_imported(install):
    install("")
    assert choose.best_kernel(GPU)[0] == "flash4"


def test_triton_replaces_a_broken_install_and_says_why(install):
    install("from flash_attn.missing import kernels")
    name, reason = choose.best_kernel(GPU)
    assert name == "triton"
    assert "fails to import (ModuleNotFoundError: No module named 'flash_attn.missing')" in reason
    with pytest.raises(ValueError, match=r"'flash4' is not available .* reinstall it"):
        choose.choose_kernel("flash4", GPU)


@pytest.mark.parametrize("version", ["4.0.0b1", ""])
def test_triton_replaces_another_version_and_says_why(install, version):
    install("", version)
    name, reason = choose.best_kernel(GPU)
    assert name == "triton"
    assert f"{choose.FLASH4_VERSION} is needed" in reason
