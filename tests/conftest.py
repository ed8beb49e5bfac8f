"""What every test may use: the repository, its small checkpoints, and (where present) published configurations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported, and for commands that tests start. The models here are tiny: a second thread gains nothing
# on an idle machine, and on a busy one with two cores a token took 600 ms with two threads and 17 ms with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU Triton's kernels are interpreted. Triton asks when it is imported, which transformers does too.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPO = Path(__file__).resolve().parent.parent
FIXTURES = REPO / "tests" / "fixtures"


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], Path]:
    """Folder of a small checkpoint that an exporter wrote: checkpoint("q35moe-w4a16-modelopt")."""

    def folder(name: str) -> Path:
        found = FIXTURES / name
        assert found.is_dir(), f"no fixture {name}"
        return found

    return folder


@pytest.fixture(scope="session")
def published() -> Path:
    """Folder with config.json and quantization JSON of public models; the test is skipped where there is none."""
    folder = Path(os.environ.get("FP4WARD_PUBLISHED_CONFIGS") or REPO.parent / "shared" / "published_configs")
    if not folder.is_dir():
        pytest.skip("no published configurations here (FP4WARD_PUBLISHED_CONFIGS names their folder)")
    return folder
