"""Evaluation at length, without a model: tasks from a seed, files of suites, scorers, statistics. No torch."""
