/* Ends what `_level.h` began. */
#undef LEVEL
#undef LANES
#undef TOKENS
#undef FMA
#undef F16C
#undef WIDEN
#undef NARROW
#undef PICK
#undef LOOK_UP
#undef PLANES_MANY
#undef INLINE
#undef SHARED
#undef vf
#undef vi
#undef vu
#undef vh
#undef vb
