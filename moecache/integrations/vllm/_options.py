"""Options: what `--model-loader-extra-config` says, as options of `moecache.open`."""

from typing import Any

from moecache.errors import ConfigError
from moecache.runtime.options import Options

# What vLLM itself decides, or what cannot be written as JSON.
_NOT_TAKEN = ("device", "dtype", "layers", "share", "progress", "makes_room")


def options_of(given: object) -> dict[str, Any]:
    """Return keywords for `moecache.Options`, and "metrics_port", from what vLLM got as JSON.

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
    port = given.get("metrics_port")
    if port is not None and (type(port) is not int or not 0 < port < 65536):
        raise ConfigError(f"metrics_port must be a port from 1 to 65535, got {port!r}")
    try:
        # Refused here, before the trunk is read.
        named = {name: given[name] for name in given if name != "metrics_port"}
        Options.of(memory=named.pop("memory", None), device="cpu", **named)
    except TypeError as error:
        raise ConfigError(f"--model-loader-extra-config: {error}; see docs/vllm.md") from error
    return dict(given)
