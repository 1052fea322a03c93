"""History: each expert's probability of use by its own past.

Moving averages of its use, and a table of popularity by age that is learned as it goes.
"""

cimport cython
cimport numpy as cnp
from libc.math cimport powf
from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memset

import numpy as np

from moecache.policies._echo_loops cimport ECHO_AGES, echo_loops

cnp.import_array()

cdef enum:
    FIRST_CELL = 6 * 16 + 15

cdef float FAST = 0.04
cdef float SLOW = 0.001


@cython.final
cdef class History:
    """What is known of each expert, without a look at other tokens.

    Parameters
    ----------
    num_layers, num_experts : int
    """

    def __cinit__(self, int num_layers, int num_experts):
        cdef dict arrays = {
            name: np.zeros((num_layers, num_experts), dtype)
            for name, dtype in (
                ("fast", np.float32), ("slow", np.float32), ("own", np.float32),
                ("last", np.int32), ("cells", np.uint8),
            )
        }
        arrays["table"] = np.zeros(CELLS, np.float32)
        arrays["samples"] = np.zeros(CELLS, np.float32)
        arrays["found"] = np.zeros(num_experts, np.float32)
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.loops = echo_loops()
        self.arrays = arrays
        self.fast = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["fast"])
        self.slow = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["slow"])
        self.own = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["own"])
        self.last = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>arrays["last"])
        self.cells = <uint8_t*>cnp.PyArray_DATA(<cnp.ndarray>arrays["cells"])
        self.table = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["table"])
        self.samples = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["samples"])
        self.found = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["found"])

    cdef void expect(self, int top_k) noexcept nogil:
        """Note how many experts a request has; 0: none was seen."""
        self.top_k = top_k
        self.scale = <float>self.num_experts / top_k if top_k else 0

    cdef void start(self, int top_k) noexcept nogil:
        """Believe what is likely before anything was seen: popular experts are used more."""
        cdef Py_ssize_t key
        cdef int cell
        cdef float share = <float>top_k / self.num_experts
        self.expect(top_k)
        for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
            self.fast[key] = self.slow[key] = share
        for cell in range(CELLS):
            self.table[cell] = min(
                <float>0.9, share * powf(2.0, (cell // ECHO_AGES - 6) / <float>1.5)
            )

    cdef void learn(
        self, int layer, int32_t token, Py_ssize_t rows, const float* wanted
    ) noexcept nogil:
        """Learn from one row, or from the mean of rows of several sequences."""
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        cdef float* table = self.table
        cdef const uint8_t* cells = self.cells + base
        cdef float rate = min(<float>1, rows / (<float>token + 5))
        cdef float fast = FAST, slow = SLOW
        cdef int e, cell
        for _ in range(rows - 1):
            fast += FAST * (1 - fast)
            slow += SLOW * (1 - slow)
        # A quarter of the experts each time is enough.
        for e in range(token // rows % 4, self.num_experts, 4):
            cell = cells[e]
            table[cell] += (
                max(<float>0.002, 1 / (self.samples[cell] + <float>1.5))
                * (wanted[e] - table[cell])
            )
            self.samples[cell] += 1
        self.loops.average(
            self.num_experts, wanted, max(fast, rate), max(slow, rate), self.scale, token,
            1 / <float>rows, self.last + base, self.fast + base, self.slow + base,
            self.cells + base,
        )

    cdef void recall(self, int layer) noexcept nogil:
        """Compute `own` of a layer from the averages and the table."""
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        cdef const uint8_t* cells = self.cells + base
        cdef int e
        for e in range(self.num_experts):
            self.found[e] = self.table[cells[e]]
        self.loops.own(self.num_experts, self.found, self.fast + base, self.own + base)

    cdef void blend(self) noexcept nogil:
        """Let the fast averages fall back to the slow ones."""
        cdef Py_ssize_t key
        for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
            self.fast[key] = self.slow[key]

    cdef void set_back(self, int32_t tokens) noexcept nogil:
        """Number tokens lower by so many."""
        cdef Py_ssize_t key
        for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
            self.last[key] = max(NEVER, self.last[key] - tokens)

    cdef void forget(self) noexcept nogil:
        cdef Py_ssize_t key, num_keys = <Py_ssize_t>self.num_layers * self.num_experts
        self.expect(0)
        for key in range(num_keys):
            self.last[key] = NEVER
            self.cells[key] = FIRST_CELL
        memset(self.own, 0, num_keys * sizeof(float))
        memset(self.samples, 0, CELLS * sizeof(float))
