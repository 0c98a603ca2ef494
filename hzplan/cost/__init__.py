"""The cost of a step: seconds and bytes from a profile, and the simulator of its schedule. Pure; no torch."""
