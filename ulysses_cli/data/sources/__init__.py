"""Reads files, folders and hub data sets as blocks of raw documents."""
