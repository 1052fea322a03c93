"""A whole trace through a policy, without the GIL: ExpertCache's work, less the slots."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

import numpy as np

from moecache.policies._ids cimport sort_by_uses
from moecache.policies._policy cimport MAX_KEYS, MAX_SEQUENCES, Policy, hold, unhold
from moecache.policies._python_policy cimport PythonPolicy

from moecache.policies.making import make_policies

cdef enum:
    SIGNALS_EVERY = 4096  # visits between two looks at Ctrl-C


def replay_policy(
    const int32_t[:, :, ::1] experts not None,
    const int64_t[::1] steps not None,
    const uint8_t[::1] begins not None,
    const uint8_t[::1] bulk not None,
    int num_experts,
    int capacity,
    policy,
    str scope,
    int32_t[:, ::1] hits_out not None,
    int32_t[:, ::1] misses_out not None,
    const int32_t[::1] sequences=None,
) -> None:
    """Replay a trace and count hits and misses of each step and layer.

    Blocks, without the GIL unless the policy is written in Python. A step's own
    experts are never victims. A step admits everything, or, if it is `bulk`, its
    layer's fair share, the most used experts first. A layer that a step has no id
    for is not visited.

    Parameters
    ----------
    experts : int32 [num_tokens, num_layers, top_k]
        -1 is no expert.
    steps : int64 [num_steps + 1]
        Step s is the rows from steps[s] to steps[s + 1].
    begins : uint8 [num_steps]
        1 where a sequence begins that does not continue the last one.
    bulk : uint8 [num_steps]
        1 where a step admits no more than its layer's fair share, or what the policy finds
        worth it.
    num_experts, capacity : int
    policy : str, or list of Policy
        A name, or one policy for all layers, or one for each.
    scope : {"global", "layer"}
    hits_out, misses_out : int32 [num_steps, num_layers]
        Receive distinct experts, an expert that several rows ask for once.
    sequences : int32 [num_tokens], optional
        Which sequence each row is of. The rows of a step that has more than 64, and all rows
        by default, are consecutive tokens of one.

    Raises
    ------
    ValueError
        If an id is out of range, or the arrays do not fit together.
    ConfigError
        If a name is unknown, or the capacity cannot be split.
    """
    cdef int num_layers = <int>experts.shape[1]
    cdef Py_ssize_t num_steps = steps.shape[0] - 1
    cdef Py_ssize_t step, begin, row
    cdef int layer, k = <int>experts.shape[2]
    cdef Py_ssize_t widest = 0
    cdef uint64_t visits = 0
    cdef bint is_global = scope == "global"
    cdef bint named = sequences is not None
    cdef const int32_t* ids
    cdef const int32_t* names
    cdef PythonPolicy scripted = None
    if num_steps < 0 or begins.shape[0] != num_steps or bulk.shape[0] != num_steps:
        raise ValueError(
            f"{steps.shape[0]} step bounds, {begins.shape[0]} beginnings, {bulk.shape[0]} bulk"
        )
    if (
        hits_out.shape[0] != num_steps or misses_out.shape[0] != num_steps
        or hits_out.shape[1] != num_layers or misses_out.shape[1] != num_layers
    ):
        raise ValueError(f"the results must be [{num_steps}, {num_layers}]")
    if num_layers * <int64_t>num_experts > MAX_KEYS:
        raise ValueError(f"{num_layers} layers of {num_experts} experts are more than {MAX_KEYS}")
    if sequences is not None and sequences.shape[0] != experts.shape[0]:
        raise ValueError(f"{experts.shape[0]} rows, {sequences.shape[0]} of sequences")
    _check_ids(experts, num_experts)
    for step in range(num_steps):
        if not 0 <= steps[step] <= steps[step + 1] <= experts.shape[0]:
            raise ValueError(f"step {step} ends before it begins, or past the trace's end")
        widest = max(widest, steps[step + 1] - steps[step])
    if num_steps == 0 or num_layers == 0 or k == 0:
        hits_out[:] = 0
        misses_out[:] = 0
        return
    counts = np.zeros((num_layers, num_experts), np.uint64)
    if isinstance(policy, str):
        partitions = make_policies(policy, scope, num_layers, num_experts, capacity, counts)
    else:
        partitions = list(policy)
    if isinstance(partitions[0], PythonPolicy):
        scripted = partitions[0]
    cdef Visit visit = Visit(num_layers, num_experts, widest * k, partitions, counts)
    with nogil:
        for step in range(num_steps):
            begin = steps[step]
            if begins[step]:
                visit.begin_sequence()
            names = NULL
            if named and steps[step + 1] > begin:
                names = _told_apart(&sequences[begin], steps[step + 1] - begin)
            for layer in range(num_layers):
                ids = &experts[begin, layer, 0]
                if steps[step + 1] - begin != 1:
                    # The rows of a step are not neighbours in the trace.
                    for row in range(steps[step + 1] - begin):
                        visit.copy_row(row, &experts[begin + row, layer, 0], k)
                    ids = visit.rows
                visit.run(
                    layer, ids, names, steps[step + 1] - begin, k, bulk[step], is_global,
                    &hits_out[step, layer], &misses_out[step, layer],
                )
                visits += 1
                if visits % SIGNALS_EVERY == 0 or scripted is not None:
                    with gil:
                        PyErr_CheckSignals()
                        if scripted is not None:
                            PythonPolicy.reraise(partitions)


cdef const int32_t* _told_apart(const int32_t* sequences, Py_ssize_t rows) noexcept nogil:
    # NULL if there are too many.
    cdef int32_t[MAX_SEQUENCES] found
    cdef Py_ssize_t row
    cdef int i, count = 0
    for row in range(rows):
        if row and sequences[row] == sequences[row - 1]:
            continue
        for i in range(count):
            if found[i] == sequences[row]:
                break
        else:
            if count == MAX_SEQUENCES:
                return NULL
            found[count] = sequences[row]
            count += 1
    return sequences


cdef void _check_ids(const int32_t[:, :, ::1] experts, int num_experts) except *:
    cdef Py_ssize_t i, size = experts.shape[0] * experts.shape[1] * experts.shape[2]
    cdef const int32_t* data
    cdef int32_t low = 0, high = -1
    if size == 0:
        return
    data = &experts[0, 0, 0]
    with nogil:
        for i in range(size):
            low = min(low, data[i])
            high = max(high, data[i])
    if low < -1 or high >= num_experts:
        bad = low if low < -1 else high
        raise ValueError(f"expert {bad} is not in [0, {num_experts}), nor -1")


@cython.final
cdef class Visit:
    """One layer of one step: which experts are there, which come, which leave."""

    def __cinit__(
        self, int num_layers, int num_experts, Py_ssize_t widest, list partitions, counts
    ):
        cdef int layer
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.partitions = partitions
        self.counts_owner = counts
        self.counts = counts
        self.begin_part = <BeginPart><void*>_begin_part
        self.run_part = <RunPart><void*>_run_part
        self.policies = <void**>calloc(num_layers, sizeof(void*))
        self.seen = <uint64_t*>calloc(num_experts, sizeof(uint64_t))
        self.uses = <int*>calloc(num_experts, sizeof(int))
        self.hits = <int*>calloc(num_experts, sizeof(int))
        self.missing = <int*>calloc(num_experts, sizeof(int))
        self.order = <uint64_t*>calloc(num_experts, sizeof(uint64_t))
        self.rows = <int32_t*>malloc(max(1, widest) * sizeof(int32_t))
        if (
            self.policies == NULL or self.seen == NULL or self.uses == NULL or self.hits == NULL
            or self.missing == NULL or self.order == NULL or self.rows == NULL
        ):
            raise MemoryError(f"no memory to replay {num_layers} x {num_experts} experts")
        for layer in range(num_layers):
            # Kept alive by the list.
            self.policies[layer] = <void*>partitions[layer % len(partitions)]

    def __dealloc__(self):
        free(self.policies)
        free(self.seen)
        free(self.uses)
        free(self.hits)
        free(self.missing)
        free(self.order)
        free(self.rows)

    cdef void copy_row(self, Py_ssize_t row, const int32_t* ids, int k) noexcept nogil:
        cdef int i
        for i in range(k):
            self.rows[row * k + i] = ids[i]

    cdef void begin_sequence(self) noexcept nogil:
        cdef int layer
        for layer in range(self.num_layers):
            if layer == 0 or self.policies[layer] != self.policies[0]:
                self.begin_part(self.policies[layer])

    cdef void run(
        self, int layer, const int32_t* ids, const int32_t* names, Py_ssize_t rows, int k,
        bint bulk, bint is_global, int32_t* hits_out, int32_t* misses_out,
    ) noexcept nogil:
        self.run_part(
            self.policies[layer], <void*>self, layer, ids, names, rows, k, bulk, is_global,
            hits_out, misses_out,
        )


cdef void _begin_part(Policy part) noexcept nogil:
    part.begin_sequence()


cdef void _run_part(
    Policy part, Visit visit, int layer, const int32_t* ids, const int32_t* names,
    Py_ssize_t rows, int k, bint bulk, bint is_global, int32_t* hits_out, int32_t* misses_out,
) noexcept nogil:
    cdef int base = layer * visit.num_experts if is_global else 0
    cdef uint64_t* counts = &visit.counts[layer, 0]
    cdef const int* worths
    cdef int i, expert, victim, num_hits = 0, num_missing = 0, admitted, share
    cdef bint repeated = False
    cdef Py_ssize_t position
    # As the cache has it, which is told a share alone: one that is no limit counts by the rows.
    share = max(1, part.capacity // visit.num_layers) if is_global else part.capacity
    if share >= visit.num_experts:
        bulk = rows > 1
    visit.call += 1
    for position in range(rows * k):
        expert = ids[position]
        if expert < 0:
            continue
        if visit.seen[expert] == visit.call:
            visit.uses[expert] += 1
            repeated = True
            continue
        visit.seen[expert] = visit.call
        if part.nodes[base + expert].segment:
            visit.hits[num_hits] = expert
            num_hits += 1
        else:
            visit.uses[expert] = 1
            visit.missing[num_missing] = expert
            num_missing += 1
    hits_out[0] = num_hits
    misses_out[0] = num_missing
    if num_hits + num_missing == 0:
        return
    part.begin_step(layer, ids, False, rows, k, names)
    for i in range(num_hits):
        counts[visit.hits[i]] += 1
        part.access(base + visit.hits[i])
    if num_missing == 0:
        return
    share = visit.num_experts
    worths = part.worths(layer) if bulk else NULL
    if bulk and (worths == NULL or part.size < part.capacity):
        share = max(1, part.capacity // visit.num_layers) if is_global else part.capacity
    admitted = min(num_missing, max(0, min(share, part.capacity) - num_hits))
    if worths != NULL:
        sort_by_uses(visit.missing, worths, visit.order, num_missing)
    elif repeated:
        sort_by_uses(visit.missing, visit.uses, visit.order, num_missing)
    for i in range(num_hits):
        hold(part, base + visit.hits[i])
    for i in range(num_missing):
        expert = visit.missing[i]
        # Counted first: the policy reads the count when the key enters.
        counts[expert] += 1
        if i < admitted:
            if part.size == part.capacity:
                part.expect(base + expert)
                victim = part.victim()
                if worths != NULL and not part.prefers(base + expert, victim):
                    # The others are worth less.
                    admitted = i
                    continue
                part.remove(victim)
            part.insert(base + expert, True)
            hold(part, base + expert)
    for i in range(num_hits):
        unhold(part, base + visit.hits[i])
    for i in range(admitted):
        unhold(part, base + visit.missing[i])
