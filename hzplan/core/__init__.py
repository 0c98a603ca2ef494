"""What a step is: sharding hierarchy, layout of buckets, buffers, schedule of tasks. Pure; no torch."""
