"""Bytes of recurrences: gated delta nets and Mamba2, with their kernels."""
