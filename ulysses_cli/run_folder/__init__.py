"""Reads and checks the files of a run folder, without torch: checkpoints, manifests, line files, failure records."""
