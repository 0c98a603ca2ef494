"""What only a GPU can show."""
