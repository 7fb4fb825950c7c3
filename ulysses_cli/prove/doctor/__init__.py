"""`doctor`: checks of the machine, its software and its devices."""
