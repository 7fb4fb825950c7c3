"""Turns a layout into the agent's command line and environment, locks the run's folder, and reports how a run
ended."""
