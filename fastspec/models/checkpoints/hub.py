"""Gets the files of a model on the Hugging Face Hub from the local cache, or downloads them, the config first."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, cast

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.gguf.header import GGUF_SUFFIX
from fastspec.models.checkpoints.safetensors_files import find_shards

CONFIG_FILES: Final = ("*.json",)
WEIGHT_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# copies of the same weights in other formats: subfolders, and Mistral's single file
IGNORED_FILES: Final = ("*/*", "consolidated*")
# chat templates for tools and retrieval, which AutoTokenizer reads
TEMPLATES: Final = ("additional_chat_templates/*.jinja",)
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# suffixes of files that are only a part of a checkpoint
OF_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".json")
HUB_ID: Final = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


def download(source: str | os.PathLike[str], revision: str | None, check: Callable[[Path], object]) -> Path:
    """Returns a local directory with the files of a Hub id, from the cache or downloaded.

    The config is downloaded and checked first, then the weights of the same commit.

    Args:
        source: the Hub id.
        revision: branch, tag or commit. None: the default branch.
        check: function that raises an error if the config in a directory is not supported.

    Raises:
        CheckpointError: `source` is not a Hub id, or it could not be downloaded.
    """
    name = os.fspath(source)
    if name.lower().endswith(GGUF_SUFFIX):
        raise CheckpointError(
            f"there is no file {name!r}; wanted a GGUF file, or one of the Hub like owner/name:model.gguf"
        )
    if os.path.isfile(source) or name.endswith(OF_FILES):
        raise CheckpointError(
            f"{name!r} names a file; wanted a GGUF file, or a checkpoint directory, in which weights lie beside a "
            "config.json"
        )
    if not isinstance(source, str) or os.path.exists(source) or HUB_ID.fullmatch(source) is None:
        raise CheckpointError(
            f"{os.fspath(source)!r} is not a directory and not a Hub id; wanted a checkpoint directory as "
            "save_pretrained writes it, or a Hub id like owner/name"
        )
    directory = _snapshot(source, revision, CONFIG_FILES, check)
    # a snapshot's directory has the name of its commit, so two commits cannot be mixed if a branch moves meanwhile
    directory = _snapshot(source, directory.name, WEIGHT_FILES, find_shards)
    return _snapshot(source, directory.name, TEMPLATES, find_shards, ignored=())


def hub_gguf(source: object) -> tuple[str, str] | None:
    """Splits a source of the form "owner/name:file.gguf" into (Hub id, file name). None: it has another form."""
    if not isinstance(source, str) or os.path.exists(source):
        return None
    repo, colon, file = source.partition(":")
    found = colon and file.lower().endswith(GGUF_SUFFIX) and HUB_ID.fullmatch(repo) is not None
    return (repo, file) if found else None


def download_file(repo: str, file: str, revision: str | None) -> Path:
    """Returns the local path of one file of a Hub id, from the cache or downloaded.

    Args:
        repo: the Hub id.
        file: name of the file in it.
        revision: branch, tag or commit. None: the default branch.

    Raises:
        CheckpointError: the file could not be downloaded.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    http_error = cast("type[Exception]", HfHubHTTPError.__mro__[1])
    try:
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
    except (OSError, ValueError, http_error) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"{file!r} of {repo!r} could not be downloaded from the Hub: {said}; {_way_out(repo, error)}, or pass a "
            "local file"
        ) from error


def _snapshot(
    repo: str,
    revision: str | None,
    files: tuple[str, ...],
    check: Callable[[Path], object],
    ignored: tuple[str, ...] = IGNORED_FILES,
) -> Path:
    """Returns a local directory with some files of a Hub id, from the cache or downloaded, and checks them.

    Args:
        repo: the Hub id.
        revision: branch, tag or commit. None: the default branch.
        files: patterns of the names of the files.
        check: function that raises an error if the files in a directory are not supported or not complete.
        ignored: patterns of names that are left out.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # base error of the HTTP library on which this version of the Hub client is built
    http_error = cast("type[Exception]", HfHubHTTPError.__mro__[1])
    fetch = partial(
        huggingface_hub.snapshot_download,
        repo,
        revision=revision,
        allow_patterns=list(files),
        ignore_patterns=list(ignored),
    )
    try:
        found = Path(fetch())
    except (OSError, ValueError, http_error) as error:
        commit = revision is not None and COMMIT.fullmatch(revision) is not None
        cached = _cached(fetch, check) if commit else None
        if cached is not None:
            return cached
        wanted = f"{repo!r}" if revision is None else f"{repo!r} at revision {revision!r}"
        said = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"there is no local directory {repo!r}, and {wanted} could not be downloaded from the Hub: {said}; "
            f"{_way_out(repo, error)}, or pass a local directory"
        ) from error
    check(found)
    return found


def _way_out(repo: str, error: Exception) -> str:
    """Returns the part of an error message that advises what to do about an error of the Hub client."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError, so tested first
        return f"ask for access at https://huggingface.co/{repo} and log in (hf auth login)"
    if isinstance(error, RepositoryNotFoundError):
        return "check the name, or log in (hf auth login) where it is private"
    if isinstance(error, RevisionNotFoundError):
        return f"see https://huggingface.co/{repo}/tree/main for the branches and tags that there are"
    return "check the name, the network or HF_HUB_OFFLINE, and access to the repository"


def _cached(fetch: Callable[..., str], check: Callable[[Path], object]) -> Path | None:
    """Returns the directory of a commit's files in the cache. None if some are missing.

    Some versions of the Hub client ask the Hub for the list of files. Without a network they fail, although all files
    of a commit are cached. A commit never changes, so cached files are valid.

    Args:
        fetch: function that downloads the files, or with `local_files_only=True` only looks in the cache.
        check: see `_snapshot`.
    """
    try:
        found = Path(fetch(local_files_only=True))
        check(found)
    except UnsupportedModel:
        raise
    except (OSError, ValueError):
        return None
    return found
