"""How a measurement goes: ranks that measure together, rounds, statistics, progress, resuming."""
