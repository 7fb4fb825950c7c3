"""Commands for what a run has left: its page, its model, the card and where it is published."""
