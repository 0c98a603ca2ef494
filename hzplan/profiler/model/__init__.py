"""The model's side of a profile: its units' calls are recorded, timed, and their memory and FLOPs counted."""
