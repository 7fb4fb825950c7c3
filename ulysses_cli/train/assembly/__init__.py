"""Builds model, loss, optimizer and engine of a recipe on this rank."""
