"""What vLLM is given for the plug-in: refused before a trunk is read. vLLM is not needed."""

import pytest

from moecache.errors import ConfigError
from moecache.integrations.vllm._options import options_of


def test_options_are_taken_as_they_are() -> None:
    """Of a model loader's extra configuration, which is JSON."""
    given = {"memory": "25%", "prefetch": "off", "metrics_port": 9400}
    assert options_of(given) == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be a JSON object"),
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"memory": -1}, "a size cannot be negative, got -1"),
        ({"read": "zzz"}, "read 'zzz' is not one of auto"),
        ({"record_trace": True}, "record_trace must be a path"),
        ({"metrics_port": True}, "metrics_port must be a port"),
        ({"metrics_port": 65536}, "metrics_port must be a port"),
        ({"makes_room": True}, "makes_room is decided by vLLM"),
        ({"device": "cuda"}, "device is decided by vLLM"),
        ({"memories": "4GiB"}, "there is no option 'memories'; did you mean 'memory'"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(given: object, message: str) -> None:
    """With the name of the option, or the one that was meant."""
    with pytest.raises(ConfigError, match=message):
        options_of(given)
