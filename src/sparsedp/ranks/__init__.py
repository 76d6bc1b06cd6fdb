"""Several processes, one run: who is who, what they tell each other, and how they stay alike."""
