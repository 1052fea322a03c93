cdef list make_partitions(
    str policy, str scope, int num_layers, int num_experts, int capacity, counts
)
