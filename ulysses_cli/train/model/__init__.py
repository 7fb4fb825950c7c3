"""From a resolved plan to a model in DeepSpeed's engine."""
