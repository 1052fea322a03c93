"""Options: what `--model-loader-extra-config` says, as options of `moecache.open`."""

from typing import Any

from moecache.errors import ConfigError
from moecache.runtime.options import Options

# What vLLM itself decides, or what cannot be written as JSON.
_NOT_TAKEN = ("device", "dtype", "layers", "share", "progress")


def options_of(given: object) -> dict[str, Any]:
    """Return keywords for `moecache.Options` from what vLLM was given as JSON.

    Raises
    ------
    ConfigError
        If it is no object, or a name in it is none of an option.
    """
    if not isinstance(given, dict):
        raise ConfigError(
            f"--model-loader-extra-config must be a JSON object of moecache's options, got {given}"
        )
    for name in given:
        if name in _NOT_TAKEN:
            raise ConfigError(f"{name} is decided by vLLM; leave it out of moecache's options")
    try:
        # Refused here, before the trunk is read.
        Options(**given)
    except TypeError as error:
        raise ConfigError(f"--model-loader-extra-config: {error}; see docs/vllm.md") from error
    return dict(given)
