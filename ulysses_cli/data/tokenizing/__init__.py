"""Turns documents into token ids and targets: tokenizer, chat templates, pieces, worker processes."""
