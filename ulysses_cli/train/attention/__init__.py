"""Ulysses attention: the exchange, the heads of each rank, the kernels. Takes tensors and a process group."""
