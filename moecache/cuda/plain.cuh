// Matrices of plain numbers, and dot products with rows of them.

// The sums of some rows over a warp's lanes: `total` returns row r's to the lanes from r * LANES on.
// A row's numbers are added in one order, however many rows there are: lane by lane 16 away, then 8,
// and so on. After each such step a lane goes on with half of the rows.
template <unsigned ROWS> struct RowSums {
    static constexpr unsigned PADDED = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
    static constexpr unsigned LANES = 32 / PADDED; // that have the same total
    static_assert(ROWS <= 8, "a lane has so many rows at most");

    static __device__ float total(const float (&sums)[ROWS])
    {
        float left[PADDED];
#pragma unroll
        for (unsigned r = 0; r < PADDED; r++) left[r] = r < ROWS ? sums[r] : 0.0f;
#pragma unroll
        for (unsigned distance = 16, rows = PADDED / 2; distance > 0; distance /= 2, rows /= 2) {
            if (rows == 0) {
                left[0] = add_rn(left[0], __shfl_xor_sync(ALL_LANES, left[0], distance));
                continue;
            }
            const bool is_upper = threadIdx.x & distance;
#pragma unroll
            for (unsigned r = 0; r < rows; r++) {
                const float own = is_upper ? left[r + rows] : left[r];
                const float other = is_upper ? left[r] : left[r + rows];
                left[r] = add_rn(own, __shfl_xor_sync(ALL_LANES, other, distance));
            }
        }
        return left[0];
    }

    // The row whose total a lane has; ROWS or more if it has none.
    static __device__ unsigned row() { return threadIdx.x % 32 / LANES; }
    // Whether it is the first lane that has it.
    static __device__ bool is_first() { return threadIdx.x % LANES == 0 && row() < ROWS; }
};

// Chunks of weights that a lane has under way at once, of all its rows together: enough to hide the
// latency of memory, and all that fits into 80 registers: three blocks to a multiprocessor.
constexpr unsigned IN_FLIGHT = 8;

template <class D> struct Plain {
    using At = Row<D>; // where a row is
    using H = F32; // rows of h
    // Rows of down that a warp takes at once, elements of h, each of two rows, and blocks of 256
    // threads whose registers a multiprocessor has. ExpertKind has BLOCKS, too.
    static constexpr unsigned ROWS = 3, ELEMENTS = 1, BLOCKS = 3;

    static __device__ long long matrix_bytes(int rows, int columns)
    {
        return (long long)rows * columns * sizeof(typename D::Bits);
    }

    static __device__ At row(const u8* matrix, long long index, int rows, int columns)
    {
        return (At)matrix + index * columns;
    }

    // The dot products of some rows with x, by one warp: a lane has the sums of its columns.
    template <class X, unsigned ROWS>
    static __device__ inline void dots(
        const At (&rows)[ROWS], Row<X> x, unsigned n, float (&sums)[ROWS])
    {
        constexpr unsigned per_chunk = PER_CHUNK<D>, ahead = IN_FLIGHT / ROWS;
        constexpr unsigned at_once = per_chunk < PER_CHUNK<X> ? per_chunk : PER_CHUNK<X>;
        bool is_aligned = is_chunked<D>(n, x);
        for (unsigned r = 0; r < ROWS; r++) {
            sums[r] = 0.0f;
            is_aligned = is_aligned && is_chunked<D>(n, rows[r]);
        }
        const unsigned lane = threadIdx.x % 32, num_chunks = is_aligned ? n / per_chunk : 0;
        for (unsigned start = lane; start < num_chunks; start += 32 * ahead) {
            uint4 chunks[ahead][ROWS];
#pragma unroll
            for (unsigned k = 0; k < ahead; k++)
                if (const unsigned chunk = start + 32 * k; chunk < num_chunks)
#pragma unroll
                    for (unsigned r = 0; r < ROWS; r++)
                        // Weights are used once per step: the cache is for x and h.
                        chunks[k][r] = __ldcs((const uint4*)rows[r] + chunk);
#pragma unroll
            for (unsigned k = 0; k < ahead; k++)
                if (const unsigned chunk = start + 32 * k; chunk < num_chunks) {
                    const Row<X> inputs = x + chunk * per_chunk;
#pragma unroll
                    for (unsigned part = 0; part < per_chunk; part += at_once) {
                        float values[at_once];
                        load<X, at_once>(inputs + part, values);
#pragma unroll
                        for (unsigned r = 0; r < ROWS; r++)
#pragma unroll
                            for (unsigned i = 0; i < at_once; i++)
                                sums[r] = fma_rn(
                                    element<D>(chunks[k][r], part + i), values[i], sums[r]);
                    }
                }
        }
        if (!is_aligned) add_elements<X, ROWS>(rows, x, n, sums);
    }

    // Units of 32 columns in runs of 16, as other formats have them.
    static __device__ unsigned num_units(unsigned n) { return (n + 31) / 32; }
    static __device__ unsigned column(unsigned unit, unsigned run) { return unit * 32 + run * 16; }
    static __device__ bool is_aligned(At row) { return (u64)row % CHUNK_BYTES == 0; }

    template <bool IS_ALIGNED>
    static __device__ inline void values(
        At row, unsigned unit, unsigned run, unsigned n, float* found)
    {
#pragma unroll
        for (unsigned i = 0; i < 16; i++) {
            const unsigned at = column(unit, run) + i;
            found[i] = at < n ? D::widen(row[at]) : 0.0f;
        }
    }

    // Rows that are not aligned to chunks: a lane adds the same elements in the same order.
    template <class X, unsigned ROWS>
    static __device__ inline void add_elements(
        const At (&rows)[ROWS], Row<X> x, unsigned n, float (&sums)[ROWS])
    {
        constexpr unsigned per_chunk = PER_CHUNK<D>;
#pragma unroll 1
        for (unsigned start = threadIdx.x % 32 * per_chunk; start < n; start += 32 * per_chunk)
#pragma unroll 1
            for (unsigned i = start; i < n && i < start + per_chunk; i++) {
                const float value = X::widen(x[i]);
#pragma unroll
                for (unsigned r = 0; r < ROWS; r++)
                    sums[r] = fma_rn(D::widen(rows[r][i]), value, sums[r]);
            }
    }
};
