"""A trace as one sequence of accesses."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from moecache.policies._policy cimport MAX_KEYS


@cython.final
cdef class Accesses:
    """A trace as one sequence of accesses: per step and layer each distinct expert once.

    Parameters
    ----------
    experts : int32 [num_tokens, num_layers, top_k]
        -1 is no expert.
    steps : int64 [num_steps + 1]
        Step s is the rows from steps[s] to steps[s + 1].
    num_experts : int
    bulk : uint8 [num_steps], optional
        1 where a step admits no more than its layer's fair share, 2 where it admits what is
        used before what would leave. By default 1 for the steps of several rows.

    Raises
    ------
    ValueError
        If an id is out of range, a step ends before it begins, or `bulk` has another
        length.
    """

    def __cinit__(
        self, const int32_t[:, :, ::1] experts not None, const int64_t[::1] steps not None,
        int num_experts, const uint8_t[::1] bulk=None,
    ):
        cdef Py_ssize_t step, row, position, visit, n = 0
        cdef Py_ssize_t num_rows = experts.shape[0]
        cdef int layer, i, k = <int>experts.shape[2]
        cdef int32_t expert
        cdef int64_t* seen
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if experts.shape[1] * <int64_t>num_experts > MAX_KEYS:
            raise ValueError(
                f"{experts.shape[1]} layers of {num_experts} experts are more than {MAX_KEYS}"
            )
        self.num_layers = <int>experts.shape[1]
        self.num_experts = num_experts
        self.num_steps = steps.shape[0] - 1
        if bulk is not None and bulk.shape[0] != self.num_steps:
            raise ValueError(f"{self.num_steps} steps, {bulk.shape[0]} of bulk")
        for step in range(self.num_steps):
            if not 0 <= steps[step] <= steps[step + 1] <= num_rows:
                raise ValueError(f"step {step} ends before it begins, or past the trace's end")
        self.keys = <int32_t*>malloc(max(1, num_rows * self.num_layers * k) * sizeof(int32_t))
        self.uses = <int32_t*>malloc(max(1, num_rows * self.num_layers * k) * sizeof(int32_t))
        self.bounds = <Py_ssize_t*>malloc(
            (self.num_steps * self.num_layers + 1) * sizeof(Py_ssize_t)
        )
        self.bulk = <unsigned char*>calloc(max(1, self.num_steps), 1)
        # The access of this visit that an expert has already, as its index.
        seen = <int64_t*>malloc(num_experts * sizeof(int64_t))
        if (
            self.keys == NULL or self.uses == NULL or self.bounds == NULL or self.bulk == NULL
            or seen == NULL
        ):
            free(seen)
            raise MemoryError(f"no memory for the accesses of {num_rows} tokens")
        memset(seen, 0xFF, num_experts * sizeof(int64_t))
        try:
            visit = 0
            self.bounds[0] = 0
            for step in range(self.num_steps):
                if bulk is None:
                    self.bulk[step] = steps[step + 1] - steps[step] > 1
                else:
                    self.bulk[step] = bulk[step]
                for layer in range(self.num_layers):
                    for row in range(steps[step], steps[step + 1]):
                        for i in range(k):
                            expert = experts[row, layer, i]
                            if expert == -1:
                                continue
                            if not 0 <= expert < num_experts:
                                raise ValueError(
                                    f"expert {expert} is not in [0, {num_experts}), nor -1"
                                )
                            position = seen[expert]
                            if position >= self.bounds[visit]:
                                self.uses[position] += 1
                                continue
                            seen[expert] = n
                            self.keys[n] = layer * num_experts + expert
                            self.uses[n] = 1
                            n += 1
                    visit += 1
                    self.bounds[visit] = n
            self.size = n
        finally:
            free(seen)

    def __dealloc__(self):
        free(self.keys)
        free(self.uses)
        free(self.bounds)
        free(self.bulk)

    def __len__(self) -> int:
        return self.size
