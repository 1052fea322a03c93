"""Products over weights where they lie, on the CPU and without the GIL."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.string cimport memset

from moecache.kernels._inputs cimport Inputs, Rows
from moecache.kernels._jobs cimport (
    MC_BF16,
    MC_BLOCK,
    MC_DIVIDED,
    MC_E8M0,
    MC_F16,
    MC_F32,
    MC_IN_STEPS,
    MC_NUM_CODES,
    MC_TIMES,
    MC_X_F32,
    mc_code_names,
    mc_expansion,
    mc_input_columns,
    mc_input_type,
    mc_is_coded,
    mc_level,
    mc_product,
    mc_tile_of,
)
from moecache.kernels._processor cimport level_in_use, run_expansion, run_product

from moecache.errors import ConfigError
from moecache.formats import find_format
from moecache.kernels._inputs import INPUTS as _INPUTS

# Of weights, in the order of their numbers in C; of scales, their numbers.
NUMBERS = ("f32", "f16", "bf16")
CODES = tuple((<bytes>mc_code_names[i]).decode() for i in range(MC_NUM_CODES - len(NUMBERS)))
SCALES = {
    "f32": MC_F32, "f16": MC_F16, "bf16": MC_BF16, "e8m0": MC_E8M0, "f16*i8": MC_IN_STEPS,
    "e4m3*": MC_TIMES, "e4m3/": MC_DIVIDED,
}


@cython.final
cdef class Matrix:
    """A weight matrix [rows, columns] in memory, as the kernels read it.

    Parameters
    ----------
    address : int
        Of its first byte.
    name : str
        Format: one of numbers, or one that has a compute form, in which the matrix lies.
    rows, columns : int
    row_bytes : int, optional
        From a row to the next; of a compute form, from a group of 16 rows to the next. By default
        there are no gaps.
    owner : object
        Kept alive.

    Attributes
    ----------
    rows, columns : int
    """

    def __cinit__(
        self, uintptr_t address, str name, int64_t rows, int64_t columns, row_bytes=None,
        owner=None
    ):
        cdef int64_t least
        cdef const mc_level *level = level_in_use()
        if rows < 0 or columns < 0 or address == 0:
            raise ConfigError(f"a matrix of {rows} x {columns} at {address:#x} cannot be computed")
        self.matrix.data = <const uint8_t *>address
        self.matrix.rows = rows
        self.matrix.columns = columns
        if name in NUMBERS:
            self.matrix.codes = NUMBERS.index(name)
            least = columns * (4 if self.matrix.codes == MC_F32 else 2)
        else:
            form = find_format(name).form
            if form is None:
                raise ConfigError(f"format {name!r} has no compute form, which kernels need")
            if form.codes not in CODES:
                raise ConfigError(f"codes {form.codes!r} have no kernel; {', '.join(CODES)} have")
            self.matrix.codes = len(NUMBERS) + <int>CODES.index(form.codes)
            self.matrix.scale = SCALES[form.scale]
            self.matrix.has_zeros = form.has_zeros
            self.matrix.has_offsets = form.has_offsets
            self.matrix.group = form.group or max(MC_BLOCK, mc_input_columns(&self.matrix))
            least = form.tile_bytes(columns)
            if mc_tile_of(
                level, mc_input_type(level, MC_X_F32, &self.matrix), &self.matrix
            ) == NULL:
                raise ConfigError(f"format {name!r} has the form {form}, for which is no kernel")
        self.matrix.row_bytes = least if row_bytes is None else row_bytes
        if self.matrix.row_bytes < least:
            raise ConfigError(
                f"{columns} columns of {name} take more than {row_bytes} bytes a row"
            )
        self.owner = owner

    @property
    def rows(self):
        """Rows, outputs."""
        return self.matrix.rows

    @property
    def columns(self):
        """Columns, inputs."""
        return self.matrix.columns

    def expand(self, uintptr_t out, str out_type, int64_t out_row_bytes):
        """Write the values of a matrix in its compute form, in the order of rows.

        Parameters
        ----------
        out : int
            Address of rows of `columns`.
        out_type : {"f32", "bf16"}
        out_row_bytes : int
            From a row to the next.

        Raises
        ------
        ConfigError
            If the matrix is one of numbers.
        """
        cdef mc_expansion expansion
        if not mc_is_coded(&self.matrix):
            raise ConfigError("a matrix of numbers has no compute form to expand")
        expansion.level = level_in_use()
        expansion.matrix = self.matrix
        expansion.out.data = <uint8_t *>out
        expansion.out.row_bytes = out_row_bytes
        expansion.out.type = _INPUTS.index(out_type)
        with nogil:
            run_expansion(&expansion)

    def multiply(
        self, uintptr_t inputs, str input_type, int64_t num, int64_t input_row_bytes,
        uintptr_t out, str out_type, int64_t out_row_bytes, uintptr_t bias=0,
        str bias_type="f32"
    ):
        """Write the products with `num` inputs: out[i] = matrix @ inputs[i] + bias.

        Parameters
        ----------
        inputs, out, bias : int
            Addresses: rows of `columns`, rows of `rows`, one row of `rows`, or 0.
        input_type, out_type, bias_type : {"f32", "bf16"}
        num : int
        input_row_bytes, out_row_bytes : int
            From a row to the next.

        Raises
        ------
        MemoryError
            If there is none for what the inputs are converted to.
        """
        cdef mc_product product
        cdef Inputs given
        cdef Rows found
        cdef int64_t i
        cdef int kind = _INPUTS.index(input_type)
        if num <= 0:
            return
        memset(&product, 0, sizeof(product))
        product.level = level_in_use()
        product.matrix = self.matrix
        product.out.data = <uint8_t *>out
        product.out.row_bytes = out_row_bytes
        product.out.type = _INPUTS.index(out_type)
        product.bias.data = <uint8_t *>bias
        product.bias.type = _INPUTS.index(bias_type)
        product.num_inputs = num
        given = Inputs.__new__(Inputs)
        given.fill(<const uint8_t *>inputs, kind, kind, num, input_row_bytes, &self.matrix)
        product.input_type = given.wanted
        found = Rows(num)
        for i in range(num):
            found.rows[i] = given.first + i * given.row_bytes
        product.inputs = found.rows
        with nogil:
            run_product(&product)
