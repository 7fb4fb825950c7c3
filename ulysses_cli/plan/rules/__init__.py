"""Every rule that spans several keys of a recipe: one function each, which yields Problems."""
