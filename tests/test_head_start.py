"""HeadStart: what is brought in before anybody asks, and given back."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moecache._prefault import address_of
from moecache.errors import StoreError
from moecache.runtime import head_start
from moecache.runtime.options import Options
from moecache.stores import open_store
from tests.helpers.checkpoints import write_mixtral

MIB = 2**20


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def wait(condition: object) -> None:
    until = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)
