"""RS's Table 3, trained: batches by Poisson sampling against batches by partition, with the same noise."""
