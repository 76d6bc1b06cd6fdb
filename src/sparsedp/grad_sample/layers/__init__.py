"""What the fast engine knows about each family of layers."""
