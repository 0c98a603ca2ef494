"""The training step as data: sharding hierarchy, layout of buckets, buffers, schedule. Pure; no torch."""
