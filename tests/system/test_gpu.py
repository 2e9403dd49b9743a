"""A GPU that is there and that torch cannot use: device nodes and the driver's file are pretended."""

import os

import pytest
import torch

from grpo.system import gpu
from grpo.system.errors import UserError
from grpo.system.gpu import driver_version, unused_gpu
from grpo.training.trainer import make_trainer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2.0\n"
NEW = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A machine with a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpu, "NODES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(gpu, "DRIVER", str(tmp_path / "version"))
    return tmp_path


def test_each_cause_has_its_line(there, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built for CPUs: install its CUDA build" in unused_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert unused_gpu() == "torch is built for CUDA 13.0 and cannot start it: see what nvidia-smi says"
    (there / "version").write_text(NEW)
    assert driver_version() == "580.65.06" and "nvidia-smi" in unused_gpu()
    (there / "version").write_text(OLD)
    assert driver_version() == "550.54.15"
    line = "torch is built for CUDA 13.0, which needs driver 580 or newer, and this is 550.54.15: update it"
    assert unused_gpu() == line
    monkeypatch.setattr(torch.version, "cuda", "12.8")  # needs 525
    assert "nvidia-smi" in unused_gpu()


def test_a_gpu_that_is_hidden_forbidden_or_absent_is_not_missed(there, monkeypatch):
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert unused_gpu() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert unused_gpu()
    monkeypatch.setattr(
        os, "open", lambda *_: (_ for _ in ()).throw(PermissionError())
    )  # a job without a GPU on its node
    assert unused_gpu() is None
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "NODES", str(there / "none[0-9]*"))
    assert unused_gpu() is None


def test_trainer_and_server_stop_and_the_cpu_is_a_choice(there, monkeypatch):
    from grpo.extras.serve.__main__ import device_of

    monkeypatch.setattr(torch.version, "cuda", None)
    for accelerator in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"has a GPU that the run cannot use: .*or set trainer=cpu"):
            make_trainer([], [], accelerator=accelerator)
    with pytest.raises(UserError, match=r"has a GPU that the server cannot use: .*or set device=cpu"):
        device_of("auto")
    assert device_of("cpu") == torch.device("cpu")
    make_trainer([], [], accelerator="cpu")


@pytest.mark.parametrize(
    ("card", "arches", "refused"),
    [
        ((7, 0), "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", True),  # V100
        ((7, 0), "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", False),
        ((7, 5), "sm_75 sm_80", False),  # T4
        ((8, 9), "sm_75 sm_80 sm_86 sm_90", False),  # L4: code for 8.6 is of its generation
        ((9, 0), "sm_75 sm_80 sm_86", True),  # code for 8.6 is not
        ((9, 0), "sm_75 sm_80 compute_86", False),  # PTX is compiled for any later card
        ((7, 0), "compute_75", True),  # and for no earlier one
        ((12, 1), "sm_100a sm_120f", False),
        ((10, 0), "sm_100a sm_120f", False),
        ((9, 0), "gfx90a gfx942", False),  # AMD's
    ],
)
def test_a_gpu_that_torch_was_not_built_for_is_refused_in_a_line(monkeypatch, card, arches, refused):
    """torch.cuda.is_available() is True there, and the first kernel would end the run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    monkeypatch.setattr(torch.cuda, "get_arch_list", arches.split)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla X")
    if not refused:
        assert unused_gpu() is None
        return
    what = f"a GPU that the run cannot use: Tesla X has compute capability {card[0]}.{card[1]}, and torch was built for"
    with pytest.raises(UserError, match=f"{what} {', '.join(arches.split())}: install a build .*, or set trainer=cpu"):
        make_trainer([], [])
