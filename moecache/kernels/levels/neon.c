/* NEON with products of four bytes (dotprod). */
#include "_levels.h"

#ifdef MC_ARM
#include <arm_neon.h>

BEGIN("arch=armv8.2-a+dotprod")
static inline uint32x4_t mc_four_bytes(const uint8_t *raw)
{
    uint32_t four;
    memcpy(&four, raw, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

#define LEVEL(name) mc_neon_##name
#define NAME "neon"
#define LANES 4
#define TOKENS 4
#define PLANES_MANY 4
#define PLANES_FEWER 1
#define VECTORS 4
#define FMA(a, b, c) (vf) vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#define F16C(raw) (vf) vcvt_f32_f16((float16x4_t)(raw))
#define WIDEN(raw) (vu) mc_four_bytes(raw)
#define LOOK_UP(table, at) (vu) vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)(at))
#define DOT_NEON
#include "_level.h"
END
#endif
