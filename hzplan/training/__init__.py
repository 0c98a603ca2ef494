"""What `hzplan run` adds to the runtime: data, the loop, checkpoints."""
