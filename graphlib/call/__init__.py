"""Functions of tensors called on arrays, and their gradients apart from them, for the tapes of others."""
