"""Values -> what people and programs read. Decides nothing: exit codes are the commands', problems are plan's."""
