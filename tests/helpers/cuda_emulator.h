// CUDA C on the CPU: what moecache/cuda/*.cu use of it, and a launch.
//
// Each thread is a fiber, left only where it waits for others: at shuffles, barriers and sleeps.
// Which warp goes on is drawn by lot, so that a missing barrier shows in some seed. A launch in
// which no thread can go on ends with a message, as does one that a signal of the processor stops.
//
// Only C's headers: those of C++ took half of the time in which a source compiles.
#pragma once
#define _GNU_SOURCE 1
// Else <math.h> and <stdlib.h> are those of C++, which include much of it.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#ifndef __global__
#define __global__
#endif
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__

struct Dim3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace emulator {

constexpr size_t STACK_BYTES = 64 * 1024;
constexpr unsigned LANES = 32;
constexpr unsigned MOST_WORDS = 6;

enum State { READY, AT_WARP, AT_BLOCK, ASLEEP, DONE };

// Where a function goes on, as the compiler's own jumps keep it: the C library's, which look for
// cleanups, were a quarter of a launch.
using Place = void*[5];

// These two are zeros at first.
struct Fiber {
    Place resumed;
    ucontext_t start;
    void* stack;
    bool is_started;
    State state;
};

struct Warp {
    unsigned num_arrived;
    // A lane that has not read yet is at most one exchange behind.
    unsigned turn;
    uint64_t values[2][LANES];
    unsigned words[2][LANES][MOST_WORDS];
    bool is_queued;
};

struct Kernel {
    const char* name;
    int num_parameters;
    const size_t* sizes;
    void (*call)(void** args);
};

struct Launch {
    const Kernel* kernel;
    void** args;
    unsigned block_size;
    uint64_t random;
    Warp* warps;
    unsigned* num_arrived;
    unsigned* queue;
    unsigned num_queued;
};

inline Fiber** fibers;
inline size_t num_fibers_made;
inline Launch launch;
inline Place scheduler;
inline sigjmp_buf stopped;
inline unsigned current;
inline volatile uintptr_t fault_address;
inline uint64_t num_launches;

}

inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

template <class T> T* resized(T* before, size_t count)
{
    T* after = (T*)realloc(before, count * sizeof(T));
    if (after == nullptr) abort();
    return after;
}

// A function of its own: such a jump may not be made where one of them leads to.
__attribute__((noinline, noclone, noreturn)) inline void go_on_at(Place& place)
{
    __builtin_longjmp(place, 1);
}

__attribute__((noinline, noclone)) inline void leave(State state)
{
    Fiber* fiber = fibers[current];
    fiber->state = state;
    if (__builtin_setjmp(fiber->resumed) == 0) go_on_at(scheduler);
}

inline void enter()
{
    for (;;) {
        launch.kernel->call(launch.args);
        leave(DONE);
    }
}

// Nothing of this frame is used after the jump back.
__attribute__((noinline)) inline void resume(Fiber* fiber)
{
    if (__builtin_setjmp(scheduler) != 0) return;
    if (fiber->is_started) go_on_at(fiber->resumed);
    fiber->is_started = true;
    setcontext(&fiber->start);
}

