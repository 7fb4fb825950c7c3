"""Reads files of unknown origin as rows, in bounded time and memory: documents to train on, questions of benchmarks."""
