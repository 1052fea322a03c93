/* "generic" is plain C, for what every processor of an architecture has: it defines what is equal. */
#include "_levels.h"

#define LEVEL(name) mc_generic_##name
#define NAME "generic"
#define LANES 4
#define TOKENS 2
#define PLANES_MANY 2
#define PLANES_FEWER 1
#define VECTORS 2
#define ROLLED
#include "_level.h"
