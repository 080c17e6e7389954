"""What every other part stands on: errors, dtypes, tensors, what an op is, and the handles of the C module."""
