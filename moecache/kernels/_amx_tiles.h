/* Registers of AMX, which have up to 16 rows of 64 bytes. Their numbers are nothing that a compiler knows: what is
 * said here happens in the order of the program ("memory"). */

/* Inputs that a tile has. */
enum { MC_GROUP = 16 };

#define TILE_LOAD(number, at, step)                                                            \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #number : : "r"(at), "r"((int64_t)(step)) : "memory")
#define TILE_STORE(number, at, step)                                                           \
    __asm__ volatile("tilestored %%tmm" #number ", (%0,%1,1)" : : "r"(at), "r"((int64_t)(step)) : "memory")
#define TILE_ZERO(number) __asm__ volatile("tilezero %%tmm" #number : : : "memory")
/* sums += inputs * weights: bytes with signs, or bf16. */
#define TILE_DOT(sums, inputs, weights)                                                        \
    __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums : : : "memory")
#define TILE_DOT_BF16(sums, inputs, weights)                                                   \
    __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums : : : "memory")

/* Rows of each register, and their bytes. */
typedef struct {
    uint8_t palette, start_row, zeros[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} mc_tile_shapes;

/* Those that this thread's registers have: telling them takes as long as a KiB of weights, and nothing overtakes it. */
static __thread const mc_tile_shapes *mc_shapes;

INLINE void mc_begin_tiles(const mc_tile_shapes *shapes)
{
    if (mc_shapes == shapes)
        return;
    mc_shapes = shapes;
    __asm__ volatile("ldtilecfg (%0)" : : "r"(shapes) : "memory");
}

/* Threads that hold no tiles are switched faster, and other code has shapes of its own. */
static void mc_release_tiles(void)
{
    if (mc_shapes)
        __asm__ volatile("tilerelease" : : : "memory");
    mc_shapes = NULL;
}
