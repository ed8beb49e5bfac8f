"""From what the user calls a model to a folder: a folder itself, a Hugging Face name, or the package's own "demo".

Only safetensors, JSON, the chat template and tokenizer files are fetched: no pickle, no code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from fp4ward.checkpoint.index import select_files
from fp4ward.errors import UserError, one_line, shown

ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.tiktoken", "merges.txt", "vocab.txt"]
IGNORE = ["*/*", "consolidated*", "*.py", "*.bin"]  # "*/*": nothing from subfolders
DEMO = Path(__file__).resolve().parent.parent / "demo_model"  # package data
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Folder of `model`: a folder, else `org/name` from the local Hugging Face cache, else by download.

    weights: False is content with the JSON files, and downloads no more.

    "demo" is the small model in this package, unless ./demo is a checkpoint; "./demo" is always the folder.
    A complete cached copy is used without asking the network. UserError in one sentence when nothing leads to a folder.
    """
    path = Path(os.path.expanduser(model))  # os.path's functions take any name: too long, of an unknown user
    if not model or "\0" in model:
        raise UserError("no model is given; give a folder or a Hugging Face name (organization/name)")
    if model == "demo" and not (path / "config.json").is_file():
        if revision is not None:
            raise UserError(f"demo is the model in this package, so the revision '{revision}' has no meaning")
        if not (DEMO / "config.json").is_file():
            raise UserError(f"this installation of fp4ward came without the demo model ({DEMO}); give a folder")
        return DEMO
    if os.path.isdir(path):
        if revision is not None:
            raise UserError(f"{model} is a folder, so the revision '{revision}' has no meaning; leave it out")
        return path
    if os.path.exists(path):
        raise UserError(f"{model} is a file; give the folder that holds config.json and the safetensors files")
    if not HUB_NAME.fullmatch(model) or ".." in model:
        raise UserError(f"{shown(model)}: there is no such folder, and it is no Hugging Face name (organization/name)")
    cached, fault = _cached(model, revision, weights)
    return cached or _download(model, revision, fault, ALLOW if weights else ["*.json"])


def _cached(model: str, revision: str | None, weights: bool) -> tuple[Path | None, str | None]:
    """The cached snapshot if it is complete; else None and what is wrong with it (None: there is none)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model, revision=revision, local_files_only=True, allow_patterns=ALLOW, ignore_patterns=IGNORE
        )
    except LocalEntryNotFoundError as e:
        partial = getattr(e, "snapshot_path", None)  # newer versions know when a download was interrupted
        return None, f"the copy in {partial} is incomplete" if partial else None
    except (HFValidationError, ValueError) as e:
        raise UserError(f"{model}: not a name or revision that Hugging Face allows: {one_line(e)}") from None
    if not weights and (Path(found) / "config.json").is_file():
        return Path(found), None
    try:
        select_files(Path(found))
    except UserError as e:
        return None, f"the cached copy is incomplete ({e})"
    return Path(found), None


def _download(model: str, revision: str | None, fault: str | None, allow: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local = fault or "it is not in the local cache"
    where = f"{model} (revision {revision})" if revision else model
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{where}: no such folder, {local}, and HF_HUB_OFFLINE forbids a download; give a folder")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=allow, ignore_patterns=IGNORE))
    except GatedRepoError:
        raise UserError(
            f"{where}: the repository is gated; accept its terms on huggingface.co and log in with 'hf auth login'"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{where}: the repository has no such revision") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{where}: no such folder here and no such repository on huggingface.co; "
            f"check the name, or log in with 'hf auth login' if it is private"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise UserError(
            f"{where}: no such folder, {local}, and huggingface.co cannot be reached; give a folder or connect"
        ) from None
    except Exception as e:  # a full disk, a server error, the HTTP library's own: which one depends on the version
        raise UserError(
            f"{where}: the download failed: {type(e).__name__}: {one_line(e)}; run the command again to resume it"
        ) from None
