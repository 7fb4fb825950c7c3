"""Commands that prove a claim: what a step takes, without a GPU."""
