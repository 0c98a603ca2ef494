"""What a step costs: seconds and bytes from a profile, and the simulator of the schedule. Pure; no torch."""
