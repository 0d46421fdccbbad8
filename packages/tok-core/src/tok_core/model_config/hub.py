"""Resolve a model name to a local directory: an existing path, or a hub repository that is downloaded once."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from tok_core.errors import ModelError

WANTED_FILES = ["*.json", "*.jinja", "*.safetensors"]  # excludes pickles and code
UNWANTED_FILES = ["*/*", "consolidated*"]  # copies of the same weights in other formats


def resolve(model: str, data_dir: str | None = None) -> Path:
    """Return the directory of `model`: an existing directory as it is, any other name as a hub id ("owner/name").

    A hub repository is downloaded once and stored below `data_dir`, or in the hub library's own cache if that is
    None. Code in a repository is neither downloaded nor run. Raises ModelError, which says how `model` was resolved.
    """
    local = Path(model).expanduser()
    if model and local.is_dir():
        return _with_config(local, f"directory {model}")
    if not model or local.exists() or model.startswith(("/", "./", "../", "~")):
        raise ModelError(f"model {model!r}: is no directory; allowed: a directory or a hub id (owner/name)")
    return _with_config(_download(model, data_dir), f"hub repository {model}")


def _download(model: str, data_dir: str | None) -> Path:
    cache = None if data_dir is None else Path(data_dir).expanduser() / "models"
    tried = f"model {model!r}: is no directory, and as a hub id"
    try:
        return Path(
            snapshot_download(model, cache_dir=cache, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES)
        )
    except HFValidationError as error:
        raise ModelError(f'{tried} it is malformed; allowed: "owner/name": {error}') from error
    except GatedRepoError as error:
        raise ModelError(f"{tried} it is gated: accept its terms there, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{tried} it is not found; a private repository needs HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        raise ModelError(f"{tried} it is not cached, and the hub does not answer: {cause}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{tried} its download failed: {error}") from error


def _with_config(path: Path, name: str) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{name}: has no config.json; a model is config.json with *.safetensors")
    return path
