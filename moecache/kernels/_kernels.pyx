"""Products over weights where they lie, on the CPU and without the GIL."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from moecache.kernels._jobs cimport (
    MC_BF16,
    MC_BLOCK,
    MC_DIVIDED,
    MC_E8M0,
    MC_F16,
    MC_F32,
    MC_IN_STEPS,
    MC_NUM_CODES,
    MC_NUM_ORDERS,
    MC_TILE,
    MC_TIMES,
    MC_X_F32,
    MC_X_PLANES,
    mc_are_alike,
    mc_code_names,
    mc_experts,
    mc_file,
    mc_input_columns,
    mc_input_row_bytes,
    mc_input_type,
    mc_is_coded,
    mc_level,
    mc_matrix,
    mc_order,
    mc_order_names,
    mc_product,
    mc_rows,
    mc_sum,
    mc_tile_of,
    mc_work,
)
from moecache.kernels._products cimport (
    MC_MAX_LEVELS,
    mc_after_fork,
    mc_combine,
    mc_compute_experts,
    mc_conversion,
    mc_convert_all,
    mc_expand,
    mc_expansion,
    mc_is_late,
    mc_levels,
    mc_now_ns,
    mc_products,
    mc_share,
    mc_share_from,
    mc_shared_bytes,
    mc_tiles_are_refused,
    mc_use_level,
    mc_waking_bytes,
)

from moecache.errors import ConfigError
from moecache.formats import find_format
from moecache.units import whole_number

cnp.import_array()


cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)


# Of weights and of scales, each in the order of its numbers in C.
NUMBERS = ("f32", "f16", "bf16")
CODES = tuple((<bytes>mc_code_names[i]).decode() for i in range(MC_NUM_CODES - len(NUMBERS)))
ORDERS = tuple((<bytes>mc_order_names[i]).decode() for i in range(MC_NUM_ORDERS))
INPUTS = ("f32", "bf16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu", "relu", "relu2", "clamped_silu")
TILE = MC_TILE
_SCALES = {
    "f32": MC_F32, "f16": MC_F16, "bf16": MC_BF16, "e8m0": MC_E8M0, "f16*i8": MC_IN_STEPS,
    "e4m3*": MC_TIMES, "e4m3/": MC_DIVIDED,
}

cdef const mc_level *_levels[MC_MAX_LEVELS]
cdef int _num_levels = mc_levels(_levels)
cdef const mc_level *_level = _levels[_num_levels - 1]
mc_use_level(_level)
cdef int _num_threads = 1
pthread_atfork(NULL, NULL, mc_after_fork)


def levels():
    """Return the names of the levels that this processor has, the best one last."""
    return tuple((<bytes>_levels[i].name).decode() for i in range(_num_levels))


def level():
    """Return the name of the level in use."""
    return (<bytes>_level.name).decode()


def amx_is_refused():
    """Return whether the processor has AMX, and the operating system denies it to this process."""
    return bool(mc_tiles_are_refused)


def use_level(str name):
    """Compute with a level from now on; for tests, and to compare.

    Raises
    ------
    ConfigError
        If the processor does not have it.
    """
    global _level
    cdef int i
    for i in range(_num_levels):
        if (<bytes>_levels[i].name).decode() == name:
            _level = _levels[i]
            mc_use_level(_level)
            return
    raise ConfigError(f"level {name!r} is not one of {', '.join(levels())}")


def num_threads():
    """Return how many threads compute."""
    return _num_threads


def use_threads(number):
    """Compute with so many threads from now on, the calling one included.

    Raises
    ------
    ConfigError
        If that is no integer between 1 and 256.
    """
    global _num_threads
    _num_threads = whole_number(number, "threads", 1, 256)


def share_from(int64_t shared_bytes, int64_t waking_bytes):
    """Have threads share work from so many bytes of weights on; for tests.

    Parameters
    ----------
    shared_bytes, waking_bytes : int
        If one of them is awake, and if all sleep.

    Returns
    -------
    (int, int)
        What it was.
    """
    before = mc_shared_bytes, mc_waking_bytes
    mc_share_from(shared_bytes, waking_bytes)
    return before


cdef const mc_level *level_in_use() noexcept nogil:
    return _level


cdef void convert_rows(
    const float *rows, int64_t step, int64_t num, int wanted, const mc_matrix *matrix,
    uint8_t *out, int64_t out_bytes
) noexcept nogil:
    cdef mc_conversion conversion
    conversion.level, conversion.matrix = _level, matrix
    conversion.inputs, conversion.row_bytes = <const uint8_t *>rows, step * 4
    conversion.num, conversion.given, conversion.wanted = num, MC_X_F32, wanted
    conversion.out, conversion.out_bytes = out, out_bytes
    mc_convert_all(&conversion, _num_threads)


cdef void run_product(mc_product *product) noexcept nogil:
    mc_products(product, _num_threads)


cdef void run_experts(mc_experts *experts) noexcept nogil:
    mc_compute_experts(experts, _num_threads)


cdef void run_sum(mc_sum *sum) noexcept nogil:
    mc_combine(sum, _num_threads)


cdef void run_items(mc_work work, void *job, int64_t num_items, int64_t num_bytes) noexcept nogil:
    mc_share(_num_threads, work, job, num_items, num_bytes)


cdef int64_t now_ns() noexcept nogil:
    return mc_now_ns()


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
            self.matrix.scale = _SCALES[form.scale]
            self.matrix.has_zeros = form.has_zeros
            self.matrix.has_offsets = form.has_offsets
            self.matrix.group = form.group or max(MC_BLOCK, mc_input_columns(&self.matrix))
            least = form.tile_bytes(columns)
            if mc_tile_of(
                _level, mc_input_type(_level, MC_X_F32, &self.matrix), &self.matrix
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
        expansion.level = _level
        expansion.matrix = self.matrix
        expansion.out.data = <uint8_t *>out
        expansion.out.row_bytes = out_row_bytes
        expansion.out.type = INPUTS.index(out_type)
        cdef int threads = _num_threads
        with nogil:
            mc_expand(&expansion, threads)

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
        cdef _Rows found
        cdef int64_t i
        if num <= 0:
            return
        memset(&product, 0, sizeof(product))
        product.level = _level
        product.matrix = self.matrix
        product.out.data = <uint8_t *>out
        product.out.row_bytes = out_row_bytes
        product.out.type = INPUTS.index(out_type)
        product.bias.data = <uint8_t *>bias
        product.bias.type = INPUTS.index(bias_type)
        product.num_inputs = num
        given = Inputs.__new__(Inputs)
        given.fill(
            <const uint8_t *>inputs, INPUTS.index(input_type), num, input_row_bytes, &self.matrix
        )
        product.input_type = given.wanted
        found = _Rows(num)
        for i in range(num):
            found.rows[i] = given.first + i * given.row_bytes
        product.inputs = found.rows
        cdef int threads = _num_threads
        with nogil:
            mc_products(&product, threads)


@cython.final
cdef class Experts:
    """Gated feed-forwards of the experts in slots: down(act(gate(x)) * up(x)).

    Parameters
    ----------
    ups : sequence of Matrix
        Gate and up, of `width` rows each, in formats of their own; or one: up without a gate, or
        rows of gate and up in turns. These and `down` are those of slot 0.
    up_slot_bytes : int
        From a slot's matrices to the next one's.
    down : Matrix
    down_slot_bytes : int
    width : int
        Rows of gate.
    is_interleaved : bool
        Whether the one matrix has rows of gate and up in turns.
    activation : str
        One of `ACTIVATIONS`; "swiglu" is gpt-oss's, with `alpha` and `limit`; "clamped_silu"
        limits gate and up alike, and is silu(gate) * up then.
    up_bias, down_bias : (int, int, str), optional
        Address of slot 0's, bytes to the next, type.
    owner : object
        Kept alive.
    """

    def __cinit__(
        self, ups, int64_t up_slot_bytes, Matrix down not None, int64_t down_slot_bytes,
        int64_t width, *, bint is_interleaved=False, str activation="silu", float alpha=1.702,
        float limit=7.0, up_bias=None, down_bias=None, owner=None
    ):
        cdef Matrix up
        cdef mc_rows *bias
        cdef int i
        if activation not in ACTIVATIONS:
            raise ConfigError(
                f"activation {activation!r} has no kernel; {', '.join(ACTIVATIONS)} have"
            )
        self.ups, self.down, self.owner = tuple(ups), down, owner
        if not 1 <= len(self.ups) <= 2 - is_interleaved:
            raise ConfigError(
                "an expert has gate and up, or up, or one matrix of both in turns; got "
                f"{len(self.ups)} matrices{' in turns' if is_interleaved else ''}"
            )
        for up in self.ups:
            if up is None:
                raise TypeError("a matrix is None")
            if (
                width < 0 or down.columns != width or up.rows != width * (1 + is_interleaved)
                or up.columns != (<Matrix>self.ups[0]).columns
            ):
                raise ConfigError(
                    f"experts of width {width} do not fit: up is {up.rows} x {up.columns}, down "
                    f"has {down.columns} columns"
                )
        if activation in ("swiglu", "clamped_silu") and len(self.ups) == 1 and not is_interleaved:
            raise ConfigError("experts without a gate have one input of the activation alone")
        memset(&self.experts, 0, sizeof(self.experts))
        self.experts.num_ups = len(self.ups)
        for i in range(self.experts.num_ups):
            up = self.ups[i]
            self.experts.up[i].first = up.matrix
            self.experts.up[i].slot_bytes = up_slot_bytes
            bias = &self.experts.up[i].bias
            _set_bias(bias, up_bias)
            if bias.data != NULL:
                bias.data += i * width * mc_input_row_bytes(bias.type, 1)
        self.multiplies_alike = len(self.ups) == 1 or mc_are_alike(
            &self.experts.up[0].first, &self.experts.up[1].first
        )
        self.experts.down.first = down.matrix
        self.experts.down.slot_bytes = down_slot_bytes
        self.experts.width = width
        self.experts.is_interleaved = is_interleaved
        self.experts.activation.kind = ACTIVATIONS.index(activation)
        self.experts.activation.alpha = alpha
        self.experts.activation.limit = limit
        _set_bias(&self.experts.down.bias, down_bias)

    def inputs(
        self, uintptr_t inputs, str input_type, int64_t num_tokens, int64_t input_row_bytes
    ):
        """Return a step's hidden states as `compute` takes them, for all waves of the step.

        Each row is converted once, where the experts multiply another type.

        Parameters
        ----------
        inputs : int
            Address of the hidden states [num_tokens, columns]; they stay there meanwhile.
        input_type : {"f32", "bf16"}
        num_tokens : int
        input_row_bytes : int
            From a row to the next.

        Raises
        ------
        MemoryError
            If there is none for what they are converted to.
        """
        cdef Inputs found = Inputs.__new__(Inputs)
        cdef int given = INPUTS.index(input_type)
        num_tokens = max(0, num_tokens)
        found.fill(
            <const uint8_t *>inputs, given, num_tokens, input_row_bytes, &self.experts.up[0].first
        )
        if not self.multiplies_alike:
            found.more = Inputs.__new__(Inputs)
            found.more.fill(
                <const uint8_t *>inputs, given, num_tokens, input_row_bytes,
                &self.experts.up[1].first
            )
        return found

    def compute(
        self, const int32_t[::1] slots, const int64_t[::1] offsets, const int64_t[::1] pairs,
        int64_t top_k, Inputs inputs not None, uintptr_t out, str out_type, int64_t out_row_bytes
    ):
        """Write the rows that a wave covers: out[p], for each of its pairs.

        Parameters
        ----------
        slots : int32 [n]
        offsets : int64 [n + 1]
        pairs : int64 [m]
            As a `Wave` has them.
        top_k : int
            Pair p is of token p // top_k.
        inputs : Inputs
            The tokens' hidden states, of experts with the same columns in the same format.
        out : int
            Address of the rows [num_tokens * top_k, hidden_size].
        out_type : {"f32", "bf16"}
        out_row_bytes : int
            From a row to the next.

        Raises
        ------
        MemoryError
            If there is none for the activations.
        """
        cdef mc_experts e = self.experts
        cdef Inputs of_part
        cdef _Rows rows, hidden
        cdef list kept = []
        cdef uint8_t *scratch
        cdef int64_t i, filled, written, num = pairs.shape[0]
        cdef int part, threads = _num_threads
        if offsets.shape[0] != slots.shape[0] + 1 or top_k < 1:
            raise ValueError("a wave has one offset more than slots, and a positive top_k")
        if offsets[0] != 0 or offsets[slots.shape[0]] != num:
            raise ValueError(
                f"offsets go from {offsets[0]} to {offsets[slots.shape[0]]}, but there are {num} "
                "pairs"
            )
        if num == 0:
            return
        for i in range(slots.shape[0]):
            if offsets[i] > offsets[i + 1]:
                raise ValueError(f"offsets fall from {offsets[i]} to {offsets[i + 1]}")
        for i in range(num):
            if not 0 <= pairs[i] < inputs.num * top_k:
                raise ValueError(f"pair {pairs[i]} is not in [0, {inputs.num * top_k})")
        e.level = _level
        e.slots = &slots[0]
        e.offsets = &offsets[0]
        e.pairs = &pairs[0]
        e.num_experts = slots.shape[0]
        e.out.data = <uint8_t *>out
        e.out.row_bytes = out_row_bytes
        e.out.type = INPUTS.index(out_type)
        e.hidden_type = mc_input_type(_level, inputs.given, &e.down.first)
        e.hidden.type = MC_X_F32 if e.hidden_type == MC_X_PLANES else e.hidden_type
        for part in range(e.num_ups):
            e.input_types[part] = mc_input_type(_level, inputs.given, &e.up[part].first)
            of_part = inputs if part == 0 or self.multiplies_alike else inputs.more
            if (
                of_part is None or of_part.wanted != e.input_types[part]
                or of_part.codes != e.up[part].first.codes
                or of_part.columns != e.up[part].first.columns
            ):
                raise ValueError("these inputs were made for other experts, or for another level")
            if part == 0 or of_part is not inputs:
                rows = _Rows(num)
                kept.append(rows)
                for i in range(num):
                    rows.rows[i] = of_part.first + pairs[i] // top_k * of_part.row_bytes
            e.inputs[part] = rows.rows
        hidden = _Rows(num)
        filled = mc_input_row_bytes(e.hidden.type, mc_input_columns(&e.down.first))
        written = mc_input_row_bytes(e.hidden.type, e.width)
        e.hidden.row_bytes = (filled + 63) & ~63
        hidden.scratch = <uint8_t *>malloc(max(1, num * e.hidden.row_bytes))
        if hidden.scratch == NULL:
            raise MemoryError(f"no memory for the activations of {num} pairs")
        scratch = hidden.scratch
        e.hidden.data = scratch
        for i in range(num):
            hidden.rows[i] = scratch + i * e.hidden.row_bytes
            # Behind the activations: codes are multiplied by whole blocks.
            memset(<uint8_t *>hidden.rows[i] + written, 0, <size_t>(filled - written))
        e.hidden_inputs = hidden.rows
        with nogil:
            mc_compute_experts(&e, threads)


def combine(
    uintptr_t rows, int64_t num_tokens, int64_t top_k, int64_t columns, uintptr_t weights,
    str weight_type, int64_t weight_row_bytes, uintptr_t out, str out_type, int64_t out_row_bytes
):
    """Write each token's weighted sum of rows: out[t] = sum of weights[t, j] * rows[t * top_k + j].

    Parameters
    ----------
    rows, weights, out : int
        Addresses: fp32 [num_tokens * top_k, columns] without gaps, [num_tokens, top_k],
        [num_tokens, columns].
    weight_type, out_type : {"f32", "bf16"}
    weight_row_bytes, out_row_bytes : int
        From a row to the next.
    """
    cdef mc_sum job
    job.rows = <const float *>rows
    job.num_tokens = num_tokens
    job.top_k = top_k
    job.columns = columns
    job.weights.data = <uint8_t *>weights
    job.weights.type = INPUTS.index(weight_type)
    job.weights.row_bytes = weight_row_bytes
    job.out.data = <uint8_t *>out
    job.out.type = INPUTS.index(out_type)
    job.out.row_bytes = out_row_bytes
    cdef int threads = _num_threads
    with nogil:
        mc_combine(&job, threads)


@cython.final
cdef class Inputs:
    """Rows that matrices multiply, where they lie or converted; `Experts.inputs` makes them.

    `more` has them as up multiplies them, where gate takes another type.
    """

    cdef const uint8_t *first
    cdef Inputs more
    cdef uint8_t *scratch
    cdef int64_t row_bytes, num, columns
    cdef int given, wanted, codes

    def __cinit__(self):
        self.scratch = NULL
        # One that nobody filled has no rows.
        self.num = 0

    def __dealloc__(self):
        free(self.scratch)

    cdef int fill(
        self, const uint8_t *inputs, int given, int64_t num, int64_t row_bytes,
        const mc_matrix *matrix
    ) except -1:
        """Point to `num` rows of a type, or to their values as a matrix multiplies them."""
        cdef int64_t nbytes
        cdef mc_conversion conversion
        cdef int threads = _num_threads
        self.given, self.wanted = given, mc_input_type(_level, given, matrix)
        self.codes, self.columns, self.num = matrix.codes, matrix.columns, num
        self.first, self.row_bytes = inputs, row_bytes
        nbytes = mc_input_row_bytes(self.wanted, mc_input_columns(matrix))
        if self.given == self.wanted and mc_input_columns(matrix) == matrix.columns:
            return 0
        self.scratch = <uint8_t *>malloc(max(1, self.num * nbytes))
        if self.scratch == NULL:
            raise MemoryError(f"no memory for {self.num} inputs of {matrix.columns} numbers")
        conversion.level, conversion.matrix, conversion.inputs = _level, matrix, inputs
        conversion.row_bytes, conversion.num = row_bytes, self.num
        conversion.given, conversion.wanted = self.given, self.wanted
        conversion.out, conversion.out_bytes = self.scratch, nbytes
        with nogil:
            mc_convert_all(&conversion, threads)
        self.first, self.row_bytes = self.scratch, nbytes
        return 0


@cython.final
cdef class _Rows:
    """Addresses of rows, and memory for some."""

    cdef const uint8_t **rows
    cdef uint8_t *scratch

    def __cinit__(self, int64_t num):
        self.scratch = NULL
        self.rows = <const uint8_t **>malloc(num * sizeof(void *))
        if self.rows == NULL:
            raise MemoryError(f"no memory for {num} inputs")

    def __dealloc__(self):
        free(self.rows)
        free(self.scratch)


cdef int _set_bias(mc_rows *rows, bias) except -1:
    if bias is not None:
        address, stride, kind = bias
        rows.data = <uint8_t *><uintptr_t>address
        rows.row_bytes = stride
        rows.type = INPUTS.index(kind)
    return 0


def is_late(int64_t waited_ns, int64_t own_ns, int64_t own_items):
    """Return whether a wait for other threads means that they lost their processors.

    Then a job's thread works alone for 20 ms, and twice as long each time, up to 320 ms.

    Parameters
    ----------
    waited_ns : int
        From the end of the caller's own items to the end of the others'.
    own_ns, own_items : int
        What the caller did, and how long that took.
    """
    return mc_is_late(waited_ns, own_ns, own_items) != 0


def read_all(uintptr_t address, int64_t nbytes):
    """Read memory and do nothing with it, by the thread that calls; to be timed."""
    cdef uint32_t found
    with nogil:
        found = _level.read(<const uint8_t *>address, nbytes)
    return found


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
        of 8 rows; or ggml's blocks, by the name of their format, with all that is in them.
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
    cdef mc_file file = tiling.file
    cdef int64_t i, row
    cdef int wrong = 0
    cdef uint8_t *to
    for i in range(num):
        to = form + i * tiling.form_bytes
        file.codes, file.scales = raw + tiling.codes_at, raw + tiling.scales_at
        file.zeros, file.factor = raw + tiling.zeros_at, raw + tiling.factor_at
        row = 0
        while row < file.rows:
            to = _level.form(&file, row, to, &wrong)
            row += MC_TILE
        raw += tiling.raw_bytes
    return wrong != 0
