"""`resolve`: the path of a model that the hub has, its files brought into the hub's cache."""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moecache.errors import ConfigError, MissingDependencyError, StoreError
from moecache.integrations.hub import NoSuchFileError, ask, is_whole, telling
from moecache.integrations.hub_files import HubName, choose_gguf, choose_safetensors, is_safe
from moecache.units import format_bytes

logger = logging.getLogger(__name__)


def resolve(
    path: str | os.PathLike[str],
    *,
    file: str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> str:
    """Return the path of a model: the same one, or that of a hub's model in the hub's cache.

    Blocks while files are downloaded that are not there yet; what an earlier call has got stays.
    A path that exists, and what has not the form `user/repo`, comes back as it is. The network is
    left alone if the cache has the whole model.

    Parameters
    ----------
    path : str or Path
        A path, or `user/repo`, `user/repo:Q4_K_M`, `user/repo@revision:Q4_K_M`.
    file : str, optional
        A GGUF file of the repository, of a split one any part, instead of a quantisation.
    revision : str, optional
        A branch, tag or commit, instead of one in the name.
    cache_dir, token, local_files_only
        As `from_pretrained` has them.

    Returns
    -------
    str
        A directory of safetensors, or a GGUF file, the first of a split one.

    Raises
    ------
    ConfigError
        If a file is named beside a path.
    StoreError
        If the hub has no such model, does not give it to this user, or cannot be reached; if the
        quantisation is not there, or cannot be told; or if the disk has no room.
    MissingDependencyError
        If huggingface_hub is not installed.
    """
    text = os.fspath(path)
    name = HubName.parse(text) if isinstance(text, str) and not os.path.lexists(text) else None
    if name is None:
        if file is not None:
            raise ConfigError(f"--hf-file {file} is a file of a model on the hub, not of {path}")
        return text
    if name.quant is not None and file is not None:
        raise ConfigError(f"{path} says a quantisation, and --hf-file a file; give one of them")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{text!r} is no path here, and to look for it on the Hugging Face hub needs "
            "huggingface_hub; install it with: pip install 'moecache[transformers]'"
        ) from error
    found = _Repository(text, name, revision or name.revision, cache_dir, token)
    return str(found.find(file, local_only=local_files_only))


