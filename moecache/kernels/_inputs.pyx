"""Rows that matrices multiply."""

cimport cython
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc

from moecache.kernels._jobs cimport (
    mc_conversion,
    mc_input_columns,
    mc_input_row_bytes,
    mc_input_type,
    mc_level,
    mc_matrix,
)
from moecache.kernels._processor cimport level_in_use, run_conversion

# In the order of their numbers in C.
INPUTS = ("f32", "bf16")


@cython.final
cdef class Inputs:
    """Rows that matrices multiply, where they lie or converted; `Experts.inputs` makes them.

    `more` has them as up multiplies them, where gate takes another type.
    """

    def __cinit__(self):
        self.scratch = NULL
        # One that nobody filled has no rows.
        self.num = 0

    def __dealloc__(self):
        free(self.scratch)

    cdef int fill(
        self, const uint8_t *inputs, int given, int product_type, int64_t num, int64_t row_bytes,
        const mc_matrix *matrix
    ) except -1:
        """Point to `num` rows, or to their values as a matrix multiplies them.

        They are `given` as one type and multiplied as those of another, the same or narrower.
        """
        cdef int64_t nbytes
        cdef mc_conversion conversion
        cdef const mc_level *level = level_in_use()
        self.product_type = product_type
        self.wanted = mc_input_type(level, product_type, matrix)
        self.codes, self.columns, self.num = matrix.codes, matrix.columns, num
        self.first, self.row_bytes = inputs, row_bytes
        nbytes = mc_input_row_bytes(self.wanted, mc_input_columns(matrix))
        if given == self.wanted and mc_input_columns(matrix) == matrix.columns:
            return 0
        self.scratch = <uint8_t *>malloc(max(1, self.num * nbytes))
        if self.scratch == NULL:
            raise MemoryError(f"no memory for {self.num} inputs of {matrix.columns} numbers")
        conversion.level, conversion.matrix, conversion.inputs = level, matrix, inputs
        conversion.row_bytes, conversion.num = row_bytes, self.num
        conversion.given, conversion.wanted = given, self.wanted
        conversion.out, conversion.out_bytes = self.scratch, nbytes
        with nogil:
            run_conversion(&conversion)
        self.first, self.row_bytes = self.scratch, nbytes
        return 0


@cython.final
cdef class Rows:
    """Addresses of rows, and memory for some."""

    def __cinit__(self, int64_t num):
        self.scratch = NULL
        self.rows = <const uint8_t **>malloc(num * sizeof(void *))
        if self.rows == NULL:
            raise MemoryError(f"no memory for {num} inputs")

    def __dealloc__(self):
        free(self.rows)
        free(self.scratch)
