"""Facts about model families: shapes, vocabularies, chat templates. Data stand here too: a JSON file per known model,
`templates/` with chat templates, `defaults/` with transformers' own defaults.
"""