class _Repository:
    """A repository of the hub, with its part in the cache.

    Parameters
    ----------
    text : str
        The model's name as the user wrote it.
    name : HubName
    revision : str or None
    cache_dir : str, Path or None
    token : str, bool or None
    """

    def __init__(
        self,
        text: str,
        name: HubName,
        revision: str | None,
        cache_dir: str | os.PathLike[str] | None,
        token: str | bool | None,
    ) -> None:
        from huggingface_hub import constants, file_download

        self._text = text
        self._name = name
        self._revision = revision or constants.DEFAULT_REVISION
        self._cache = Path(cache_dir or constants.HF_HUB_CACHE)
        self._token = token
        self._endpoint = constants.ENDPOINT
        folder = file_download.repo_folder_name(repo_id=name.repo, repo_type="model")
        self._storage = self._cache / folder

    def find(self, file: str | None, *, local_only: bool) -> Path:
        """Return the model's path, once all of it is in the cache."""
        from huggingface_hub import constants

        snapshot = self._snapshot()
        known = self._cached(snapshot, file)
        if known is not None:
            return known
        if local_only or constants.HF_HUB_OFFLINE:
            is_named = self._name.quant is not None or file is not None
            # A program may load a model whose tokenizer it has elsewhere.
            if snapshot is not None and not is_named and is_whole(snapshot, needs_tokenizer=False):
                return snapshot
            why = "HF_HUB_OFFLINE forbids" if constants.HF_HUB_OFFLINE else "local_files_only does"
            raise self._incomplete(snapshot, file, f"{why} not let the hub be asked")
        sizes = self._listed()
        files = self._choose(sizes, file)
        self._check_room({one: sizes[one] for one in files}, snapshot)
        paths = [self._download(one, sizes[one]) for one in files]
        gguf = [one for one in paths if one.suffix.lower() == ".gguf"]
        return gguf[0] if gguf else paths[0].parent

    def _incomplete(self, snapshot: Path | None, file: str | None, why: str) -> StoreError:
        if snapshot is None:
            return StoreError(
                f"{self._text!r}: there is no such file or directory here, and none in the hub's "
                f"cache ({self._cache}), while {why}"
            )
        try:
            self._choose(_below(snapshot), file)
            said = "not all of its files are"
        except StoreError as error:
            said = str(error)
        return StoreError(f"{self._text!r}: is not whole in the hub's cache ({said}), while {why}")

    def _snapshot(self) -> Path | None:
        """Return the directory of the revision in the cache, if it is there."""
        commit = self._revision
        with contextlib.suppress(OSError, ValueError):
            commit = (self._storage / "refs" / self._revision).read_text().strip()
        found = self._storage / "snapshots" / commit
        return found if is_safe(commit) and found.is_dir() else None

    def _cached(self, snapshot: Path | None, file: str | None) -> Path | None:
        """Return the model's path if the cache has it whole."""
        from huggingface_hub import constants

        if snapshot is None:
            return None
        if self._name.quant is None and file is None and is_whole(snapshot):
            return snapshot
        files = _below(snapshot)
        if file is None and self._name.quant is None and not constants.HF_HUB_OFFLINE:
            # The only one here may be one of several there.
            with contextlib.suppress(StoreError):
                return snapshot / choose_gguf(self._text, files, "Q4_K_M")[0]
            return None
        with contextlib.suppress(StoreError):
            return snapshot / choose_gguf(self._text, files, self._name.quant, file)[0]
        return None

    def _choose(self, files: dict[str, int], file: str | None) -> list[str]:
        """Return the files of the model: safetensors unless a GGUF was asked for."""
        small = choose_safetensors(files)
        if file is None and self._name.quant is None:
            if any(one.endswith(".safetensors") for one in small):
                if "config.json" not in small:
                    raise StoreError(
                        f"{self._text!r}: the hub's has no config.json; is it a model of "
                        "transformers?"
                    )
                return small
            if not any(one.lower().endswith(".gguf") for one in files):
                raise StoreError(
                    f"{self._text!r}: the hub's has neither safetensors nor GGUF files at its "
                    "root; is it a language model?"
                )
        return choose_gguf(self._text, files, self._name.quant, file)

    def _listed(self) -> dict[str, int]:
        """Return the files that the hub has, with their sizes."""
        import huggingface_hub

        # Asked once and shortly: the listing is tried again for minutes where nothing answers.
        with contextlib.suppress(NoSuchFileError):
            ask(self._endpoint, self._name.repo, "config.json", self._revision, self._token)
        api = huggingface_hub.HfApi(endpoint=self._endpoint, token=self._token)
        with telling(self._endpoint, self._name.repo, "list of files", self._revision):
            entries = list(
                api.list_repo_tree(self._name.repo, recursive=True, revision=self._revision)
            )
        files = (one for one in entries if isinstance(one, huggingface_hub.hf_api.RepoFile))
        # A listing is not to be trusted: no file leaves the cache.
        return {one.path: one.size for one in files if is_safe(one.path)}

    def _check_room(self, sizes: dict[str, int], snapshot: Path | None) -> None:
        """Raise StoreError if the disk does not hold what is not there yet."""
        if snapshot is not None:
            sizes = {one: size for one, size in sizes.items() if not (snapshot / one).exists()}
        partial = sum(one.stat().st_size for one in self._storage.glob("blobs/*.partial"))
        needed = max(0, sum(sizes.values()) - partial)
        where = next(one for one in (self._cache, *self._cache.parents) if one.exists())
        free = shutil.disk_usage(where).free
        if needed > free:
            raise StoreError(
                f"{self._text}: {len(sizes)} files of {format_bytes(needed)} are to be downloaded, "
                f"but {format_bytes(free)} are free in {self._cache}; free some, or set "
                "HF_HUB_CACHE to a directory of another disk"
            )
        logger.info("hub.download %s files=%d bytes=%d", self._text, len(sizes), needed)

    def _download(self, file: str, size: int) -> Path:
        """Return a file's path in the cache, once it is there."""
        import huggingface_hub

        # One after the other, in this thread, so that an interrupt ends it.
        with telling(self._endpoint, self._name.repo, file, self._revision):
            if file.endswith((".gguf", ".safetensors")):
                self._fetch(file, size)
            found = huggingface_hub.hf_hub_download(
                self._name.repo,
                file,
                revision=self._revision,
                cache_dir=self._cache,
                token=self._token,
            )
        return Path(found)

    def _fetch(self, file: str, size: int) -> None:
        """Put a file's bytes where `hf_hub_download` looks for them, and go on where it ended.

        That begins a file anew in each process.
        """
        import huggingface_hub
        from huggingface_hub import constants, file_download
        from huggingface_hub.utils._headers import build_hf_headers

        if size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return
        url = huggingface_hub.hf_hub_url(self._name.repo, file, revision=self._revision)
        found = huggingface_hub.get_hf_file_metadata(url, token=self._token)
        if found.etag is None or found.commit_hash is None or not is_safe(found.etag):
            return
        blob = self._storage / "blobs" / found.etag
        if "/" in found.etag or blob.exists():
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _appended(blob.with_name(f"{found.etag}.partial")) as partial:
            if blob.exists():  # another process has got it meanwhile
                return
            file_download.http_get(
                url,
                partial,
                resume_size=partial.tell(),
                headers=build_hf_headers(token=self._token),
                expected_size=found.size,
                displayed_filename=file,
            )
            partial.flush()
            os.replace(partial.name, blob)


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[Any]:
    """Open a file to go on with it, alone: another process that wants it waits."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, os.SEEK_END)
        try:
            yield file
        finally:
            # One without bytes is nothing to go on with, and neither is one that was replaced.
            if path.exists() and path.stat().st_size == 0:
                path.unlink()


def _below(snapshot: Path) -> dict[str, int]:
    """Return the files of a model in the cache, by their names in the repository."""
    return {
        str(file.relative_to(snapshot)): file.stat().st_size
        for file in snapshot.rglob("*")
        if file.is_file()
    }
