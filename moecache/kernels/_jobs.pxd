"""Declarations of what is to be done, and of what it is done with."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t


cdef extern from "_jobs.h" nogil:
    enum:
        MC_TILE
        MC_TIMES
        MC_BLOCK
        MC_BF16
        MC_DIVIDED
        MC_E8M0
        MC_F16
        MC_F32
        MC_IN_STEPS
        MC_X_F32
        MC_X_BF16
        MC_X_PLANES
        MC_NUM_CODES
        MC_NUM_ORDERS

    ctypedef enum mc_order:
        pass

    const char *const mc_code_names[]
    const char *const mc_order_names[]

    ctypedef struct mc_matrix:
        const uint8_t *data
        int64_t rows
        int64_t columns
        int64_t row_bytes
        int64_t group
        int codes
        int scale
        int has_zeros
        int has_offsets

    ctypedef struct mc_file:
        const uint8_t *codes
        const uint8_t *scales
        int64_t rows
        int64_t columns
        int64_t group
        int64_t row_bytes
        int64_t block_bytes
        int64_t scale_rows
        int64_t scale_row_bytes
        int64_t scale_step
        int64_t num_scales
        mc_order order
        int scale
        uint32_t largest
        const uint8_t *factor
        int zero
        const uint8_t *zeros
        int64_t zero_row_bytes
        const uint32_t *zero_points

    ctypedef void (*mc_tile)() noexcept nogil

    ctypedef struct mc_activation:
        int kind
        float alpha
        float limit

    ctypedef struct mc_attention:
        const uint8_t *keys
        const uint8_t *values
        const uint8_t *more
        int64_t key_step
        int64_t value_step
        int64_t more_step
        int64_t width
        int64_t value_width
        int64_t more_width
        int type
        float scale

    ctypedef struct mc_level:
        const char *name
        void (*activate)(
            float *gate, const float *up, int64_t num, const mc_activation *how
        ) noexcept nogil
        void (*gate)(float *x, const float *gate, int64_t num) noexcept nogil
        void (*softplus)(float *x, int64_t num) noexcept nogil
        uint8_t *(*form)(const mc_file *, int64_t, uint8_t *, int *) noexcept nogil
        uint32_t (*read)(const uint8_t *, int64_t) noexcept nogil

    ctypedef void (*mc_work)(void *job, int64_t item) noexcept nogil

    ctypedef struct mc_rows:
        uint8_t *data
        int64_t row_bytes
        int type

    ctypedef struct mc_product:
        const mc_level *level
        mc_matrix matrix
        mc_rows bias
        mc_rows out
        const uint8_t *const *inputs
        int input_type
        int64_t num_inputs

    ctypedef struct mc_conversion:
        const mc_level *level
        const mc_matrix *matrix
        const uint8_t *inputs
        int64_t row_bytes
        int64_t num
        int given
        int wanted
        uint8_t *out
        int64_t out_bytes

    ctypedef struct mc_expansion:
        const mc_level *level
        mc_matrix matrix
        mc_rows out

    ctypedef struct mc_slots:
        mc_matrix first
        int64_t slot_bytes
        mc_rows bias

    ctypedef struct mc_experts:
        const mc_level *level
        mc_slots up[2]
        mc_slots down
        mc_activation activation
        int num_ups
        int is_interleaved
        int64_t width
        const int32_t *slots
        const int64_t *offsets
        const int64_t *pairs
        int64_t num_experts
        const uint8_t *const *inputs[2]
        int input_types[2]
        mc_rows hidden
        int hidden_type
        const uint8_t **hidden_inputs
        mc_rows out

    ctypedef struct mc_sum:
        const float *rows
        mc_rows weights
        mc_rows out
        int64_t num_tokens
        int64_t top_k
        int64_t columns

    int mc_is_coded(const mc_matrix *matrix)
    mc_tile mc_tile_of(const mc_level *level, int type, const mc_matrix *matrix)
    int mc_input_type(const mc_level *level, int given, const mc_matrix *matrix)
    int mc_are_alike(const mc_matrix *a, const mc_matrix *b)
    int64_t mc_input_columns(const mc_matrix *matrix)
    int64_t mc_input_row_bytes(int type, int64_t columns)

    enum:
        MC_MOST_WIDTH

    ctypedef struct mc_page:
        const uint8_t *queries
        const uint8_t *keys
        const uint8_t *values
        const uint8_t *mask
        uint8_t *out
        int64_t query_step
        int64_t query_head_step
        int64_t key_step
        int64_t key_head_step
        int64_t value_step
        int64_t value_head_step
        int64_t mask_step
        int64_t out_step
        int64_t num_queries
        int64_t num_keys
        int64_t num_heads
        int64_t num_kv_heads
        int64_t width
        int64_t value_width
        int type
        float scale

    ctypedef struct mc_attending:
        const mc_level *level
        mc_page page
        int64_t per_item
        int64_t items_per_head
        int has_failed

    void mc_page_item(void *job, int64_t item) noexcept nogil
