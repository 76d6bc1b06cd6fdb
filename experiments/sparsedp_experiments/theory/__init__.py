"""The papers' theory: bounds, criteria and oracles. What touches un-noised gradients is not private."""
