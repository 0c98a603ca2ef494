"""A plan for a runtime that a team has already: one file per target."""
