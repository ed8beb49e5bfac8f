"""Every CUDA kernel compiles for every GPU we name, without one, and keeps what it computes in registers.

Of the variants that differ only in sizes (tokens, rings, warps) the largest is compiled, for all formats and types:
about a second each. FP4WARD_SOAK=1 compiles all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kernel import Floor
from fp4ward.kernels import nvrtc

# Defines that change what is computed, and not how it is cut up
MEANINGS = ("W4", "HALF", "BLOCKED", "PDL", "GATED", "OWN", "REPEAT", "X_HALF", "CACHE")


@pytest.fixture(scope="module", autouse=True)
def cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kept between runs: an entry's name is a hash of all that it is made from."""
    nvrtc._nvrtc()  # not found is an error: the [test] extra brings it
    before, nvrtc.folder = nvrtc.folder, Path(request.config.cache.mkdir("kernels"))
    yield
    nvrtc.folder = before


def largest(sources: list[nvrtc.Source]) -> list[nvrtc.Source]:
    groups: dict[tuple[object, ...], list[nvrtc.Source]] = {}
    for source in sources:
        same = tuple(pair for pair in source.defines if pair[0] in MEANINGS)
        groups.setdefault((source.file, source.entry, same), []).append(source)
    return [max(g, key=lambda s: [v for n, v in sorted(s.defines) if n not in MEANINGS]) for g in groups.values()]


@pytest.mark.parametrize("sm", nvrtc.TARGETS)
def test_every_kernel_compiles_for_it_without_spills(sm: int) -> None:
    sources = nvrtc.rows(sm) if os.environ.get("FP4WARD_SOAK") else largest(nvrtc.rows(sm))
    sources += [Floor.source(threads, loads) for threads, loads in sorted({way[:2] for way in Floor.WAYS})]
    nvrtc.warm(sources, nvrtc.arch(sm))
    made = {f"{s.file} {s.entry} {s.defines}": nvrtc.binary(s, nvrtc.arch(sm)) for s in sources}
    assert {name: b.spills for name, b in made.items() if b.spills} == {}
    assert all(b.code[:4] == b"\x7fELF" and 0 < b.registers <= 255 for b in made.values())


def test_every_file_has_a_row() -> None:
    """A .cu that nothing launches would not be compiled here either."""
    assert {s.file for sm in nvrtc.TARGETS for s in nvrtc.rows(sm)} == {p.name for p in nvrtc.HERE.glob("*.cu")}


def test_the_largest_of_variants_stands_for_them() -> None:
    def variant(**defines: int) -> nvrtc.Source:
        return nvrtc.Source("a.cu", tuple(defines.items()), "k")

    few = [variant(W4=1, NT=1, RING=9), variant(W4=1, NT=8, RING=2), variant(W4=0, NT=1)]
    assert largest(few) == [few[1], few[2]]
