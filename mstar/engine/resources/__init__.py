"""Per-request state and static buffers of a step, behind one protocol."""
