"""The plan as a page, in a real browser: what it shows is what the plan says, and nothing in it is executed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fp4ward import cli
from tests.conftest import FIXTURES

FIXTURE = FIXTURES / "q35moe-vl-mixed-w4a16-fp8-modelopt"


def page_of(folder: Path, out: Path, *flags: str) -> str:
    assert cli.main(["plan", str(folder), "--gpu", "H200", "--html", str(out), *flags]) == 0
    return out.read_text()


def shown(page: Path, profile: Path) -> str:
    """The document after its script ran, by Debian's chromium."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium here")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
    command = [browser, *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.partition("<main")[2]


def test_the_page_holds_the_whole_plan_and_nothing_from_elsewhere(tmp_path, capsys):
    page = page_of(FIXTURE, tmp_path / "plan.html")
    text = capsys.readouterr().out
    assert "layers.*.mlp.experts" in text  # the table is still printed
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["hardware"]["name"] == "H200" and data["layers"]
    assert "http:" not in page and "https:" not in page and "src=" not in page


def test_a_browser_shows_memory_steps_and_layers(tmp_path):
    page_of(FIXTURE, tmp_path / "plan.html", "--tp", "2")
    dom = shown(tmp_path / "plan.html", tmp_path / "profile").partition("</main>")[0]
    top = ("on 2 x H200", "SM 9.0, no FP4 cores", "Memory of each rank", "second layout of weights is for cuda_")
    top += ("Not counted: launching from Python",)
    for says in (*top, "rank 1", "decode of 1", "layers.*.mlp.experts", "nvfp4 W4A16"):
        assert says in dom, says


def test_names_from_a_checkpoint_are_text(tmp_path):
    folder = tmp_path / "<img src=x onerror=document.title='hacked'>"
    shutil.copytree(FIXTURE, folder)
    page = page_of(folder, tmp_path / "plan.html")
    assert "<img" not in page
    dom = shown(tmp_path / "plan.html", tmp_path / "profile")
    assert "&lt;img src=x onerror" in dom.partition("</main>")[0]


def test_a_file_that_cannot_be_written_is_one_sentence_before_planning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fp4ward.pieces.read", lambda *_: pytest.fail("it was planned"))
    for path, why in (
        (str(tmp_path / "no" / "plan.html"), f"{tmp_path}/no/plan.html: its folder does not exist"),
        (str(tmp_path), f"{tmp_path}: Is a directory; a file is expected"),
        ("", "'': Is a directory; a file is expected"),
    ):
        assert cli.main(["plan", str(FIXTURE), "--gpu", "cpu", "--html", path]) == 2
        assert capsys.readouterr().err == f"fp4ward: error: {why}\n"
