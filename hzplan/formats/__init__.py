"""The files: profiles, links, plans, clusters, checkpoints, metrics. Strict, versioned, canonical."""
