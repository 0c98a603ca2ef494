"""The runtime: executes a plan's schedule with real collectives."""
