"""Export of a plan to other runtimes, one file per target."""
