"""A GPU for tests whose arrays are torch's: it calls itself "cpu", as tensors without CUDA do."""

import pytest

from moecache.cuda import open_device
from moecache.errors import MoeCacheError
from tests.helpers.fake_device import FakeDevice


class TensorDevice(FakeDevice):
    """A device whose arrays are torch's on the CPU."""

    name = "cpu"
    description = "cpu (fake)"


def opened(name: str, monkeypatch: pytest.MonkeyPatch, per_expert: bool = True) -> str:
    """Let `load` and `open` find a device, "fake" or a real one; return torch's name of it.

    `per_expert`: on a real one, "grouped_mm" of whole models is a product for each expert.
    """
    if name == "fake":
        for place in ("moecache.runtime.plan", "moecache.integrations.transformers._arguments"):
            monkeypatch.setattr(f"{place}.open_device", lambda _: TensorDevice())
        return "cpu"
    try:
        open_device(name)
    except MoeCacheError as error:
        pytest.skip(str(error))
    if per_expert:
        monkeypatch.setattr(
            "transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False
        )
    return name
