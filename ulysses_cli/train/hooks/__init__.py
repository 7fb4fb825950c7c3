"""What runs around each training step."""
