"""Declarations of what is beside this file."""

cdef dict in_order(dict arrays)
cdef dict checked_state(state, dict known, int num_layers, int num_experts)
