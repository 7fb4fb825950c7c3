"""Commands that ask before they act: the first recipe, and what the shell offers when Tab is pressed."""
