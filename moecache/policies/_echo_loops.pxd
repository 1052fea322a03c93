"""ECHO's loops, in C: over the experts of a layer, and over the tokens of the ring."""

from libc.stdint cimport int32_t, uint8_t, uint64_t


cdef extern from "_echo.h" nogil:
    enum:
        ECHO_RING
        ECHO_AGES

    const float ECHO_TIME_DISCOUNT

    ctypedef struct EchoLoops:
        void (*match)(
            const uint64_t*, const uint64_t*, int, float, float, float*
        ) noexcept nogil
        void (*average)(
            int, const float*, float, float, float, int32_t, float, int32_t*, float*, float*,
            uint8_t*
        ) noexcept nogil
        void (*own)(int, const float*, const float*, float*) noexcept nogil
        void (*value)(
            int, const float*, const float*, float, float, float, float*, float*
        ) noexcept nogil
        void (*spare)(int, const float*, const float*, float, float, float*) noexcept nogil
        void (*unite)(int, const float*, const float*, int, float, float*, float*) noexcept nogil

    EchoLoops echo_loops()
    int echo_lowest_bit(uint64_t bits)
    int echo_nearest(const float* scores, int wanted, int* slots)
