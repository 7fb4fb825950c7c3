"""Scores of answers, by the rules of the benchmarks that the questions come from."""
