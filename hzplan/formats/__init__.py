"""The two files: profiles (what was measured) and plans (what was chosen). Strict, versioned, canonical."""
