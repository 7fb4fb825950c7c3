"""Facts about model families: shapes, vocabularies, chat templates."""
