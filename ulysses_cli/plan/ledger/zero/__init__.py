"""What DeepSpeed's ZeRO holds: states, gathered weights, gradients on their way, files on a disk."""
