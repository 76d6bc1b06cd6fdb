"""Plain values everything else is built from: layout, support, geometry, clip, randomness, batches."""
