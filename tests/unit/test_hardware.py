"""Rows of machines, and what `--gpu` takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.errors import UserError
from fp4ward.hardware import GIB, ROWS, detect, parse, seen


def test_every_row_makes_sense() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.memory > 10 * GIB and row.bandwidth >= 1e10 and row.f32 > 0
        assert row.cpu == (row.bf16 == 0), row.name
        assert bool(row.fp4) == (row.sm >= 100), row.name  # FP4 tensor cores came with Blackwell
        assert (row.fp8 > 0) == (row.sm >= 89), row.name
        assert row.cpu or row.bf16 > row.f32


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H200", "H200"), ("h200", "H200"), ("NVIDIA H200", "H200"), ("H20", "H20"), ("h20-141", "H20-141"),
        ("NVIDIA H20 141GB", "H20-141"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("h100_nvl", "H100-NVL"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA L40S", "L40S"), ("4090", "RTX-4090"),
        ("A100", "A100"), ("NVIDIA A100-SXM4-40GB", "A100-40"), ("a100_40gb", "A100-40"), ("A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A10", "A10"), ("a10g 24GB", "A10G"), ("A30", "A30"), ("A40", "A40"), ("L4 24GB", "L4"),
        ("RTX-3090", "RTX-3090"), ("rtx_3090", "RTX-3090"), ("rtx 3090", "RTX-3090"), ("RTX3090Ti", "RTX-3090-Ti"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090-Ti"), ("NVIDIA RTX A6000", "RTX-A6000"), ("a6000", "RTX-A6000"),
        ("A5000", "RTX-A5000"), ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"), ("rtx6000ada", "RTX-6000-Ada"),
        ("rtx_6000-ADA", "RTX-6000-Ada"), ("NVIDIA GeForce RTX 4080", "RTX-4080"), ("l40", "L40"),
        ("rtx5090", "RTX-5090"), ("NVIDIA GeForce RTX 5090", "RTX-5090"), ("cpu", "cpu"), ("GB10", "GB10"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"), ("pro6000", "RTX-PRO-6000"),
        ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA B200", "B200"), ("b300", "B300"), ("NVIDIA H20-3e", "H20-141"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144"), ("gh200-144", "GH200-144"), ("H20 96GB", "H20"),
        ("H100 NVL 94GB", "H100-NVL"), ("H100 96GB,mem=95,bw=3350", "H100"), ("H20,mem=141", "H20-141"),
    ],
)  # fmt: skip
def test_names_in_any_spelling(text: str, name: str) -> None:
    assert parse(text).name == name


def test_numbers_make_a_machine_and_change_one() -> None:
    own = parse("sm=90, mem=141, bw=4800, bf16=989")
    assert (own.sm, own.memory, own.bandwidth, own.bf16) == (90, 141 * GIB, 4.8e12, 989e12)
    assert own.f32 > 0 and not own.fp4
    assert parse("sm=120,mem=32,bw=1792,bf16=209,fp4=1676").fp4 == 1.676e15
    changed = parse("h20,mem=90.5")
    assert changed == dataclasses.replace(parse("H20"), memory=int(90.5 * GIB), source=changed.source)
    assert "--gpu" in changed.source
    for text, sm in (("9.0", 90), ("90", 90), ("10.3", 103), ("121", 121), ("7.5", 75)):
        assert parse(f"sm={text},mem=141,bw=4800,bf16=989").sm == sm


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("H200x2", "--tp"), ("V100", "known are A100"), ("", "no key"), ("sm=90,mem=141,bw=4800", "bf16 is missing"),
        ("sm=90,mem=0,bw=4800,bf16=1", "mem is missing"), ("H200,speed=3", "'speed=3'"),
        ("H200,mem=-1", "not one plain number"),
        ("H200,mem=nan", "not one plain number"), ("H200,mem=1,mem=2", "not one"), ("mem=1,H200", "no key=number"),
        ("H200,bf16=0", "above 0"), ("cpu,bf16=3", "above 0"), ("Radeon RX 7900", "is not known; known are"),
        ("RTX 4080 12GB", "RTX-4080 has 16 GiB; give"), ("H100 96GB", "H100 has 79 GiB"),
        ("RTX 4090 Laptop", "not known"), ("sm75", "give numbers: sm=75,mem=..,"),
        *((f"H200,sm={n}", "from 50 to 130") for n in ("999", "9", "0.9", "49", "90.0", "9.00", "1000", "131")),
    ],
)  # fmt: skip
def test_what_is_no_machine_gets_a_sentence(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word.replace("(", r"\(")) as e:
        parse(text)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("RTX 3080", "RTX-4080, RTX-3090"), ("NVIDIA GeForce RTX 5080", "RTX-5090"), ("rtx_4070-ti", "RTX-3090-Ti"),
        ("T4", "L4"), ("H200x2", "H200"), ("RTX A4000", "RTX-A6000"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_told_those_like_it(text: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"is not known \(close are {near}[^)]*\); known are A100, ") as e:
        parse(text)
    assert str(e.value).count("B300") == 1  # of all, not of those like it


@given(st.text(max_size=40) | st.from_regex(r"(sm|mem|bw|bf16|fp4)=[0-9.e,-]{0,8}(,(mem|bw|bf16)=[0-9]{1,4}){0,3}"))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_any_text_is_a_machine_or_a_sentence(text: str) -> None:
    try:
        row = parse(text)
    except UserError as e:
        assert "\n" not in str(e) and len(str(e)) < 500
    else:
        assert row.memory > 0 and row.bandwidth > 0 and (row.bf16 or row.f32) > 0


@pytest.mark.parametrize(
    ("name", "gib", "row", "memory"),
    [
        ("NVIDIA H20-3e", 139.7, "H20-141", 139.7), ("NVIDIA GH200 144G HBM3e", 142.5, "GH200-144", 142.0),
        ("NVIDIA H20", 95.6, "H20", 95.0), ("NVIDIA H20", 140.4, "H20-141", 139.7),
        ("NVIDIA A100-SXM4-40GB", 39.6, "A100-40", 39.4), ("NVIDIA H100 96GB", 94.5, "H100", 94.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.75, "H100", 9.75),
        ("NVIDIA RTX 6000 Ada Generation", 44.4, "RTX-6000-Ada", 44.4),  # with ECC
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, "NVIDIA GeForce RTX 4090 Laptop GPU", 15.6),
    ],
)  # fmt: skip
def test_of_one_name_the_row_closest_in_memory_is_seen(name: str, gib: float, row: str, memory: float) -> None:
    found = seen(name, 90, int(gib * GIB))
    assert (found.name, found.memory) == (row, int(memory * GIB))


def test_the_driver_is_asked_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    here = detect()  # no such tool
    assert here.cpu and here.memory > GIB
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771'\necho 'NVIDIA H200, 9.0, 143771'\n")
    tool.chmod(0o755)
    assert detect() == parse("H200")
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 96GB, 9.0, 96256'\n")  # not the memory that the row has
    assert detect().memory == 94 * GIB
    tool.write_text("#!/bin/sh\necho 'NVIDIA A16, 8.6, 15356'\n")  # no row: as the engine sees it
    assert detect() == seen("NVIDIA A16", 86, 15356 << 20) and "assumed" in detect().source
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' ; exit 9\n")
    assert detect().cpu