inline void prepare(size_t num_fibers)
{
    if (num_fibers_made < num_fibers) fibers = resized(fibers, num_fibers);
    while (num_fibers_made < num_fibers)
        fibers[num_fibers_made++] = (Fiber*)calloc(1, sizeof(Fiber));
    for (size_t i = 0; i < num_fibers; i++) {
        Fiber& fiber = *fibers[i];
        fiber.state = READY;
        if (fiber.is_started) continue;
        if (fiber.stack == nullptr)
            fiber.stack = mmap(
                nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack;
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
    }
}

inline uint64_t draw()
{
    launch.random ^= launch.random << 13;
    launch.random ^= launch.random >> 7;
    launch.random ^= launch.random << 17;
    return launch.random >> 11;
}

inline void queue_warp(unsigned warp)
{
    if (launch.warps[warp].is_queued) return;
    launch.warps[warp].is_queued = true;
    launch.queue[launch.num_queued++] = warp;
}

inline void release(unsigned first, unsigned count, State waited)
{
    for (unsigned i = first; i < first + count; i++)
        if (fibers[i]->state == waited) fibers[i]->state = READY;
    for (unsigned warp = first / LANES; warp < (first + count) / LANES; warp++) queue_warp(warp);
}

inline void wait_for_warp()
{
    const unsigned number = current / LANES;
    Warp& warp = launch.warps[number];
    if (++warp.num_arrived < LANES) return leave(AT_WARP);
    warp.num_arrived = 0;
    warp.turn ^= 1;
    release(number * LANES, LANES, AT_WARP);
}

inline void wait_for_block()
{
    const unsigned number = current / launch.block_size;
    if (++launch.num_arrived[number] < launch.block_size) return leave(AT_BLOCK);
    launch.num_arrived[number] = 0;
    release(number * launch.block_size, launch.block_size, AT_BLOCK);
}

template <class T> inline T exchange(T value, unsigned source)
{
    Warp& warp = launch.warps[current / LANES];
    uint64_t* values = warp.values[warp.turn];
    memcpy(&values[current % LANES], &value, sizeof value);
    wait_for_warp();
    memcpy(&value, &values[source % LANES], sizeof value);
    return value;
}

// The words of each lane, until the lane that asks meets the others again.
template <unsigned N> inline auto exchange_words(const unsigned (&own)[N])
{
    static_assert(N <= MOST_WORDS);
    Warp& warp = launch.warps[current / LANES];
    const unsigned(*words)[MOST_WORDS] = warp.words[warp.turn];
    memcpy(warp.words[warp.turn][current % LANES], own, sizeof own);
    wait_for_warp();
    return words;
}

// True where a lane has come further than another sleep.
inline bool run_warp(unsigned warp, unsigned first_block)
{
    bool has_progress = false;
    const unsigned first_lane = draw() % LANES, stride = draw() % (LANES / 2) * 2 + 1;
    for (bool again = true, is_first = true; again; is_first = false) {
        again = false;
        for (unsigned i = 0; i < LANES; i++) {
            const unsigned at = warp * LANES + (first_lane + i * stride) % LANES;
            const State before = fibers[at]->state;
            if (before != READY && !(before == ASLEEP && is_first)) continue;
            current = at;
            threadIdx.x = at % launch.block_size;
            blockIdx.x = first_block + at / launch.block_size;
            resume(fibers[at]);
            if (before == READY || fibers[at]->state != ASLEEP) again = has_progress = true;
        }
    }
    return has_progress;
}

inline bool can_go_on(unsigned warp)
{
    for (unsigned i = warp * LANES; i < (warp + 1) * LANES; i++)
        if (fibers[i]->state == READY || fibers[i]->state == ASLEEP) return true;
    return false;
}

inline bool run_blocks(unsigned first_block, unsigned num_blocks)
{
    const unsigned num_fibers = num_blocks * launch.block_size, num_warps = num_fibers / LANES;
    prepare(num_fibers);
    launch.warps = resized(launch.warps, num_warps);
    memset(launch.warps, 0, num_warps * sizeof(Warp));
    launch.num_arrived = resized(launch.num_arrived, num_blocks);
    memset(launch.num_arrived, 0, num_blocks * sizeof(unsigned));
    launch.queue = resized(launch.queue, num_warps);
    launch.num_queued = 0;
    for (unsigned warp = 0; warp < num_warps; warp++) queue_warp(warp);
    unsigned num_idle = 0;
    while (launch.num_queued && num_idle < 1000 + 100 * launch.num_queued) {
        const unsigned at = draw() % launch.num_queued;
        const unsigned warp = launch.queue[at];
        num_idle = run_warp(warp, first_block) ? 0 : num_idle + 1;
        if (can_go_on(warp)) continue;
        launch.warps[warp].is_queued = false;
        launch.queue[at] = launch.queue[--launch.num_queued];
    }
    for (unsigned i = 0; i < num_fibers; i++)
        if (fibers[i]->state != DONE) return false;
    return true;
}

inline void stop(int number, siginfo_t* info, void*)
{
    fault_address = (uintptr_t)info->si_addr;
    siglongjmp(stopped, number);
}

template <auto kernel> struct Wrapped;
template <class... A, void (*kernel)(A...)> struct Wrapped<kernel> {
    static constexpr size_t sizes[] = {sizeof(A)..., 0};
    struct Call {
        Call(A... values) { kernel(values...); }
    };
    // In braces, what is given is evaluated from left to right.
    static void call(void** args) { Call{*static_cast<A*>(*args++)...}; }
    static constexpr Kernel named(const char* name) { return {name, sizeof...(A), sizes, call}; }
};

// The kernels, and one without a name; what loads the source writes them behind the source.
extern const Kernel kernels[];

inline const Kernel* find(const char* name)
{
    for (const Kernel* kernel = kernels; kernel->name != nullptr; kernel++)
        if (strcmp(kernel->name, name) == 0) return kernel;
    return nullptr;
}

}

