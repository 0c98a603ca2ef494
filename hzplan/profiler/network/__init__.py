"""The cluster's side of a profile: links, interference with compute, stragglers, the host's memory."""
