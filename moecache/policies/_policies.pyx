"""Policies by name: one for all layers, or one for each."""

from moecache.policies._arc cimport ArcCache
from moecache.policies._echo cimport Echo
from moecache.policies._echo_cache cimport EchoCache
from moecache.policies._fifo cimport FifoCache, S3FifoCache, SieveCache
from moecache.policies._lecar cimport LecarCache
from moecache.policies._lfu cimport LfruCache, LfuCache
from moecache.policies._lrfu cimport LrfuCache
from moecache.policies._policy cimport LruCache, Policy
from moecache._slru cimport SlruCache
from moecache.policies._stale cimport LeastStaleCache
from moecache.policies._tinylfu cimport WTinyLfuCache

from moecache.errors import ConfigError
from moecache.settings import POLICIES, SCOPES

# Policies that are made from a capacity and the keys alone.
cdef dict SIMPLE = {
    "arc": ArcCache,
    "fifo": FifoCache,
    "lecar": LecarCache,
    "lfru": LfruCache,
    "lfu": LfuCache,
    "lrfu": LrfuCache,
    "lru": LruCache,
    "s3-fifo": S3FifoCache,
    "sieve": SieveCache,
    "w-tinylfu": WTinyLfuCache,
}


cdef list make_partitions(
    str policy, str scope, int num_layers, int num_experts, int capacity, counts
):
    """Return the policy over all keys, or one over each layer's experts.

    With scope "layer" the capacity is split evenly, the remainder to the first layers.
    `counts` is a profiler's, [num_layers, num_experts].
    """
    cdef int layer
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    if scope not in SCOPES:
        raise ConfigError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
    if scope == "layer" and capacity < num_layers:
        raise ConfigError(
            f"{capacity} slots cannot be split over {num_layers} layers; "
            'raise the memory or use scope="global"'
        )
    if policy in ("echo", "haz2"):
        return _make_echo(policy, scope, num_layers, num_experts, capacity)
    if scope == "global":
        return [_make_policy(policy, capacity, num_layers * num_experts, num_experts, counts)]
    return [
        _make_policy(
            policy, _share(capacity, num_layers, layer), num_experts, num_experts, counts[layer]
        )
        for layer in range(num_layers)
    ]


cdef list _make_echo(str policy, str scope, int num_layers, int num_experts, int capacity):
    # Layers share what is learned about tokens.
    cdef Echo echo = Echo(num_layers, num_experts, ring=policy == "echo")
    if scope == "global":
        return [EchoCache(capacity, num_keys=num_layers * num_experts, echo=echo)]
    return [
        EchoCache(
            _share(capacity, num_layers, layer), num_keys=num_experts, echo=echo, layer=layer
        )
        for layer in range(num_layers)
    ]


cdef int _share(int capacity, int num_layers, int layer):
    return capacity // num_layers + (layer < capacity % num_layers)


cdef Policy _make_policy(str name, int capacity, int num_keys, int num_experts, counts):
    cdef int probationary
    if name in SIMPLE:
        return SIMPLE[name](capacity, num_keys=num_keys)
    if name == "least-stale":
        return LeastStaleCache(capacity, num_keys=num_keys, num_experts=num_experts)
    # Two segments need two slots; with one, SLRU and LRU are the same.
    if capacity == 1:
        return LruCache(capacity, num_keys=num_keys)
    probationary = max(1, capacity // 4)
    return SlruCache(
        probationary,
        capacity - probationary,
        num_keys=num_keys,
        counts=counts if name == "slru-lfu" else None,
    )
