"""From a name to a folder, without a network: local folders, the Hugging Face cache, and one sentence for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.utils
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from fp4ward.checkpoint import hub
from fp4ward.checkpoint.hub import resolve_model
from fp4ward.errors import UserError
from tests.build import Checkpoint, Raw

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a network that must not be used."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    real = huggingface_hub.snapshot_download

    def local_only(*args: Any, **kwargs: Any) -> object:
        assert kwargs.get("local_files_only"), "the network is asked"
        return real(*args, cache_dir=folder, **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local_only)
    return folder


def fill(cache: Path, name: str = "org/model", shards: int = 1) -> Path:
    """A cached snapshot of the main branch, as the hub's client lays it out."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    c = Checkpoint({"config.json": {}}, {f"t{i}": Raw.f32(1.0) for i in range(shards)})
    return c.save(repo / "snapshots" / COMMIT, shards=shards)


def online(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[dict[str, Any]]:
    """A hub that answers a download; returns the calls."""
    calls: list[dict[str, Any]] = []
    local_only = huggingface_hub.snapshot_download

    def download(*args: Any, **kwargs: Any) -> object:
        if kwargs.get("local_files_only"):
            return local_only(*args, **kwargs)
        calls.append(kwargs)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def fault(model: str, revision: str | None = None) -> str:
    with pytest.raises(UserError) as e:
        resolve_model(model, revision)
    assert "\n" not in str(e.value)
    return str(e.value)


def http_error(kind: type[HfHubHTTPError], status: int = 404) -> HfHubHTTPError:
    import httpx

    return kind("two\nlines", response=httpx.Response(status, request=httpx.Request("GET", "http://x")))


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_model("org/model") == Path("org/model")  # before any look at the cache
    assert "revision" in fault(str(tmp_path), "main")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file" in fault(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./x", "../org/m", "a/b/c", "model", "", "a\\b", "org/..", "a b"])
def test_what_is_neither_folder_nor_name(name: str) -> None:
    text = fault(name)
    assert "no such folder" in text or (name == "" and "no model is given" in text)


def test_names_that_the_file_system_refuses() -> None:
    assert "no such folder" in fault("a" * 5000) and len(fault("a" * 5000)) < 300
    assert "no such folder" in fault("~no-such-user/model")
    assert "not a name" in fault("a" * 500 + "/" + "b" * 500)


def test_the_cache_is_used_without_the_network(cache: Path) -> None:
    snapshot = fill(cache, shards=2)
    assert resolve_model("org/model") == snapshot
    assert resolve_model("org/model", COMMIT) == snapshot
    assert resolve_model("org/model", "main") == snapshot


def test_an_interrupted_download_is_resumed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, shards=2)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    calls = online(monkeypatch, snapshot)
    assert resolve_model("org/model") == snapshot
    assert len(calls) == 1


def test_an_interrupted_download_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, shards=2)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    (snapshot / "model-00002-of-00002.safetensors").symlink_to(cache / "blob.incomplete")
    online(monkeypatch, huggingface_hub.errors.LocalEntryNotFoundError("no\nnetwork"))
    text = fault("org/model")
    assert "incomplete" in text and "model-00002-of-00002.safetensors" in text and "cannot be reached" in text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("x"), "huggingface.co cannot be reached"),
        (http_error(RepositoryNotFoundError), "no such repository"),
        (http_error(GatedRepoError, 403), "gated"),
        (http_error(RevisionNotFoundError), "no such revision"),
        (http_error(HfHubHTTPError, 500), "download failed"),
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("anything\nelse"), "download failed: RuntimeError: anything else"),
    ],
)
def test_each_failure_has_its_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    online(monkeypatch, error)
    assert words in fault("org/model", "v1") and "org/model (revision v1)" in fault("org/model", "v1")


def test_only_data_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = online(monkeypatch, tmp_path)
    resolve_model("org/model")
    allow, ignore = calls[0]["allow_patterns"], calls[0]["ignore_patterns"]
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt",
             "pytorch_model.bin", "modeling_x.py", "original/model.safetensors", "consolidated.safetensors",
             "tokenizer.py"]  # fmt: skip
    keep = huggingface_hub.utils.filter_repo_objects  # type: ignore[attr-defined]
    kept = list(keep(files, allow_patterns=allow, ignore_patterns=ignore))
    assert kept == files[:5]


def test_offline_mode_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in fault("org/model")


def test_the_hub_is_imported_on_use() -> None:
    code = "import sys, fp4ward.checkpoint.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert hub.HUB_NAME.fullmatch("nvidia/Qwen3.6-35B-A3B-NVFP4")


def test_planning_downloads_no_weights(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "answer"
    calls = online(monkeypatch, here)
    assert resolve_model("org/model", weights=False) == here
    assert [c["allow_patterns"] for c in calls] == [["*.json"]]
    snapshot = fill(cache, shards=2)
    (snapshot / "model-00002-of-00002.safetensors").unlink()  # an interrupted download is enough for a plan
    assert resolve_model("org/model", weights=False) == snapshot and len(calls) == 1
    assert resolve_model("org/model") == here and calls[1]["allow_patterns"] == hub.ALLOW
