"""Models that hzplan can profile and train, and how to reach a user's own."""
