// The work around the products of many tokens: their rows gathered, activated, combined.

// The kernels' arguments; STRUCTS of _structs.py has the same fields. No __grid_constant__: with one
// the compiler makes a single loop for both kinds of weights, which waits for each row by itself.
struct CombineArguments {
    const void* rows; // float32 for `combine_rows`
    const int* place;
    const void* weights;
    Hidden::Bits* out;
    int weights_kind, num_tokens, top_k, hidden;
};

struct GatherArguments {
    const Hidden::Bits* x;
    const int* pairs;
    Hidden::Bits* out;
    int num_pairs, top_k, hidden;
};

struct ActivateArguments {
    const Hidden::Bits* both;
    Hidden::Bits* out;
    long long num_rows;
    int width, is_gated, activation;
};

// N elements at a time of a token's rows, weighted and summed. Without `place`, row p is pair p's;
// a pair whose place is negative was dropped.
template <class D, class X, unsigned N>
__device__ inline void combine_tokens(
    Row<X> rows, const int* place, const void* weights, int weights_kind, int num_tokens,
    int top_k, int hidden, typename D::Bits* out)
{
    for (long long token = blockIdx.x; token < num_tokens; token += gridDim.x)
        for (unsigned k = threadIdx.x * N; k < (unsigned)hidden; k += blockDim.x * N) {
            float sums[N] = {};
            for (long long pair = token * top_k; pair < (token + 1) * top_k; pair++) {
                const long long row = place ? place[pair] : pair;
                if (row < 0) continue;
                const float weight = weight_of<D>(weights, weights_kind, pair);
                float values[N];
                load<X, N>(rows + row * hidden + k, values);
                for (unsigned i = 0; i < N; i++) sums[i] = add_weighted(sums[i], weight, values[i]);
            }
            store<D, N>(out + token * hidden + k, sums);
        }
}

// activation(gate) * up, or, where rows have no gate, activation(up).
template <class D, unsigned N>
__device__ inline void activate_rows(
    Row<D> both, long long num_rows, int width, bool is_gated, int activation,
    typename D::Bits* out)
{
    for (long long row = blockIdx.x; row < num_rows; row += gridDim.x)
        for (unsigned k = threadIdx.x * N; k < (unsigned)width; k += blockDim.x * N) {
            float values[N], up[N];
            const Row<D> from = both + row * (is_gated ? 2 : 1) * width + k;
            load<D, N>(from, values);
            for (unsigned i = 0; i < N; i++) values[i] = activated(values[i], activation);
            if (is_gated) {
                load<D, N>(from + width, up);
                for (unsigned i = 0; i < N; i++) values[i] = mul_rn(values[i], up[i]);
            }
            store<D, N>(out + row * width + k, values);
        }
}

template <class T>
__device__ inline void gather_rows(
    const T* x, const int* pairs, int num_pairs, int top_k, int row_length, T* out)
{
    for (long long i = blockIdx.x; i < num_pairs; i += gridDim.x) {
        const T* from = x + (long long)(pairs[i] / top_k) * row_length;
        for (int k = threadIdx.x; k < row_length; k += blockDim.x)
            out[i * row_length + k] = from[k];
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) combine_rows(
    const CombineArguments given)
{
    combine_tokens<Hidden, F32, 1>(
        (Row<F32>)given.rows, nullptr, given.weights, given.weights_kind, given.num_tokens,
        given.top_k, given.hidden, given.out);
}

extern "C" __global__ void __launch_bounds__(256, 3) combine(
    const CombineArguments given)
{
    const auto rows = (Row<Hidden>)given.rows;
    if (is_chunked<Hidden>(given.hidden, rows, given.out))
        combine_tokens<Hidden, Hidden, PER_CHUNK<Hidden>>(
            rows, given.place, given.weights, given.weights_kind, given.num_tokens, given.top_k,
            given.hidden, given.out);
    else
        combine_tokens<Hidden, Hidden, 1>(
            rows, given.place, given.weights, given.weights_kind, given.num_tokens, given.top_k,
            given.hidden, given.out);
}

extern "C" __global__ void __launch_bounds__(256, 3) gather(
    const GatherArguments given)
{
    const int hidden = given.hidden;
    if (is_chunked<Hidden>(hidden, given.x, given.out))
        gather_rows(
            (const uint4*)given.x, given.pairs, given.num_pairs, given.top_k,
            hidden / (int)PER_CHUNK<Hidden>, (uint4*)given.out);
    else
        gather_rows(given.x, given.pairs, given.num_pairs, given.top_k, hidden, given.out);
}

extern "C" __global__ void __launch_bounds__(256, 3) activate(
    const ActivateArguments given)
{
    if (is_chunked<Hidden>(given.width, given.both, given.out))
        activate_rows<Hidden, PER_CHUNK<Hidden>>(
            given.both, given.num_rows, given.width, given.is_gated, given.activation, given.out);
    else
        activate_rows<Hidden, 1>(
            given.both, given.num_rows, given.width, given.is_gated, given.activation, given.out);
}
