"""Ulysses attention: the exchange, the heads of each rank, and the kernels. Takes tensors and a group."""
