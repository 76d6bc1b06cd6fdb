"""The leaks, by where they are planted."""
