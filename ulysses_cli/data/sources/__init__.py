"""What files, folders and hub data sets hold, as blocks of raw documents."""
