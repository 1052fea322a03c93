// A token's steps without the host: a gate lets each step run, and a record tells the host of it.
//
// The host opens the gate when a token begins, by a copy in the stream that computes, and closes it
// behind the token. A step that finds an expert missing closes it too, so that all later steps
// return at once; the host brings the expert in and opens the gate again, for that layer and those
// behind it. Everything that a step reads was written by work before it in its stream.

enum Closed { OPEN, STALLED, OUTSIDE };

// Aligned, so that a warp reads it by few loads.
struct alignas(16) Control {
    int closed;
    int first_layer; // results of layers before it are there already
    unsigned token;
};

// In the host's memory: the host looks at it while the device works.
struct Notice {
    unsigned stalled_token; // written last
    int stalled_layer;
    int outside; // whether a step came when no token was open
};

// The gate of one layer. `record`, also in host memory: token, number of tokens, top_k, and ids.
struct StepGate {
    Control* control;
    Notice* notice;
    int* record;
    int layer, num_ids; // ids that a record has room for
};

// Whether a step is to be computed; the same for all of its threads. Without a gate it always is.
template <class R>
__device__ inline bool enter_step(const StepGate* gate, const R& routing, int num_tokens, int top_k)
{
    if (!gate) return true;
    // Loaded plainly, through the caches, by all warps: the host's copies write it between launches
    // only. Block 0 may close it before others have looked; they come to its result either way.
    const Control control = *gate->control;
    volatile Notice* const notice = gate->notice;
    const bool tells = blockIdx.x == 0 && threadIdx.x == 0;
    if (control.closed != OPEN) {
        if (tells && control.closed == OUTSIDE) notice->outside = 1;
        return false;
    }
    if (gate->layer < control.first_layer) return false;
    const int num_pairs = num_tokens * top_k;
    bool is_missing = false;
    for (int pair = 0; pair < num_pairs; pair++)
        is_missing |= routing.id_of(pair) >= 0 && routing.slot_of(pair) < 0;
    if (!tells) return !is_missing;
    volatile int* record = gate->record;
    for (int pair = 0; pair < num_pairs && pair < gate->num_ids; pair++)
        record[3 + pair] = (int)routing.id_of(pair);
    record[1] = num_tokens;
    record[2] = top_k;
    record[0] = (int)control.token;
    if (is_missing) {
        notice->stalled_layer = gate->layer;
        // The host may look at any time: the record and the layer must reach it before the token.
        __threadfence_system();
        notice->stalled_token = control.token;
        gate->control->closed = STALLED;
    }
    return !is_missing;
}
