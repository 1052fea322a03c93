"""The entry point `vllm.general_plugins`: vLLM calls it once in each of its processes."""

import logging

from moecache.integrations.vllm._version import check_version

logger = logging.getLogger(__name__)


def register() -> None:
    """Tell vLLM of the load format `moecache`.

    With another vLLM than the plug-in is for, this warns and leaves vLLM as it is: models load
    without moecache, and vLLM refuses the load format.
    """
    try:
        check_version()
        from moecache.integrations.vllm import _loader, _vllm

        _vllm.check_names()
    except ImportError as error:
        logger.warning("vllm.refused reason=%s", error)
        return
    if "RoutedExperts" in _vllm.replaced():
        return
    register = _vllm.PluggableLayer.register_oot
    register(name="RoutedExperts")(_loader.SlotExperts)
    register(name="GptOssRoutedExperts")(_loader.SlotGptOssExperts)
    _vllm.register_model_loader(_loader.LOAD_FORMAT)(_loader.SlotLoader)
    _vllm.watch_steps(_loader.SEQUENCES.begin)
