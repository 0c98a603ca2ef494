"""Back ends for collectives: one class each, chosen once per group."""
