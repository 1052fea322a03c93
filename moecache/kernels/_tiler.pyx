"""Compute forms, made of matrices in the order of a file."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memset

from moecache.kernels._jobs cimport (
    MC_NUM_ORDERS,
    MC_TILE,
    mc_file,
    mc_level,
    mc_order,
    mc_order_names,
)
from moecache.kernels._processor cimport level_in_use

from moecache.errors import ConfigError
from moecache.kernels._matrix import SCALES as _SCALES

cdef extern from "_columns.h" nogil:
    void mc_transpose(
        const uint8_t *raw, int64_t rows, int64_t columns, int64_t size, uint8_t *out)

cnp.import_array()

# In the order of their numbers in C.
_COLUMNS = "columns"
ORDERS = tuple((<bytes>mc_order_names[i]).decode() for i in range(MC_NUM_ORDERS))
TILE = MC_TILE


@cython.final
cdef class Tiler:
    """Makes compute forms of matrices of one format and one shape.

    Parameters
    ----------
    rows, columns : int
        They are filled up with codes of zero.
    group : int
        Columns that share a scale: 16, or a multiple of 32.
    raw_bytes, form_bytes : int
        Of a matrix in the file's order, its parts one after the other, and in its form.
    order : str
        One of `ORDERS`: bytes, bytes with 128 added, nibbles with the even column in the low one,
        or ggml's, the first 16 columns of 32 in low nibbles; or words of 16, 8 or 4 columns, or
        of 8 rows; or ggml's blocks, by the name of their format, with all that is in them. Or
        "columns": numbers of 2 or 4 `block_bytes` of a matrix that is stored transposed.
    row_bytes, block_bytes : int
        Of codes, from a row to the next, and from 32 columns, or a block, to the next; of words,
        from those of some columns to the next.
    zero : int
        A byte of codes that mean zero, in the file's order.
    scale : {"f32", "f16", "bf16", "e8m0", "f16*i8", "e4m3*", "e4m3/"}
        Those of "e8m0" become bfloat16; see `Form`.
    largest : int
        The largest scale that makes no code infinite: bits without the sign, of its type in the
        form; of scales in two steps, of that float16.
    scale_rows : int
        Rows that share their scales.
    scale_row_bytes, scale_step : int
        From the scales of such rows to the next, and from a scale to the next.
    num_scales : int
        In a row; those beyond are zero.
    codes_at, scales_at, zeros_at, factor_at : int
        Where they begin in a matrix's bytes.
    zero_row_bytes : int
        Of words, from the zero points of a group to the next; `scale_row_bytes` is that of scales.
    zero_points : bytes
        Of words, for each stored zero point the bits of a number of the scales' type, 32 bits each.

    Attributes
    ----------
    raw_bytes, form_bytes : int
    """

    def __cinit__(
        self, *, int64_t rows, int64_t columns, int64_t group, int64_t raw_bytes,
        int64_t form_bytes, str order, int64_t row_bytes, str scale, uint32_t largest,
        int64_t scale_row_bytes,
        int64_t block_bytes=0, int zero=0, int64_t scale_rows=1, int64_t scale_step=0,
        int64_t num_scales=0, int64_t codes_at=0, int64_t scales_at=0, int64_t zeros_at=0,
        int64_t factor_at=0, int64_t zero_row_bytes=0, bytes zero_points=b""
    ):
        memset(&self.tiling.file, 0, sizeof(self.tiling.file))
        self.tiling.file.rows, self.tiling.file.columns = rows, columns
        self.tiling.file.group = group
        self.tiling.file.row_bytes, self.tiling.file.block_bytes = row_bytes, block_bytes
        self.tiling.file.scale_rows, self.tiling.file.scale_row_bytes = scale_rows, scale_row_bytes
        self.tiling.file.scale_step, self.tiling.file.num_scales = scale_step, num_scales
        self.tiling.number_bytes = block_bytes if order == _COLUMNS else 0
        if order == _COLUMNS:
            order = ORDERS[0]
        if order not in ORDERS:
            raise ConfigError(f"order {order!r} is not one of {', '.join(ORDERS)}")
        self.tiling.file.zero, self.tiling.file.order = zero, <mc_order><int>ORDERS.index(order)
        self.tiling.file.scale, self.tiling.file.largest = _SCALES[scale], largest
        self.tiling.file.zero_row_bytes, self.zero_points = zero_row_bytes, zero_points
        self.tiling.file.zero_points = <const uint32_t *><const char *>zero_points
        self.tiling.codes_at, self.tiling.scales_at = codes_at, scales_at
        self.tiling.zeros_at = zeros_at
        self.tiling.factor_at = factor_at
        self.tiling.raw_bytes, self.tiling.form_bytes = raw_bytes, form_bytes

    @property
    def raw_bytes(self):
        return self.tiling.raw_bytes

    @property
    def form_bytes(self):
        return self.tiling.form_bytes

    def tile(self, cnp.ndarray raw not None, cnp.ndarray out not None):
        """Write the forms of matrices that lie one after the other.

        Parameters
        ----------
        raw, out : ndarray
            C-contiguous, of any shape and dtype.

        Returns
        -------
        bool
            Whether a scale is infinite, no number, or too large for its codes; `Format.check`
            says which.

        Raises
        ------
        ValueError
            If these are not as many whole matrices as forms, or an array is not contiguous, or
            what is written to is read-only.
        """
        cdef int64_t num = self.check(raw, 0, out)
        cdef bint wrong
        cdef const uint8_t *given = <const uint8_t *>cnp.PyArray_DATA(raw)
        cdef uint8_t *form = <uint8_t *>cnp.PyArray_DATA(out)
        if self.tiling.form_bytes and raw.nbytes != num * self.tiling.raw_bytes:
            raise _misfit(self, raw, out)
        with nogil:
            wrong = tile_matrices(&self.tiling, given, form, num)
        return wrong

    cdef int64_t check(self, cnp.ndarray raw, int64_t raw_at, cnp.ndarray out) except -1:
        """Return the number of matrices; raise ValueError if arrays do not fit together.

        The matrices begin at byte `raw_at` of `raw`, and others may lie behind them.
        """
        cdef int64_t num, given = cnp.PyArray_NBYTES(raw)
        if not (cnp.PyArray_IS_C_CONTIGUOUS(raw) and cnp.PyArray_ISCARRAY(out)):
            raise ValueError("a matrix must be contiguous, and what it is tiled into writable, too")
        if self.tiling.form_bytes == 0:
            return 0
        num = cnp.PyArray_NBYTES(out) // self.tiling.form_bytes
        if (
            cnp.PyArray_NBYTES(out) != num * self.tiling.form_bytes
            or not 0 <= raw_at <= given or given - raw_at < num * self.tiling.raw_bytes
        ):
            raise _misfit(self, raw, out)
        return num


def _misfit(Tiler tiler, cnp.ndarray raw, cnp.ndarray out):
    return ValueError(
        f"matrices of {tiler.raw_bytes} bytes are tiled into {tiler.form_bytes}; got {raw.nbytes} "
        f"and {out.nbytes}"
    )


cdef bint tile_matrices(
    const Tiling *tiling, const uint8_t *raw, uint8_t *form, int64_t num
) noexcept nogil:
    """Write the forms of some matrices; return whether a scale is wrong, as `Tiler.tile` does."""
    cdef const mc_level *level = level_in_use()
    cdef mc_file file = tiling.file
    cdef int64_t i, row
    cdef int wrong = 0
    cdef uint8_t *to
    for i in range(num):
        to = form + i * tiling.form_bytes
        if tiling.number_bytes:
            mc_transpose(raw, file.rows, file.columns, tiling.number_bytes, to)
            raw += tiling.raw_bytes
            continue
        file.codes, file.scales = raw + tiling.codes_at, raw + tiling.scales_at
        file.zeros, file.factor = raw + tiling.zeros_at, raw + tiling.factor_at
        row = 0
        while row < file.rows:
            to = level.form(&file, row, to, &wrong)
            row += MC_TILE
        raw += tiling.raw_bytes
    return wrong != 0
