"""What a run leaves in its folder, read and judged without torch: checkpoints, manifests, lines, failures."""