// A block's own memory; rubbish, of which a float is no number, at the beginning of each launch.
template <class T> inline T& block_memory()
{
    struct Memory {
        uint64_t launch;
        T memory;
    };
    static_assert(alignof(Memory) <= 16);
    static Memory** memories;
    static unsigned num_memories;
    const unsigned block = blockIdx.x;
    if (num_memories <= block) memories = emulator::resized(memories, block + 1);
    while (num_memories <= block) memories[num_memories++] = (Memory*)calloc(1, sizeof(Memory));
    Memory& found = *memories[block];
    if (found.launch != emulator::num_launches) {
        found.launch = emulator::num_launches;
        memset((void*)&found.memory, 0xff, sizeof(T));
    }
    return found.memory;
}

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulator::wait_for_warp(); }
inline void __nanosleep(unsigned) { emulator::leave(emulator::ASLEEP); }
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T> T __shfl_sync(unsigned, T value, int lane)
{
    return emulator::exchange(value, lane);
}

template <class T> T __shfl_xor_sync(unsigned, T value, int mask)
{
    return emulator::exchange(value, emulator::current % 32 ^ mask);
}

template <class T> T __shfl_down_sync(unsigned, T value, unsigned distance)
{
    const unsigned lane = emulator::current % 32;
    return emulator::exchange(value, lane + distance < 32 ? lane + distance : lane);
}

// As WordsOfLanes on a GPU: one meeting of the lanes instead of one for each word.
template <unsigned N> struct WordsOfLanes {
    const unsigned (*words)[emulator::MOST_WORDS];
    explicit WordsOfLanes(const unsigned (&own)[N]) : words(emulator::exchange_words(own)) {}
    unsigned word(unsigned index, unsigned lane) const { return words[lane][index]; }
};

template <class T> T atomicAdd(T* address, T value)
{
    const T before = *address;
    *address += value;
    return before;
}

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++)
        result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float mul_rn(float a, float b) { return a * b; }
inline float add_rn(float a, float b) { return a + b; }
inline float div_rn(float a, float b) { return a / b; }
inline bool is_less(float a, float b) { return a < b; }

inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline float half_to_float(unsigned short bits)
{
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, rest = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | rest << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | rest << 13);
    return __uint_as_float(sign | __float_as_uint(ldexpf((float)rest, -24)));
}

inline void halves_to_floats(unsigned word, float& low, float& high)
{
    low = half_to_float((unsigned short)word);
    high = half_to_float((unsigned short)(word >> 16));
}

inline unsigned short float_to_half(float x)
{
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
    if (x != x) return (unsigned short)0x7fffu;
    const float size = fabsf(x);
    if (size >= 65520.0f) return (unsigned short)(sign | 0x7c00u);
    // Below the normal numbers, steps are of 2^-24.
    if (size < 6.103515625e-5f) return (unsigned short)(sign | (unsigned)rintf(ldexpf(size, 24)));
    const unsigned rebased = (bits & 0x7fffffffu) - (112u << 23);
    return (unsigned short)(sign | (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13);
}

extern "C" {

int num_parameters(const char* name)
{
    const emulator::Kernel* found = emulator::find(name);
    return found == nullptr ? -1 : found->num_parameters;
}

size_t parameter_bytes(const char* name, int index)
{
    return emulator::find(name)->sizes[index];
}

// 0; -1 where threads wait for others that never come; or the signal that stopped it.
int launch_kernel(
    const char* name, unsigned grid, unsigned block, void** args, int cooperative, uint64_t seed,
    uintptr_t* address)
{
    using namespace emulator;
    constexpr int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    static char signal_stack[64 * 1024];
    stack_t stack = {}, stack_before;
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {}, before[4];
    action.sa_sigaction = stop;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(signals[i], &action, &before[i]);

    num_launches++;
    launch.kernel = find(name);
    launch.args = args;
    launch.block_size = block;
    launch.random = (seed + 1) * 0x9e3779b97f4a7c15ull;
    blockDim = {block, 1, 1};
    gridDim = {grid, 1, 1};
    volatile int result = sigsetjmp(stopped, 1);
    if (result == 0) {
        const unsigned at_once = cooperative ? grid : 1;
        for (unsigned first = 0; first < grid && result == 0; first += at_once)
            if (!run_blocks(first, at_once)) result = -1;
    }
    if (result != 0)
        for (size_t i = 0; i < num_fibers_made; i++) fibers[i]->is_started = false;
    *address = fault_address;

    for (int i = 0; i < 4; i++) sigaction(signals[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
    return result;
}
}
