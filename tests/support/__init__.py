"""Holds what tests share: small models and recipes, rank processes, commands, kill points. Contains no test."""
