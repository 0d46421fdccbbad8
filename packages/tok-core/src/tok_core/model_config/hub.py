"""Resolve a model name to a local directory: an existing path, or a hub repository that is downloaded once."""

from __future__ import annotations

from pathlib import Path

from tok_core.errors import InvalidField, ModelError
from tok_core.model_config.families import read_family
from tok_core.model_config.fields import Fields

WANTED_FILES = ["*.json", "*.jinja", "*.safetensors"]  # excludes pickles and code
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.jinja"]
# Copies of the same weights in other formats; "*" also matches "/", and templates may be in a folder.
UNWANTED_FILES = ["*/*.json", "*/*.safetensors", "consolidated*"]


def resolve(model: str, data_dir: str | None = None, revision: str | None = None) -> Path:
    """Return the absolute path of `model`: of an existing directory, or of a hub id ("owner/name").

    A hub repository is downloaded once and stored below `data_dir`, or in the hub library's own cache if that is
    None; `revision` is its branch, tag or commit (None: main). Code in a repository is neither downloaded nor run.
    Raises ModelError, which says how `model` was resolved, or that its architecture is not supported: config.json is
    downloaded first. Raises InvalidField for a revision of a directory.
    """
    path, name = _resolve("model", model, data_dir, ["config.json"], revision)
    if not (path / "config.json").is_file():
        raise ModelError(f"{name}: has no config.json; a model is config.json with *.safetensors")
    read_family(Fields.of_file(path / "config.json"))
    return _resolve("model", model, data_dir, WANTED_FILES, revision)[0]


def resolve_draft(draft: str, data_dir: str | None) -> Path:
    """Return the directory of a draft model, as `resolve` does that of a model."""
    path, name = _resolve("draft", draft, data_dir, WANTED_FILES, None)
    if not (path / "config.json").is_file():
        raise ModelError(f"draft {name}: has no config.json; a model is config.json with *.safetensors")
    return path


def resolve_tokenizer(tokenizer: str, data_dir: str | None) -> Path:
    """Return the directory of a tokenizer, as `resolve` does that of a model; only its files are downloaded."""
    path, name = _resolve("tokenizer", tokenizer, data_dir, TOKENIZER_FILES, None)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{name}: has no tokenizer.json")
    return path


def _resolve(what: str, source: str, data_dir: str | None, files: list[str], revision: str | None) -> tuple[Path, str]:
    """Return the directory of a model or tokenizer, absolute since the process may leave its own, and words for it."""
    local = Path(source).expanduser()
    if source and local.is_dir():
        if revision is not None:
            raise InvalidField("revision", revision, f"none, since {what} is a directory")
        return local.absolute(), f"directory {source}"
    if not source or local.exists() or source.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{what} {source!r}: is no directory; allowed: a directory or a hub id (owner/name)")
    return _download(what, source, data_dir, files, revision).absolute(), f"hub repository {source}"


def _download(what: str, source: str, data_dir: str | None, files: list[str], revision: str | None) -> Path:
    # Importing it takes half a second, in each process, and most models are directories.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cache = None if data_dir is None else Path(data_dir).expanduser() / "models"
    tried = f"{what} {source!r}: is no directory, and as a hub id"
    try:
        return Path(
            snapshot_download(
                source, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=UNWANTED_FILES
            )
        )
    except HFValidationError as error:
        raise ModelError(f'{tried} it is malformed; allowed: "owner/name": {error}') from error
    except GatedRepoError as error:
        raise ModelError(f"{tried} it is gated: accept its terms there, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{tried} it has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{tried} it is not found; a private repository needs HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        raise ModelError(f"{tried} it is not cached, and the hub does not answer: {cause}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{tried} its download failed: {error}") from error
