"""vLLM's plug-in: routed experts in a bounded number of slots, the engine around them vLLM's.

`vllm serve MODEL --load-format moecache` finds it by the entry point `vllm.general_plugins`.
"""

from moecache.integrations.vllm._plugin import register

__all__ = ["register"]
